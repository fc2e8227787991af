"""The example of an RL loop: scripts/phases.py, which uses the public Python interface alone."""

import re

import yaml
from conftest import ROOT


def test_two_phases_take_turns(jobs, tmp_path):
    config = {**yaml.safe_load((ROOT / "configs" / "phases.yaml").read_text())["dynatrain"], "run_dir": str(tmp_path / "run")}
    arguments = {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 2, "train-iters": 34}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    result = jobs.run(tmp_path / "phases", 4, arguments, config, script="phases.py").assert_ok()
    # 8 steps as launched, then 6 of `generate` and 8 of `train` in turn.
    assert [(event["iteration"], event["from"], event["to"]) for event in result.events_of("switch")] == [
        (8, "launch", "generate"), (14, "generate", "train"), (22, "train", "generate"), (28, "generate", "train")]
    assert [event["to"] for event in result.events_of("cost")][:4] == ["generate", "train", "generate", "train"]
    assert sorted(result.steps) == list(range(1, 35))
    for iteration, step in result.steps.items():
        assert abs(step["loss"] - plain.steps[iteration]["loss"]) < 1e-4 * plain.steps[iteration]["loss"]
    assert result.samples == plain.samples
    log = result.logs[0]
    assert len(re.findall(r"\[phases\] generate: 'def .*'", log)) == 2  # one in each phase, on rank 0
    moved = {event["to"]: event["moved_bytes"] for event in result.events_of("switch")}
    told = {(phase, int(bytes_)) for phase, bytes_ in re.findall(r"phase '(\w+)' would move (\d+) bytes", log)}
    assert {("generate", moved["generate"]), ("train", moved["train"])} <= told
