"""Every rank of a world described, in parallel processes, and kept for the next time.

Each process captures the job once and describes a share of the ranks (`megatron.survey`); what comes back are files of plain
columns (`archive`). A description is kept under a key of everything that it follows from: arguments, layout, world size, the
versions of Megatron and torch, and this package's own code.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_dynatrain import archive, errors
from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.layout import LAUNCH, Layout
from megatron_dynatrain.space import Memory, World

_RANKS_PER_PROCESS = 64  # fewer are not worth the start of another process


@dataclass(frozen=True, slots=True)
class Job:
    """What is launched: a model file's arguments with the layout of the launch, or a script with its arguments.

    source: names it in messages.
    """

    source: str
    model: dict | None
    launch: Layout
    script: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """One layout, described. memory: of each rank, in the order of `world.ranks`. seconds: what describing took; 0 where it was
    kept from before."""

    world: World
    memory: list[Memory]
    seconds: float

    @property
    def state_bytes(self) -> np.ndarray:
        """What ranks hold weights, persistent buffers, masters and optimizer states in: int64 [num_ranks]."""
        return np.array([memory.state_bytes for memory in self.memory], np.int64)

    @property
    def gradient_bytes(self) -> np.ndarray:
        """What ranks hold gradients in while they train: int64 [num_ranks]."""
        return np.array([memory.gradient_bytes for memory in self.memory], np.int64)


def describe(job: Job, layouts: dict[str, Layout], world_size: int, num_processes: int,
             cache: Path | None) -> dict[str, Survey]:
    """Every layout of `layouts`, by name, on as many ranks as it wants, or else on the `world_size` of the launch. 'launch' is the
    name of the launch's own layout.

    cache: the folder in which descriptions are kept, or None. Raises LayoutRefused and ConfigError as the job would.
    """
    with tempfile.TemporaryDirectory(prefix="dynatrain-") as scratch:
        kept = cache or Path(scratch, "kept")
        files = {name: kept / f"{_key(job, name, layout, world_size)}.npz" for name, layout in layouts.items()}
        missing = {name: layout for name, layout in layouts.items() if not files[name].exists()}
        started = time.perf_counter()
        if missing:
            largest = max(layout.num_ranks or world_size for layout in missing.values())
            num_processes = max(1, min(num_processes, -(-largest // _RANKS_PER_PROCESS)))
            _run(job, missing, world_size, num_processes, Path(scratch))
            for i, name in enumerate(missing):
                _merge([Path(scratch, f"{number}.{i}.npz") for number in range(num_processes)], files[name])
        seconds = (time.perf_counter() - started) / max(len(missing), 1)
        return {name: _survey(files[name], seconds if name in missing else 0.0) for name in layouts}


def default_cache() -> Path:
    """Where descriptions are kept: $XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "megatron_dynatrain", "worlds")


def _survey(path: Path, seconds: float) -> Survey:
    holdings = archive.read(path)
    return Survey(World.assemble(holdings), [holdings[rank].memory for rank in sorted(holdings)], seconds)


def _run(job: Job, layouts: dict[str, Layout], world_size: int, num_processes: int, folder: Path) -> None:
    """Start the processes and wait for them. Raises what they found wrong, as they would have."""
    task = {"source": job.source, "model": job.model, "launch": job.launch.arguments(), "script": job.script,
            "layouts": {name: layout.arguments() for name, layout in layouts.items()}, "world_size": world_size}
    (folder / "task.json").write_text(json.dumps(task))
    logs = [(folder / f"{number}.log").open("w+") for number in range(num_processes)]
    path = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": path}
    processes = [subprocess.Popen([sys.executable, "-m", "megatron_dynatrain.megatron.survey", str(folder), str(number),
                                   str(num_processes)], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                 for number, log in enumerate(logs)]
    try:
        codes = [process.wait() for process in processes]
    finally:
        for process in processes:
            process.kill()
    for number, (code, log) in enumerate(zip(codes, logs, strict=True)):
        log.seek(0)
        answer = folder / f"{number}.json"
        if code or not answer.exists():
            raise ConfigError(f"describing the ranks failed (exit code {code}): {log.read()[-2000:].strip()}")
        refused = json.loads(answer.read_text())["refused"]
        if refused:
            if job.script and refused["kind"] == "ConfigError":  # the script's own words
                print(log.read()[-4000:].strip(), file=sys.stderr)
            raise getattr(errors, refused["kind"])(refused["reason"])


def _merge(parts: list[Path], path: Path) -> None:
    """The file of a layout from the files of all processes; it appears as a whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.stem}.{os.getpid()}.npz")
    if len(parts) == 1:
        shutil.copyfile(parts[0], unfinished)
    else:
        archive.merge(parts, unfinished)
    unfinished.replace(path)


def _key(job: Job, name: str, layout: Layout, world_size: int) -> str:
    """A hash of what a description follows from."""
    script = [Path(word).read_text() if i == 0 else word for i, word in enumerate(job.script)]
    facts = [job.model, job.launch.arguments(), script, name == LAUNCH, layout.arguments(), world_size, _versions()]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


@functools.cache
def _versions() -> list[str]:
    """What describes: Megatron, torch, Transformer Engine where it is there, and this package, by its code."""
    code = hashlib.blake2b(digest_size=12)
    package = Path(__file__).resolve().parents[1]
    for file in sorted(package.rglob("*.py")):
        code.update(file.read_bytes())
    return [sys.version, _megatron(), importlib.metadata.version("torch"), code.hexdigest(),
            str(importlib.util.find_spec("transformer_engine") is not None)]


def _megatron() -> str:
    """The Megatron that would be imported, a wheel or a checkout: where its code lies and when it was last changed."""
    found = importlib.util.find_spec("megatron")
    for folder in (found.submodule_search_locations if found else ()):
        files = sorted(Path(folder, "core").rglob("*.py"))
        if files:
            return f"{folder} {len(files)} {max(file.stat().st_mtime_ns for file in files)}"
    raise ConfigError("no Megatron was found, with whose code ranks are described; install megatron-core, or put a checkout on "
                      "PYTHONPATH")
