"""Change the parallel layout of a running Megatron job between two iterations, in memory, without a restart.

    torchrun ... -m megatron_dynatrain.launch pretrain_gpt.py <Megatron arguments> --dynatrain-config switch.yaml

From Python, within training: `megatron_dynatrain.reconfigure("deep")`. Importing this package loads neither torch nor
Megatron.
"""

__version__ = "0.1.0"

__all__ = ["Layout", "reconfigure", "__version__"]


def reconfigure(layout) -> None:
    """Ask for a switch to `layout` at the next iteration boundary at which all ranks can act together.

    layout: the name of a layout of the configuration, 'launch' for the one of the command line, or a `Layout`.
    May be called from any rank's code between steps, on one rank or on several; not collective, returns at once. Raises
    ConfigError or LayoutRefused for a layout that cannot be. What only shows later is refused at the boundary, on every
    rank, and training goes on.
    """
    from megatron_dynatrain import session

    running = session.current()
    if running is None:
        from megatron_dynatrain.errors import ConfigError

        raise ConfigError("reconfigure() was called, but this process was not started by megatron_dynatrain.launch; start it "
                          "with `torchrun ... -m megatron_dynatrain.launch <script> --dynatrain-config <file>`")
    running.request(layout)


def __getattr__(name):
    if name == "Layout":
        from megatron_dynatrain.layout import Layout

        return Layout
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
