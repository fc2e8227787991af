"""The next generation is made beside the training: by all that it takes, in a thread of each, as rank 0 decides.

Rank 0 (`Coordinator`) looks for a wish whose ranks are there, gives the attempt a number and publishes its `Record`. Every process
of the record makes its part (`Preparer` in a thread where the process trains, `controller.form` in any case) and reports. When all
have, rank 0 tells all ranks through the messages of the job (`requests`), as it does where one has failed, died or is late: so
that the attempt is carried out at one boundary by all, or by none. Training never waits.
"""

import json
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from megatron_dynatrain.agenda import Formed, Unformed, Wish
from megatron_dynatrain.elastic import roster
from megatron_dynatrain.errors import reason
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.members import Unavailable, choose

_SLEEP_SECONDS = 0.25  # between looks for an attempt
_TICK_SECONDS = 0.05  # between looks for what becomes of one
_RETRY_SECONDS = 10.0  # before what has failed is tried again
_OUTPACED = "another switch came first"
_AT_BOUNDARY_SECONDS = 0.002  # while training stands still
ACTIVE_PULSE = "pulse/active"  # raised by rank 0 while the job trains
_ENDED = "ended"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a generation.

    key: names the switch for which it is. base: the generation that trains, with the ranks `old`. new: the ranks of the next one,
    by their numbers in the job. leave: those of `old` that end after the switch; the others that are not in `new` wait.
    """

    number: int
    key: str
    layout: str | Layout
    base: int
    old: tuple[int, ...]
    new: tuple[int, ...]
    leave: tuple[int, ...] = ()

    @property
    def union(self) -> tuple[int, ...]:
        return tuple(sorted({*self.old, *self.new}))


class GivenUp(Exception):
    """An attempt is not carried on. The message says why."""


class Board:
    """Where an attempt is published and reported on. Each thread needs its own (`clone`)."""

    def __init__(self, store):
        self.store = store

    def clone(self) -> "Board":
        return Board(self.store.clone())

    # The attempt.

    def publish(self, record: Record) -> None:
        self.store.set(f"generation/{record.number}", msgspec.json.encode(record))

    def record(self, number: int) -> Record | None:
        """The record of an attempt, if there is one."""
        text = self._get(f"generation/{number}")
        return None if text is None else msgspec.json.decode(text, type=Record)

    def _get(self, key: str) -> bytes | None:
        # Asking, as a store that is asked to wait writes two warnings each time that nothing has come.
        return self.store.get(key) if self.store.check([key]) else None

    # How it goes.

    def report(self, number: int, member: int, error: str | None) -> None:
        """A process has made its part, or could not."""
        self.store.set(f"generation/{number}/report/{member}", error or "")

    def reports(self, record: Record) -> dict[int, str]:
        """{number: error or ''} of those that have reported."""
        keys = {member: f"generation/{record.number}/report/{member}" for member in record.union}
        return {member: self.store.get(key).decode() for member, key in keys.items() if self.store.check([key])}

    def next_number(self) -> int:
        return self.store.add("generation/count", 1)

    def assemble(self, record: Record) -> None:
        """Wait until all of a record are about to make their parts, as whoever begins alone waits long. Raises GivenUp."""
        here = f"generation/{record.number}/assembled"
        self.store.add(here, 1)
        while self.store.add(here, 0) < len(record.union):
            verdict = self.verdict(record.number)
            if verdict is not None:
                raise GivenUp(verdict)
            time.sleep(_TICK_SECONDS)

    def settle(self, number: int, verdict: str) -> bool:
        """Say what becomes of an attempt: 'go N' after iteration N, or why it is given up. Whether nobody said otherwise before."""
        return self.store.compare_set(f"generation/{number}/verdict", "", verdict).decode() == verdict

    def verdict(self, number: int) -> str | None:
        """What became of an attempt, if that was said."""
        text = self._get(f"generation/{number}/verdict")
        return None if text is None else text.decode()

    # The roll-call at the boundary.

    def answer(self, number: int, member: int) -> None:
        self.store.set(f"generation/{number}/here/{member}", "")

    def absent(self, record: Record, patience: float) -> list[int]:
        """Who of those that have waited does not answer: dead, or silent for `patience` seconds. By rank 0."""
        deadline, ears = time.monotonic() + patience, roster.Ears(self.store)
        missing = [member for member in record.new if member not in record.old]
        while missing and time.monotonic() < deadline:
            missing = [member for member in missing if not self.store.check([f"generation/{record.number}/here/{member}"])]
            if any(not ears.hears(roster.pulse_key(member)) for member in missing):
                break
            if missing:
                time.sleep(_AT_BOUNDARY_SECONDS)
        return missing

    def start(self, number: int, absent: list[int]) -> None:
        self.store.set(f"generation/{number}/start", json.dumps(absent))

    def started(self, number: int, patience: float) -> list[int]:
        """Who was absent, as rank 0 found. Raises TimeoutError where it does not say so within `patience` seconds."""
        return json.loads(self._awaited(f"generation/{number}/start", patience,
                                        f"rank 0 did not say within {patience:g} s who takes part in generation {number}"))

    def _awaited(self, key: str, patience: float, failure: str) -> bytes:
        """What stands under `key` as soon as it does, while training stands still. Raises TimeoutError(failure)."""
        deadline = time.monotonic() + patience
        while (text := self._get(key)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(failure)
            time.sleep(_AT_BOUNDARY_SECONDS)
        return text

    def say_outcome(self, number: int, all_is_well: bool) -> None:
        self.store.set(f"generation/{number}/outcome", "1" if all_is_well else "")

    def hear_outcome(self, number: int, patience: float) -> bool:
        """What `say_outcome` said. Raises TimeoutError."""
        return bool(self._awaited(f"generation/{number}/outcome", patience,
                                  f"the old ranks did not say within {patience:g} s whether generation {number} has come about"))

    def arrive(self, number: int) -> None:
        """A rank of the new generation has all that it needs; those that leave may go."""
        self.store.add(f"generation/{number}/arrived", 1)

    def has_arrived(self, number: int, count: int) -> bool:
        return self.store.add(f"generation/{number}/arrived", 0) >= count

    # The job.

    def end(self, why: str) -> None:
        self.store.set(_ENDED, why)

    @property
    def ended(self) -> str | None:
        text = self._get(_ENDED)
        return None if text is None else text.decode()


class Preparer:
    """On a process that trains: makes its part of each attempt in a thread. `make(record)` returns what has a `discard()`."""

    def __init__(self, board: Board, member: int, after: int, make: Callable[[Record], object]):
        """after: the number of the attempt that trains now."""
        self._board, self._member, self._make = board.clone(), member, make
        self._next = after + 1
        self._formed: dict[int, object] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dynatrain-generation", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed:
            try:
                record = self._board.record(self._next)
                if self._closed:
                    return
                if record is None:
                    time.sleep(_SLEEP_SECONDS)
                    continue
                self._next += 1
                if self._member in record.union:
                    self._attempt(record)
            except Exception:
                return  # the store is gone: the job is ending

    def _attempt(self, record: Record) -> None:
        error = None
        try:
            formed = self._make(record)
            with self._lock:
                self._formed[record.number] = formed
        except GivenUp:
            return
        except Exception as caught:
            error = f"rank {self._member} of the job: {reason(caught)}"
        self._board.report(record.number, self._member, error)

    def take(self, number: int):
        """What was made for an attempt that all have reported."""
        with self._lock:
            return self._formed.pop(number)

    def discard(self, number: int) -> None:
        with self._lock:
            formed = self._formed.pop(number, None)
        if formed is not None:
            formed.discard()

    def stop(self) -> None:
        """Begin nothing any more."""
        self._closed = True

    def close(self) -> None:
        """End the thread; what was made and not taken is destroyed."""
        self.stop()
        self._thread.join(60)
        for number in list(self._formed):
            self.discard(number)


class Coordinator:
    """On rank 0: decides when the next generation is made, by whom, and whether it is ready."""

    def __init__(self, board: Board, base: int, members: tuple[int, ...], spares: int, patience: float,
                 size_of: Callable[[str | Layout], tuple[int, tuple[int, ...] | None]], tell: Callable):
        """base: the generation that trains, with `members`. size_of: how many ranks a layout wants, and which if it says so.
        tell: sends a message to all ranks, with a store."""
        self._board, self._base, self._members = board.clone(), base, members
        self._spares, self._patience, self._size_of, self._tell = spares, patience, size_of, tell
        self._roster = roster.Roster(self._board.store)
        self._wish: Wish | None = None
        self._ready: set[str] = set()  # keys of what is ready
        self._not_before: dict[str, float] = {}  # when what has failed is tried again, by key
        self._waiting: list[int] = []  # as last seen
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="dynatrain-coordinator", daemon=True)
        self._pulse = roster.Pulse(self._board.store, ACTIVE_PULSE)
        self._thread.start()

    def want(self, wish: Wish | None) -> None:
        """The switch for which ranks are to be made ready; None for none. From the thread that trains, at a boundary."""
        self._wish = wish

    def again(self, number: int, key: str) -> None:
        """What was ready is let go: it is made anew if it is wanted again."""
        self._board.clone().settle(number, "it is no longer wanted")
        self._ready.discard(key)

    def stop(self) -> None:
        """Begin nothing any more; an attempt that is open is given up."""
        self._closed = True

    def close(self) -> None:
        """End the threads."""
        self.stop()
        self._pulse.stop()
        self._thread.join(60)

    def _run(self) -> None:
        try:
            while not self._closed:
                wish = self._wish
                self._waiting = waiting = self._roster.waiting(self._members)  # always: only who is watched is known to live
                if wish is not None and wish.key not in self._ready and (
                        time.monotonic() >= self._not_before.get(wish.key, 0.0)):
                    self._try(wish, waiting)
                time.sleep(_SLEEP_SECONDS)
        except Exception as error:
            if not self._closed:
                print(f"[dynatrain] no more ranks can be made ready ({reason(error)}); training goes on", file=sys.stderr,
                      flush=True)

    def _try(self, wish: Wish, waiting: list[int]) -> None:
        try:
            record = self._drafted(wish, waiting)
        except Unavailable as error:
            self._give_up(wish, 0, str(error))
            return
        if record is None:
            return  # training goes on until they are there
        self._board.publish(record)
        failure = self._watched(record)
        if failure is None:
            self._ready.add(wish.key)
            self._tell(Formed(id=wish.key, generation=record.number, base=self._base), self._board.store)
            return
        self._board.settle(record.number, failure)
        if not self._closed:
            self._give_up(wish if failure != _OUTPACED else Wish("", wish.layout), record.number, failure)

    def _give_up(self, wish: Wish, number: int, why: str) -> None:
        """Tell all ranks. An entry of the schedule that is not due stays on the agenda, and is tried again later."""
        self._not_before[wish.key] = time.monotonic() + _RETRY_SECONDS
        self._tell(Unformed(id=wish.key, generation=number, base=self._base, reason=why), self._board.store)

    def would_train(self, layout: str | Layout) -> dict[int, str]:
        """{rank: its host} of those that would train in a layout if it were asked for now; where there are too few, with those
        that would join next, each on a host of its own. From the thread that trains, at a boundary. Raises Unavailable."""
        seats = roster.Roster(self._board.clone().store)
        members = (self._chosen(layout, self._waiting, seats)
                   or self._chosen(layout, [*self._waiting, *range(seats.count, seats.count + self._size_of(layout)[0])], seats)
                   or tuple(sorted(self._size_of(layout)[1])))  # those that it names, which are not there yet
        told = {number: seats.seat(number) for number in members}
        return {number: seat.about["host"] if seat else f"the host of rank {number}" for number, seat in told.items()}

    def _chosen(self, layout: str | Layout, waiting: list[int], seats: roster.Roster) -> tuple[int, ...] | None:
        size, named = self._size_of(layout)
        count = seats.count
        gone = tuple(number for number in named or () if number < count and number not in self._members
                     and (seat := seats.seat(number)) is not None and not seat.waits)
        return choose(size, named, self._members, waiting, count, gone)

    def _drafted(self, wish: Wish, waiting: list[int]) -> Record | None:
        members = self._chosen(wish.layout, waiting, self._roster)
        if members is None:
            return None
        others = sorted(number for number in {*self._members, *waiting} if number not in members)
        leave = tuple(number for number in others[self._spares:] if number in self._members)
        return Record(number=self._board.next_number(), key=wish.key, layout=wish.layout, base=self._base, old=self._members,
                      new=members, leave=leave)

    def _watched(self, record: Record) -> str | None:
        """Wait for the reports; why the attempt has failed, or None."""
        deadline = time.monotonic() + self._patience
        while True:
            reports = self._board.reports(record)
            failed = [error for error in reports.values() if error]
            silent = [member for member in record.union if member not in reports]
            if failed:
                return failed[0]
            if not silent:
                return None
            dead = [member for member in silent if member not in record.old and not self._roster.is_alive(member)]
            if dead:
                return f"rank {dead[0]} of the job, which was to be taken in, has died"
            if time.monotonic() > deadline:
                return (f"ranks {silent} of the job were not ready within `elastic.patience_seconds` "
                        f"({self._patience:g} s)")
            if self._closed or self._wish is None or self._wish.key != record.key:
                return _OUTPACED
            time.sleep(_TICK_SECONDS)
