"""The errors that users of megatron_dynatrain can meet. All derive from `DynaTrainError`.

A message has four parts: what was asked, what is true (with values), what would follow, what to do.
"""

import traceback


class DynaTrainError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(DynaTrainError, ValueError):
    """The YAML configuration, a flag or an argument of the Python interface is wrong."""


class LayoutRefused(DynaTrainError, ValueError):
    """A layout cannot be trained here. Nothing has been changed: the job stays in the layout that it is in."""


class RequestDropped(DynaTrainError):
    """A request was not carried out: a newer one took its place, its iteration had passed, or the job ended first."""


class UnsupportedMegatron(DynaTrainError, RuntimeError):
    """The installed Megatron is not one that this package was checked against."""


class PatchError(DynaTrainError, ValueError):
    """A Megatron-LM source tree cannot be patched. Nothing in it has been changed."""


class SpaceError(DynaTrainError, RuntimeError):
    """Descriptions of a layout do not cover the Virtual Parameter Space exactly once."""


class VerificationError(DynaTrainError, RuntimeError):
    """State after a switch differs from the state before it."""


class TransferError(DynaTrainError, RuntimeError):
    """The bytes of a switch did not arrive. The job cannot go on."""


def reason(error: BaseException, limit: int = 400) -> str:
    """What somebody else's exception says, in one line of at most `limit` characters; for a bare assertion, the line of
    code that failed."""
    text = " ".join(str(error).split())
    if not text and error.__traceback__ is not None:
        text = "assertion failed: " + (traceback.extract_tb(error.__traceback__)[-1].line or "")
    return text[:limit] + " ..." if len(text) > limit else text or type(error).__name__
