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
