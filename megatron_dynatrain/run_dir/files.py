"""The files of a run directory. Nothing in them is executed; what does not read as described here is never acted upon.

    status.json          of the job that has the directory, written anew about once a second
    requests/ID.json     a wish for a switch; goes when it is answered
    cancels/ID.json      the wish to take request ID back
    answers/ID.json      what became of request ID; stays
    rejected/            what was put into requests/ or cancels/ and was none

A file is published by writing it under a temporary name, which starts with a dot, and renaming it.
"""

import json
import os
import re
import stat
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from megatron_dynatrain.errors import DynaTrainError
from megatron_dynatrain.layout import Layout

MAX_BYTES = 64 << 10  # of a request or a cancellation
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

AnswerKind = Literal["done", "unchanged", "refused", "superseded", "expired", "cancelled"]


class RequestFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """requests/ID.json. `layout`: the name of a declared layout, or Megatron's arguments. `at_iteration`: switch after this
    iteration has finished; as soon as all ranks can, if not given. `run`: the run token of the job that is meant, from its
    status; any, if not given. `by`: who asks, for people. `time`: seconds since the epoch."""

    layout: Annotated[str, msgspec.Meta(max_length=200)] | Layout
    at_iteration: Annotated[int, msgspec.Meta(ge=0)] | None = None
    run: str | None = None
    by: str = ""
    time: float = 0.0


class CancelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """cancels/ID.json."""

    by: str = ""
    time: float = 0.0


class Answer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """answers/ID.json: what became of a request.

    iteration: the boundary at which it was answered. reason: why it was not carried out. by: the ID of the request that took
    its place. report: of a switch that was done, the fields of its event in report.jsonl. request: what was asked.
    """

    id: str
    answer: AnswerKind
    iteration: int | None = None
    reason: str | None = None
    by: str | None = None
    report: dict[str, Any] | None = None
    request: RequestFile | None = None
    run: str | None = None
    time: float = 0.0


class Status(msgspec.Struct, frozen=True, omit_defaults=False, kw_only=True):
    """status.json. Times in seconds since the epoch; `time` is that of the writing host.

    run: a token that no other run of the directory has. job: the scheduler's number of the job, if there is one.
    iteration: finished ones. layout: the name of the current one. sizes: of it, for people, such as {"TP": 2}.
    ranks: where they may change, the numbers of the ranks that train, and store: HOST:PORT of the store of the job.
    layouts: declared ones, {name: arguments}. pending: IDs of requests that have no answer yet. last_switch: its event in
    report.jsonl. reason: why the job ended, if by an error.
    """

    run: str
    state: Literal["starting", "training", "switching", "ended"]
    host: str
    boot: str  # of the host: a process number means something within one boot only
    pid: int
    pid_started: int  # clock ticks between the boot and the start of the process
    job: str | None
    world_size: int
    started: float
    time: float
    iteration: int
    train_iters: int
    layout: str
    sizes: dict[str, int]
    layouts: dict[str, dict[str, Any]]
    schedule: list[tuple[int, str]]
    pending: list[str]
    last_switch: dict[str, Any] | None = None
    reason: str | None = None
    ranks: list[int] | None = None
    store: str | None = None


class Unreadable(DynaTrainError):
    """A file is not what it should be. The message says why."""


def is_id(text: str) -> bool:
    """Whether `text` may name a request: letters, digits, '-' and '_', at most 64."""
    return _ID.fullmatch(text) is not None


def new_id() -> str:
    """An ID for a request: sortable by time, and no other one has it."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{os.urandom(4).hex()}"


class RunDir:
    """The files of one run directory. Methods raise OSError where the file system does."""

    FOLDERS = ("requests", "cancels", "answers", "rejected")

    def __init__(self, path: str | Path):
        self.path = Path(path).absolute()
        self.requests, self.cancels, self.answers, self.rejected = (self.path / name for name in self.FOLDERS)
        self.status = self.path / "status.json"

    def make(self) -> None:
        """Create the directory and its folders where they do not exist."""
        for folder in self.FOLDERS:
            (self.path / folder).mkdir(parents=True, exist_ok=True)

    def mend(self) -> None:
        """Create what was removed of a directory that `make` has made; not what lies above it."""
        for folder in (self.path, *(self.path / name for name in self.FOLDERS)):
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)

    @staticmethod
    def publish(path: Path, content: msgspec.Struct) -> None:
        """Write `content` to `path`, so that a reader sees the whole file or none of it."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}")
        try:
            with temporary.open("xb") as file:
                file.write(msgspec.json.encode(content) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def read_status(self) -> Status | None:
        """The status, or None if there is none. Raises Unreadable."""
        return read(self.status, Status, max_bytes=16 << 20)

    def read_answer(self, request_id: str) -> Answer | None:
        """The answer to a request, or None if there is none yet. Raises Unreadable."""
        return read(self.answers / f"{request_id}.json", Answer, max_bytes=16 << 20)

    @staticmethod
    def listed(folder: Path) -> list[str]:
        """Names of what was published in `folder`, oldest first."""
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    try:
                        found.append((entry.stat(follow_symlinks=False).st_mtime_ns, entry.name))
                    except FileNotFoundError:
                        pass  # taken back in this moment
        return [name for _, name in sorted(found)]

    def set_aside(self, path: Path, reason: str) -> Path:
        """Move what should not be there to rejected/, with the reason beside it. Returns its new place."""
        name = re.sub(r"[^A-Za-z0-9._-]", "_", path.name)[:80].lstrip(".")
        place = self.rejected / f"{new_id()}-{name}"
        path.rename(place)
        place.with_name(f"{place.name}.reason").write_text(reason + "\n", encoding="utf-8", errors="backslashreplace")
        return place


def read(path: Path, kind: type, max_bytes: int = MAX_BYTES):
    """A file of `kind`, or None if it does not exist. Only regular files are opened: nothing here can block or follow a link.

    Raises Unreadable, whose message says what the file is instead.
    """
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            raise Unreadable(f"it is {_KINDS.get(stat.S_IFMT(mode), 'a special file')} and not a file")
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            text = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise Unreadable(f"it cannot be read: {error.strerror or error}") from None
    if len(text) > max_bytes:
        raise Unreadable(f"it is larger than {max_bytes} bytes")
    if not text.strip():
        raise Unreadable("it is empty")
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise Unreadable(f"it does not read as a {_WHAT[kind]}: {error or type(error).__name__}") from None


_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
_WHAT = {RequestFile: "request", CancelFile: "cancellation", Answer: "answer", Status: "status"}


def as_json(content: msgspec.Struct) -> str:
    """A file's content for people and for pipes, on one line."""
    return json.dumps(msgspec.to_builtins(content))
