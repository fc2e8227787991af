"""Patches for checkouts: each release's tree is patched, trains with a switch and no launcher, and is as it was after revert."""

import os
import shutil
import subprocess
import sys

import pytest
import yaml
from conftest import ROOT
from harness import CPU, MODEL, TRAINING, words_of

from megatron_dynatrain.errors import PatchError
from megatron_dynatrain.megatron.versions import TESTED
from megatron_dynatrain.patching import diff, tree
from megatron_dynatrain.report import read

LAUNCHER = ["-m", "megatron_dynatrain.launch", "--cpu", "scripts/pretrain_gpt.py"]
PLAIN = ["tests/pretrain_on_cpu.py"]


@pytest.fixture(scope="module", params=TESTED.values())
def source(request, tmp_path_factory):
    """A tree of each release, unpatched."""
    import wheels

    return wheels.unpack(request.param, tmp_path_factory.mktemp("tree"))


@pytest.fixture
def copy(tmp_path):
    """The files of a tree that a patch looks at, as the installed release has them."""
    import megatron.core
    from pathlib import Path

    installed = Path(megatron.core.__file__).parent.parent.parent
    for path in (tree.RELEASE, "megatron/training/arguments.py", "megatron/training/training.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(installed / path, tmp_path / path)
    return tmp_path


def patch(action, root):
    return subprocess.run([sys.executable, "-m", "megatron_dynatrain", "patch", action, str(root)], cwd=ROOT,
                          capture_output=True, text=True)


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}


def train(jobs, root, command, folder, config=True, ranks=2):
    """Six steps on the tree at `root`, with a switch after the third; the events of the report, and what was printed."""
    folder.mkdir()
    arguments = {**MODEL, **TRAINING, **CPU, "train-iters": 6, "tensor-model-parallel-size": 2, "data-path": jobs.data,
                 "data-cache-path": jobs.cache}
    if config:
        arguments["dynatrain-config"] = folder / "switch.yaml"
        (folder / "switch.yaml").write_text(yaml.safe_dump({"dynatrain": {
            "layouts": {"data": {"tensor_model_parallel_size": 1}}, "schedule": [{"at_iteration": 3, "layout": "data"}],
            "verify": "full", "report": str(folder / "report.jsonl"), "report_steps": True}}))
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                           "--rdzv-endpoint", "localhost:0", *command, *words_of(arguments)], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, "PYTHONPATH": f"{root}:{ROOT}", "OMP_NUM_THREADS": "1",
                                          "PYTHONDONTWRITEBYTECODE": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return (read(folder / "report.jsonl") if config else []), done.stdout


def steps(events):
    return [{name: event[name] for name in ("iteration", "losses", "grad_norm", "learning_rate")} for event in events
            if event["event"] == "step"]


def test_a_patched_release_switches_without_the_launcher_as_with_it(jobs, tmp_path, source):
    before = contents(source)
    launched, _ = train(jobs, source, LAUNCHER, tmp_path / "launched")
    assert (patch("check", source).returncode, patch("apply", source).returncode, patch("check", source).returncode) == (1, 0, 0)
    assert {path for path, content in contents(source).items() if content != before[path]} == {
        source.__class__("megatron/training/arguments.py"), source.__class__("megatron/training/training.py")}
    patched, printed = train(jobs, source, PLAIN, tmp_path / "patched")
    assert "attached: True" in printed
    assert [event["event"] for event in patched] == [event["event"] for event in launched]
    switch, = (event for event in patched if event["event"] == "switch")
    assert (switch["iteration"], switch["to"], switch["verify"]) == (3, "data", "ok")
    assert steps(patched) == steps(launched) and len(steps(patched)) == 6
    assert patch("revert", source).returncode == 0
    assert contents(source) == before
