"""Ranks join and leave a job while it trains."""

import pytest

LAYOUTS = {
    "four": {"world_size": 4, "tensor_model_parallel_size": 2},
    "two": {"world_size": 2, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
    "high": {"ranks": [1, 3], "tensor_model_parallel_size": 2},
}


def schedule(*entries):
    return [{"at_iteration": iteration, "layout": layout} for iteration, layout in entries]


def test_spares_are_taken_in_and_sent_back(jobs, tmp_path):
    result = jobs.run(tmp_path, 4, {"train-iters": 40}, {
        "layouts": LAYOUTS, "schedule": schedule((2, "four"), (12, "two")), "verify": "full", "run_dir": str(tmp_path / "run"),
        "elastic": {"world_size": 2, "spares": 2}}).assert_ok()
    print(result.events)
