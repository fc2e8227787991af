"""Ranks join and leave a job while it trains."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT
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
    "moe": ({**MOE, "num-layers": 2, "num-experts": 6, "expert-model-parallel-size": 2, "sequence-parallel": True},
            {"a": moe(6, ep=3, tp=2), "b": moe(8, ep=2, tp=2, pp=2), "c": moe(3, ep=3), "d": moe(5, ep=1),
             "e": moe(4, ep=2, pp=2)}),
}


@pytest.mark.parametrize("model", ROUTES)
def test_a_world_grows_and_shrinks_like_a_world_that_stays(jobs, tmp_path, model):
    model_arguments, layouts = ROUTES[model]
    arguments = {**model_arguments, "train-iters": 36, "global-batch-size": 30, "tensor-model-parallel-size": 2}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    elastic = jobs.run(tmp_path / "elastic", 8, arguments, {
        "layouts": layouts, "schedule": schedule(*((2 + i, name) for i, name in enumerate("abcde"))), "verify": "full",
        "run_dir": str(tmp_path / "run"), "elastic": {"world_size": 4, "spares": 8}}, probe="probes:paced", seconds=0.1).assert_ok()
    assert [len(ranks) for ranks in members(elastic)] == [6, 8, 3, 5, 4]
    assert [event["from_sizes"]["DP"] for event in elastic.events_of("switch")] == [2, 3, 2, 3, 5]
    assert all(event["verify"] == "ok" and event["moved_bytes"] == event["minimum_bytes"] for event in elastic.events_of("switch"))
    assert_same_steps(elastic.steps, plain.steps, 2e-4)
    assert elastic.samples == plain.samples


def test_what_the_loop_does_goes_to_the_new_ranks(jobs, tmp_path):
    """Rank 0 and the last rank leave: evaluation, checkpoint, TensorBoard, the log and its averages are those of ranks 1 and 2."""
    from test_loop import log_lines
    from test_writers import scalars

    form = {"ckpt-format": "torch_dist", "dist-ckpt-optim-fully-reshardable": True, "tensor-model-parallel-size": 2}
    form |= {"log-interval": 5, "eval-interval": 30}
    plain = jobs.run(tmp_path / "plain", 4, {**form, "train-iters": 34}, kind="plain").assert_ok()
    store = subprocess.Popen([sys.executable, "-m", "megatron_dynatrain", "store", "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE,
                             text=True)  # as the one of the launch lives in rank 0 here
    try:
        port = store.stdout.readline().rpartition(":")[2].strip()
        elastic = jobs.run(tmp_path / "job", 4, {**form, "train-iters": 30, "save": tmp_path / "ckpt", "save-interval": 100,
                                                 "tensorboard-dir": tmp_path / "board"}, {
            "layouts": {"inner": {"ranks": [1, 2], "tensor_model_parallel_size": 1}}, "schedule": schedule((3, "inner")),
            "verify": "full", "run_dir": str(tmp_path / "run"), "elastic": {"store": f"127.0.0.1:{port}"}},
            probe="probes:paced", seconds=0.1).assert_ok()
    finally:
        store.kill()
        store.wait()
    assert members(elastic) == [[1, 2]]
    (change,) = elastic.events_of("switch")
    expected = log_lines(plain)
    logged = re.findall(r"iteration +(\d+)/ +30 .*lm loss: ([\d.E+-]+)", elastic.logs[3] + elastic.logs[2])
    assert [int(iteration) for iteration, _ in logged] == [1, 5, 10, 15, 20, 25, 30]
    for (iteration, loss), (_, _, plain_loss) in zip(logged[:-1], expected, strict=False):
        assert float(loss) == pytest.approx(plain_loss, rel=2e-4), iteration
    evaluated = re.compile(r"validation loss at iteration 30 \| lm loss value: ([\d.E+-]+)")
    assert float(evaluated.search(elastic.logs[2])[1]) == pytest.approx(float(evaluated.search(plain.logs[3])[1]), rel=2e-4)
    curve = dict(scalars(tmp_path / "board")["lm loss"])
    assert sorted(curve) == list(range(1, 31)) and change["iteration"] < 25
    longer = {**form, "train-iters": 34, "load": tmp_path / "ckpt", "override-opt-param-scheduler": True}
    loaded = jobs.run(tmp_path / "loaded", 4, longer, kind="plain").assert_ok()
    assert_same_steps(loaded.steps, {i: plain.steps[i] for i in range(31, 35)}, 2e-4)


def test_the_cost_that_is_told_is_that_of_the_change(jobs, tmp_path):
    result = jobs.run(tmp_path / "job", 4, {"train-iters": 60, "global-batch-size": 12, "tensor-model-parallel-size": 2}, {
        "layouts": {"others": {"ranks": [1, 2, 3], "tensor_model_parallel_size": 1}}, "schedule": schedule((30, "others")),
        "run_dir": str(tmp_path / "run"), "elastic": {"world_size": 2, "spares": 2}},
        probe="probes:ask_cost", layout="others", after=25, seconds=0.1).assert_ok()
    (told,), (change,) = result.records("costs"), result.events_of("switch")
    assert told["error"] is None and told["iteration"] < change["iteration"]
    assert (told["plan_hash"], told["moved_bytes"], told["dst_ranks"], told["windows"]) == (
        change["plan_hash"], change["moved_bytes"], change["to_ranks"], change["windows"])


# Where a process is killed, on which rank, and what becomes of the change to other ranks.
DEATHS = {
    "waits": ("megatron_dynatrain.device_manager:form", 3, "refused"),
    "makes-groups": ("megatron_dynatrain.megatron.job:MegatronJob.make_groups_in", 3, "refused"),
    "is-called": ("megatron_dynatrain.elastic.formation:Board.answer", 3, "refused"),
    "builds-data": ("megatron_dynatrain.megatron.job:MegatronJob.build_data", 3, "refused"),
    "receives": ("megatron_dynatrain.controller:execute", 3, "refused"),
    "has-handed-over": ("megatron_dynatrain.elastic.membership:Membership.leave", 1, "done"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_process_that_dies_takes_nobody_with_it(jobs, tmp_path, death):
    at, on_rank, answer = DEATHS[death]
    arguments = {"train-iters": 32, "global-batch-size": 12, "tensor-model-parallel-size": 2}
    change = {"refused": layout(4, tp=2), "done": layout(2, pp=2)}[answer]
    if answer == "done":
        change = {"ranks": [0, 2], "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 1}
    result = jobs.run(tmp_path / "job", 4, arguments if answer == "refused" else {**arguments, "tensor-model-parallel-size": 4}, {
        "layouts": {"other": change}, "schedule": schedule((3, "other")), "verify": "full", "run_dir": str(tmp_path / "run"),
        "elastic": {"world_size": 2, "spares": 2, "patience_seconds": 15} if answer == "refused" else {}},
        probe="probes:die", grace=100, on_rank=on_rank, at=at)
    assert [code for rank, code in enumerate(result.exit_codes) if rank != on_rank] == [0, 0, 0], result.logs
    assert result.exit_codes[on_rank] == -9
    assert sorted(result.steps) == list(range(1, 33))
    if answer == "refused":
        assert not members(result) and len(result.events_of("refused")) == 1, result.events
    else:
        assert members(result) == [[0, 2]]


def test_twenty_changes_leave_nothing_behind(jobs, tmp_path):
    layouts = {"two": {"ranks": [0, 1], "tensor_model_parallel_size": 2}, "four": layout(4, tp=2)}
    result = jobs.run(tmp_path / "job", 4, {"train-iters": 300, "tensor-model-parallel-size": 2}, {
        "layouts": layouts, "schedule": schedule(*((1 + i, ("two", "four")[i % 2]) for i in range(20))), "verify": "digest",
        "run_dir": str(tmp_path / "run"), "elastic": {"spares": 2}}, probe="probes:count_elastic").assert_ok()
    assert len(members(result)) == 20
    for rank in range(4):
        counts = [record for record in result.records("resources") if record["number"] == rank]
        assert len(counts) >= 9
        for name in ("worlds", "groups", "python_threads", "threads", "descriptors", "tensors", "resident"):
            # What is left of the last generation goes while the next one trains, sooner or later: whatever stays for good is in
            # every one of the last rounds.
            early, late = max(record[name] for record in counts[1:5]), min(record[name] for record in counts[-4:])
            slack = {"tensors": 20, "resident": 25 << 20, "threads": 4}.get(name, 0)
            assert late <= early + slack, (rank, name, [record[name] for record in counts])
