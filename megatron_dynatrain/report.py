"""Events of a run as JSON lines, one object a line, appended as they happen."""

import json
import time
from pathlib import Path


class Report:
    """Writes events to `path`; does nothing where `path` is None. One rank of the job writes."""

    def __init__(self, path: str | None):
        self._path = Path(path) if path else None
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("")  # a report describes one run

    def event(self, name: str, /, **fields) -> None:
        if self._path is not None:
            line = json.dumps({"event": name, "time": round(time.time(), 3), **fields})
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")


def read(path: str | Path) -> list[dict]:
    """All events of a report, in order."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]


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
