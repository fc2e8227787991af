"""A running job changes layout: the steps after it, the data, the log, and what the loop does around them."""

import random
import re

import pytest

TP2_PP2 = {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2}
TP2 = {"tensor-model-parallel-size": 2}
LAYOUTS = {
    "deep": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4},
    "wide": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
    "pipe": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
    "data": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
}


def schedule(*entries):
    return [{"at_iteration": iteration, "layout": layout} for iteration, layout in entries]


def config(*entries, **more):
    return {"layouts": LAYOUTS, "schedule": schedule(*entries), "verify": "full", **more}


def log_lines(result):
    """(iteration, last iteration, loss) of every line of Megatron's log."""
    return [(int(i), int(last), float(loss)) for i, last, loss in
            re.findall(r"iteration +(\d+)/ +(\d+) .*lm loss: ([\d.E+-]+)", result.logs[-1])]


def assert_same_steps(steps, expected, tolerance):
    assert sorted(steps) == sorted(expected)
    for iteration, step in steps.items():
        for name in ("loss", "grad_norm"):
            if expected[iteration]["skipped"]:
                continue  # the numbers of a step that overflowed mean nothing
            assert step[name] == pytest.approx(expected[iteration][name], rel=tolerance, abs=0), (iteration, name)
        assert step["lr"] == expected[iteration]["lr"], iteration


@pytest.mark.core
def test_eight_ranks_two_switches_same_losses(jobs, tmp_path):
    arguments = {**TP2_PP2, "train-iters": 24, "global-batch-size": 8}
    plain = jobs.run(tmp_path / "plain", 8, arguments, kind="plain").assert_ok()
    switched = jobs.run(tmp_path / "switched", 8, arguments, config((4, "deep"), (14, "wide"))).assert_ok()
    assert [(e["from"], e["to"], e["verify"]) for e in switched.events_of("switch")] == [
        ("launch", "deep", "ok"), ("deep", "wide", "ok")]
    for begin, end, tolerance in ((1, 4, 0), (5, 9, 1e-5), (10, 14, 1e-4), (15, 24, 1e-4)):
        part = {i: s for i, s in switched.steps.items() if begin <= i <= end}
        assert_same_steps(part, {i: plain.steps[i] for i in range(begin, end + 1)}, tolerance)
    assert switched.samples == plain.samples
    # The log reads as if nothing had happened (Megatron's own second line averages two steps).
    logged, expected = log_lines(switched), log_lines(plain)
    assert [line[:2] for line in logged] == [line[:2] for line in expected] == [(i, 24) for i in range(1, 25)]
    for (_, _, loss), (_, _, plain_loss) in zip(logged, expected, strict=True):
        assert loss == pytest.approx(plain_loss, rel=1e-4)
    for event in switched.events_of("switch"):
        assert event["moved_bytes"] == event["minimum_bytes"] > 0
        assert event["stall_seconds"] == pytest.approx(sum(event["phases"].values()), abs=1e-4)


@pytest.mark.core
def test_there_and_back_without_a_step_leaves_later_steps_bit_identical(jobs, tmp_path):
    plain = jobs.run(tmp_path / "plain", 4, TP2_PP2, kind="plain").assert_ok()
    back = jobs.run(tmp_path / "back", 4, TP2_PP2, config((3, "data"), (3, "deep"), (3, "launch"))).assert_ok()
    assert [e["to"] for e in back.events_of("switch")] == ["data", "deep", "launch"]
    assert back.steps == plain.steps


def test_switch_before_the_first_step(jobs, tmp_path):
    plain = jobs.run(tmp_path / "plain", 4, TP2_PP2, kind="plain").assert_ok()
    switched = jobs.run(tmp_path / "switched", 4, TP2_PP2, config((0, "data"), (1, "deep"))).assert_ok()
    assert [(e["iteration"], e["verify"]) for e in switched.events_of("switch")] == [(0, "ok"), (1, "ok")]
    assert_same_steps(switched.steps, plain.steps, 1e-5)
    assert switched.samples == plain.samples


@pytest.mark.parametrize("seed", [1, 2])
def test_ten_random_switches_and_back_leave_later_steps_bit_identical(jobs, tmp_path, seed):
    names = random.Random(seed).choices([*LAYOUTS, "launch"], k=10)
    route = [name for name, previous in zip(names, ["launch", *names]) if name != previous]
    plain = jobs.run(tmp_path / "plain", 4, TP2_PP2, kind="plain").assert_ok()
    back = jobs.run(tmp_path / "back", 4, TP2_PP2, config(*[(3, name) for name in route], (3, "launch"))).assert_ok()
    assert len(back.events_of("switch")) >= len(route)
    assert back.steps == plain.steps


@pytest.mark.core
def test_idle_plugin_changes_no_bit(jobs, tmp_path):
    arguments = {**TP2, "train-iters": 5}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    dormant = jobs.run(tmp_path / "dormant", 4, arguments).assert_ok()
    idle = jobs.run(tmp_path / "idle", 4, arguments, config()).assert_ok()
    assert plain.steps == dormant.steps == idle.steps and len(plain.steps) == 5


@pytest.mark.parametrize("arguments, optimizer, tolerance", [
    pytest.param({}, "torch", 1e-5, id="fp32-torch-adamw"),
    pytest.param({"bf16": True}, "fused", 2e-2, id="bf16-fused"),
    pytest.param({"bf16": True}, "torch", 2e-2, id="bf16-torch-adamw", marks=pytest.mark.core),
    pytest.param({"bf16": True, "use-distributed-optimizer": None}, "fused", 2e-2, id="bf16-not-distributed"),
    pytest.param({"use-distributed-optimizer": None}, "fused", 1e-5, id="fp32-not-distributed"),
    pytest.param({"overlap-grad-reduce": True, "ddp-bucket-size": 4000}, "fused", 1e-5, id="overlap-grad-reduce"),
    pytest.param({"overlap-grad-reduce": True, "overlap-param-gather": True, "ddp-bucket-size": 4000}, "fused", 1e-5,
                 id="overlap-param-gather", marks=pytest.mark.core),
    pytest.param({"overlap-grad-reduce": True, "overlap-param-gather": True, "bf16": True}, "fused", 2e-2,
                 id="overlap-param-gather-bf16"),
    pytest.param({"untie-embeddings-and-output-weights": None}, "fused", 1e-5, id="tied-embeddings"),
    pytest.param({"fp16": True, "initial-loss-scale": 2.0**9, "min-loss-scale": 1.0, "loss-scale-window": 3, "hysteresis": 1,
                  "use-distributed-optimizer": None}, "fused", 2e-2, id="fp16-not-distributed"),
    pytest.param({"fp16": True, "initial-loss-scale": 2.0**30, "loss-scale-window": 3, "hysteresis": 2}, "fused", 2e-2,
                 id="fp16-after-skipped-steps", marks=pytest.mark.core),
    pytest.param({"decoupled-lr": 1e-3, "decoupled-min-lr": 1e-4}, "fused", 1e-5, id="own-learning-rates"),
    pytest.param({"optimizer": "sgd", "use-distributed-optimizer": None, "lr": 0.05}, "fused", 1e-5, id="sgd"),
])
def test_kinds_of_optimizer_and_precision(jobs, tmp_path, arguments, optimizer, tolerance):
    arguments = {**TP2_PP2, "train-iters": 9, **arguments}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain", optimizer=optimizer).assert_ok()
    switched = jobs.run(tmp_path / "switched", 4, arguments, config((2, "data"), (5, "deep")), optimizer=optimizer).assert_ok()
    assert [e["verify"] for e in switched.events_of("switch")] == ["ok", "ok"]
    assert_same_steps(switched.steps, plain.steps, tolerance)
    for iteration, step in switched.steps.items():
        assert (step["skipped"], step["loss_scale"]) == tuple(plain.steps[iteration][k] for k in ("skipped", "loss_scale"))


@pytest.mark.parametrize("part", ["embedding", "linear_qkv"])
def test_frozen_parameters(jobs, tmp_path, part):
    arguments = {**TP2_PP2, "train-iters": 8}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain", probe="probes:freeze", part=part).assert_ok()
    switched = jobs.run(tmp_path / "switched", 4, arguments, config((2, "data"), (5, "deep")), probe="probes:freeze",
                        part=part).assert_ok()
    assert [e["verify"] for e in switched.events_of("switch")] == ["ok", "ok"]
    assert_same_steps(switched.steps, plain.steps, 1e-5)


@pytest.mark.core
def test_evaluation_during_and_after_training(jobs, tmp_path):
    arguments = {**TP2_PP2, "train-iters": 8, "eval-interval": 3, "eval-iters": 2}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    switched = jobs.run(tmp_path / "switched", 4, arguments, config((3, "data"), (7, "deep"))).assert_ok()

    def evaluations(result):
        return [(name, float(value)) for name, value in
                re.findall(r"loss at (iteration \d+.*?) \| lm loss value: ([\d.E+-]+)", result.logs[-1])]

    assert len(evaluations(plain)) == 4  # after 3 and 6, and at the end on the validation and on the test set
    for (name, value), (expected_name, expected) in zip(evaluations(switched), evaluations(plain), strict=True):
        assert name == expected_name and value == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("saving", [{"save-interval": 2}, {"async-save": True, "save-interval": 4}], ids=["at-once", "async"])
def test_checkpoint_saved_after_a_switch_loads_in_either_layout(jobs, tmp_path, saving):
    form = {"ckpt-format": "torch_dist", "dist-ckpt-optim-fully-reshardable": True}
    arguments = {**TP2_PP2, **form, "train-iters": 8}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    saved = jobs.run(tmp_path / "saved", 4, {**arguments, **saving, "save": tmp_path / "ckpt",
                                             "exit-interval": 5}, config((2, "data"), (3, "pipe"))).assert_ok()
    assert sorted(saved.steps) == [1, 2, 3, 4, 5]
    for name, sizes in (("old", TP2_PP2), ("new", {"pipeline-model-parallel-size": 2})):
        loaded = jobs.run(tmp_path / name, 4, {**form, **sizes, "train-iters": 8, "load": tmp_path / "ckpt"},
                          kind="plain").assert_ok()
        assert_same_steps(loaded.steps, {i: plain.steps[i] for i in (6, 7, 8)}, 1e-5)


@pytest.mark.core
def test_checkpoint_saved_after_the_last_step_holds_the_current_layout(jobs, tmp_path):
    """Megatron saves it from `pretrain`, which still has the objects of the first layout."""
    form = {"ckpt-format": "torch_dist", "dist-ckpt-optim-fully-reshardable": True}
    plain = jobs.run(tmp_path / "plain", 4, {**TP2_PP2, **form, "train-iters": 8}, kind="plain").assert_ok()
    jobs.run(tmp_path / "saved", 4, {**TP2_PP2, **form, "train-iters": 5, "save": tmp_path / "ckpt", "save-interval": 100},
             config((2, "data"))).assert_ok()
    longer = {**TP2_PP2, **form, "train-iters": 8, "load": tmp_path / "ckpt", "override-opt-param-scheduler": True}
    loaded = jobs.run(tmp_path / "loaded", 4, longer, kind="plain").assert_ok()
    assert_same_steps(loaded.steps, {i: plain.steps[i] for i in (6, 7, 8)}, 1e-5)


def test_switch_equals_stop_and_restart_by_megatron(jobs, tmp_path):
    form = {"ckpt-format": "torch_dist", "dist-ckpt-optim-fully-reshardable": True, "train-iters": 9}
    stopped = {**TP2_PP2, **form, "save": tmp_path / "ckpt", "save-interval": 100, "exit-interval": 4}
    jobs.run(tmp_path / "stop", 4, stopped, kind="plain").assert_ok()
    restarted = jobs.run(tmp_path / "restart", 4, {**form, "load": tmp_path / "ckpt"}, kind="plain").assert_ok()
    switched = jobs.run(tmp_path / "switched", 4, {**TP2_PP2, **form}, config((4, "data"))).assert_ok()
    assert_same_steps({i: s for i, s in switched.steps.items() if i > 4}, restarted.steps, 1e-5)


def test_switch_equals_restart_where_megatron_itself_depends_on_the_layout(jobs, tmp_path):
    """Local multi-latent attention has other gradients at TP 2 than at TP 1: the steps are those of a run started there."""
    from matrix import MLA

    form = {**MLA, "ckpt-format": "torch_dist", "dist-ckpt-optim-fully-reshardable": True, "train-iters": 8}
    jobs.run(tmp_path / "stop", 4, {**form, "save": tmp_path / "ckpt", "save-interval": 100, "exit-interval": 3},
             kind="plain").assert_ok()
    restarted = jobs.run(tmp_path / "restart", 4, {**form, **TP2, "load": tmp_path / "ckpt"}, kind="plain").assert_ok()
    switched = jobs.run(tmp_path / "switched", 4, form,
                        {"layouts": {"tp2": {"tensor_model_parallel_size": 2}}, "schedule": schedule((3, "tp2")),
                         "verify": "full"}).assert_ok()
    assert_same_steps({i: s for i, s in switched.steps.items() if i > 3}, restarted.steps, 1e-5)


def test_switching_after_a_load(jobs, tmp_path):
    form = {"ckpt-format": "torch_dist", "dist-ckpt-optim-fully-reshardable": True, "train-iters": 8}
    plain = jobs.run(tmp_path / "plain", 4, {**TP2, **form}, kind="plain").assert_ok()
    jobs.run(tmp_path / "stop", 4, {**TP2, **form, "save": tmp_path / "ckpt", "save-interval": 100, "exit-interval": 3},
             kind="plain").assert_ok()
    resumed = jobs.run(tmp_path / "resumed", 4, {**TP2, **form, "load": tmp_path / "ckpt"}, config((5, "pipe"))).assert_ok()
    assert_same_steps(resumed.steps, {i: plain.steps[i] for i in range(4, 9)}, 1e-5)
    past = jobs.run(tmp_path / "past", 4, {**TP2, **form, "load": tmp_path / "ckpt"}, config((2, "pipe")))
    assert 0 not in past.exit_codes
    assert all("at_iteration 2 lies in the past" in log for log in past.logs)


def test_log_interval_spanning_a_switch(jobs, tmp_path):
    arguments = {**TP2_PP2, "train-iters": 8, "log-interval": 4}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    switched = jobs.run(tmp_path / "switched", 4, arguments, config((2, "deep"), (6, "data"))).assert_ok()

    assert [line[:2] for line in log_lines(switched)] == [line[:2] for line in log_lines(plain)]
    for (_, _, found), (_, _, expected) in zip(log_lines(switched), log_lines(plain), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
