"""The Elastic Device Manager of one process: its part in a job whose ranks change.

While it trains, a thread makes its part of the next generation and, on rank 0, another one decides when. While it waits, it does
the same without threads, and uses no core otherwise. What is decided here is carried out by the controller.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable

from megatron_dynatrain.agenda import Wish
from megatron_dynatrain.elastic import worlds
from megatron_dynatrain.elastic.formation import ACTIVE_PULSE, Coordinator, GivenUp, Preparer, Record
from megatron_dynatrain.elastic.membership import Membership
from megatron_dynatrain.elastic.roster import Ears
from megatron_dynatrain.errors import LayoutRefused, TransferError, reason
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.members import Unavailable
from megatron_dynatrain.passage import Passage, form

_SILENT_SECONDS = 60.0  # after which a job that was not heard of is taken for dead by those who wait
_SLEEP_SECONDS = 0.25  # between looks for an attempt
_AT_END_SECONDS = 0.02  # between looks for its end
_GO = "go "


class JobEnded(Exception):
    """There is nothing to wait for any more. failed: whether the job ended by an error, or died."""

    def __init__(self, why: str, failed: bool):
        super().__init__(why)
        self.failed = failed


class DeviceManager:
    """generation: the number of the one that trains, as far as this process knows."""

    def __init__(self, membership: Membership, controller, tell: Callable):
        """tell: sends a message to all ranks that train, with a store (`Requests.put`)."""
        self.membership, self.generation = membership, 0
        self._controller, self._tell = controller, tell
        self._board = membership.board
        self._preparer: Preparer | None = None
        self._coordinator: Coordinator | None = None
        self._pulse = None
        self.left_for_good = False  # whether this process is to end, as the job does not need it
        self._left: list[Callable] = []  # ends what nobody needs any more: worlds, threads
        self._ending: threading.Thread | None = None

    @property
    def number(self) -> int:
        """Of this process in the job."""
        return self.membership.number

    # While this process trains.

    def train(self, is_first: bool) -> None:
        """This process trains from now on, as rank 0 or as another. Not collective."""
        elastic = self._controller.config.elastic
        self._preparer = Preparer(self._board, self.number, self.generation, self._form)
        if is_first:
            self._coordinator = Coordinator(self._board, self.generation, self._controller.members, elastic.spares,
                                            elastic.patience_seconds, self._controller.size_of, self._tell)

    def _form(self, record: Record) -> Passage:
        if record.base != self.generation:
            raise LayoutRefused("the ranks of the job have changed meanwhile")
        return form(record, self.number, self._board.store.clone(), self._controller)

    def want(self, wishes: list[Wish]) -> None:
        """What is to come, the next first. On rank 0 the ranks of the first change are made ready."""
        if self._coordinator is not None:
            self._coordinator.want(next((wish for wish in wishes if self._controller.is_described(wish.layout)
                                         and self._controller.changes_ranks(wish.layout)), None))

    def would_train(self, layout: str | Layout) -> dict[int, str]:
        """{rank: its host} of those that would train in a layout for others than now. On rank 0. Raises LayoutRefused."""
        try:
            return self._coordinator.would_train(layout)
        except Unavailable as error:
            raise LayoutRefused(str(error)) from error

    def drop(self, number: int, key: str) -> None:
        """An attempt will not be carried out, for the switch of that key."""
        if self._coordinator is not None:
            self._coordinator.again(number, key)
        if self._preparer is not None:
            self._preparer.discard(number)

    def call_roll(self, number: int, iteration: int) -> Passage:
        """At the boundary after `iteration`, on every rank that trains: the passage of an attempt that is ready, if all that have
        waited are still there. Raises LayoutRefused, on every rank, where one is not."""
        passage = self._preparer.take(number)
        patience = self._controller.config.elastic.patience_seconds
        if self._coordinator is not None:
            goes = self._board.settle(number, f"{_GO}{iteration}")
            self._board.start(number, self._board.absent(passage.record, patience) if goes else [-1])
        absent = self._board.started(number, 2 * patience)
        if absent:
            passage.discard()
            raise LayoutRefused("it is no longer wanted" if absent == [-1] else
                                f"ranks {absent} of the job, which were to be taken in, do not answer")
        return passage

    def settle_in(self, passage: Passage) -> None:
        """After a change of ranks, on every process of it: the end of the old generation. One that trains goes on, one that waits
        goes back to `wait`, one that leaves has nothing left."""
        record = passage.record
        self.generation = record.number
        self.stop()
        if self._pulse is not None and passage.own_dst is not None:
            self._pulse.stop()
            self._pulse = None
        self._left += [functools.partial(worlds.destroy, world) for world in (passage.old, passage.union)
                       if world is not None]
        if passage.own_dst is not None:
            self._board.arrive(record.number)
            return
        deadline = time.monotonic() + self._controller.config.elastic.patience_seconds
        while not self._board.has_arrived(record.number, len(record.new)) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.let_go(wait=True)
        self.left_for_good = self.number in record.leave
        if self.left_for_good:
            self.membership.leave()

    def let_go(self, wait: bool = False) -> None:
        """End what is left of the old generation, beside the training. When all ranks of the new one have heard of each other."""
        left, self._left = self._left, []
        if left:
            self._ending = threading.Thread(target=lambda: [end() for end in left], name="dynatrain-let-go")
            self._ending.start()
        if wait and self._ending is not None:
            self._ending.join()

    def stop(self) -> None:
        """Stop what runs beside the training; `let_go` waits for its end."""
        for part in (self._coordinator, self._preparer):
            if part is not None:
                part.stop()
                self._left.append(part.close)
        self._coordinator = self._preparer = None

    def afterwards(self, end: Callable) -> None:
        """Have `let_go` call `end`, too."""
        self._left.append(end)

    def end(self, why: str, failed: bool) -> None:
        """The job ends; those who wait need not. On rank 0."""
        with contextlib.suppress(Exception):  # the store has ended before; those who wait see that
            self._board.end(f"{'failed' if failed else 'ended'}: {why}")

    # While it waits.

    def wait(self) -> tuple[Passage, int]:
        """Wait to be taken in: (the passage, the iteration after which it is). Raises JobEnded."""
        if self._pulse is None:
            self._pulse = self.membership.wait_in_line()
            print(f"[dynatrain] rank {self.number} of the job waits to be taken in", flush=True)
        ears, next_number = Ears(self._board.store, _SILENT_SECONDS), self.generation + 1
        try:
            while True:
                self._check_that_the_job_lives(ears)
                record = self._board.record(next_number)
                if record is None:
                    time.sleep(_SLEEP_SECONDS)
                    continue
                next_number += 1
                if self.number not in record.new or self._board.store.check([f"generation/{record.number}/verdict"]):
                    continue
                passage = self._made_ready(record)
                if passage is None:
                    continue
                while (verdict := self._board.verdict(record.number)) is None:
                    self._check_that_the_job_lives(ears)
                    time.sleep(_AT_END_SECONDS)
                if verdict.startswith(_GO):
                    self._board.answer(record.number, self.number)
                    if not self._board.started(record.number, 2 * self._controller.config.elastic.patience_seconds):
                        return passage, int(verdict.removeprefix(_GO))
                passage.discard()
        except (JobEnded, TransferError):
            raise
        except Exception as error:
            raise JobEnded(f"the store of the job is gone ({reason(error)})", failed=True) from error

    def _made_ready(self, record: Record) -> Passage | None:
        error = None
        try:
            passage = form(record, self.number, self._board.store, self._controller)
        except GivenUp:
            return None
        except Exception as caught:
            passage, error = None, f"rank {self.number} of the job: {reason(caught)}"
        self._board.report(record.number, self.number, error)
        return passage

    def _check_that_the_job_lives(self, ears: Ears) -> None:
        why = self._board.ended
        if why is not None:
            raise JobEnded(why.partition(": ")[2], failed=why.startswith("failed"))
        if not ears.hears(ACTIVE_PULSE):
            raise JobEnded(f"nothing was heard of the job for {_SILENT_SECONDS:g} s", failed=True)

    def depart(self) -> None:
        """This process ends; nobody needs to wait for it."""
        if self._pulse is not None:
            self._pulse.stop()
        self.membership.leave()
