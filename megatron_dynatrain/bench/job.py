"""What runs in every rank of a benchmark: a Megatron job that switches, and measures beside each switch.

    torchrun ... -m megatron_dynatrain.bench.job SPEC pretrain_gpt.py <Megatron arguments>

SPEC is the JSON file that `run` wrote. Every rank appends its records to `rank<n>.jsonl` beside it; nobody gathers
anything while the job runs. What is measured beside a switch is done before its stall begins and after it has ended.
"""

import contextlib
import json
import os
import resource
import shutil
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from megatron_dynatrain import launch
from megatron_dynatrain import session as sessions
from megatron_dynatrain.bench.cases import Visit
from megatron_dynatrain.controller import SwitchReport
from megatron_dynatrain.import_hooks import after_import
from megatron_dynatrain.megatron import measure
from megatron_dynatrain.memory import resident_bytes
from megatron_dynatrain.transfer import Checksums
from megatron_dynatrain.transfer.memory import Allocations


def main() -> None:
    spec_path, *script = sys.argv[1:]
    spec = json.loads(Path(spec_path).read_text())
    writer = Writer(Path(spec_path).parent / f"rank{os.environ['RANK']}.jsonl")
    steps = {"first_step_started": None, "last_step_ended": None}

    def started():
        if steps["first_step_started"] is None:
            steps["first_step_started"] = time.time()

    def ended():
        steps["last_step_ended"] = time.time()

    measure.stamp_steps(started, ended)
    visits = [Visit(**visit) for visit in spec["visits"]]
    if visits:
        after_import("megatron.training.training", lambda _: Beside(sessions.current(), visits, spec, writer).attach())
    try:
        launch.run(script, cpu=True)
    finally:  # Megatron ends with SystemExit
        writer.write("end", **steps)


class Writer:
    """Appends records of one rank."""

    def __init__(self, path: Path):
        self._path = path

    def write(self, kind: str, **fields) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")


class Beside:
    """Measures beside the switches of one job, visit by visit."""

    def __init__(self, session, visits: list[Visit], spec: dict, writer: Writer):
        self.session = session
        self.visits = list(visits)
        self.raw_repeats = spec["raw_repeats"]
        self.checkpoint = Path(spec["checkpoint"])
        self.writer = writer
        self.record: dict = {}

    def attach(self) -> None:
        SwitchReport.phase = self._profiled(SwitchReport.phase)
        self.session.before_switch.append(self.before)
        self.session.after_switch.append(self.after)

    def before(self, iteration: int, target) -> None:
        """All ranks are at the boundary, the stall has not begun."""
        visit, self.record = self.visits[0], {}
        assert (visit.iteration, visit.dst) == (iteration, target), f"{visit} was due, not {target} after {iteration}"
        controller = self.session.controller
        verify = "full" if visit.kind == "verified" else "off"
        controller.config = msgspec.structs.replace(controller.config, verify=verify)
        if visit.checkpoint:  # twice: the first one imports and starts what Megatron needs for it
            self.record["save_seconds"] = [measure.save(self.session.job, self.checkpoint, iteration)]
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(self.checkpoint)
            self.record["save_seconds"].append(measure.save(self.session.job, self.checkpoint, iteration))
        if visit.refit:
            self._refit_when_built()
        dist.barrier()

    def _profiled(self, phase):
        """`SwitchReport.phase`, with what the phase costs the processor beside its time."""
        @contextlib.contextmanager
        def profiled(report, name):
            before = usage()
            with phase(report, name):
                yield
            costs = self.record.setdefault("profile", {})
            costs[name] = (usage() - before + costs.get(name, 0)).tolist()  # a switch may come to a phase twice

        return profiled

    def _refit_when_built(self) -> None:
        """In the switch to come, move the weights by Megatron's refit before they are moved by the plan."""
        job = self.session.job

        def build(name):
            del job.build
            state = job.build(name)
            Allocations(state.storages, state.allocations, state.holdings.memory).take_all()  # which the switch takes later
            try:
                self.record["refit_plan_seconds"], self.record["refit_seconds"] = measure.refit(job.live.model, job._next.model)
                self.record["refit_sums"] = _weight_sums(job._next.model)
            except Exception as error:
                self.record["refit_error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            return state

        job.build = build

    def after(self, report) -> None:
        """The stall is over, the first step of the new layout has not begun."""
        visit, plan, job = self.visits.pop(0), report.plan, self.session.job
        rank = dist.get_rank()
        self.record["resident_bytes"] = resident_bytes()
        sums = self.record.pop("refit_sums", None)
        if sums is not None and sums != _weight_sums(job.live.model):
            self.record["refit_error"] = "the weights after the refit are not those of the old layout"
        if visit.kind != "verified":
            self.record["raw_seconds"], self.record["raw_profile"] = raw_exchange(pair_bytes(plan), rank, self.raw_repeats)
        if visit.checkpoint:
            before = Checksums(plan.dst, rank, job.describe_live().storages, plan.common)
            self.record["load_seconds"] = [measure.load(job, self.checkpoint) for _ in range(2)]
            after = Checksums(plan.dst, rank, job.describe_live().storages, plan.common)
            self.record["loaded_differs"] = before.differences(after)[:3]
            if rank == 0:
                shutil.rmtree(self.checkpoint)  # every rank has loaded: the checksums are collective
        received = [[src, dst, size] for (src, dst), size in pair_bytes(plan).items() if dst == rank]
        self.writer.write("visit", visit=msgspec.to_builtins(visit), num_params=num_params(plan), pair_bytes=received,
                          **report.event(), **self.record)


def pair_bytes(plan) -> dict[tuple[int, int], int]:
    """{(src_rank, dst_rank): bytes} that the plan moves between two ranks, in a stable order. A rank's own plan knows those
    that it sends and receives."""
    crosses = plan.src_rank != plan.dst_rank
    pairs, number = np.unique(np.column_stack([plan.src_rank[crosses], plan.dst_rank[crosses]]), axis=0, return_inverse=True)
    sizes = np.zeros(len(pairs), np.int64)
    np.add.at(sizes, number.reshape(-1), plan.nbytes[crosses])
    return {(int(src), int(dst)): int(size) for (src, dst), size in zip(pairs, sizes, strict=True)}


def num_params(plan) -> int:
    """Parameters of the whole model: elements of the first moments of Adam, which exist once for each."""
    return sum(tensor.numel for tensor in plan.dst.tensors if tensor.field == "exp_avg")


def usage() -> np.ndarray:
    """What this process has cost so far: seconds of the processor in it, seconds of it in the system, pages handed out."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return np.array([used.ru_utime, used.ru_stime, used.ru_minflt])


def raw_exchange(pairs: dict[tuple[int, int], int], rank: int, repeats: int) -> tuple[list[float], list[float]]:
    """(seconds of each repeat, `usage` of one) in which this rank exchanges the bytes of `pairs` and nothing else: the floor
    under any transfer.

    One contiguous message a pair, memory allocated and touched before, one `batch_isend_irecv`, a barrier before each
    repeat; one more, not counted, comes first. All messages of a sender are cut from the same memory, since there need not
    be room for a second copy of everything that it sends. Collective.
    """
    source = torch.ones(max((size for (src, _), size in pairs.items() if src == rank), default=0), dtype=torch.uint8)
    sends = {dst: source[:size] for (src, dst), size in pairs.items() if src == rank}
    receives = {src: torch.zeros(size, dtype=torch.uint8) for (src, dst), size in pairs.items() if dst == rank}
    seconds = []
    for repeat in range(repeats + 1):
        if repeat == 1:
            before = usage()
        operations = [dist.P2POp(dist.isend, message, peer) for peer, message in sends.items()]
        operations += [dist.P2POp(dist.irecv, message, peer) for peer, message in receives.items()]
        dist.barrier()
        start = time.perf_counter()
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        seconds.append(time.perf_counter() - start)
    cost = (usage() - before) / repeats
    assert all(bool(message[-1] == 1) for message in receives.values())
    dist.barrier()
    return seconds[1:], cost.tolist()


def _weight_sums(model: list) -> list[float]:
    return [float(param.detach().double().sum()) for chunk in model for param in chunk.parameters()]


if __name__ == "__main__":
    main()
