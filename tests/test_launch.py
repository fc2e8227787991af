"""The launcher as a user starts it: through torchrun, with a wrong command line, with an unsupported Megatron."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import wheels
import yaml
from conftest import ROOT
from harness import CPU, LAUNCHER, MODEL, TRAINING, torchrun, words_of

from megatron_dynatrain.errors import UnsupportedMegatron
from megatron_dynatrain.megatron import seams
from megatron_dynatrain.report import read


pytestmark = pytest.mark.core


def launch(*words, env=None):
    return subprocess.run([sys.executable, "-m", "megatron_dynatrain.launch", *map(str, words)], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, **(env or {})})


def test_torchrun_switches_and_says_so(jobs, tmp_path):
    config = tmp_path / "switch.yaml"
    config.write_text(yaml.safe_dump({"dynatrain": {
        "layouts": {"data": {"tensor_model_parallel_size": 1}}, "schedule": [{"at_iteration": 2, "layout": "data"}],
        "verify": "digest", "report": str(tmp_path / "deep" / "report.jsonl"), "report_steps": True}}))
    arguments = {**MODEL, **TRAINING, **CPU, "train-iters": 4, "tensor-model-parallel-size": 2, "data-path": jobs.data,
                 "data-cache-path": jobs.cache, "dynatrain-config": config}
    done = torchrun(2, [*LAUNCHER, *words_of(arguments)], os.environ)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [line for line in done.stdout.splitlines() if "[dynatrain]" in line]
    assert any(re.search(r"after iteration 2: launch \(TP2 PP1 DP1\) -> data \(TP1 PP1 DP2\), stall [\d.]+ s, moved .*"
                         r"\(minimum .*\), verify ok", line) for line in said), said
    events = read(tmp_path / "deep" / "report.jsonl")
    assert [event["event"] for event in events] == ["start", "step", "step", "switch", "step", "step", "end"]
    assert {"iteration", "from", "to", "stall_seconds", "phases", "moved_bytes", "minimum_bytes", "verify", "plan_hash"} <= set(
        events[3])
    assert [event["consumed_samples"] for event in events if event["event"] == "step"] == [4, 8, 12, 16]


@pytest.mark.parametrize("words, message", [
    ([], "no script was given"),
    (["--cpu"], "no script was given"),
    (["nowhere.py"], "the script nowhere.py does not exist"),
    (["--gpu", "scripts/pretrain_gpt.py"], "unrecognized arguments: --gpu"),
    (["--cpu-optimizer", "lion", "scripts/pretrain_gpt.py"], "invalid choice: 'lion'"),
])
def test_a_wrong_command_line_is_explained(words, message):
    done = launch(*words)
    assert done.returncode == 2 and message in done.stderr


def test_a_script_without_megatron_runs_as_it_would_alone(tmp_path):
    (tmp_path / "neighbour.py").write_text("value = 42")
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour\nprint(__name__, neighbour.value, sys.argv[1:])")
    done = launch(script, "--cpu", "x")
    assert done.stdout == "__main__ 42 ['--cpu', 'x']\n", done.stderr


def test_an_unsupported_megatron_is_refused_when_it_is_imported(tmp_path):
    done = launch(wheels.pretend("0.16.1", tmp_path), env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "megatron-core 0.16.1 was found, but megatron_dynatrain was tested with 0.17.1, 0.18.2 and 0.19.2 only" in done.stderr


@pytest.mark.parametrize("train, message", [
    (None, "megatron.training.training.train does not exist"),
    (lambda model, optimizer: None, "megatron.training.training.train has no parameter opt_param_scheduler"),
])
def test_a_seam_that_looks_otherwise_is_named(train, message):
    fitting = {seam.name: eval(f"lambda {', '.join(seam.parameters)}: None") for seam in seams.SEAMS
               if seam.module == "megatron.training.training" and seam.is_of((0, 19))}
    module = SimpleNamespace(**{**fitting, "train": train})
    with pytest.raises(UnsupportedMegatron, match=message):
        seams._wrap_all(module, "megatron.training.training", SimpleNamespace(), (0, 19))


LATE_THREAD = """
import ctypes, threading, time
from megatron_dynatrain import gloo_threads

gloo_threads.outlast()
begun = threading.Event()

def thread():
    ctypes.CDLL(None).prctl(15, b"pt_gloo_runloop", 0, 0, 0)  # PR_SET_NAME
    begun.set()
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        pass
    print("let go", flush=True)
    threading.Event().wait()

threading.Thread(target=thread, daemon=True).start()
begun.wait()
"""


def test_a_process_ends_when_the_threads_of_gloo_have_let_go():
    done = subprocess.run([sys.executable, "-c", LATE_THREAD], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "let go\n"), done.stderr
