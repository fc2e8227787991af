"""Ranks join and leave a job while it trains."""

import pytest
from matrix import MOE
from test_loop import assert_same_steps


def layout(size, tp=1, pp=1, **more):
    return {"world_size": size, "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more}


def moe(size, ep, tp=1, pp=1):
    return layout(size, tp, pp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp)


def schedule(*entries):
    return [{"at_iteration": iteration, "layout": name} for iteration, name in entries]


def members(result):
    """The ranks that train, change by change."""
    return [event["to_ranks"] for event in result.events_of("switch")]


# The data-parallel sizes are 2, 3, 2, 3, 5, 2.
ROUTES = {
    "dense": ({}, {"a": layout(6, tp=2), "b": layout(8, tp=2, pp=2), "c": layout(3), "d": layout(5), "e": layout(4, pp=2)}),
    "moe": ({**MOE, "num-experts": 6, "expert-model-parallel-size": 2, "sequence-parallel": True},
            {"a": moe(6, ep=3, tp=2), "b": moe(8, ep=2, tp=2, pp=2), "c": moe(3, ep=3), "d": moe(5, ep=1), "e": moe(4, ep=2, pp=2)}),
}


@pytest.mark.parametrize("model", ROUTES)
def test_a_world_grows_and_shrinks_like_a_world_that_stays(jobs, tmp_path, model):
    model_arguments, layouts = ROUTES[model]
    arguments = {**model_arguments, "train-iters": 45, "global-batch-size": 30, "tensor-model-parallel-size": 2}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    elastic = jobs.run(tmp_path / "elastic", 8, arguments, {
        "layouts": layouts, "schedule": schedule(*((2 + i, name) for i, name in enumerate("abcde"))), "verify": "full",
        "run_dir": str(tmp_path / "run"), "elastic": {"world_size": 4, "spares": 8}}, probe="probes:paced", seconds=0.1).assert_ok()
    assert [len(ranks) for ranks in members(elastic)] == [6, 8, 3, 5, 4]
    assert [event["from_sizes"]["DP"] for event in elastic.events_of("switch")] == [2, 3, 2, 3, 5]
    assert all(event["verify"] == "ok" and event["moved_bytes"] == event["minimum_bytes"] for event in elastic.events_of("switch"))
    assert_same_steps(elastic.steps, plain.steps, 2e-4)
    assert elastic.samples == plain.samples
