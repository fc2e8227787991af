"""Messages from any rank of a running job to all, without a word between ranks while there is none.

A message is put into the job's own key-value store (the rendezvous store of torch.distributed). On every rank one thread asks
there for the next message, some times a second. When there is a message it *arms* its rank, and only armed ranks look into the
store at iteration boundaries. So an idle step costs nothing.

All ranks must take note at the same boundary. Rank 0 decides: when every rank is armed, it publishes, at the end of
iteration c and before it starts c + 1, that the messages count from c + 1 on. A rank that finishes c + 1 finds the decision in
the store: no iteration ends anywhere before rank 0 has started it, since every step reduces over all ranks.

Where ranks join and leave, each generation of ranks counts its own armed ranks, and takes up the messages where the one before it
has stopped (`Position`).
"""

import json
import threading
import time
from dataclasses import dataclass

import msgspec

from megatron_dynatrain.agenda import Message

_PREFIX = "megatron_dynatrain"
# The thread asks again and again, as a store that is asked to wait writes two warnings each time that nothing has come: the more
# ranks ask, the more rarely; and for a moment often, as messages come in company.
_SLEEP_SECONDS, _MORE_PER_RANK = 0.05, 2e-4
_AWAKE_SECONDS, _NAP_SECONDS = 0.05, 0.002
_DECODER = msgspec.json.Decoder(Message)


@dataclass(frozen=True, slots=True)
class Position:
    """How far the messages of a job have come: how many were handed out, how many all ranks know of, the decision to come next."""

    done: int = 0
    armed: int = 0
    decision: int = 1


class Requests:
    """This rank's end of the protocol. `is_armed` is the only thing that an idle step may look at."""

    def __init__(self, store, rank: int, world_size: int, on_armed, generation: int = 0, position: Position = Position()):
        """store: a c10d store shared by all ranks. on_armed: called, in the waiting thread, when a message has come. position: the
        same on all ranks of the generation."""
        self._store = store
        self._waiting_store = store.clone()  # its own connection: a waiting thread blocks it
        self._rank, self._world_size = rank, world_size
        self._on_armed = on_armed
        self._counter = f"{_PREFIX}/armed/{generation}"
        self._known_to_all = position.armed
        self._armed = position.armed  # messages that this rank knows of
        self._done = position.done  # messages that were handed out
        self._decision = position.decision  # the next decision to come
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="dynatrain-requests", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Hear nothing any more; `close` waits for the thread."""
        self._closed.set()

    def close(self) -> None:
        """End the thread. A thread that comes back from the store while the interpreter ends would abort the process. Not
        collective."""
        self._closed.set()
        self._thread.join(10)

    @property
    def position(self) -> Position:
        """Where the next generation takes up. At a boundary, when what was due has been handed out. On rank 0."""
        return Position(self._done, self._latest_known_to_all(), self._decision)

    @property
    def is_armed(self) -> bool:
        return self._armed > self._done

    def put(self, message: Message, store=None) -> None:
        """Tell all ranks. Not collective; any rank, at any time. Another thread than the training one gives its own `store`."""
        store = store or self._store
        ticket = store.add(f"{_PREFIX}/tickets", 1)
        store.set(f"{_PREFIX}/request/{ticket}", msgspec.json.encode(message))

    def _wait(self) -> None:
        awake_until, sleep = 0.0, _SLEEP_SECONDS + _MORE_PER_RANK * self._world_size
        while not self._closed.is_set():
            ticket = self._armed + 1
            try:
                has_come = self._waiting_store.check([f"{_PREFIX}/request/{ticket}"])
            except Exception:
                return  # the store is gone: the job is ending
            if not has_come:
                self._closed.wait(_NAP_SECONDS if time.monotonic() < awake_until else sleep)
                continue
            awake_until = time.monotonic() + _AWAKE_SECONDS
            self._armed = ticket
            self._on_armed()
            self._waiting_store.add(f"{self._counter}/{ticket}", 1)

    def due(self, iteration: int) -> list[Message]:
        """The messages that count from the end of `iteration` on, oldest first; the same on every rank. For armed ranks, at a
        boundary."""
        decided = self._decided()
        if decided is None and self._rank == 0:
            latest = self._latest_known_to_all()
            if latest > self._done:
                text = json.dumps({"at_iteration": iteration + 1, "up_to": latest})
                self._store.set(f"{_PREFIX}/decision/{self._decision}", text)
            return []
        if decided is None or decided["at_iteration"] > iteration:  # it may lie on an iteration that was skipped
            return []
        tickets = range(self._done + 1, decided["up_to"] + 1)
        self._done = decided["up_to"]
        self._decision += 1
        return [self._message(ticket) for ticket in tickets]

    def _latest_known_to_all(self) -> int:
        latest, known = self._armed, max(self._done, self._known_to_all)
        while latest > known and self._store.add(f"{self._counter}/{latest}", 0) < self._world_size:
            latest -= 1
        return latest

    def undecided(self) -> list[Message]:
        """Messages that were not handed out: at the end of a job, when no boundary comes any more. Not collective."""
        last = self._store.add(f"{_PREFIX}/tickets", 0)
        return [self._message(ticket) for ticket in range(self._done + 1, last + 1)
                if self._store.check([f"{_PREFIX}/request/{ticket}"])]

    def _message(self, ticket: int) -> Message:
        return _DECODER.decode(self._store.get(f"{_PREFIX}/request/{ticket}"))

    def _decided(self) -> dict | None:
        key = f"{_PREFIX}/decision/{self._decision}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
