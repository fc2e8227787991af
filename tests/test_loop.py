"""A running job changes layout: the steps after it, the data, the log, and what the loop does around them."""

import pytest

TP2_PP2 = {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2}
LAYOUTS = {
    "deep": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4},
    "wide": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
    "data": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1},
}


def schedule(*entries):
    return [{"at_iteration": iteration, "layout": layout} for iteration, layout in entries]


def test_eight_ranks_two_switches_same_losses(jobs, tmp_path):
    arguments = {**TP2_PP2, "train-iters": 24}
    plain = jobs.run(tmp_path / "plain", 8, arguments, kind="plain").assert_ok()
    switched = jobs.run(tmp_path / "switched", 8, arguments,
                        {"layouts": LAYOUTS, "schedule": schedule((4, "deep"), (14, "wide")), "verify": "full"}).assert_ok()
    assert [(e["from"], e["to"], e["verify"]) for e in switched.events_of("switch")] == [
        ("launch", "deep", "ok"), ("deep", "wide", "ok")]
    assert sorted(switched.steps) == sorted(plain.steps) == list(range(1, 25))
    for iteration, step in switched.steps.items():
        tolerance = 0 if iteration <= 4 else 1e-5 if iteration <= 9 or 14 < iteration <= 19 else 1e-4
        assert step["loss"] == pytest.approx(plain.steps[iteration]["loss"], rel=tolerance, abs=0), iteration
        assert step["grad_norm"] == pytest.approx(plain.steps[iteration]["grad_norm"], rel=tolerance, abs=0), iteration
        assert step["lr"] == plain.steps[iteration]["lr"], iteration
    assert switched.samples == plain.samples
