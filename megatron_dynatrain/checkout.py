"""What a patched Megatron-LM checkout calls (see `patches/`): the launcher's work, without the launcher.

Both functions are called only where --dynatrain-config is given.
"""

from megatron_dynatrain import session
from megatron_dynatrain.errors import ConfigError


def attach() -> None:
    """Make the session of this process, unless the launcher made one, and wrap Megatron's seams.

    Called by the patched `parse_args`, before the arguments are validated; a second call changes nothing. Not collective.
    Raises UnsupportedMegatron.
    """
    if session.current() is None:
        from megatron_dynatrain import launch

        launch.install()
    session.current().loop_asks = True


def leaves_loop(iteration: int) -> bool:
    """Whether Megatron's `train` must return after `iteration`, because the layout is to be switched: on all ranks or on none.

    Called by the patched loop at every iteration boundary; one comparison of integers where nothing is due. Raises ConfigError
    where the arguments did not come through `parse_args` and `validate_args`, so that no switch could ever come.
    """
    running = session.current()
    if running is None or not running.active:
        raise ConfigError("--dynatrain-config is set, but the arguments of this job did not pass through Megatron's parse_args and "
                          "validate_args, as is the case with --yaml-cfg, so its layout would never be switched; give all "
                          "arguments on the command line, or leave --dynatrain-config out")
    return iteration >= running.boundary and running.at_boundary(iteration)
