"""The errors that users of megatron_dynatrain can meet. All derive from `DynaTrainError`.

A message has four parts: what was asked, what is true (with values), what would follow, what to do.
"""


class DynaTrainError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(DynaTrainError, ValueError):
    """The YAML configuration, a flag or an argument of the Python interface is wrong."""


class LayoutRefused(DynaTrainError, ValueError):
    """A layout cannot be trained here. Nothing has been changed: the job stays in the layout that it is in."""


class UnsupportedMegatron(DynaTrainError, RuntimeError):
    """The installed Megatron is not one that this package was checked against."""


class SpaceError(DynaTrainError, RuntimeError):
    """Descriptions of a layout do not cover the Virtual Parameter Space exactly once."""


class VerificationError(DynaTrainError, RuntimeError):
    """State after a switch differs from the state before it."""
