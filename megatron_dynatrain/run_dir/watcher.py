"""The thread of rank 0 that looks after the run directory: reads requests, writes answers and the status.

Training never waits for it. It hands what it finds to the other ranks' threads through the store (`requests`), and is handed
answers through a queue; a file system that hangs, fills or vanishes stops this thread alone. It rests nineteen
twentieths of the time.
"""

import os
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_dynatrain.agenda import Cancel, Message, Switch, too_late
from megatron_dynatrain.config import Config
from megatron_dynatrain.layout import LAUNCH, nearest
from megatron_dynatrain.run_dir.files import Answer, CancelFile, RequestFile, RunDir, Status, Unreadable, is_id, read
from megatron_dynatrain.run_dir.ownership import claim, this_process, who

_TICK_SECONDS = 0.2
_HEARTBEAT_SECONDS = 1.0
_GRACE_SECONDS = 2.0  # how long a file that does not read may still be on its way, if it was not published by a rename
_REST = 19  # times as long as a look took of a core
_FILES_A_LOOK = 32


def watch(config: Config, world_size: int, train_iters: int, layout: str, sizes: dict[str, int],
          iteration: Callable[[], int]) -> "Watcher":
    """Take `config.run_dir` for this job and look after it from now on. On one rank. Raises ConfigError."""
    run_dir, now = RunDir(config.run_dir), round(time.time(), 3)
    status = Status(
        run=uuid.uuid4().hex, state="starting", **this_process(), job=os.environ.get("SLURM_JOB_ID"), world_size=world_size,
        started=now, time=now, iteration=iteration(), train_iters=train_iters, layout=layout, sizes=sizes,
        layouts={name: layout.arguments() for name, layout in config.layouts.items()},
        schedule=[(switch.at_iteration, switch.layout) for switch in config.schedule], pending=[])
    claim(run_dir, status)
    return Watcher(run_dir, status, iteration)


class Watcher:
    """Looks after a directory that `ownership.claim` has made this job's.

    status: as it was claimed. iteration: how many iterations have finished. baton: of the process that looked after it before.
    Until `open` requests are left lying.
    """

    def __init__(self, run_dir: RunDir, status: Status, iteration: Callable[[], int], baton: "Baton | None" = None):
        self._run_dir, self._status, self._iteration = run_dir, status, iteration
        self._tell: Callable[[Message], None] | None = None
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()  # what other threads say: answers, status fields, the end
        # Requests without an answer, by ID, and answers that are not on disk yet.
        self._open: dict[str, RequestFile] = dict(baton.open) if baton else {}
        self._unwritten: dict[str, Answer] = dict(baton.unwritten) if baton else {}
        self._answered: set[str] = set()  # written, but the request could not be removed yet
        self._doubtful: dict[Path, tuple] = {}  # files that do not read: (size, mtime), and since when they are so
        self._left: set[Path] = set()  # files that could be neither read nor moved
        self._written_at = 0.0
        self._changed = True
        self._in_trouble = False
        self._lost = False  # another job has the directory
        self._handed_over = False
        self._end_reason: str | None = None  # the answer to what is left at the end of the job
        self._thread = threading.Thread(target=self._run, name="dynatrain-run-dir", daemon=True)
        self._thread.start()

    # Called by other threads; they return at once.

    def open(self, tell: Callable[[Message], None]) -> None:
        """From now on requests are told with `tell`, which this thread calls."""
        self._tell = tell

    @property
    def run(self) -> str:
        """The token of this run of the directory."""
        return self._status.run

    def answer(self, answer: Answer) -> None:
        """Write the answer to a request of the directory."""
        self._inbox.put(answer)

    def update(self, **fields) -> None:
        """Set fields of the status."""
        self._inbox.put(fields)

    def close(self, answer: str, reason: str | None, timeout: float = 5.0) -> None:
        """The job ends: answer every request that is left with 'expired', `answer` saying why; `reason` is that of a failure,
        for the status. Waits for it `timeout` seconds at most."""
        self.update(state="ended", reason=reason)
        self._inbox.put(answer)
        self._thread.join(timeout)

    def hand_over(self, timeout: float = 5.0) -> "Baton":
        """Stop looking after the directory: what another process needs to go on (`Baton.taken`). Waits `timeout` seconds at
        most."""
        self._handed_over = True
        self._inbox.put({})
        self._thread.join(timeout)
        while not self._inbox.empty():
            self._take_note(self._inbox.get_nowait())
        return Baton(self._status, self._open, self._unwritten)

    # The thread.

    def _run(self) -> None:
        while not self._lost and not self._handed_over:
            start = time.thread_time()  # what it waits for the file system costs no core
            try:
                self._look()
                if self._in_trouble:
                    _say(f"run_dir {self._run_dir.path} works again")
                self._in_trouble = False
            except OSError as error:
                self._warn(error)
            except Exception as error:  # a fault of ours must not end the answers
                self._warn(error)
            if self._end_reason is not None and not self._in_trouble:
                return
            self._listen(max(_TICK_SECONDS, _REST * (time.thread_time() - start)))

    def _warn(self, error: Exception) -> None:
        if not self._in_trouble:
            _say(f"run_dir {self._run_dir.path} cannot be used at the moment ({error}); training goes on, requests wait")
        self._in_trouble = True

    def _listen(self, seconds: float) -> None:
        """Sleep, or take what other threads say."""
        try:
            said = self._inbox.get(timeout=seconds)
            while True:
                self._take_note(said)
                said = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _take_note(self, said: Answer | dict | str) -> None:
        if isinstance(said, Answer):
            if said.id in self._open:
                self._unwritten[said.id] = said
        elif isinstance(said, dict):
            self._status = msgspec.structs.replace(self._status, **said)
            self._changed = True
        else:
            self._end_reason = said

    def _look(self) -> None:
        if self._in_trouble or self._heartbeat_is_due:
            self._run_dir.mend()
            self._check_ownership()
            if self._lost:
                return
        if self._tell is not None or self._end_reason is not None:
            files = self._files()
            for path, kind in files if self._end_reason is not None else files[:_FILES_A_LOOK]:
                self._read(path, kind)
        if self._end_reason is not None:
            for request_id in self._open:
                self._unwritten.setdefault(request_id, Answer(id=request_id, answer="expired", reason=self._end_reason,
                                                              iteration=self._iteration()))
        self._write_answers()
        if self._changed or self._heartbeat_is_due:
            self._write_status()

    @property
    def _heartbeat_is_due(self) -> bool:
        return time.monotonic() - self._written_at >= _HEARTBEAT_SECONDS

    def _files(self) -> list[tuple[Path, type]]:
        """Requests and cancellations that were not read yet, oldest first."""
        requests = [(self._run_dir.requests / name, RequestFile) for name in self._run_dir.listed(self._run_dir.requests)
                    if name.removesuffix(".json") not in self._open and name.removesuffix(".json") not in self._answered]
        cancels = [(self._run_dir.cancels / name, CancelFile) for name in self._run_dir.listed(self._run_dir.cancels)]
        self._doubtful = {path: state for path, state in self._doubtful.items() if (path, RequestFile) in requests
                          or (path, CancelFile) in cancels}
        return [(path, kind) for path, kind in requests + cancels if path not in self._left]

    def _read(self, path: Path, kind: type) -> None:
        request_id = path.name.removesuffix(".json")
        if not (path.name.endswith(".json") and is_id(request_id)):
            self._set_aside(path, f"{path.name!r} is no name of a request; it must be ID.json, with letters, digits, '-' and "
                            "'_' in the ID, 64 at most")
            return
        try:
            content = read(path, kind)
        except Unreadable as error:
            if not self._may_still_come(path):
                self._set_aside(path, str(error), request_id if kind is RequestFile else None)
            return
        self._doubtful.pop(path, None)
        if content is None:
            return
        if kind is CancelFile:
            if request_id in self._open and request_id not in self._unwritten and self._end_reason is None:
                self._tell(Cancel(id=request_id))
            path.unlink(missing_ok=True)
        elif (self._run_dir.answers / path.name).exists():
            self._set_aside(path, f"request {request_id} was answered before; file it anew under another ID")
        else:
            self._take(request_id, content)

    def _may_still_come(self, path: Path) -> bool:
        """Whether a file that does not read was changed a moment ago: it may have been copied here, without a rename."""
        try:
            state = path.lstat()
        except FileNotFoundError:
            return True
        now, seen = time.monotonic(), (state.st_size, state.st_mtime_ns)
        if self._end_reason is not None:
            return False
        if self._doubtful.get(path, ((), 0))[0] != seen:
            self._doubtful[path] = (seen, now)
        return now - self._doubtful[path][1] < _GRACE_SECONDS

    def _set_aside(self, path: Path, reason: str, request_id: str | None = None) -> None:
        """Move what is no request out of the way; it is answered where its name allows that."""
        self._doubtful.pop(path, None)
        try:
            place = self._run_dir.set_aside(path, reason)
        except OSError as error:
            self._left.add(path)
            _say(f"{path} is no request ({reason}) and cannot be moved ({error}); it is left there")
            return
        _say(f"{path.name!r} in {path.parent} is no request ({reason}); it was moved to {place}")
        if request_id is not None and not (self._run_dir.answers / f"{request_id}.json").exists():
            self._run_dir.publish(self._run_dir.answers / f"{request_id}.json", self._complete(
                Answer(id=request_id, answer="refused", reason=f"{reason}; the file was moved to {place}")))

    def _take(self, request_id: str, request: RequestFile) -> None:
        """Tell all ranks of a request, or answer it here where it needs nobody else."""
        self._open[request_id] = request
        self._changed = True
        if self._end_reason is not None:
            return  # answered with all that is left
        kind, reason = self._at_once(request)
        if kind is not None:
            self._unwritten[request_id] = Answer(id=request_id, answer=kind, reason=reason, iteration=self._iteration())
            return
        try:
            self._tell(Switch(id=request_id, layout=request.layout, at_iteration=request.at_iteration))
        except Exception:
            del self._open[request_id]  # the store is gone: the job is ending, and `close` answers
            raise

    def _at_once(self, request: RequestFile) -> tuple[str | None, str | None]:
        """(answer, reason) of a request that needs no rank to decide; (None, None) of any other."""
        if request.run is not None and request.run != self._status.run:
            return "expired", "it was meant for an earlier run of this directory"
        known = (LAUNCH, *self._status.layouts)
        if isinstance(request.layout, str) and request.layout not in known:
            return "refused", f"there is no layout {request.layout!r}{nearest(request.layout, known)}"
        late = too_late(request.at_iteration, self._iteration(), self._status.train_iters)
        return ("expired", late) if late else (None, None)

    def _complete(self, answer: Answer) -> Answer:
        return msgspec.structs.replace(answer, request=self._open.get(answer.id), run=self._status.run,
                                       time=round(time.time(), 3))

    def _write_answers(self) -> None:
        for request_id, answer in list(self._unwritten.items()):
            self._run_dir.publish(self._run_dir.answers / f"{request_id}.json", self._complete(answer))
            if answer.report is not None:
                self._status = msgspec.structs.replace(self._status, last_switch=answer.report)
            del self._unwritten[request_id], self._open[request_id]
            self._answered.add(request_id)
            self._changed = True
        for request_id in list(self._answered):
            (self._run_dir.requests / f"{request_id}.json").unlink(missing_ok=True)
            self._answered.discard(request_id)

    def _write_status(self) -> None:
        self._status = msgspec.structs.replace(self._status, iteration=self._iteration(), time=round(time.time(), 3),
                                               pending=sorted(self._open))
        self._run_dir.publish(self._run_dir.status, self._status)
        self._written_at, self._changed = time.monotonic(), False

    def _check_ownership(self) -> None:
        """Two jobs never act on one directory: the one whose status was replaced lets go of it."""
        try:
            found = self._run_dir.read_status()
        except Unreadable:
            return
        if found is not None and found.run != self._status.run:
            self._lost = True
            _say(f"run_dir {self._run_dir.path} now belongs to another job ({who(found)}); this one trains on and takes no "
                 "more requests from it")


@dataclass(frozen=True, slots=True)
class Baton:
    """What goes from one process that looks after a run directory to the next."""

    status: Status
    open: dict[str, RequestFile]
    unwritten: dict[str, Answer]

    def taken(self, run_dir: str, iteration: Callable[[], int]) -> Watcher:
        """Look after the directory from now on, on this process, for the same run."""
        return Watcher(RunDir(run_dir), msgspec.structs.replace(self.status, **this_process()), iteration, self)


def _say(text: str) -> None:
    print(f"[dynatrain] {text}", file=sys.stderr, flush=True)
