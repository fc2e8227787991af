"""What is to be done at which iteration boundary: the schedule, and what was asked while the job runs.

Every rank keeps an agenda and is told the same messages at the same boundaries, so that all agendas agree without a word.
"""

import sys
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from megatron_dynatrain.config import ScheduledSwitch
from megatron_dynatrain.layout import Layout

NEVER = sys.maxsize
_SCHEDULED = "schedule/"  # begins the key of an entry of the schedule


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


class Formed(msgspec.Struct, frozen=True, tag="formed", kw_only=True):
    """The ranks of generation `generation` are ready for the switch `id`, which needs other ranks than those of the present
    generation, `base`."""

    id: str
    generation: int
    base: int


class Unformed(msgspec.Struct, frozen=True, tag="unformed", kw_only=True):
    """They will not be: `reason` says why."""

    id: str
    generation: int
    base: int
    reason: str


Message = Switch | Cost | Cancel | Formed | Unformed


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to do at a boundary. `ids`: of the messages that asked for it; none for an entry of the schedule. `key`: names it
    where other ranks are made ready for it."""

    kind: Literal["switch", "cost"]
    layout: str | Layout
    ids: tuple[str, ...] = ()
    key: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Wish:
    """A switch for which other ranks may be made ready now."""

    key: str
    layout: str | Layout


@dataclass(frozen=True, slots=True)
class Dropped:
    """A switch that will not be carried out. `by`: the message that took its place."""

    switch: Switch
    answer: Literal["superseded", "expired", "cancelled", "refused"]
    reason: str
    by: Switch | None = None


class Agenda:
    """Pure: no communication, no clock."""

    def __init__(self, schedule: list[ScheduledSwitch], train_iters: int):
        self.train_iters = train_iters
        self._schedule = [switch for switch in schedule if switch.at_iteration < train_iters]
        self._asked: list[tuple[int, Switch]] = []  # (iteration, what), in the order in which it was asked
        self._costs: list[Cost] = []
        self._waiting: list[Item] = []  # for ranks that are not ready
        self.formed: dict[str, int] = {}  # generations that are ready, by the key of the switch

    @property
    def wishes(self) -> list[Wish]:
        """What is to come, the next first."""
        later = sorted([(switch.at_iteration, 0, Wish(_key(switch), switch.layout)) for switch in self._schedule]
                       + [(at, 1, Wish(switch.id, switch.layout)) for at, switch in self._asked], key=lambda entry: entry[:2])
        return [Wish(item.key, item.layout) for item in self._waiting] + [wish for *_, wish in later]

    def wait(self, item: Item) -> None:
        """Keep what was taken until its ranks are ready, behind what waits already."""
        self._waiting.append(item)

    def sort_out(self, due: list[Item], changes_ranks) -> list[Item]:
        """What can be carried out now of what waits and of what is due, in this order; the rest waits.

        changes_ranks: whether a layout needs other ranks than the present ones. What needs ranks that are not ready waits, and so
        does every later entry of the schedule, whose order stays. Behind a change of ranks everything waits for the next boundary.
        """
        queue, self._waiting = self._waiting + due, []
        now, kept_back, changed = [], False, False
        for item in queue:
            if item.kind == "cost":
                now.append(item)
                continue
            changes = changes_ranks(item.layout)
            if changed or (kept_back and item.key.startswith(_SCHEDULED)) or (changes and item.key not in self.formed):
                self._waiting.append(item)
                kept_back = True
            else:
                now.append(item)
                changed = changes
        return now

    @property
    def next_iteration(self) -> int:
        """The first iteration after which something is due."""
        if self._costs or any(item.key in self.formed for item in self._waiting):
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
                found = self._no_longer_asked(message.id)
                found += [Switch(id=message.id, layout=item.layout) for item in self._waiting if message.id in item.ids]
                kept = [replace(item, ids=tuple(other for other in item.ids if other != message.id)) for item in self._waiting]
                self._waiting = [new for new, old in zip(kept, self._waiting, strict=True) if new.ids or not old.ids]
                return [Dropped(switch, "cancelled", "it was taken back") for switch in found]
            case Formed():
                self.formed[message.id] = message.generation
            case Unformed():
                self.formed.pop(message.id, None)
                found = self._no_longer_asked(message.id) + self._no_longer_waiting(lambda key: key == message.id)
                return [Dropped(switch, "refused", message.reason) for switch in found]
            case Switch():
                if message.id in (switch.id for _, switch in self._asked) or message.id in self._ids_waiting:
                    return []  # told again by the rank that took over the run directory
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
        items = [Item("switch", switch.layout, key=_key(switch)) for switch in scheduled]
        items += [Item("cost", cost.layout, (cost.id,)) for cost in self._costs]
        self._schedule, self._costs = self._schedule[len(scheduled):], []
        self._asked = [(at, switch) for at, switch in self._asked if at > iteration]
        if not asked:
            return items, []
        last = asked[-1]
        same = tuple(switch.id for switch in asked if switch.layout == last.layout)
        item = Item("switch", last.layout, same, key=last.id)
        for waiting in [item for item in self._waiting if item.ids and item.layout == last.layout]:
            self._waiting.remove(waiting)  # what is ready for it is ready for this one, too
            item = replace(item, ids=waiting.ids + item.ids, key=waiting.key)
        older = self._no_longer_waiting(lambda key: not key.startswith(_SCHEDULED))
        older += [switch for switch in asked if switch.layout != last.layout]
        return ([*items, item],
                [Dropped(switch, "superseded", "a newer request took its place", last) for switch in older])

    @property
    def _ids_waiting(self) -> set[str]:
        return {message_id for item in self._waiting for message_id in item.ids}

    def _no_longer_asked(self, message_id: str) -> list[Switch]:
        """Take a request that is not due off the agenda."""
        found = [switch for _, switch in self._asked if switch.id == message_id]
        self._asked = [(at, switch) for at, switch in self._asked if switch.id != message_id]
        return found

    def _no_longer_waiting(self, which) -> list[Switch]:
        """Take what waits under such keys off the agenda: the requests for it. An entry of the schedule is nobody's request."""
        dropped = [item for item in self._waiting if which(item.key)]
        self._waiting = [item for item in self._waiting if not which(item.key)]
        return [Switch(id=message_id, layout=item.layout) for item in dropped for message_id in item.ids or (item.key,)]

    def close(self, reason: str) -> list[Dropped]:
        """No boundary comes any more: what was asked expires."""
        left, self._asked, self._costs = [switch for _, switch in self._asked], [], []
        left += self._no_longer_waiting(lambda key: True)
        return [Dropped(switch, "expired", reason) for switch in left]


def _key(switch: ScheduledSwitch) -> str:
    return f"{_SCHEDULED}{switch.at_iteration}/{switch.layout}"


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
