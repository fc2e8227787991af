"""One switch: prepare it, carry it out, or refuse it and leave everything as it was.

The controller knows the order of things and nothing of Megatron: what it does to the job goes through the job adapter
(`megatron.job.MegatronJob`), what it knows of layouts through the registry. Everything that can be refused is refused in
`prepare`, or in `switch` while the old objects are still whole; ranks agree before each step that could leave them apart.
"""

import functools
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from msgspec import UNSET

from megatron_dynatrain import memory
from megatron_dynatrain.config import Config
from megatron_dynatrain.consensus import gather, share, together
from megatron_dynatrain.elastic import worlds
from megatron_dynatrain.errors import DynaTrainError, LayoutRefused, SpaceError, TransferError, VerificationError, reason
from megatron_dynatrain.layout import LAUNCH, Layout
from megatron_dynatrain.passage import Passage, Place, in_union, planned
from megatron_dynatrain.planning import Plan, Totals, Turnover
from megatron_dynatrain.registry import Entry, Registry
from megatron_dynatrain.report import in_bytes
from megatron_dynatrain.space import Holdings, World, nothing
from megatron_dynatrain.transfer import Allocations, Checksums, Exchange, compare_bits, execute


@dataclass(slots=True)
class SwitchReport:
    """What there is to say of one switch. Times in seconds on this rank; `stall_seconds` is set when the first new step
    starts. peak_memory_bytes: the most that any rank held until then, None where the system does not say it. src_ranks, dst_ranks:
    the numbers of the ranks before and after, where they changed; beside: processor seconds of this rank for what was made ready
    while the job trained, from `beside_from` until `beside_until`, in seconds since the epoch."""

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
    src_ranks: tuple[int, ...] = ()
    dst_ranks: tuple[int, ...] = ()
    beside: dict[str, float] = field(default_factory=dict)
    beside_from: float = 0.0
    beside_until: float = 0.0

    @contextmanager
    def phase(self, name: str):
        start = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + time.perf_counter() - start

    def event(self) -> dict:
        """The fields of the event in report.jsonl."""
        ranks = {} if self.src_ranks == self.dst_ranks else {
            "from_ranks": list(self.src_ranks), "to_ranks": list(self.dst_ranks),
            "beside": {name: round(seconds, 6) for name, seconds in self.beside.items()},
            "beside_interval": [round(self.beside_from, 3), round(self.beside_until, 3)],
            "without_overlap_seconds": round(self.stall_seconds + sum(self.beside.values()), 6)}
        return {"iteration": self.iteration, "from": self.src, "to": self.dst, "from_sizes": self.src_sizes,
                "to_sizes": self.dst_sizes, "stall_seconds": round(self.stall_seconds, 6),
                "phases": {name: round(seconds, 6) for name, seconds in self.phases.items()},
                **_amounts(self.plan, self.totals), "peak_memory_bytes": self.peak_memory_bytes, "verify": self.verify,
                "plan_hash": self.plan.digest, **ranks}


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
    when this job last made this switch, on this rank; None if it has not made it. src_ranks, dst_ranks: where the ranks of the
    job would change, those that train now and those that would. All are 0 where src is dst.
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
    src_ranks: tuple[int, ...] = ()
    dst_ranks: tuple[int, ...] = ()


class Controller:
    """Prepares and carries out switches of `job` between the layouts of `registry`. All methods are collective."""

    def __init__(self, job, registry: Registry, config: Config):
        self.job = job
        self.registry = registry
        self.config = config
        self.current = LAUNCH
        self.members: tuple[int, ...] = ()  # the ranks that train, by their numbers in the job
        self._launched = 0  # ranks of the launch layout
        self._considered: Entry | None = None  # the undeclared layout whose cost was asked for last

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the current layout: {'TP': 2, 'PP': 2, 'DP': 2}."""
        return _sizes(self.job.args)

    @property
    def patience(self) -> timedelta:
        """How long a rank is waited for while a generation is made."""
        return timedelta(seconds=self.config.elastic.patience_seconds)

    def size_of(self, target: str | Layout) -> tuple[int, tuple[int, ...] | None]:
        """How many ranks a layout wants, and which if it says so. Not collective."""
        layout = self.registry.find(target).layout
        return layout.num_ranks or self._launched, tuple(layout.ranks) if layout.ranks is not UNSET else None

    def changes_ranks(self, target: str | Layout) -> bool:
        """Whether a layout wants other ranks than those that train. Not collective, the same on all ranks."""
        size, named = self.size_of(target)
        return size != len(self.members) if named is None else set(named) != set(self.members)

    def is_described(self, target: str | Layout) -> bool:
        """Whether it is known what ranks hold in a layout. Not collective, the same on all ranks."""
        return self.registry.find(target).world is not None

    def begin(self, launched: int) -> None:
        """Before anything else: how many ranks train in the layout of the launch."""
        self._launched = launched
        self.members = tuple(range(launched))

    def start(self) -> None:
        """Describe the launch layout, check and describe all declared ones, make their groups and the scheduled plans.

        Raises LayoutRefused on every rank if any of it is impossible.
        """
        self.begin(dist.get_world_size())
        together(LayoutRefused, "megatron_dynatrain cannot switch this job", self.job.start, LAUNCH)
        for entry in list(self.registry.entries.values()):
            self.describe(entry)
        # If what is described without building it were not what is there, no other description could be trusted.
        together(LayoutRefused, "megatron_dynatrain cannot switch this job", _as_described, self.job.describe_live,
                 LAUNCH, self.registry.entries[LAUNCH].own)
        route = [LAUNCH] + [switch.layout for switch in self.config.schedule]
        for src, dst in zip(route, route[1:]):
            if self.changes_ranks(dst):
                break
            if src != dst:
                self._plan(self.registry.entries[src], self.registry.entries[dst])
        for name in self.registry.entries:
            if not self.changes_ranks(name):
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
            self.describe(entry)
            plan = self._plan(self.registry.entries[self.current], entry)
        except (LayoutRefused, SpaceError):
            self._forget_unless_declared(entry)
            raise
        self.job.make_groups(entry.name)
        return plan

    def cost(self, target: str | Layout, members: Callable[[str | Layout], dict[int, str]]) -> SwitchCost:
        """What a switch to `target` would cost now. Changes nothing that trains; what it finds out is kept for the switch.

        members: on the first rank, which ranks would train in a layout for others than now, with the host of each. Raises
        LayoutRefused, ConfigError or SpaceError, on every rank.
        """
        entry = together(LayoutRefused, "the cost cannot be told", self.registry.find, target)
        if entry.name == self.current:
            return SwitchCost(self.current, entry.name)
        if self._considered is not None and self._considered.name not in (entry.name, self.current):
            self._forget_unless_declared(self._considered)
        self._considered = None if entry.declared else entry
        try:
            self.describe(entry)
            src = self.registry.entries[self.current]
            if self.changes_ranks(target):
                return self._cost_of_other_ranks(src, entry, members)
            plan = self._plan(src, entry)
            together(LayoutRefused, "the switch would be refused", self._check_that_it_fits,
                     Passage(src, entry, plan, self.registry.totals[src.name, entry.name],
                             self.registry.peaks[src.name, entry.name], self.rank, src.own, entry.own))
        except (LayoutRefused, SpaceError):
            self._forget_unless_declared(entry)
            raise
        return SwitchCost(self.current, entry.name, plan_hash=plan.digest,
                          **_amounts(plan, self.registry.totals[self.current, entry.name]))

    def _cost_of_other_ranks(self, src: Entry, dst: Entry, members) -> SwitchCost:
        """Those that train plan for those that would come, too."""
        hosts, = (told for told in share(LayoutRefused, "the cost cannot be told", lambda: (
            None, members(dst.layout) if self.rank == 0 else None))[1] if told is not None)
        new = tuple(hosts)
        old, size = self.members, len(self.members)
        union = sorted({*old, *new})
        own = [old[self.rank], *[number for number in union if number not in old][self.rank::size]]
        held = {union.index(number): [entry.holdings[numbers.index(number)] if number in numbers else None
                                      for entry, numbers in ((src, old), (dst, new))] for number in own}
        ranks = {union.index(number): Place(*((holdings or nothing()).memory for holdings in held[union.index(number)]),
                                            *([] if number in old else [hosts[number]])) for number in own}
        ((plan, peak), *_), totals = planned((src.name, dst.name), *in_union(src, dst, old, new), ranks,
                                             self.config.transfer.staging_bytes, self.config.keeps_old_state)
        together(LayoutRefused, "the switch would be refused", self._check_that_it_fits,
                 Passage(src, dst, plan, totals, peak, plan.rank, *held[plan.rank]))
        return SwitchCost(src.name, dst.name, plan_hash=plan.digest, src_ranks=old, dst_ranks=new, **_amounts(plan, totals))

    def check(self, entry: Entry) -> None:
        """Raise LayoutRefused for a layout that cannot be trained here. Not collective, changes nothing."""
        if self.config.elastic is None and self.changes_ranks(entry.layout):
            raise LayoutRefused(f"({entry.layout}) wants other ranks than the {len(self.members)} that train, and the ranks of the "
                                "job change with `dynatrain.elastic` alone; launch with it (`elastic: {}`), or leave world_size "
                                "and ranks out")
        self.job.check(entry.name, entry.layout)

    def describe(self, entry: Entry) -> None:
        """Find out what every rank of a layout would hold, of however many ranks. Collective. Raises LayoutRefused."""
        if entry.world is not None:
            return
        what = f"layout {entry.name!r} is refused"
        together(LayoutRefused, what, self.check, entry)
        size, _ = self.size_of(entry.layout)
        gathered = share(LayoutRefused, what, lambda: (None, self._describe_share(entry.name, size)))[1]
        of_rank = {rank: described for part in gathered for rank, described in part.items()}
        self.job.hear(entry.name, [of_rank[rank][1] for rank in range(size)])
        holdings = {rank: of_rank[rank][0] for rank in range(size)}
        entry.own = holdings.get(self.rank)
        if self.config.elastic is not None:
            entry.holdings = holdings
        entry.world = together(LayoutRefused, what, World.assemble, holdings)

    def _describe_share(self, name: str, size: int) -> dict[int, tuple]:
        """{rank: (what it would hold, what it would say)} of the ranks of a layout that this one describes: its own where there are
        as many as now."""
        here = dist.get_world_size()
        return {rank % size: (self.job.describe_dry(name, rank % size, size), self.job.said(name))
                for rank in range(self.rank, max(size, here), here)}

    def _plan(self, src: Entry, dst: Entry) -> Plan:
        names = src.name, dst.name
        if names not in self.registry.plans:
            ((plan, peak),), totals = planned(names, src.world, dst.world, {self.rank: Place(src.own.memory, dst.own.memory)},
                                              self.config.transfer.staging_bytes, self.config.keeps_old_state)
            self.registry.plans[names], self.registry.totals[names], self.registry.peaks[names] = plan, totals, peak
        return self.registry.plans[names]

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
        passage = Passage(src, dst, plan, self.registry.totals[src.name, dst.name], self.registry.peaks[src.name, dst.name],
                          self.rank, src.own, dst.own)
        report = self._report(passage, iteration, started, start)
        self._carry_out(passage, report, None)
        with report.phase("finish"):
            self.job.commit(iteration)
        report.dst_sizes = _sizes(self.job.args)
        self.current = dst.name
        self._forget_unless_declared(src)
        return report

    def cross(self, passage: Passage, iteration: int, started: float, baton) -> tuple[SwitchReport, object]:
        """Switch to other ranks, as was made ready: (the report, what `baton()` of the first old rank has for all). Collective over
        the old and the new ranks; the former come when their loop has returned after `iteration`, the latter from waiting.

        Afterwards the new ranks train, and the others hold nothing. Raises as `switch`.
        """
        report = self._report(passage, iteration, started, time.perf_counter())
        said = self._carry_out(passage, report, baton)
        dst = passage.dst
        with report.phase("finish"):
            passage.old = worlds.of_process() if passage.own_src is not None else None
            if passage.own_dst is None:
                self.job.retire()
            else:
                worlds.take(passage.new)
                self.job.commit(iteration, anew=True)
            self.current, self.members = dst.name, passage.record.new
        report.dst_sizes = _sizes(self.job.args)
        self.registry.forget_plans()
        for entry in list(self.registry.entries.values()):
            if not entry.declared and entry.name != dst.name:
                self.job.forget(entry.name)
                self.registry.forget(entry.name)
            elif passage.own_dst is not None:
                entry.become(passage.record.new.index(passage.number))
        return report, said

    def _report(self, passage: Passage, iteration: int, started: float, start: float) -> SwitchReport:
        memory.forget_peak()
        record = passage.record
        report = SwitchReport(iteration, passage.src.name, passage.dst.name, _sizes(self.job.args), {}, passage.plan,
                              passage.totals, self.config.verify, started, beside=passage.beside, beside_from=passage.began,
                              beside_until=passage.ended, src_ranks=record.old if record else (),
                              dst_ranks=record.new if record else ())
        report.phases["leave"] = start - started
        report.phases["prepare"] = time.perf_counter() - start
        return report

    def _carry_out(self, passage: Passage, report: SwitchReport, baton):
        """Everything up to the commitment; what fails while it can is taken back."""
        try:
            if passage.union is None:
                return self._move(passage, report, baton)
            return self._move_to_other_ranks(passage, report, baton)
        except TransferError:
            raise  # the old state is gone, or ranks can no longer speak with one another
        except Exception as error:
            _let_go_of_frames(error)
            with report.phase("roll_back"):
                self.job.roll_back(passage.src.name)
            if passage.union is None:
                self._forget_unless_declared(passage.dst)
            raise

    def _forget_unless_declared(self, entry: Entry) -> None:
        if not entry.declared and entry.name in self.registry.entries:
            self.job.forget(entry.name)
            self.registry.forget(entry.name)
        if entry is self._considered:
            self._considered = None

    def _move_to_other_ranks(self, passage: Passage, report: SwitchReport, baton):
        """As `_move`, over the union of old and new ranks, of which one that was being taken in may die at any time. So the old
        ranks agree in their own world whether all has come about, and tell the others."""
        said, failure = None, None
        try:
            with passage.in_union():
                with report.phase("prepare"):
                    self._find_source(passage, report)
                said = self._move(passage, report, baton)
        except TransferError as error:
            if not self.config.keeps_old_state:
                raise
            failure = error
        except (DynaTrainError, RuntimeError) as error:
            failure = error
        if failure is not None:
            worlds.destroy(passage.union)  # whoever still waits in it for one that has gone is woken
            _let_go_of_frames(failure)
            failure = LayoutRefused(reason(failure, 1000).partition("; the job cannot go on")[0])
        if passage.own_src is not None:
            all_is_well = False
            try:
                with passage.in_old():
                    together(LayoutRefused, "the ranks could not be changed", _raise, failure)
                all_is_well = True
            finally:
                if passage.number == passage.record.old[0]:
                    passage.say_outcome(all_is_well)
        elif failure is not None or not passage.hear_outcome():
            raise failure or LayoutRefused("the job goes on with its old ranks")
        return said

    def _find_source(self, passage: Passage, report: SwitchReport) -> None:
        """The layout that is left, which may be another than when the new ranks were made ready: then it is planned anew."""
        trains = passage.own_src is not None
        now = gather((self.current, _sizes(self.job.args)) if trains else None)
        name, report.src_sizes = next(known for known in now if known is not None)
        if name != passage.src.name:
            told = [(self.registry.entries[name], self.job.answers[name])] if passage.number == passage.record.old[0] else [None]
            dist.broadcast_object_list(told, src=passage.record.union.index(passage.record.old[0]))
            if not trains:
                self.registry.adopt([told[0][0]])
                self.job.answers[name] = told[0][1]
            src = self.registry.entries[name]
            own = src.holdings[passage.record.old.index(passage.number)] if trains else None
            passage.plan_anew(src, own, self.config.transfer.staging_bytes, self.config.keeps_old_state)
            report.src, report.plan, report.totals = name, passage.plan, passage.totals

    def _move(self, passage: Passage, report: SwitchReport, baton):
        """Everything of a switch up to the commitment. What can be refused is refused before the first byte moves."""
        job, dst = self.job, passage.dst

        def left():
            if passage.own_src is None:
                return None, (None, None)
            with passage.in_old():
                self._check_that_it_fits(passage)
                job.quiesce()
                old = _as_described(job.describe_live, passage.src.name, passage.own_src)
                said = (job.progress(), baton()) if baton is not None and self.rank == 0 else None
                return old, (job.capture(old), said)

        def built():
            if passage.own_dst is None:
                return None
            with passage.in_new():
                new = _as_described(functools.partial(job.build, dst.name), dst.name, passage.own_dst)
                job.carry_over(carried)
                return new

        with report.phase("quiesce"):
            old, gathered = share(LayoutRefused, "the job cannot be switched at this boundary", left)
        carried = [captured for captured, _ in gathered if captured is not None]
        progress, said = next((said for _, said in gathered if said is not None), (None, None))
        before = None
        if self.config.verify == "digest":
            with report.phase("verify"):
                before = Checksums(passage.plan.src, passage.rank, _storages(old), passage.plan.common)
        if passage.own_dst is not None:
            with report.phase("groups"):
                if passage.union is not None:
                    new = passage.record.new
                    job.take_world(passage.groups, new.index(passage.number), len(new), progress)
                job.enter(dst.name)
        with report.phase("build"):
            new = together(LayoutRefused, f"layout {dst.name!r} cannot be built", built)
        with report.phase("data"):
            together(LayoutRefused, f"the data of layout {dst.name!r} cannot be built", self._build_data, passage)
        try:
            self._fill(passage, old, new, report, before, carried)
        except TransferError:
            raise
        except Exception as error:
            if self.config.keeps_old_state:
                raise
            raise TransferError(f"rank {self.rank}: {reason(error)}; the old state is given back already, in part or whole, so "
                                "the job cannot go on, start it again from its last checkpoint") from error
        return said

    def _build_data(self, passage: Passage) -> None:
        if passage.own_dst is not None:
            with passage.in_new():
                self.job.build_data()

    def _fill(self, passage: Passage, old, new, report: SwitchReport, before: Checksums | None, carried) -> None:
        """Move the state and verify it; the old one is given back on the way, unless it is to stay."""
        job, keeps, plan, rank = self.job, self.config.keeps_old_state, passage.plan, passage.rank
        src, dst = _storages(old), _storages(new)
        with report.phase("transfer"):
            filled = _allocations(new)
            if keeps:  # a rank that has not the memory says so before any byte moves
                together(LayoutRefused, "there is no memory for the new state beside the old one", filled.take_all)
            turnover = Turnover.of(plan, rank, passage.memory_before, passage.memory_after)
            exchange = Exchange(turnover, None if keeps else _allocations(old), filled)
            execute(plan, rank, src, dst, timedelta(seconds=self.config.transfer.timeout_seconds), exchange)
        if self.config.verify != "off":
            with report.phase("verify"):
                differences = (compare_bits(plan.src, plan.dst, rank, src, dst) if before is None
                               else before.differences(Checksums(plan.dst, rank, dst, plan.common)))
                together(VerificationError if keeps else TransferError,
                         f"the state differs after the switch from {report.src!r} to {report.dst!r}",
                         _same_state, differences, job, carried if passage.own_dst is not None else None)
            report.verify = "ok"

    def _check_that_it_fits(self, passage: Passage) -> None:
        """Raise LayoutRefused if this rank cannot hold what the switch needs at its peak."""
        peak, limit = passage.peak_bytes, self.config.transfer.memory_limit_bytes
        source = "`transfer.memory_limit_bytes`"
        if limit is None:
            limit, source = self.job.memory_limit(passage.memory_before), "what is free on its GPU beside that"
        if limit is not None and peak > limit:
            both = " and the old state is to stay until the switch is verified (`transfer.keep_old_state`)"
            raise LayoutRefused(
                f"the switch does not fit into memory: it needs up to {in_bytes(peak)} at once for the states and the scratch"
                f"{both if self.config.keeps_old_state else ''}, of which {in_bytes(passage.memory_before.state_bytes)} is the old "
                f"state, {in_bytes(passage.memory_after.state_bytes)} the new one and "
                f"{in_bytes(self.config.transfer.staging_bytes)} `transfer.staging_bytes`; {source} allows {in_bytes(limit)}")


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _storages(state) -> list:
    """The flat tensors of a rank's state; none of a rank that has no state."""
    return [] if state is None else state.storages


def _allocations(state) -> Allocations:
    return Allocations([], [], nothing().memory) if state is None else Allocations(state.storages, state.allocations,
                                                                                   state.holdings.memory)


def _let_go_of_frames(error: BaseException | None) -> None:
    """Empty the frames that the tracebacks of an error and of its causes hold: in them lives the new state, for which there
    may be no room beside the gradients of the old one."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _as_described(state_of_rank, name: str, own: Holdings):
    """What `state_of_rank()` returns. Raises SpaceError if it is not what the plan was made for."""
    state = state_of_rank()
    if state.holdings.digest() != own.digest():
        raise SpaceError(f"what the rank holds is not what was described for layout {name!r}")
    return state


def _same_state(differences: list[str], job, carried) -> None:
    """Raise VerificationError if tensors differ, or anything else that was carried over; None: nothing was, to this rank."""
    if carried is not None:
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
