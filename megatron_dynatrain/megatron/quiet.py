"""Silence for the parts of Megatron that are run again: they print as if the job were starting."""

import contextlib
import io
import logging
import warnings


@contextlib.contextmanager
def quiet():
    """Swallow standard output, warnings and log records below ERROR. Exceptions pass."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
