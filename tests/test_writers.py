"""TensorBoard and W&B across switches: Megatron's own writers go on as if nothing had happened."""

import pytest

pytest.importorskip("tensorboard")

LAYOUTS = {"deep": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4},
           "wide": {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1}}
CONFIG = {"layouts": LAYOUTS, "verify": "full",
          "schedule": [{"at_iteration": 2, "layout": "deep"}, {"at_iteration": 4, "layout": "wide"}]}


def scalars(folder):
    """{tag: [(step, value)]} of all event files below a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def run(jobs, folder, **more):
    arguments = {"train-iters": 6, "tensorboard-dir": str(folder / "tensorboard"), "tensorboard-log-interval": 1,
                 "log-timers-to-tensorboard": True, "timing-log-level": 1, "wandb-project": "p", "wandb-exp-name": "e",
                 "wandb-save-dir": str(folder / "wandb")}
    return jobs.run(folder, 4, arguments, probe="probes:wandb", **more).assert_ok()


def test_curves_are_those_of_a_run_without_a_switch(jobs, tmp_path):
    plain = run(jobs, tmp_path / "plain", kind="plain")
    switched = run(jobs, tmp_path / "switched", config=CONFIG)
    assert [event["to"] for event in switched.events_of("switch")] == ["deep", "wide"]
    curves, expected = scalars(tmp_path / "switched" / "tensorboard"), scalars(tmp_path / "plain" / "tensorboard")
    assert curves.keys() >= expected.keys() >= {"lm loss", "grad-norm", "learning-rate", "batch-size"}
    for tag in ("lm loss", "grad-norm", "learning-rate", "batch-size"):
        assert [step for step, _ in curves[tag]] == [step for step, _ in expected[tag]], tag
        assert [v for _, v in curves[tag]] == pytest.approx([v for _, v in expected[tag]], rel=1e-5, abs=0), tag
    assert [step for step, _ in curves["lm loss"]] == [1, 2, 3, 4, 5, 6]
    # One rank writes to W&B, from the first step to the end.
    logged = switched.records("wandb")
    assert logged == plain.records("wandb")
    assert logged[-1] == {"finished": True}
