"""Random streams across a switch, with dropout on."""

import pytest

DROPOUT = {"attention-dropout": 0.1, "hidden-dropout": 0.1, "tensor-model-parallel-size": 2, "train-iters": 6,
           "global-batch-size": 4}
EXPERTS = {"num-experts": 4, "moe-router-topk": 2, "moe-ffn-hidden-size": 32, "moe-token-dispatcher-type": "alltoall",
           "sequence-parallel": True}
LAYOUTS = {"pp2": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
           "tp2pp2": {"pipeline_model_parallel_size": 2}, "tp1": {"tensor_model_parallel_size": 1},
           "ep2": {"expert_model_parallel_size": 2}}


def run(jobs, folder, arguments, *entries, kind="plugin"):
    config = None if kind == "plain" else {
        "layouts": {name: LAYOUTS[name] for _, name in entries if name != "launch"}, "verify": "full",
        "schedule": [{"at_iteration": i, "layout": name} for i, name in entries]}
    return jobs.run(folder, 4, arguments, config, kind=kind, probe="probes:streams").assert_ok()


def sharing(result, iteration):
    """{stream: which ranks have it in common}."""
    found = {}
    for record in result.records("streams"):
        if record["iteration"] == iteration:
            for name, state in record["streams"].items():
                found.setdefault(name, {}).setdefault(state, set()).add(record["of_rank"])
    return {name: sorted(map(sorted, groups.values())) for name, groups in found.items()}


def states(result, iteration):
    return {(r["of_rank"], name): s for r in result.records("streams") if r["iteration"] == iteration
            for name, s in r["streams"].items()}


@pytest.mark.parametrize("layout, arguments, launched", [
    ("pp2", {}, {"tensor-model-parallel-size": None, "pipeline-model-parallel-size": 2}),
    ("tp2pp2", {}, {"pipeline-model-parallel-size": 2}),
    ("tp1", {}, {"tensor-model-parallel-size": 1}),
    pytest.param("ep2", EXPERTS, {"expert-model-parallel-size": 2}, marks=pytest.mark.core),
])
def test_ranks_share_streams_as_in_a_job_launched_in_that_layout(jobs, tmp_path, layout, arguments, launched):
    switched = run(jobs, tmp_path / "switched", {**DROPOUT, **arguments}, (2, layout))
    fresh = run(jobs, tmp_path / "fresh", {**DROPOUT, **arguments, **launched}, kind="plain")
    for iteration in (3, 6):
        assert sharing(switched, iteration) == sharing(fresh, iteration)


@pytest.mark.core
def test_streams_go_on_where_tensor_and_pipeline_parallelism_stay(jobs, tmp_path):
    plain = run(jobs, tmp_path / "plain", {**DROPOUT, **EXPERTS}, kind="plain")
    switched = run(jobs, tmp_path / "switched", {**DROPOUT, **EXPERTS}, (3, "ep2"))
    expected, found = states(plain, 6), states(switched, 6)
    for key, state in expected.items():
        if "expert" not in key[1]:
            assert found[key] == state, key
    for iteration, step in switched.steps.items():
        assert step["loss"] == pytest.approx(plain.steps[iteration]["loss"], rel=1e-5)


def test_there_and_back_is_reproducible(jobs, tmp_path):
    entries = (2, "pp2"), (4, "launch")
    one = run(jobs, tmp_path / "one", DROPOUT, *entries)
    two = run(jobs, tmp_path / "two", DROPOUT, *entries)
    plain = run(jobs, tmp_path / "plain", DROPOUT, kind="plain")
    assert one.steps == two.steps
    assert states(one, 6) == states(two, 6)
    assert {i: s for i, s in one.steps.items() if i <= 2} == {i: s for i, s in plain.steps.items() if i <= 2}
