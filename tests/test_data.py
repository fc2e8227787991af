"""Which samples a step sees does not depend on switches; nor do the schedules that count samples."""

import pytest

LAYOUTS = {"data": {"tensor_model_parallel_size": 1}, "pipe": {"pipeline_model_parallel_size": 2}}
SCHEDULE = [{"at_iteration": 3, "layout": "data"}, {"at_iteration": 6, "layout": "pipe"}]


@pytest.mark.parametrize("arguments", [
    pytest.param({"num-workers": 2}, id="single-two-workers"),
    pytest.param({"data-path": None, "mock-data": True}, id="mock"),
    pytest.param({"dataloader-type": "cyclic", "no-data-sharding": True}, id="cyclic-not-sharded"),
    pytest.param({"dataloader-type": "cyclic", "no-data-sharding": True, "num-workers": 2}, id="cyclic-two-workers"),
    pytest.param({"rampup-batch-size": "4 4 16", "global-batch-size": 8, "train-iters": None, "train-samples": 60,
                  "lr-warmup-iters": None, "lr-warmup-samples": 8, "lr-decay-iters": None, "lr-decay-samples": 60}, id="ramp-up"),
    pytest.param({"iterations-to-skip": "3 4 7"}, id="skipped-iterations"),
    pytest.param({"train-iters": 9, "eval-interval": 4, "full-validation": None}, id="evaluation-between"),
])
def test_samples_of_every_step(jobs, tmp_path, arguments):
    arguments = {"tensor-model-parallel-size": 2, "train-iters": 9, **arguments}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    switched = jobs.run(tmp_path / "switched", 4, arguments,
                        {"layouts": LAYOUTS, "schedule": SCHEDULE, "verify": "digest"}).assert_ok()
    assert len(switched.events_of("switch")) == 2
    assert len(plain.samples) >= 6 and switched.samples == plain.samples
    assert sorted(switched.steps) == sorted(plain.steps)
    for iteration, step in switched.steps.items():
        expected = plain.steps[iteration]
        assert (step["lr"], step["skipped"]) == (expected["lr"], expected["skipped"])
        if expected["loss"] is not None:
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
