"""`megatron_dynatrain.reconfigure`, called from ranks' own code between steps."""

import pytest

TP2 = {"tensor-model-parallel-size": 2}
PP2 = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}
LAYOUTS = {"pipe": PP2, "data": {"tensor_model_parallel_size": 1}}


def run(jobs, folder, requests, **more):
    return jobs.run(folder, 4, {**TP2, "train-iters": 12}, {"layouts": LAYOUTS, "verify": "full"}, probe="probes:ask",
                    requests=requests, **more).assert_ok()


@pytest.mark.parametrize("requests, targets", [
    pytest.param([[1, 2, "pipe"]], ["pipe"], id="one-rank"),
    pytest.param([[0, 2, "pipe"], [3, 7, "launch"]], ["pipe", "launch"], id="there-and-back"),
    pytest.param([[2, 2, {"pipeline_model_parallel_size": 2}], [0, 7, "data"]], ["pipeline_model_parallel_size=2", "data"],
                 id="layout-object"),
    pytest.param([[-1, 2, "pipe"]], ["pipe"], id="every-rank"),
    pytest.param([[3, 2, {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}]], ["pipe"],
                 id="object-equal-to-a-declared-one"),
])
def test_requests_are_carried_out_at_one_boundary_of_all_ranks(jobs, tmp_path, requests, targets):
    plain = jobs.run(tmp_path / "plain", 4, {**TP2, "train-iters": 12}, kind="plain").assert_ok()
    result = run(jobs, tmp_path / "asked", requests)
    switches = result.events_of("switch")
    assert [event["to"] for event in switches] == targets
    asked_at = sorted({iteration for _, iteration, _ in requests})
    for event, asked in zip(switches, asked_at, strict=True):
        assert asked <= event["iteration"] <= asked + 3
    assert not result.records("errors")
    for iteration, step in result.steps.items():
        assert step["loss"] == pytest.approx(plain.steps[iteration]["loss"], rel=1e-4)
    assert result.samples == plain.samples


def test_two_ranks_ask_for_different_layouts(jobs, tmp_path):
    result = run(jobs, tmp_path, [[1, 2, "pipe"], [2, 2, "data"]])
    # Both are answered: carried out one after the other, or the newer one in place of the older.
    answers = [*result.events_of("switch"), *result.events_of("superseded")]
    assert sorted(event["to"] for event in answers) == ["data", "pipe"]
    assert result.events_of("switch")
    assert sorted(result.steps) == list(range(1, 13))


def test_wrong_requests_are_errors_of_the_caller_and_training_goes_on(jobs, tmp_path):
    plain = jobs.run(tmp_path / "plain", 4, {**TP2, "train-iters": 12}, kind="plain").assert_ok()
    result = run(jobs, tmp_path / "asked", [
        [1, 2, "pip"], [2, 3, {"tensor_model_parallel_size": 3}], [0, 4, {"micro_batch_size": 3}]])
    errors = {record["kind"] + ": " + record["text"] for record in result.records("errors")}
    assert len(errors) == 3
    for part in ("ConfigError: there is no layout 'pip'; did you mean 'pipe'?", "LayoutRefused: ",
                 "(micro_batch_size=3) cannot be trained here"):
        assert any(part in error for error in errors), errors
    assert result.steps == plain.steps
    assert not result.events_of("switch")


def test_a_request_for_the_current_layout_changes_nothing(jobs, tmp_path):
    arguments = {**TP2, "train-iters": 9, "overlap-grad-reduce": True, "overlap-param-gather": True}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    result = jobs.run(tmp_path / "asked", 4, arguments, {"layouts": LAYOUTS}, probe="probes:ask",
                      requests=[[1, 2, "launch"], [0, 5, {}]]).assert_ok()
    assert result.steps == plain.steps and not result.events_of("switch")


def test_without_the_launcher_it_says_what_to_do():
    import megatron_dynatrain
    from megatron_dynatrain.errors import ConfigError

    with pytest.raises(ConfigError, match="was not started by megatron_dynatrain.launch"):
        megatron_dynatrain.reconfigure("deep")


@pytest.mark.parametrize("asking", [3])
def test_the_interface_tells_costs_calls_back_and_answers_everything(jobs, tmp_path, asking):
    plain = jobs.run(tmp_path / "plain", 4, {**TP2, "train-iters": 24}, kind="plain").assert_ok()
    result = jobs.run(tmp_path / "asked", 4, {**TP2, "train-iters": 24}, {
        "layouts": {**LAYOUTS, "vetoed": {"tensor_model_parallel_size": 1, "micro_batch_size": 1}}, "verify": "full"},
        probe="probes:interface", asking=asking).assert_ok()
    switch, = result.events_of("switch")
    assert (switch["iteration"], switch["to"]) == (14, "pipe")
    said = {}
    for record in result.records("interface"):
        said.setdefault(record["what"], []).append(record)
    assert "removed" not in said
    one = {what: records[0] for what, records in said.items() if len(records) == 1}
    # What was told beforehand is what was moved.
    assert one["cost of pipe"]["result"] == switch["moved_bytes"] > 0
    assert one["cost of launch"]["result"] == "SwitchCost" and one["cost of launch"]["error"] is None  # it moves nothing
    assert one["cost of an undeclared one"]["result"] > 0
    assert sorted(record["error"].split(":")[0] for record in said["error"]) == [
        "ConfigError", "ConfigError", "LayoutRefused", "LayoutRefused"]
    assert any("(world_size=2) wants other ranks than the 4 that train" in record["error"] for record in said["error"])
    assert any("the thread that trains was about to wait" in record["error"] for record in said["error"])
    assert (one["switch"]["error"], one["switch"]["result"]) == (None, "SwitchReport")
    assert one["late"]["error"].startswith("RequestDropped: the request was expired: iteration 2 had passed")
    # Around the switch, on every rank: before it in the old layout, after it in the new one.
    assert [(r["iteration"], r["to"], r["layout"]) for r in said["before"] if r["to"] == "pipe"] == [
        (14, "pipe", ["launch", {"TP": 2, "PP": 1, "DP": 2}])] * 4
    assert [(r["iteration"], r["to"], r["layout"], r["moved"]) for r in said["after"]] == [
        (14, "pipe", ["pipe", {"TP": 1, "PP": 2, "DP": 2}], switch["moved_bytes"])] * 4
    # A callback of one rank refuses on all.
    refused, = result.events_of("refused")
    assert "a callback before the switch failed: not now (on rank 1)" in refused["reason"]
    assert [record["error"] for record in said["refused"]] == [refused["reason"]] * 4
    assert one["vetoed"]["error"] == f"LayoutRefused: {refused['reason']}"
    for what in ("last", "last cost"):
        assert one[what]["error"] == "RequestDropped: the request was expired: the job ended after iteration 24"
    assert [event["to"] for event in result.events_of("expired")] == ["pipe", "launch"]
    # Asking for costs, and what was refused, changed no bit.
    assert {i: s for i, s in result.steps.items() if i <= 14} == {i: s for i, s in plain.steps.items() if i <= 14}
    assert sorted(result.steps) == sorted(plain.steps)


def test_the_cost_of_a_switch_that_does_not_fit_into_memory_is_a_refusal(jobs, tmp_path):
    result = jobs.run(tmp_path, 2, {"train-iters": 8}, {"layouts": {"pipe": {"pipeline_model_parallel_size": 2}},
                                                        "transfer": {"memory_limit_bytes": 4096}},
                      probe="probes:ask_cost", layout="pipe").assert_ok()
    told, = result.records("costs")
    assert told["iteration"] < 8
    assert "the switch would be refused: the switch does not fit into memory" in told["error"]
    assert "`transfer.memory_limit_bytes` allows 4.1 kB" in told["error"]
    assert not result.events_of("cost") and sorted(result.steps) == list(range(1, 9))
