"""Who belongs to a job: the numbers of its processes, and which of those that wait are alive.

A process that waits says so twice a second, in a thread. Whether it is alive is judged by the clock of the one who asks:
by when its count was last seen to change.
"""

import json
import threading
import time
from dataclasses import dataclass, field

_BEAT_SECONDS = 0.5
DEAD_SECONDS = 5.0  # without a beat

_COUNT = "roster/count"


def found(store, count: int) -> None:
    """Give the launched processes the numbers from 0 to `count` - 1. By one process, before anyone joins."""
    store.set(_COUNT, str(count))


def enlist(store) -> int:
    """The number of a process that joins."""
    return store.add(_COUNT, 1) - 1


@dataclass(slots=True)
class Seat:
    """What is known of a number. waits: it may be taken into a generation."""

    waits: bool
    about: dict = field(default_factory=dict)


def say(store, number: int, waits: bool, **about) -> None:
    """Publish what others may know of this process."""
    store.set(f"roster/seat/{number}", json.dumps({"waits": waits, "about": about}))


class Pulse:
    """Says that this process is alive, from a thread, until `stop`."""

    def __init__(self, store, key: str):
        self._store, self._key = store.clone(), key
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dynatrain-pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(_BEAT_SECONDS):
            try:
                self._store.add(self._key, 1)
            except Exception:
                return  # the store is gone

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(10)


class Ears:
    """Judges by counts that others raise whether they are alive: within the last `seconds`. Of one thread."""

    def __init__(self, store, seconds: float = DEAD_SECONDS):
        self._store, self._seconds = store, seconds
        self._seen: dict[str, tuple[int, float]] = {}
        self._changed: set[str] = set()

    def hears(self, key: str) -> bool:
        """Whether the count at `key` has changed lately; one that is new gets its time."""
        count, now = self._store.add(key, 0), time.monotonic()
        if self._seen.get(key, (None, 0.0))[0] != count:
            self._seen[key] = (count, now)
        return now - self._seen[key][1] < self._seconds

    def has_heard(self, key: str) -> bool:
        """As `hears`, but only once the count was seen to change: one who died long ago is not taken for alive."""
        before = self._seen.get(key, (None, 0.0))[0]
        alive = self.hears(key)
        if before is not None and before != self._seen[key][0]:
            self._changed.add(key)
        return alive and key in self._changed


def pulse_key(number: int) -> str:
    return f"roster/pulse/{number}"


class Roster:
    """The view of the one who decides who is taken."""

    def __init__(self, store):
        self._store, self._ears = store, Ears(store)

    @property
    def count(self) -> int:
        """How many numbers were given."""
        return self._store.add(_COUNT, 0)

    def seat(self, number: int) -> Seat | None:
        """What a number said of itself; None for one that has not spoken."""
        key = f"roster/seat/{number}"
        return Seat(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def is_alive(self, number: int) -> bool:
        return self._ears.hears(pulse_key(number))

    def waiting(self, except_for: tuple[int, ...]) -> list[int]:
        """The numbers that wait and are known to live, ascending. To be asked now and then, as only who is watched is known to."""
        return [number for number in range(self.count) if number not in except_for
                and (seat := self.seat(number)) is not None and seat.waits and self._ears.has_heard(pulse_key(number))]
