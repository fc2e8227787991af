"""Drives the benchmark: one job a model, one more launch for its restart, and the records that come of them."""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from megatron_dynatrain.bench.cases import Case, parameters
from megatron_dynatrain.report import in_bytes, in_sizes

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
DATA = ROOT / "runs" / "data" / "stdlib"
RAW_REPEATS = 3
MEMORY_FOLDER = Path("/dev/shm")

# What a job needs, about: bytes a rank, and bytes a parameter over all ranks, in fp32 with two replicas of the weights.
PROCESS = 500_000_000
SAVING_PROCESS = 400_000_000  # which Megatron starts beside each rank with the first save
TWO_STATES = 24 + 16  # in a switch: weights, gradients and moments; and the same without gradients
KEPT = 16  # what malloc keeps of earlier switches
REFIT = 16  # Megatron packs all weights that it sends, and as many that it receives
SAVING = 24 + 24  # one state, and what Megatron gathers and stages of it for a save
CHECKPOINT = 12


class BenchFailed(Exception):
    """A job of the benchmark ended with an error; the message has the end of its log."""


class TooLarge(Exception):
    """There is no memory for the switches of a model."""


def prepare() -> None:
    """Make the data set, unless it is there."""
    if not SCRIPT.is_file():
        raise BenchFailed(f"{SCRIPT} does not exist: the benchmark needs the project's scripts; run it from a checkout")
    if not DATA.with_suffix(".idx").is_file():
        subprocess.run([sys.executable, str(SCRIPT.with_name("make_dataset.py")), str(DATA)], cwd=ROOT, check=True,
                       capture_output=True)


def measure(case: Case, folder: Path, restarts: str, tell: Callable[[str], None]) -> list[dict]:
    """The records of one model: two for each pair of layouts, cold and warm. `folder` keeps logs and raw measurements.

    restarts: 'one' (the first pair), 'all' or 'none'. `tell` hears, in words, what is being done.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case, restarts, left_out = _within_memory(case, restarts, _free_memory())
    with _checkpoint_folder(case) as scratch:
        stopped = Path(scratch, "stop")
        by_rank = _walk(case, folder, Path(scratch, "in-process"), stopped if restarts != "none" else None, tell)
        restart = {}
        for src, dst in case.pairs[:{"none": 0, "one": 1, "all": None}[restarts]]:
            tell(f"stop and restart, {src} -> {dst}")
            restart[src, dst] = _restart_seconds(case, folder, src, dst, stopped, by_rank)
    in_memory = Path(scratch).is_relative_to(MEMORY_FOLDER)
    return [{**record, "checkpoint_in_memory": in_memory, "left_out": {**left_out, **record["left_out"]}}
            for record in _records(case, by_rank, restart)]


def _walk(case: Case, folder: Path, checkpoint: Path, stopped: Path | None, tell) -> list[list[dict]]:
    """The records of every rank of the job that makes all switches. It ends in the launch layout, saved to `stopped`."""
    visits = case.visits
    config, report = folder / "dynatrain.yaml", folder / "report.jsonl"
    report.unlink(missing_ok=True)  # a job goes on in the report that is there
    config.write_text(yaml.safe_dump({"dynatrain": {
        "layouts": {name: sizes for name, sizes in case.layouts.items() if name != "launch"},
        "schedule": [{"at_iteration": visit.iteration, "layout": visit.dst} for visit in visits],
        "verify": "off", "report": str(report)}}))
    arguments = [*case.command_line("launch", len(visits) + 1), "--dynatrain-config", str(config)]
    if stopped is not None:
        arguments += ["--save", str(stopped)]
    _launch(case, folder / "walk", arguments, checkpoint, visits, lambda done: tell(_where(visits, done)))
    return _read(folder / "walk", case.num_ranks)


def _restart_seconds(case: Case, folder: Path, src: str, dst: str, stopped: Path, walk: list[list[dict]]) -> float:
    """From the end of the last step of a job in `src`, which saves and ends, to the start of the first step of one in `dst`,
    which loads."""
    last, before = len(case.visits) + 1, walk
    if src != "launch":  # in which the walk ended
        shutil.rmtree(stopped)
        last = 1
        _launch(case, folder / f"stop-{src}", [*case.command_line(src, last), "--save", str(stopped)])
        before = _read(folder / f"stop-{src}", case.num_ranks)
    _launch(case, folder / f"restart-{dst}", [*case.command_line(dst, last + 1), "--load", str(stopped)])
    after = _read(folder / f"restart-{dst}", case.num_ranks)
    return (max(records[-1]["first_step_started"] for records in after)
            - max(records[-1]["last_step_ended"] for records in before))


def _within_memory(case: Case, restarts: str, free: int) -> tuple[Case, str, dict[str, str]]:
    """(case, restarts, reasons): the first two without what there is no room for. Raises TooLarge where there is none for the
    switches of the case."""
    size = parameters(case.model)
    need = case.num_ranks * PROCESS + TWO_STATES * size
    if free < need:
        raise TooLarge(f"{case.model} needs about {in_bytes(need)} of free memory on {case.num_ranks} ranks, and there are "
                       f"{in_bytes(free)}")
    left_out = {}
    if free < need + (KEPT + REFIT) * size:
        case, left_out["refit"] = dataclasses.replace(case, refits=False), "too little free memory"
    if free < case.num_ranks * (PROCESS + SAVING_PROCESS) + (KEPT + SAVING) * size:
        wanted = {"save + load": case.checkpoints, "restart": restarts}
        left_out |= {what: "too little free memory" for what, pairs in wanted.items() if pairs != "none"}
        case, restarts = dataclasses.replace(case, checkpoints="none"), "none"
    return case, restarts, left_out


def _checkpoint_folder(case: Case) -> tempfile.TemporaryDirectory:
    """A folder in memory where there is room for a checkpoint beside the job in a switch, else one on the disk."""
    need = case.num_ranks * (PROCESS + SAVING_PROCESS) + (TWO_STATES + CHECKPOINT) * parameters(case.model)
    in_memory = MEMORY_FOLDER.is_dir() and min(shutil.disk_usage(MEMORY_FOLDER).free, _free_memory()) > need
    return tempfile.TemporaryDirectory(prefix="dynatrain-bench-", dir=MEMORY_FOLDER if in_memory else None)


def _free_memory() -> int:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("MemAvailable"))


def _where(visits, done: int) -> str:
    return f"switch {done + 1} of {len(visits)} ({visits[done].kind})" if done < len(visits) else "the last step"


def _launch(case: Case, folder: Path, arguments: list[str], checkpoint: Path | None = None, visits=(),
            tell: Callable[[int], None] = lambda done: None) -> None:
    """Run one job to its end, through torchrun; `tell` hears how many switches rank 0 has made."""
    folder.mkdir()
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"visits": [dataclasses.asdict(visit) for visit in visits], "raw_repeats": RAW_REPEATS,
                                "checkpoint": str(checkpoint)}))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(case.num_ranks), "--rdzv-backend", "c10d",
               "--rdzv-endpoint", "localhost:0", "-m", "megatron_dynatrain.bench.job", str(spec), str(SCRIPT), *arguments,
               "--data-path", str(DATA), "--data-cache-path", str(DATA.parent / "cache")]
    log, rank0 = folder / "log.txt", folder / "rank0.jsonl"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as file, subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT,
                                                 env=environment) as process:
        try:
            while process.poll() is None:
                time.sleep(0.2)
                tell(rank0.read_bytes().count(b"\n") if rank0.exists() else 0)
        except BaseException:
            process.terminate()
            raise
    if process.returncode != 0:
        raise BenchFailed(f"{' '.join(command[2:9])} ... ended with exit code {process.returncode}; the end of {log}:\n"
                          + log.read_text(errors="replace")[-4000:])


def _read(folder: Path, num_ranks: int) -> list[list[dict]]:
    """The records of every rank, in order."""
    return [[json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
            for rank in range(num_ranks)]


def _records(case: Case, by_rank: list[list[dict]], restart: dict) -> list[dict]:
    """What `by_rank` says of each pair, cold and warm."""
    visits = [_over_ranks([records[number] for records in by_rank]) for number in range(len(case.visits))]
    records = []
    for src, dst in case.pairs:
        of_pair = [visit for visit in visits if (visit["visit"]["src"], visit["visit"]["dst"]) == (src, dst)]
        verified = next(visit for visit in of_pair if visit["visit"]["kind"] == "verified")
        for kind in ("cold", "warm"):
            timed = [visit for visit in of_pair if visit["visit"]["kind"] == kind]
            if timed:
                records.append(_record(case, timed, verified, restart.get((src, dst))))
    return records


def _record(case: Case, timed: list[dict], verified: dict, restart: float | None) -> dict:
    """One record: the visit with the median stall, and what was measured beside it."""
    chosen = sorted(timed, key=lambda visit: visit["stall_seconds"])[(len(timed) - 1) // 2]
    raw = [seconds for visit in timed for seconds in visit["raw_seconds"]]
    warm = chosen["visit"]["kind"] == "warm"
    if verified.get("loaded_differs"):
        raise BenchFailed(f"the state that Megatron loaded differs from the switched one: {verified['loaded_differs']}")
    save, load = (verified[name][warm] if name in verified else None for name in ("save_seconds", "load_seconds"))
    saves_first = save is not None and (verified["visit"]["src"], verified["visit"]["dst"]) == case.pairs[0]
    return {
        "model": case.model, "num_params": verified["num_params"],
        "src": in_sizes(chosen["from_sizes"]), "dst": in_sizes(chosen["to_sizes"]), "warm": warm,
        "stall_seconds": chosen["stall_seconds"], "phases": chosen["phases"], "transfer_seconds": chosen["transfer_seconds"],
        "raw_exchange_seconds": statistics.median(raw), "checkpoint_seconds": None if save is None else save + load,
        "restart_seconds": restart, "moved_bytes": chosen["moved_bytes"], "minimum_bytes": chosen["minimum_bytes"],
        "max_rank_bytes": chosen["max_rank_bytes"], "balanced_max_rank_bytes": chosen.get("balanced_max_rank_bytes"),
        "peak_extra_bytes": chosen.get("peak_extra_bytes"), "staging_bytes": chosen.get("staging_bytes"),
        # beyond what the names above promise
        "num_ranks": case.num_ranks, "verified": verified["verify"] == "ok",
        "all_stall_seconds": [visit["stall_seconds"] for visit in timed],
        "all_transfer_seconds": [visit["transfer_seconds"] for visit in timed], "all_raw_exchange_seconds": raw,
        "all_resident_bytes": [visit.get("resident_bytes") for visit in timed],  # of the largest process, after each switch
        "first_checkpoint_seconds": verified["save_seconds"][0] + verified["load_seconds"][0] if saves_first else None,
        "checkpoint_save_seconds": save, "checkpoint_load_seconds": load,
        "refit_seconds": verified.get("refit_seconds"), "refit_plan_seconds": verified.get("refit_plan_seconds"),
        "left_out": {"refit": verified["refit_error"]} if "refit_error" in verified else {},
        "raw_pair_bytes": verified["pair_bytes"],
        "profile": chosen["profile"], "raw_profile": chosen["raw_profile"],  # seconds in the process, in the system; pages
    }


def _summed(costs) -> list[float]:
    return [sum(column) for column in zip(*costs, strict=True)]


def _over_ranks(of_ranks: list[dict]) -> dict:
    """One visit: the largest time of any rank; the phases of the rank with the longest stall, so that they add up; what the
    phases cost the processors, over all ranks."""
    slowest = max(of_ranks, key=lambda record: record["stall_seconds"])
    visit = {**of_ranks[0], "pair_bytes": [pair for record in of_ranks for pair in record["pair_bytes"]],
             "stall_seconds": slowest["stall_seconds"], "phases": slowest["phases"],
             "transfer_seconds": max(record["phases"]["transfer"] for record in of_ranks)}
    for name in ("refit_seconds", "refit_plan_seconds", "resident_bytes", "peak_extra_bytes", "staging_bytes"):
        values = [record[name] for record in of_ranks if record.get(name) is not None]
        if values:
            visit[name] = max(values)
    visit["profile"] = {name: _summed(record["profile"][name] for record in of_ranks) for name in of_ranks[0]["profile"]}
    if "raw_profile" in visit:
        visit["raw_profile"] = _summed(record["raw_profile"] for record in of_ranks)
    errors = [record["refit_error"] for record in of_ranks if "refit_error" in record]
    if errors:
        visit.update(refit_error=errors[0], refit_seconds=None, refit_plan_seconds=None)
    for name in ("raw_seconds", "save_seconds", "load_seconds"):
        if name in visit:
            visit[name] = [max(seconds) for seconds in zip(*(record[name] for record in of_ranks), strict=True)]
    if "loaded_differs" in visit:
        visit["loaded_differs"] = [text for record in of_ranks for text in record["loaded_differs"]]
    return visit
