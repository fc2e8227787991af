"""Events of a run as JSON lines, one object a line, appended as they happen."""

import json
import sys
import time
from pathlib import Path


class Report:
    """Appends events to `path`; does nothing where `path` is None. One rank of the job writes.

    A job that is started again with the same path goes on in the same file. Raises OSError if the file cannot be opened at the
    start. What cannot be written later is lost, with one warning, and nothing else happens.
    """

    def __init__(self, path: str | None):
        self._path = Path(path) if path else None
        self._warned = False
        self._torn = False  # the file may end within a line
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, 2)
                    self._torn = file.read() != b"\n"

    def event(self, name: str, /, **fields) -> None:
        """Append an event with the time of day, in seconds since the epoch."""
        if self._path is None:
            return
        line = json.dumps({"event": name, "time": round(time.time(), 3), **fields}) + "\n"
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + line if self._torn else line)
            self._torn = False
        except OSError as error:
            self._torn = True
            if not self._warned:
                print(f"[dynatrain] the report {self._path} cannot be written ({error}): events are missing in it from here "
                      "on, until it can be written again; training goes on", file=sys.stderr, flush=True)
            self._warned = True


def read(path: str | Path) -> list[dict]:
    """All events of a report, in order."""
    return scan(path)[0]


def scan(path: str | Path) -> tuple[list[dict], int]:
    """(all events of a report in order, number of lines that hold none). A job that is killed, or a disk that is full, leaves
    half a line."""
    events, num_bad = [], 0
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        for line in filter(str.strip, file):
            try:
                event = json.loads(line)
            except ValueError:
                event = None
            if isinstance(event, dict) and isinstance(event.get("event"), str):
                events.append(event)
            else:
                num_bad += 1
    return events, num_bad


# In the order in which a switch goes through them; what a release adds comes after these.
PHASES = ("leave", "prepare", "quiesce", "groups", "build", "data", "transfer", "finish", "roll_back", "verify", "resume")


def phase_names(phases_of_switches) -> list[str]:
    """Every phase that occurs in an iterable of {phase: seconds}, in order."""
    names = dict.fromkeys(name for phases in phases_of_switches for name in phases)
    return [name for name in PHASES if name in names] + [name for name in names if name not in PHASES]


def in_sizes(sizes: dict[str, int]) -> str:
    """{'TP': 2, 'PP': 2, 'DP': 2} -> 'TP2 PP2 DP2'."""
    return " ".join(f"{name}{size}" for name, size in sizes.items())


def in_bytes(count: int) -> str:
    """3145728 -> '3.1 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
