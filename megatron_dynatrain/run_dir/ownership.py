"""One job a run directory: who has it, and whether that job is alive.

A job that has a directory writes its status anew about once a second. Clocks of hosts may differ, so a status that looks
old is watched for a moment before the job counts as dead.
"""

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.run_dir.files import Answer, RequestFile, RunDir, Status, Unreadable, is_id, read

FRESH_SECONDS = 10.0  # a younger heartbeat needs no second look
WATCH_SECONDS = 3.0  # how long an old one is watched by commands
CLAIM_WATCH_SECONDS = 15.0  # and by a job that wants the directory


def this_process() -> dict:
    """Fields of a status that say which process this is."""
    return {"host": socket.gethostname(), "boot": _boot(), "pid": os.getpid(), "pid_started": _started(os.getpid()) or 0}


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When a process of this host started, in clock ticks since the boot; None if there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def process_is_dead(status: Status) -> bool:
    """Whether this host can tell that the process of `status` has ended. False: it lives, or lives elsewhere."""
    here = this_process()
    same_host = status.boot and (status.host, status.boot) == (here["host"], here["boot"])
    return bool(same_host and status.pid_started and _started(status.pid) != status.pid_started)


def is_running(run_dir: RunDir, watch_seconds: float = WATCH_SECONDS) -> tuple[Status | None, bool]:
    """(the status or None, whether its job is running). Watches a heartbeat that looks old for up to `watch_seconds`.

    Raises Unreadable.
    """
    status = run_dir.read_status()
    if status is None or status.state == "ended" or process_is_dead(status):
        return status, False
    if abs(time.time() - status.time) < FRESH_SECONDS:
        return status, True
    deadline = time.monotonic() + watch_seconds
    while time.monotonic() < deadline:
        time.sleep(0.2)
        latest = run_dir.read_status()
        if latest is None or latest.state == "ended":
            return latest, False
        if (latest.run, latest.time) != (status.run, status.time):
            return latest, True
    return status, False


def claim(run_dir: RunDir, status: Status) -> None:
    """Make the directory that of the job of `status`. Called on one rank.

    Raises ConfigError if a job is running there, or the directory cannot be made or written.
    """
    asked = f"`dynatrain.run_dir` {run_dir.path}"
    try:
        run_dir.make()
        with _one_claim_at_a_time(run_dir):
            try:
                other, runs = is_running(run_dir, CLAIM_WATCH_SECONDS)
            except Unreadable as error:
                run_dir.set_aside(run_dir.status, str(error))
                other, runs = None, False
            if runs and other.run != status.run:
                raise ConfigError(f"{asked}: a job is running here already ({who(other)}, heartbeat {age(other)}); give each "
                                  "job a directory of its own, or end that job first")
            _expire_leftovers(run_dir, status.run)  # before there is a status: nobody can have asked this job yet
            run_dir.publish(run_dir.status, status)
    except OSError as error:
        raise ConfigError(f"{asked}: the directory cannot be made or written ({error}); name a directory in which rank 0 may "
                          "write") from None


def _expire_leftovers(run_dir: RunDir, run: str) -> None:
    """Answer what was asked of earlier jobs of the directory, and put away what nobody asked."""
    for name in run_dir.listed(run_dir.cancels):
        run_dir.set_aside(run_dir.cancels / name, "it was here before the job started")
    for name in run_dir.listed(run_dir.requests):
        path, request_id = run_dir.requests / name, name.removesuffix(".json")
        named = name.endswith(".json") and is_id(request_id) and not (run_dir.answers / name).exists()
        try:
            request = read(path, RequestFile)
        except Unreadable:
            request = None
        if named:
            run_dir.publish(run_dir.answers / name, Answer(
                id=request_id, answer="expired", reason="it was filed before this job started", request=request, run=run,
                time=round(time.time(), 3)))
        if named and request is not None:
            path.unlink(missing_ok=True)
        else:
            run_dir.set_aside(path, "it was here before the job started")


@contextlib.contextmanager
def _one_claim_at_a_time(run_dir: RunDir):
    """Where the file system has locks. Where it has none, a job that lost its directory sees that at its next heartbeat."""
    with (run_dir.path / ".claim").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file ends the lock


def who(status: Status) -> str:
    """'job 4711, process 12 on host n1, iteration 3 of 20'."""
    job = f"job {status.job}, " if status.job else ""
    return f"{job}process {status.pid} on host {status.host}, iteration {status.iteration} of {status.train_iters}"


def age(status: Status) -> str:
    """'0.4 s ago', '3 min ago', '3.0 h ago' or 'just now'."""
    seconds = time.time() - status.time
    if seconds < 0.05:
        return "just now"
    if seconds < 120:
        return f"{seconds:.1f} s ago"
    return f"{seconds / 60:.0f} min ago" if seconds < 7200 else f"{seconds / 3600:.1f} h ago"
