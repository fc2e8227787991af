"""What the Python interface returns at once: the result comes at an iteration boundary."""

import threading
from concurrent.futures import Future

from megatron_dynatrain.errors import ConfigError


class Promise(Future):
    """A `concurrent.futures.Future` of what all ranks do at a later boundary. It cannot be cancelled.

    Callbacks (`add_done_callback`) run in the thread that trains, at the boundary. Waiting in that thread, where training would
    wait for itself, raises ConfigError.
    """

    def __init__(self, what: str, training_thread: int):
        """what: names the call in messages. training_thread: `threading.get_ident()` of the thread that trains."""
        super().__init__()
        self._what, self._training_thread = what, training_thread
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None):
        self._check_thread()
        return super().result(timeout)

    def exception(self, timeout: float | None = None):
        self._check_thread()
        return super().exception(timeout)

    def _check_thread(self) -> None:
        if not self.done() and threading.get_ident() == self._training_thread:
            raise ConfigError(f"{self._what}: the result comes at an iteration boundary, and the thread that trains was about "
                              "to wait for it, so that no boundary would come; ask done() in a later step, or use "
                              "add_done_callback()")
