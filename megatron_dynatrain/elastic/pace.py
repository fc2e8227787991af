"""Work beside the training, in small portions: for each second that its thread has worked it rests nineteen.

Threads of a process share one interpreter, and ranks may share cores, so what is made in one go takes from the steps that run
meanwhile. A twentieth of one thread does not show.
"""

import sys
import threading
import time

_REST = 19  # times as long as the work took
_LONGEST_SECONDS = 2.0
_HANDOVER_SECONDS = 0.0005  # how long the training thread waits for the interpreter, at most, while another one has it

_of_thread = threading.local()


class Pace:
    """Inside, `rest` rests. patience_seconds: what the rests of all portions may add up to."""

    def __init__(self, patience_seconds: float):
        self._left = patience_seconds
        self._worked = time.thread_time()

    def __enter__(self) -> "Pace":
        self._handover = sys.getswitchinterval()
        sys.setswitchinterval(_HANDOVER_SECONDS)
        self._outer, _of_thread.pace = getattr(_of_thread, "pace", None), self
        return self

    def __exit__(self, *error) -> None:
        sys.setswitchinterval(self._handover)
        _of_thread.pace = self._outer

    def rest(self) -> None:
        seconds = min(_REST * (time.thread_time() - self._worked), _LONGEST_SECONDS, self._left)
        if seconds > 0:
            time.sleep(seconds)
            self._left -= seconds
        self._worked = time.thread_time()


def rest() -> None:
    """A portion of work is done. Nothing, in a thread that works at its own pace."""
    pace = getattr(_of_thread, "pace", None)
    if pace is not None:
        pace.rest()
