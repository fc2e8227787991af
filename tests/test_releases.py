"""Releases of Megatron: which are accepted, and that each has what the seams say. `scripts/test_releases.sh` trains on each."""

import ast
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import wheels
from conftest import ROOT

from megatron_dynatrain.errors import LayoutRefused, UnsupportedMegatron
from megatron_dynatrain.megatron import seams, versions


def named(version):
    major, minor, _ = version.split(".", 2)
    return SimpleNamespace(MAJOR=int(major), MINOR=int(minor), __version__=version)


@pytest.mark.core
def test_the_tests_run_on_a_tested_release():
    assert wheels.installed_release() in versions.TESTED.values()


@pytest.mark.parametrize("version", [*versions.TESTED.values(), "0.19.7", "0.18.0rc1"])
def test_tested_releases_and_their_patch_releases_are_accepted(version, capsys):
    versions.check(named(version))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("version", ["0.20.0", "0.16.1", "1.0.0"])
def test_other_releases_are_refused_and_tried_only_where_they_are_named(version, monkeypatch, capsys):
    with pytest.raises(UnsupportedMegatron) as error:
        versions.check(named(version))
    text = str(error.value)
    assert text.startswith(f"megatron-core {version} was found")
    assert "tested with 0.17.1, 0.18.2 and 0.19.2 only" in text and f"set DYNATRAIN_TRY_MEGATRON={version} to try it" in text
    for wrong in ("1", "true", "0.20", "0.20.1"):
        monkeypatch.setenv(versions.OVERRIDE, wrong)
        with pytest.raises(UnsupportedMegatron):
            versions.check(named(version))
    monkeypatch.setenv(versions.OVERRIDE, version)
    versions.check(named(version))
    assert f"megatron-core {version} is tried because DYNATRAIN_TRY_MEGATRON says so" in capsys.readouterr().err


def test_a_git_commit_behind_the_number_does_not_matter(monkeypatch):
    """Megatron appends that of the repository in which it happens to lie."""
    monkeypatch.setenv(versions.OVERRIDE, "0.20.0")
    versions.check(SimpleNamespace(MAJOR=0, MINOR=20, __version__="0.20.0+f6662c9"))


@pytest.mark.parametrize("release, tp, ep, etp, refused", [
    ((0, 18), 2, 1, 1, True), ((0, 18), 2, 1, 4, True), ((0, 17), 1, 1, 2, True), ((0, 18), 2, 1, 2, False),
    ((0, 17), 2, 2, 1, False), ((0, 19), 2, 1, 1, False)])
def test_experts_that_a_release_trains_wrongly_are_refused(release, tp, ep, etp, refused, monkeypatch):
    monkeypatch.setattr(versions, "release", lambda: release)
    sizes = dict(tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp)
    for experts in (4, None):
        args = Namespace(num_experts=experts, **sizes)
        if refused and experts:
            with pytest.raises(LayoutRefused, match=f"_tensor_parallel_size {etp} and tensor_model_parallel_size {tp};"):
                versions.check_experts(args)
        else:
            versions.check_experts(args)


@pytest.mark.parametrize("found, treated_as", [((0, 17), (0, 17)), ((0, 18), (0, 18)), ((0, 19), (0, 19)), ((0, 20), (0, 19)),
                                               ((1, 0), (0, 19)), ((0, 16), (0, 17))])
def test_a_release_that_is_tried_is_treated_as_the_last_one_before_it(found, treated_as, monkeypatch):
    from megatron.core import package_info

    monkeypatch.setattr(package_info, "MAJOR", found[0])
    monkeypatch.setattr(package_info, "MINOR", found[1])
    assert versions.release() == treated_as


def test_an_override_lets_a_job_go_on(tmp_path):
    script = wheels.pretend("0.20.0", tmp_path)
    for value, goes_on in (("", False), ("0.20.0", True)):
        done = subprocess.run([sys.executable, "-m", "megatron_dynatrain.launch", str(script)], cwd=ROOT,
                              capture_output=True, text=True,
                              env={**wheels.environment(tmp_path), versions.OVERRIDE: value})
        assert (done.returncode == 0, "went on" in done.stdout) == (goes_on, goes_on), done.stderr


@pytest.mark.parametrize("release, version", versions.TESTED.items(), ids=versions.TESTED.values())
def test_every_seam_is_in_the_release_as_the_table_says(release, version, tmp_path):
    """Read in the source of the wheel, not imported: the function is defined in its module, or imported there, and has the
    parameters of the seam; no release has two seams on one function."""
    root = wheels.unpack(version, tmp_path)
    of_release = [seam for seam in seams.SEAMS if seam.is_of(release)]
    assert len({(seam.module, seam.name) for seam in of_release}) == len(of_release) >= 12
    for seam in of_release:
        definition = find(root, seam.module, seam.name)
        assert definition is not None, f"{seam.module}.{seam.name}"
        args = definition.args
        assert {*seam.parameters} <= {arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)}, seam.name


@pytest.mark.parametrize("release, version", versions.TESTED.items(), ids=versions.TESTED.values())
def test_pretrain_gives_the_objects_of_the_first_layout_to_wrapped_functions_only(release, version, tmp_path):
    """`pretrain` keeps them in its locals; what it passes them to must exchange them for those of the current layout."""
    held = {"optimizer", "opt_param_scheduler", "train_data_iterator", "valid_data_iterator", "test_data_iterator"}
    pretrain = find(wheels.unpack(version, tmp_path), "megatron.training.training", "pretrain")
    given = {getattr(call.func, "id", getattr(call.func, "attr", None)) for call in ast.walk(pretrain)
             if isinstance(call, ast.Call) and held & {getattr(value, "id", None) for value in
                                                       (*call.args, *(keyword.value for keyword in call.keywords))}}
    given -= {"evaluate_and_print_results_rl"}  # --perform-rl-step is refused
    assert {"train", "evaluate_and_print_results"} < given
    assert given <= {seam.name for seam in seams.SEAMS if seam.module == "megatron.training.training" and seam.is_of(release)}


def find(root, module, name):
    """The definition of a function of a module, followed through its imports."""
    path = root / (module.replace(".", "/") + ".py")
    tree = ast.parse((path if path.exists() else path.with_suffix("") / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.level == 0 and name in [alias.name for alias in node.names]:
            return find(root, node.module, name)
    return None
