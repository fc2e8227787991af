"""The end of a process that has spoken over gloo.

When an operation is over, the thread of gloo that carried it out lets go of what it held, which may be Python objects: for these
it needs the interpreter. If that is about to end just then, Python ends the thread in the middle of C++, and the whole process
aborts, with "terminate called without an active exception" and exit code 134, though its work was done (torch 2.14.1 with Python
3.12, with or without this package; seen on busy machines, where such a thread comes late). So a process waits for these threads.
"""

import atexit
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # as torch calls them
_LOOKS = 3  # in a row, in which all of them were asleep
_BETWEEN_SECONDS = 0.002
_LONGEST_SECONDS = 10.0


def outlast() -> None:
    """At the end of this process, wait until the threads of gloo are idle. Not collective; more than once is as once."""
    atexit.unregister(_wait)
    atexit.register(_wait)


def _wait() -> None:
    deadline, looks = time.monotonic() + _LONGEST_SECONDS, 0
    while looks < _LOOKS and time.monotonic() < deadline:
        time.sleep(_BETWEEN_SECONDS)  # whoever waits for the interpreter has it now
        looks = 0 if _any_is_busy() else looks + 1


def _any_is_busy() -> bool:
    """Whether one of them runs, or is about to. A thread that waits for the interpreter runs while this one reads."""
    for thread in Path("/proc/self/task").glob("*/stat"):  # none where the system has no such folder
        try:
            _, name, state = thread.read_text().replace("(", ")").split(")")
        except (OSError, ValueError):  # it has ended; or its name has brackets, and is not the one
            continue
        if name == _NAME and state.split()[0] != "S":
            return True
    return False
