"""What is to be done at which iteration boundary: the schedule, and what was asked while the job runs.

Every rank keeps an agenda and is told the same messages at the same boundaries, so that all agendas agree without a word.
"""

import sys
from dataclasses import dataclass
from typing import Literal

import msgspec

from megatron_dynatrain.config import ScheduledSwitch
from megatron_dynatrain.layout import Layout

NEVER = sys.maxsize


class Switch(msgspec.Struct, frozen=True, tag="switch", kw_only=True):
    """Someone asks for a switch to `layout` after iteration `at_iteration`, or as soon as can be."""

    id: str
    layout: str | Layout
    at_iteration: int | None = None


class Cost(msgspec.Struct, frozen=True, tag="cost", kw_only=True):
    """Someone asks what a switch to `layout` would cost."""

    id: str
    layout: str | Layout


class Cancel(msgspec.Struct, frozen=True, tag="cancel", kw_only=True):
    """Someone takes back the switch `id`."""

    id: str


Message = Switch | Cost | Cancel


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to do at a boundary. `ids`: of the messages that asked for it; none for an entry of the schedule."""

    kind: Literal["switch", "cost"]
    layout: str | Layout
    ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """A switch that will not be carried out. `by`: the message that took its place."""

    switch: Switch
    answer: Literal["superseded", "expired", "cancelled"]
    reason: str
    by: Switch | None = None


class Agenda:
    """Pure: no communication, no clock."""

    def __init__(self, schedule: list[ScheduledSwitch], train_iters: int):
        self.train_iters = train_iters
        self._schedule = [switch for switch in schedule if switch.at_iteration < train_iters]
        self._asked: list[tuple[int, Switch]] = []  # (iteration, what), in the order in which it was asked
        self._costs: list[Cost] = []

    @property
    def next_iteration(self) -> int:
        """The first iteration after which something is due."""
        if self._costs:
            return 0
        return min([switch.at_iteration for switch in self._schedule[:1]] + [at for at, _ in self._asked], default=NEVER)

    @property
    def schedule(self) -> list[tuple[int, str]]:
        """What is still to come of the schedule: [(iteration, layout), ...]."""
        return [(switch.at_iteration, switch.layout) for switch in self._schedule]

    def hear(self, message: Message, iteration: int) -> list[Dropped]:
        """Take note of a message that all ranks have at the end of `iteration`; what is dropped for it."""
        match message:
            case Cost():
                self._costs.append(message)
            case Cancel():
                found = [switch for _, switch in self._asked if switch.id == message.id]
                self._asked = [(at, switch) for at, switch in self._asked if switch.id != message.id]
                return [Dropped(switch, "cancelled", "it was taken back") for switch in found]
            case Switch():
                late = too_late(message.at_iteration, iteration, self.train_iters)
                if late:
                    return [Dropped(message, "expired", late)]
                self._asked.append((iteration if message.at_iteration is None else message.at_iteration, message))
        return []

    def take(self, iteration: int) -> tuple[list[Item], list[Dropped]]:
        """What is due after `iteration`, in order, and what has no room beside it; both leave the agenda.

        Entries of the schedule come first and are all carried out, then the costs. Of what was asked the last wins: what is the
        same is carried out with it, what differs is superseded.
        """
        # An entry may lie on an iteration that Megatron skipped, at whose end nobody is asked.
        scheduled = [switch for switch in self._schedule if switch.at_iteration <= iteration]
        asked = [switch for at, switch in self._asked if at <= iteration]
        items = [Item("switch", switch.layout) for switch in scheduled] + [Item("cost", cost.layout, (cost.id,))
                                                                           for cost in self._costs]
        self._schedule, self._costs = self._schedule[len(scheduled):], []
        self._asked = [(at, switch) for at, switch in self._asked if at > iteration]
        if not asked:
            return items, []
        last = asked[-1]
        same = tuple(switch.id for switch in asked if switch.layout == last.layout)
        return ([*items, Item("switch", last.layout, same)],
                [Dropped(switch, "superseded", "a newer request took its place", last) for switch in asked
                 if switch.layout != last.layout])

    def close(self, reason: str) -> list[Dropped]:
        """No boundary comes any more: what was asked expires."""
        left, self._asked, self._costs = self._asked, [], []
        return [Dropped(switch, "expired", reason) for _, switch in left]


def too_late(at_iteration: int | None, iteration: int, train_iters: int) -> str | None:
    """Why a switch cannot come after `at_iteration`, when `iteration` has finished; None if it can."""
    if at_iteration is None:
        return None
    if at_iteration >= train_iters:
        return f"no step comes after iteration {at_iteration}: --train-iters is {train_iters}"
    if at_iteration < iteration:
        return (f"iteration {at_iteration} had passed when all ranks had heard of it, after iteration {iteration}; ask for a "
                "later one, or for none to switch as soon as can be")
    return None
