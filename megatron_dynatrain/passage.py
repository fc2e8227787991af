"""What a switch goes over: the plan, which of its ranks this process is, and the worlds before, during and after it.

In a switch between two layouts of the same ranks the three worlds are one. Where the ranks change, the state moves over the union
of the old and the new ones, in a world of its own, so that neither side's groups are touched until all is there.
"""

import contextlib
import socket
import time
from dataclasses import dataclass, field

import torch.distributed as dist

from megatron_dynatrain.consensus import gather, together
from megatron_dynatrain.elastic import pace, worlds
from megatron_dynatrain.elastic.formation import Board, Record
from megatron_dynatrain.errors import LayoutRefused, SpaceError
from megatron_dynatrain.planning import Balance, Part, Plan, Totals, draft_plan, finish_plan, node_numbers, total
from megatron_dynatrain.registry import Entry
from megatron_dynatrain.space import Holdings, Memory, World, nothing


_PATIENCE_SECONDS = 600.0  # with the old ranks, which are about to say how the change has ended


@dataclass(frozen=True, slots=True)
class Place:
    """What planning asks of a rank, beside its pieces: the memory that it holds before and after, and its host."""

    src: Memory
    dst: Memory
    host: str = field(default_factory=socket.gethostname)


def planned(names: tuple[str, str], src: World, dst: World, ranks: dict[int, Place], staging_bytes: int,
            keeps_old_state: bool) -> tuple[list[tuple[Plan, int]], Totals]:
    """([(plan, peak bytes)] of `ranks`, totals of all ranks) of the switch between two layouts, `names` in messages.

    ranks: those that this process plans for, often itself alone; all processes together plan for every rank once. Collective.
    Raises LayoutRefused or SpaceError, on every rank.
    """
    pace.rest()
    drafts = together(LayoutRefused, f"the switch from {names[0]!r} to {names[1]!r} is refused",
                      lambda: [draft_plan(src, dst, staging_bytes, rank) for rank in ranks])
    pace.rest()
    told = [(draft.rank, place.host, draft.demand) for draft, place in zip(drafts, ranks.values(), strict=True)]
    told = sorted(sum(gather(told), []), key=lambda of_rank: of_rank[0])
    balance = Balance({rank: needs for *_, demand in told for rank, needs in demand.items()},
                      node_numbers([host for _, host, _ in told]))
    plans = together(SpaceError, "the plan", lambda: [finish_plan(draft, balance) for draft in drafts])
    pace.rest()
    parts = [Part.of(plan, place.src, place.dst, keeps_old_state) for plan, place in zip(plans, ranks.values(), strict=True)]
    gathered = sum(gather([(plan.digest, part) for plan, part in zip(plans, parts, strict=True)]), [])
    digests = [digest for digest, _ in gathered]
    if len(set(digests)) > 1:
        raise SpaceError(f"ranks made different plans from {names[0]!r} to {names[1]!r}: {digests}")
    return ([(plan, part.peak_bytes) for plan, part in zip(plans, parts, strict=True)],
            total([part for _, part in gathered], balance))


def in_union(src: Entry, dst: Entry, old: tuple[int, ...], new: tuple[int, ...]) -> tuple[World, World]:
    """The worlds of two layouts on the ranks `old` and `new`, all numbered by their places among both."""
    place = {number: rank for rank, number in enumerate(sorted({*old, *new}))}
    return tuple(entry.world.renumbered([place[number] for number in numbers]) for entry, numbers in ((src, old), (dst, new)))


@dataclass(slots=True, eq=False)
class Passage:
    """One switch, ready to be carried out.

    rank: of this process in the plan. own_src, own_dst: what it holds before and after it; None where it does not train then.
    union, new: worlds of a change of ranks, of all who take part and of the new ones; None where the ranks stay, or (`new`) where
    this process does not train afterwards. groups: Megatron's, in `new`. old: the world that was left. beside: processor seconds
    that this process spent on making ready while the job trained, by what was made; between the times `began` and `ended`.
    """

    src: Entry
    dst: Entry
    plan: Plan
    totals: Totals
    peak_bytes: int
    rank: int
    own_src: Holdings | None
    own_dst: Holdings | None
    record: Record | None = None
    union: object | None = None
    new: object | None = None
    groups: object | None = None
    old: object | None = None
    beside: dict[str, float] = field(default_factory=dict)
    board: Board | None = None
    began: float = field(default_factory=time.time)
    ended: float = 0.0

    @property
    def number(self) -> int:
        """Of this process in the job."""
        return self.record.union[self.rank]

    @property
    def memory_before(self) -> Memory:
        return (self.own_src or nothing()).memory

    @property
    def memory_after(self) -> Memory:
        return (self.own_dst or nothing()).memory

    def in_union(self):
        """A context in which torch.distributed is the world of all who take part."""
        return contextlib.nullcontext() if self.union is None else worlds.entered(self.union)

    def in_old(self):
        """A context in which it is the world in which this process trains until now."""
        return contextlib.nullcontext() if self.union is None else worlds.entered(worlds.of_process())

    def in_new(self):
        """A context in which it is the world of the new ranks, of which this process is one."""
        return contextlib.nullcontext() if self.union is None else worlds.entered(self.new)

    def plan_anew(self, src: Entry, own_src: Holdings | None, staging_bytes: int, keeps_old_state: bool) -> None:
        """Plan from another layout of the old ranks than the one for which it was made ready. Collective over the union."""
        self.src, self.own_src = src, own_src
        self._plan(staging_bytes, keeps_old_state)

    def _plan(self, staging_bytes: int, keeps_old_state: bool) -> None:
        """Over the union, in which ranks are numbered by their place."""
        worlds_of_plan = in_union(self.src, self.dst, self.record.old, self.record.new)
        own = {self.rank: Place(self.memory_before, self.memory_after)}
        ((self.plan, self.peak_bytes),), self.totals = planned((self.src.name, self.dst.name), *worlds_of_plan, own, staging_bytes,
                                                               keeps_old_state)

    def say_outcome(self, all_is_well: bool) -> None:
        """Tell those who were waiting whether they are taken in. By the first old rank."""
        self.board.say_outcome(self.record.number, all_is_well)

    def hear_outcome(self) -> bool:
        """Whether they are."""
        return self.board.hear_outcome(self.record.number, _PATIENCE_SECONDS)

    def discard(self) -> None:
        """Destroy the worlds that were made for it. Not collective."""
        for world in (self.new, self.union):
            if world is not None:
                worlds.destroy(world)


def form(record: Record, member: int, store, controller) -> Passage:
    """Make this process's part of an attempt at a generation, beside whatever trains here. Collective over the ranks of the
    record; from any thread.

    member: the number of this process in the job. store: of the job. What fails anywhere is raised; GivenUp, before anything is
    made, where the attempt is not carried on.
    """
    from torch.distributed import PrefixStore

    job, registry, patience = controller.job, controller.registry, controller.patience
    Board(store).assemble(record)
    seconds, began = {}, time.time()
    rank, size = record.union.index(member), len(record.union)
    passage = union = None
    try:
        with job.in_thread(), pace.Pace(patience.total_seconds() / 2):
            with _timed(seconds, "rendezvous"):
                union = worlds.make(2 * record.number, rank, size, job.backend,
                                    PrefixStore(f"generation/{record.number}/union", store), patience)
            with worlds.entered(union):
                with _timed(seconds, "describe"):
                    src, dst = _agreed(record, member, rank, controller)
                own_src = src.holdings[record.old.index(member)] if member in record.old else None
                own_dst = dst.holdings[record.new.index(member)] if member in record.new else None
                passage = Passage(src, dst, None, None, 0, rank, own_src, own_dst, record, union, beside=seconds,
                                  board=Board(store))
                with _timed(seconds, "plan"):
                    passage._plan(controller.config.transfer.staging_bytes, controller.config.keeps_old_state)
            if own_dst is not None:
                with _timed(seconds, "groups"):
                    passage.new = worlds.make(2 * record.number + 1, record.new.index(member), len(record.new), job.backend,
                                              PrefixStore(f"generation/{record.number}/world", store), patience)
                    passage.groups = job.make_groups_in(passage.new, dst.name, patience)
        job.trust(union)
        passage.began, passage.ended = began, time.time()
        return passage
    except BaseException:
        if passage is not None:
            passage.discard()
        elif union is not None:
            worlds.destroy(union)
        raise


def _agreed(record: Record, member: int, rank: int, controller) -> tuple[Entry, Entry]:
    """(old, new layout); those who do not train learn from the first who does what all layouts are. Collective over the union."""
    job, registry = controller.job, controller.registry
    dst_name, joins = registry.find(record.layout).name, member not in record.old
    teller = record.union.index(record.old[0])
    known = gather(_known(controller) if joins else None) if record.union != record.old else []
    said = [None]
    if rank == teller:  # a switch of layouts may be going on, at which ranks do not arrive in one moment
        own = _known(controller)
        unknown = [name for name in own if any(theirs is not None and theirs.get(name) != own[name] for theirs in known)]
        said = [(controller.current, [registry.entries[name] for name in unknown], {name: job.answers[name] for name in unknown})]
    dist.broadcast_object_list(said, src=teller)
    src_name, entries, answers = said[0]
    if known:
        if joins:
            registry.adopt(entries)
            job.answers.update(answers)
        together(LayoutRefused, "a rank cannot take part", _check_own if joins else lambda *_: None, controller,
                 registry.entries[dst_name], record.new.index(member) if joins else 0)
    return registry.entries[src_name], registry.entries[dst_name]


def _known(controller) -> dict[str, str]:
    """{layout: what its description is known by} of those that this process can build."""
    return {entry.name: entry.world.digest for entry in controller.registry.described() if entry.name in controller.job.answers}


def _check_own(controller, entry: Entry, rank: int) -> None:
    """On a process that joins: that it would hold in a layout what the job says. Raises SpaceError or LayoutRefused."""
    job, fact = controller.job, (entry.name, rank, entry.world.digest)
    if fact in controller.registry.checked:
        return
    job.check(entry.name, entry.layout)
    own = job.describe_dry(entry.name, rank, len(entry.world.ranks))
    job.said(entry.name)
    if own.digest() != entry.holdings[rank].digest():
        raise SpaceError(f"what this process would hold as rank {rank} of layout {entry.name!r} is not what the job describes")
    controller.registry.checked.add(fact)


@contextlib.contextmanager
def _timed(seconds: dict[str, float], name: str):
    """Processor seconds of this thread: it rests on the way, and waits for threads that do."""
    start = time.thread_time()
    try:
        yield
    finally:
        seconds[name] = time.thread_time() - start
        pace.rest()
