"""Layers know only what lies below them; Megatron is named in the adapters alone."""

import ast
import subprocess
import sys

import pytest
from conftest import ROOT

PACKAGE = ROOT / "megatron_dynatrain"

# What each module may import of torch, Megatron and this package; a prefix stands for what lies under it.
PURE = {"errors": (), "geometry": (), "report": (), "import_hooks": (),
        "space": ("errors", "geometry"),
        "layout": ("errors",),
        "planning": ("errors", "geometry", "space", "planning"),
        "config": ("errors", "layout"),
        "archive": ("geometry", "space"),
        "flags": (),
        "agenda": ("config", "layout"),
        "promise": ("errors",),
        "members": (),
        "gloo_threads": (),
        "run_dir": ("agenda", "config", "errors", "layout", "report", "run_dir"),
        "timeline": ("errors", "report", "timeline"),
        "patching": ("errors", "patching"),
        "planner": ("archive", "config", "errors", "flags", "layout", "members", "planner", "planning", "report",
                    "space")}
WITH_TORCH = {"transfer": ("errors", "geometry", "space", "planning", "transfer"),
              "consensus": (),
              "device_map": (),
              "late": (),
              "memory": (),
              "registry": ("errors", "layout", "planning", "space"),
              "requests": ("agenda",),
              "elastic": ("agenda", "config", "elastic", "errors", "layout", "members", "run_dir"),
              "passage": ("consensus", "elastic", "errors", "planning", "registry", "space"),
              "controller": ("config", "consensus", "elastic", "errors", "layout", "memory", "passage", "planning", "registry",
                             "report", "space", "transfer"),
              "device_manager": ("agenda", "elastic", "errors", "layout", "members", "passage"),
              "session": ("agenda", "config", "consensus", "controller", "device_manager", "elastic", "errors", "layout", "memory",
                          "passage", "promise", "registry", "report", "requests", "run_dir"),
              "bench": ("bench", "controller", "flags", "geometry", "import_hooks", "launch", "megatron", "memory", "planning",
                        "report", "session", "space", "transfer")}
WITH_MEGATRON = {"megatron", "cpu", "launch", "checkout", "cli", "__main__", ""}  # "" is the package's __init__


def imports(path):
    """(module name, line) of every import in a file, within functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, node.lineno
            if node.module == "megatron_dynatrain":
                yield from ((f"megatron_dynatrain.{alias.name}", node.lineno) for alias in node.names)


def layer(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0].replace("__init__", "")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = layer(path)
    if own in WITH_MEGATRON:
        return
    allowed = {**PURE, **WITH_TORCH}[own]
    for name, line in imports(path):
        where = f"{path.relative_to(ROOT)}:{line} imports {name}"
        top = name.split(".")[0]
        assert top not in ("megatron", "transformer_engine", "apex"), where
        if own in PURE:
            assert top != "torch", where
        if name.startswith("megatron_dynatrain."):
            assert name.split(".")[1] in allowed, where


def test_the_rule_knows_every_module():
    assert {layer(path) for path in PACKAGE.rglob("*.py")} == {*PURE, *WITH_TORCH, *WITH_MEGATRON}


@pytest.mark.parametrize("statement, absent", [
    ("import megatron_dynatrain; megatron_dynatrain.Layout", ("torch", "megatron")),
    ("import megatron_dynatrain.planning, megatron_dynatrain.config", ("torch", "megatron")),
    ("import megatron_dynatrain.cli, megatron_dynatrain.run_dir.commands, megatron_dynatrain.run_dir.watcher",
     ("torch", "megatron")),
    ("import megatron_dynatrain.timeline.command, megatron_dynatrain.timeline.show", ("torch", "megatron")),
    ("import megatron_dynatrain.planner.command, megatron_dynatrain.planner.show", ("torch", "megatron")),
    ("import megatron_dynatrain.patching.command", ("torch", "megatron")),
    ("import megatron_dynatrain.session, megatron_dynatrain.megatron.seams", ("megatron",)),
])
def test_importing_loads_neither_torch_nor_megatron(statement, absent):
    check = f"import sys; {statement}; print([name for name in {absent} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_support_matrix_in_the_readme_is_the_one_that_is_printed():
    printed = subprocess.run([sys.executable, "-m", "megatron_dynatrain", "check"], cwd=ROOT, capture_output=True, text=True)
    assert printed.returncode == 0 and len(printed.stdout.splitlines()) > 20
    assert printed.stdout.strip() in (ROOT / "README.md").read_text()
