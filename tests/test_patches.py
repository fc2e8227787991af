"""Patches for checkouts: the tree of each release is patched, switches without the launcher, and is reverted."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import wheels
import yaml
from conftest import ROOT
from harness import CPU, LAUNCHER, MODEL, TRAINING, torchrun, words_of

from megatron_dynatrain import checkout, launch, session
from megatron_dynatrain.errors import ConfigError, PatchError
from megatron_dynatrain.megatron import loop
from megatron_dynatrain.megatron.versions import TESTED
from megatron_dynatrain.patching import diff, tree
from megatron_dynatrain.report import read

PLAIN = ["tests/pretrain_on_cpu.py"]


@pytest.fixture(scope="module")
def launched(jobs, tmp_path_factory):
    """A release -> (its tree, unpatched; the events of a job started on it by the launcher). Each job runs once."""
    done = {}

    def launch(release):
        if release not in done:
            folder = tmp_path_factory.mktemp(release)
            root = wheels.unpack(release, folder / "tree")
            done[release] = root, train(jobs, root, LAUNCHER, folder / "job")[0]
        return done[release]

    return launch


@pytest.fixture
def small(tmp_path):
    """The files of a tree that a patch looks at, as the installed release has them."""
    installed = wheels.installed()
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


def train(jobs, root, command, folder, config=True):
    """Six steps on the tree at `root`, with a switch after the third; the events of the report, and what was printed."""
    folder.mkdir()
    arguments = {**MODEL, **TRAINING, **CPU, "train-iters": 6, "tensor-model-parallel-size": 2, "data-path": jobs.data,
                 "data-cache-path": jobs.cache}
    if config:
        arguments["dynatrain-config"] = folder / "switch.yaml"
        (folder / "switch.yaml").write_text(yaml.safe_dump({"dynatrain": {
            "layouts": {"data": {"tensor_model_parallel_size": 1}}, "schedule": [{"at_iteration": 3, "layout": "data"}],
            "verify": "full", "report": str(folder / "report.jsonl"), "report_steps": True}}))
    done = torchrun(2, [*command, *words_of(arguments)], wheels.environment(root))
    assert done.returncode == 0, done.stderr[-3000:]
    return (read(folder / "report.jsonl") if config else []), done.stdout


def steps(events):
    return [{name: event[name] for name in ("iteration", "losses", "grad_norm", "learning_rate")} for event in events
            if event["event"] == "step"]


@pytest.mark.parametrize("release", TESTED.values())
def test_a_patched_release_switches_without_the_launcher_as_with_it(jobs, tmp_path, launched, release):
    root, expected = launched(release)
    before = contents(root)
    assert (patch("check", root).returncode, patch("apply", root).returncode, patch("check", root).returncode) == (1, 0, 0)
    assert {str(path) for path, content in contents(root).items() if content != before[path]} == {
        "megatron/training/arguments.py", "megatron/training/training.py"}
    patched, printed = train(jobs, root, PLAIN, tmp_path / "patched")
    assert "attached: True" in printed
    assert [event["event"] for event in patched] == [event["event"] for event in expected]
    switch, = (event for event in patched if event["event"] == "switch")
    assert (switch["iteration"], switch["to"], switch["verify"]) == (3, "data", "ok")
    assert steps(patched) == steps(expected) and len(steps(patched)) == 6
    assert patch("revert", root).returncode == 0
    assert contents(root) == before


def test_a_patched_tree_can_have_the_launcher_too_and_trains_as_before_without_the_flag(jobs, tmp_path, launched):
    _, expected = launched(wheels.installed_release())
    root = wheels.unpack(wheels.installed_release(), tmp_path / "tree")
    tree.Tree(root).apply()
    both, _ = train(jobs, root, LAUNCHER, tmp_path / "both")
    assert steps(both) == steps(expected) and len(steps(both)) == 6
    assert [event["iteration"] for event in both if event["event"] == "switch"] == [3]
    _, printed = train(jobs, root, PLAIN, tmp_path / "plain", config=False)
    assert "attached: False" in printed
    logged = losses(printed)
    assert len(logged) == 6
    for i in (0, 2):  # before the switch; Megatron's own second line averages two steps
        assert logged[i] == (str(i + 1), f"{steps(expected)[i]['losses']['lm loss']:.6E}")


def losses(printed):
    return re.findall(r"iteration +(\d+)/.* lm loss: ([\d.E+-]+)", printed)


def test_apply_and_revert_leave_the_very_bytes_and_can_be_repeated(small):
    before, mode = contents(small), 0o640
    (small / "megatron/training/training.py").chmod(mode)
    assert patch("revert", small).returncode == 0 and contents(small) == before
    assert patch("apply", small).returncode == 0
    applied = contents(small)
    assert patch("apply", small).returncode == 0 and contents(small) == applied != before
    done = patch("check", small)
    assert done.returncode == 0 and done.stdout.rstrip().endswith("is applied")
    assert patch("revert", small).returncode == 0 and contents(small) == before
    assert (small / "megatron/training/training.py").stat().st_mode & 0o777 == mode
    done = patch("check", small)
    assert done.returncode == 1 and "fits, and is not applied" in done.stdout


def test_own_changes_elsewhere_in_the_file_stay(small):
    path = small / "megatron/training/training.py"
    path.write_bytes(b"# ours\r\n" + path.read_bytes() + b"# no line end")
    before = contents(small)
    assert patch("apply", small).returncode == 0
    assert path.read_bytes().startswith(b"# ours\r\n") and path.read_bytes().endswith(b"# no line end")
    assert patch("revert", small).returncode == 0 and contents(small) == before


@pytest.mark.parametrize("action", ["check", "apply", "revert"])
def test_a_changed_place_is_named_and_nothing_is_changed(small, action):
    path = small / "megatron/training/training.py"
    before_it, after_it = path.read_text().rsplit("        if should_exit:\n            break\n", 1)
    path.write_text(before_it + "        if should_exit or ours:\n            break\n" + after_it)
    before = contents(small)
    done = patch(action, small)
    assert done.returncode == 2 and contents(small) == before and not done.stdout
    assert "does not fit, and nothing was changed" in done.stderr
    assert re.search(r"arguments.py, hunk 1 \(line \d+ of the release\): fits", done.stderr)
    assert re.search(r"training.py, hunk 1 \(line \d+ of the release\): differs, ", done.stderr)


@pytest.mark.parametrize("action", ["check", "apply", "revert"])
def test_a_half_applied_tree_is_refused(small, action):
    original = (small / "megatron/training/training.py").read_bytes()
    tree.Tree(small).apply()
    (small / "megatron/training/training.py").write_bytes(original)
    before = contents(small)
    done = patch(action, small)
    assert done.returncode == 2 and contents(small) == before
    assert "is half applied" in done.stderr
    assert done.stderr.count("is applied") == 2 and done.stderr.count(": fits") == 1


def test_an_unknown_release_is_refused_by_name(small):
    path = small / tree.RELEASE
    path.write_text(re.sub(r"(?m)^MINOR = \d+", "MINOR = 20", path.read_text()))
    for action in ("check", "apply", "revert"):
        done = patch(action, small)
        assert done.returncode == 2
        assert "is Megatron 0.20." in done.stderr and "core_v0.17.1, core_v0.18.2, core_v0.19.0" in done.stderr


def test_a_folder_that_is_no_tree_is_refused(tmp_path):
    done = patch("check", tmp_path)
    assert done.returncode == 2 and f"{tmp_path} is no source tree of Megatron-LM" in done.stderr
    assert "megatron/core/package_info.py cannot be read (No such file or directory)" in done.stderr


def test_what_cannot_be_written_changes_nothing(small, monkeypatch):
    before = contents(small)
    replace, calls = os.replace, []

    def full(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PatchError, match="training.py cannot be written .No space left on device.; nothing was changed"):
        tree.Tree(small).apply()
    assert len(calls) == 2 and contents(small) == before


def test_every_tested_release_has_a_patch_and_a_header():
    patches = tree.known()
    assert set(patches) == set(TESTED)
    for patch in patches.values():
        text = (ROOT / "patches" / patch.name / "dynatrain.patch").read_text()
        assert text.startswith(f"megatron_dynatrain for a Megatron-LM checkout of {patch.name}\n")
        assert "\nWhat it does: " in text and "\nWhy: " in text
        changed = [line for line in text.splitlines() if re.match(r"[+-](?![+-])", line)]
        assert 0 < len(changed) < 40 and not any(line.startswith("-") for line in changed)


def test_a_unified_diff_is_read_and_applied_exactly():
    text = (b"a comment\n--- a/f.py\n+++ b/f.py\n@@ -2,2 +2,3 @@ def f():\n a\n+x\n b\n@@ -9 +10 @@\n-c\n+d\n"
            b"--- a/g.py\n+++ b/g.py\n@@ -1 +1 @@\n-e\n+f\n")
    f, g = diff.parse(text)
    assert f == diff.FileDiff("f.py", (diff.Hunk(2, (b"a\n", b"b\n"), (b"a\n", b"x\n", b"b\n")),
                                       diff.Hunk(9, (b"c\n",), (b"d\n",))))
    assert g.path == "g.py"
    content = b"0\na\n0\na\nb\nc\n"
    changed = diff.replaced(content, f.hunks)
    assert changed == b"0\na\n0\na\nx\nb\nd\n"
    assert diff.replaced(changed, f.hunks, revert=True) == content
    with pytest.raises(PatchError, match="is no line of a unified diff"):
        diff.parse(b"--- a/f\n+++ b/f\n@@ -1 +1 @@\nwhat\n")


@pytest.mark.parametrize("content, why", [
    (b"a\nc\n", "it expects the line 'b'"),
    (b"b\na\n", "its lines are there, but not next to one another"),
    (b"a\nb\na\nb\n", "its lines stand there 2 times, at lines 1, 3"),
    (b"a\r\nb\r\n", "it expects the line 'a'"),
])
def test_what_is_not_there_exactly_once_is_no_match(content, why):
    hunk = diff.Hunk(1, (b"a\n", b"b\n"), (b"a\n", b"b\n", b"x\n"))
    lines = content.splitlines(keepends=True)
    assert not diff.is_in(lines, hunk.old)
    assert diff.obstacle(lines, hunk) == why


@pytest.fixture
def no_session(monkeypatch):
    monkeypatch.setattr(session, "_session", None)


def test_the_launcher_leaves_the_boundary_to_a_loop_that_asks_itself():
    asked = []
    running = SimpleNamespace(boundary=0, loop_asks=True, reports_steps=False, at_boundary=lambda at: asked.append(at) or True,
                              job=SimpleNamespace(args=SimpleNamespace(train_iters=9)))
    wrapped = loop.watch_boundary(running, lambda *args: False)
    assert wrapped(None, None, None, 3) is False
    assert (asked, running.job.args.train_iters) == ([], 9)
    running.loop_asks = False
    assert wrapped(None, None, None, 3) is False
    assert (asked, running.job.args.train_iters) == ([3], 3)


def test_attaching_twice_keeps_the_session_and_that_of_the_launcher(no_session, monkeypatch):
    installed = []
    monkeypatch.setattr(launch, "install", lambda: installed.append(session.install(SimpleNamespace(loop_asks=False))))
    checkout.attach()
    first = session.current()
    checkout.attach()
    assert session.current() is first and first.loop_asks and len(installed) == 1


def test_the_loop_asks_the_session_where_something_is_due_and_only_there(no_session):
    asked = []
    session.install(SimpleNamespace(active=True, boundary=5, at_boundary=lambda at: asked.append(at) or at == 6))
    assert [checkout.leaves_loop(iteration) for iteration in (3, 4, 5, 6)] == [False, False, False, True]
    assert asked == [5, 6]


@pytest.mark.parametrize("running", [None, SimpleNamespace(active=False, boundary=0)])
def test_a_flag_that_could_never_act_is_an_error(no_session, running):
    session.install(running)
    with pytest.raises(ConfigError, match="--dynatrain-config is set, but .* did not pass through Megatron's parse_args"):
        checkout.leaves_loop(1)


def test_a_parser_that_has_the_flag_does_not_get_it_twice():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dynatrain-config")
    assert loop.add_flags(None, lambda parser: parser)(parser) is parser
    assert loop.add_flags(None, lambda parser: parser)(argparse.ArgumentParser()).parse_args(
        ["--dynatrain-config", "x"]).dynatrain_config == "x"
