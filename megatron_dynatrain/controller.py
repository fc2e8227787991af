"""One switch: prepare it, carry it out, or refuse it and leave everything as it was.

The controller knows the order of things and nothing of Megatron: what it does to the job goes through the job adapter
(`megatron.job.MegatronJob`), what it knows of layouts through the registry. Everything that can be refused is refused in
`prepare`, or in `switch` while the old objects are still whole; ranks agree before each step that could leave them apart.
"""

import functools
import time
import traceback
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megatron_dynatrain import memory
from megatron_dynatrain.config import Config
from megatron_dynatrain.consensus import gather, share, together
from megatron_dynatrain.errors import LayoutRefused, SpaceError, TransferError, VerificationError, reason
from megatron_dynatrain.layout import LAUNCH, Layout
from megatron_dynatrain.planning import Balance, Part, Plan, Totals, Turnover, draft_plan, finish_plan, summed, total
from megatron_dynatrain.registry import Entry, Registry
from megatron_dynatrain.report import in_bytes
from megatron_dynatrain.space import World
from megatron_dynatrain.transfer import Allocations, Checksums, Exchange, compare_bits, execute


@dataclass(slots=True)
class SwitchReport:
    """What there is to say of one switch. Times in seconds on this rank; `stall_seconds` is set when the first new step
    starts. peak_memory_bytes: the most that any rank held until then, None where the system does not say it."""

    iteration: int
    src: str
    dst: str
    src_sizes: dict[str, int]
    dst_sizes: dict[str, int]
    plan: Plan
    totals: Totals
    verify: str
    started: float
    phases: dict[str, float] = field(default_factory=dict)
    stall_seconds: float = 0.0
    peak_memory_bytes: int | None = None

    @contextmanager
    def phase(self, name: str):
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def event(self) -> dict:
        """The fields of the event in report.jsonl."""
        return {"iteration": self.iteration, "from": self.src, "to": self.dst, "from_sizes": self.src_sizes,
                "to_sizes": self.dst_sizes, "stall_seconds": round(self.stall_seconds, 6),
                "phases": {name: round(seconds, 6) for name, seconds in self.phases.items()},
                **_amounts(self.plan, self.totals), "peak_memory_bytes": self.peak_memory_bytes, "verify": self.verify,
                "plan_hash": self.plan.digest}


def _amounts(plan: Plan, totals: Totals) -> dict[str, int]:
    """What a switch moves, in numbers."""
    return {"moved_bytes": totals.moved_bytes, "minimum_bytes": totals.minimum_bytes, "local_bytes": totals.local_bytes,
            "max_rank_bytes": totals.max_rank_bytes, "balanced_max_rank_bytes": totals.balanced_max_rank_bytes,
            "peak_bytes": totals.peak_bytes, "peak_extra_bytes": totals.peak_extra_bytes,
            "staging_bytes": plan.staging_bytes, "windows": totals.num_windows, "copies": totals.num_copies}


@dataclass(frozen=True, slots=True)
class SwitchCost:
    """What a switch would move, known before it is made. Bytes over all ranks, unless said otherwise.

    moved_bytes cross between ranks; minimum_bytes have to in any plan; local_bytes are copied within ranks. max_rank_bytes: the
    most that one rank sends or receives; balanced_max_rank_bytes: the same of an ideally balanced plan. peak_bytes: the most
    that one rank holds during the switch; peak_extra_bytes: beyond what it holds in the larger of the two layouts.
    staging_bytes: scratch of a rank. windows: the most that one rank walks. last_stall_seconds: how long training stood still
    when this job last made this switch, on this rank; None if it has not made it. All are 0 where src is dst.
    """

    src: str
    dst: str
    moved_bytes: int = 0
    minimum_bytes: int = 0
    local_bytes: int = 0
    max_rank_bytes: int = 0
    balanced_max_rank_bytes: int = 0
    peak_bytes: int = 0
    peak_extra_bytes: int = 0
    staging_bytes: int = 0
    windows: int = 0
    copies: int = 0
    plan_hash: str = ""
    last_stall_seconds: float | None = None


class Controller:
    """Prepares and carries out switches of `job` between the layouts of `registry`. All methods are collective."""

    def __init__(self, job, registry: Registry, config: Config):
        self.job = job
        self.registry = registry
        self.config = config
        self.current = LAUNCH
        self._considered: Entry | None = None  # the undeclared layout whose cost was asked for last

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the current layout: {'TP': 2, 'PP': 2, 'DP': 2}."""
        return _sizes(self.job.args)

    def start(self) -> None:
        """Describe the launch layout, check and describe all declared ones, make their groups and the scheduled plans.

        Raises LayoutRefused on every rank if any of it is impossible.
        """
        together(LayoutRefused, "megatron_dynatrain cannot switch this job", self.job.start, LAUNCH)
        for entry in list(self.registry.entries.values()):
            self._describe(entry)
        # If what is described without building it were not what is there, no other description could be trusted.
        together(LayoutRefused, "megatron_dynatrain cannot switch this job", _as_described, self.job.describe_live,
                 self.registry.entries[LAUNCH])
        route = [LAUNCH] + [switch.layout for switch in self.config.schedule]
        for src, dst in zip(route, route[1:]):
            if src != dst:
                self._plan(self.registry.entries[src], self.registry.entries[dst])
        for name in self.registry.entries:
            self.job.make_groups(name)

    def prepare(self, target: str | Layout) -> Plan | None:
        """Do everything for a switch to `target` that changes nothing; its plan, or None if the job is in it already.

        Raises LayoutRefused, ConfigError or SpaceError, on every rank.
        """
        def found():
            entry = self.registry.find(target)
            return entry, entry.name

        entry, names = share(LayoutRefused, "the request cannot be carried out", found)
        if len(set(names)) > 1:
            raise LayoutRefused(f"ranks were asked for different layouts: {sorted(set(names))}; ask all for the same")
        if entry.name == self.current:
            return None
        try:
            self._describe(entry)
            plan = self._plan(self.registry.entries[self.current], entry)
        except (LayoutRefused, SpaceError):
            self._forget_unless_declared(entry)
            raise
        self.job.make_groups(entry.name)
        return plan

    def cost(self, target: str | Layout) -> SwitchCost:
        """What a switch to `target` would cost now. Changes nothing that trains; what it finds out is kept for the switch.

        Raises LayoutRefused, ConfigError or SpaceError, on every rank.
        """
        entry = together(LayoutRefused, "the cost cannot be told", self.registry.find, target)
        if entry.name == self.current:
            return SwitchCost(self.current, entry.name)
        if self._considered is not None and self._considered.name not in (entry.name, self.current):
            self._forget_unless_declared(self._considered)
        self._considered = None if entry.declared else entry
        try:
            self._describe(entry)
            plan = self._plan(self.registry.entries[self.current], entry)
            together(LayoutRefused, "the switch would be refused", self._check_that_it_fits,
                     self.registry.entries[self.current], entry)
        except (LayoutRefused, SpaceError):
            self._forget_unless_declared(entry)
            raise
        return SwitchCost(self.current, entry.name, plan_hash=plan.digest,
                          **_amounts(plan, self.registry.totals[self.current, entry.name]))

    def _describe(self, entry: Entry) -> None:
        if entry.world is not None:
            return
        what = f"layout {entry.name!r} is refused"
        together(LayoutRefused, what, self.job.check, entry.name, entry.layout)
        entry.own = together(LayoutRefused, what, self.job.describe_dry, entry.name, self.rank, dist.get_world_size())
        gathered = gather((entry.own, self.job.said(entry.name)))
        self.job.hear(entry.name, [said for _, said in gathered])
        entry.world = together(LayoutRefused, what, World.assemble,
                               {rank: held for rank, (held, _) in enumerate(gathered)})

    def _plan(self, src: Entry, dst: Entry) -> Plan:
        if (src.name, dst.name) not in self.registry.plans:
            draft = together(LayoutRefused, f"the switch from {src.name!r} to {dst.name!r} is refused",
                             draft_plan, src.world, dst.world, self.config.transfer.staging_bytes, self.rank)
            balance = Balance(summed(gather(draft.demand)))
            plan = together(SpaceError, "the plan", finish_plan, draft, balance.shares)
            own = Part.of(plan, src.own.memory, dst.own.memory, self.config.keeps_old_state)
            gathered = gather((plan.digest, own))
            digests = [digest for digest, _ in gathered]
            if len(set(digests)) > 1:
                raise SpaceError(f"ranks made different plans from {src.name!r} to {dst.name!r}: {digests}")
            self.registry.plans[src.name, dst.name] = plan
            self.registry.peaks[src.name, dst.name] = own.peak_bytes
            self.registry.totals[src.name, dst.name] = total([part for _, part in gathered], balance)
        return self.registry.plans[src.name, dst.name]

    def switch(self, target: str | Layout, iteration: int, started: float) -> SwitchReport | None:
        """Switch the job, whose loop has returned after `iteration`, to `target`; None if it is in that layout already.

        started: when the last old step ended, by time.perf_counter(). Raises LayoutRefused, SpaceError or
        VerificationError, on every rank, after which the job is in the layout that it was in; or TransferError, after which it
        cannot go on.
        """
        src = self.registry.entries[self.current]
        start = time.perf_counter()
        plan = self.prepare(target)
        if plan is None:
            return None
        dst = self.registry.find(target)
        report = SwitchReport(iteration, src.name, dst.name, _sizes(self.job.args), {}, plan,
                              self.registry.totals[src.name, dst.name], self.config.verify, started)
        memory.forget_peak()
        report.phases["leave"] = start - started
        report.phases["prepare"] = time.perf_counter() - start
        try:
            self._move(plan, dst, report)
        except TransferError:
            raise  # the old state is gone, or ranks can no longer speak with one another
        except Exception as error:
            _let_go_of_frames(error)
            with report.phase("roll_back"):
                self.job.roll_back(src.name)
            self._forget_unless_declared(dst)
            raise
        with report.phase("finish"):
            self.job.commit(iteration)
        report.dst_sizes = _sizes(self.job.args)
        self.current = dst.name
        self._forget_unless_declared(src)
        return report

    def _forget_unless_declared(self, entry: Entry) -> None:
        if not entry.declared and entry.name in self.registry.entries:
            self.job.forget(entry.name)
            self.registry.forget(entry.name)
        if entry is self._considered:
            self._considered = None

    def _move(self, plan: Plan, dst: Entry, report: SwitchReport) -> None:
        """Everything of a switch up to the commitment. What can be refused is refused before the first byte moves."""
        job, src = self.job, self.registry.entries[self.current]

        def left():
            self._check_that_it_fits(src, dst)
            job.quiesce()
            old = _as_described(job.describe_live, src)
            return old, job.capture(old)

        def built():
            new = _as_described(functools.partial(job.build, dst.name), dst)
            job.carry_over(carried)
            return new

        with report.phase("quiesce"):
            old, carried = share(LayoutRefused, "the job cannot be switched at this boundary", left)
        before = None
        if self.config.verify == "digest":
            with report.phase("verify"):
                before = Checksums(plan.src, self.rank, old.storages, plan.common)
        with report.phase("groups"):
            job.enter(dst.name)
        with report.phase("build"):
            new = together(LayoutRefused, f"layout {dst.name!r} cannot be built", built)
        with report.phase("data"):
            together(LayoutRefused, f"the data of layout {dst.name!r} cannot be built", job.build_data)
        try:
            self._fill(plan, src, old, new, report, before, carried)
        except TransferError:
            raise
        except Exception as error:
            if self.config.keeps_old_state:
                raise
            raise TransferError(f"rank {self.rank}: {reason(error)}; the old state is given back already, in part or whole, so "
                                "the job cannot go on, start it again from its last checkpoint") from error

    def _fill(self, plan: Plan, src: Entry, old, new, report: SwitchReport, before: Checksums | None, carried) -> None:
        """Move the state and verify it; the old one is given back on the way, unless it is to stay."""
        job, keeps = self.job, self.config.keeps_old_state
        with report.phase("transfer"):
            filled = _allocations(new)
            if keeps:  # a rank that has not the memory says so before any byte moves
                together(LayoutRefused, "there is no memory for the new state beside the old one", filled.take_all)
            turnover = Turnover.of(plan, self.rank, old.holdings.memory, new.holdings.memory)
            exchange = Exchange(turnover, None if keeps else _allocations(old), filled)
            execute(plan, self.rank, old.storages, new.storages, timedelta(seconds=self.config.transfer.timeout_seconds),
                    exchange)
        if self.config.verify != "off":
            with report.phase("verify"):
                differences = (compare_bits(plan.src, plan.dst, self.rank, old.storages, new.storages) if before is None
                               else before.differences(Checksums(plan.dst, self.rank, new.storages, plan.common)))
                together(VerificationError if keeps else TransferError,
                         f"the state differs after the switch from {src.name!r} to {report.dst!r}",
                         _same_state, differences, job, carried)
            report.verify = "ok"

    def _check_that_it_fits(self, src: Entry, dst: Entry) -> None:
        """Raise LayoutRefused if this rank cannot hold what the switch needs at its peak."""
        peak, limit = self.registry.peaks[src.name, dst.name], self.config.transfer.memory_limit_bytes
        source = "`transfer.memory_limit_bytes`"
        if limit is None:
            limit, source = self.job.memory_limit(src.own.memory), "what is free on its GPU beside that"
        if limit is not None and peak > limit:
            both = " and the old state is to stay until the switch is verified (`transfer.keep_old_state`)"
            raise LayoutRefused(
                f"the switch does not fit into memory: it needs up to {in_bytes(peak)} at once for the states and the scratch"
                f"{both if self.config.keeps_old_state else ''}, of which {in_bytes(src.own.memory.state_bytes)} is the old state,"
                f" {in_bytes(dst.own.memory.state_bytes)} the new one and {in_bytes(self.config.transfer.staging_bytes)} "
                f"`transfer.staging_bytes`; {source} allows {in_bytes(limit)}")


def _allocations(state) -> Allocations:
    return Allocations(state.storages, state.allocations, state.holdings.memory)


def _let_go_of_frames(error: BaseException | None) -> None:
    """Empty the frames that the tracebacks of an error and of its causes hold: in them lives the new state, for which there
    may be no room beside the gradients of the old one."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _as_described(state_of_rank, entry: Entry):
    """What `state_of_rank()` returns. Raises SpaceError if it is not what the plan was made for."""
    state = state_of_rank()
    if state.holdings.digest() != entry.own.digest():
        raise SpaceError(f"what the rank holds is not what was described for layout {entry.name!r}")
    return state


def _same_state(differences: list[str], job, carried) -> None:
    """Raise VerificationError if tensors differ, or anything else that was carried over."""
    differences = differences + job.compare_carried(carried, job.capture_next())
    if differences:
        raise VerificationError("; ".join(differences[:3]))


def _sizes(args) -> dict[str, int]:
    """The sizes of a layout for people, from Megatron's live arguments."""
    sizes = {"TP": args.tensor_model_parallel_size, "PP": args.pipeline_model_parallel_size,
             "VPP": args.virtual_pipeline_model_parallel_size or 1, "CP": args.context_parallel_size,
             "EP": args.expert_model_parallel_size, "ETP": args.expert_tensor_parallel_size, "DP": args.data_parallel_size}
    if args.num_experts is None or sizes["ETP"] in (None, sizes["TP"]):
        del sizes["ETP"]
    return {name: size for name, size in sizes.items() if name in ("TP", "PP", "ETP", "DP") or size != 1}
