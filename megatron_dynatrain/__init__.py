"""Change the parallel layout of a running Megatron job between two iterations, in memory, without a restart.

    torchrun ... -m megatron_dynatrain.launch pretrain_gpt.py <Megatron arguments> --dynatrain-config switch.yaml

From Python, within training: `megatron_dynatrain.reconfigure("deep")`, and `plan`, `current_layout`, `on_switch`
(scripts/phases.py uses them all). From outside: `python -m megatron_dynatrain request`. Importing this package loads neither
torch nor Megatron.
"""

from typing import NamedTuple

__version__ = "0.1.0"

__all__ = ["CurrentLayout", "Layout", "SwitchCost", "SwitchReport", "current_layout", "on_switch", "plan", "reconfigure",
           "__version__"]


class CurrentLayout(NamedTuple):
    """name: of the layout. layout: what it sets (a `Layout`; nothing for 'launch'). sizes: for people, {'TP': 2, 'DP': 4}."""

    name: str
    layout: object
    sizes: dict[str, int]


def reconfigure(layout, at_iteration: int | None = None):
    """Ask for a switch to `layout` at the next iteration boundary at which all ranks can act together, or after iteration
    `at_iteration` has finished.

    layout: the name of a layout of the configuration, 'launch' for the one of the command line, or a `Layout`.
    May be called from any rank's code between steps, on one rank or on several; not collective, returns at once. Raises
    ConfigError or LayoutRefused for a layout that cannot be. What only shows later is refused at the boundary, on every
    rank, and training goes on.

    Returns a `concurrent.futures.Future` of the report of the switch, which is None if the job is in that layout already. It
    has the exception LayoutRefused if the switch was refused; RequestDropped if a newer one took its place, if `at_iteration`
    had passed, or if the job ended first. Ask it in a later step, or let it call you (`add_done_callback`); do not wait for it
    between steps.
    """
    return _session("reconfigure()").request(layout, at_iteration)


def plan(layout):
    """Ask what a switch to `layout` would cost, without making it. To be called like `reconfigure`, not collective.

    Returns a `concurrent.futures.Future` of a `SwitchCost`: bytes that would move, the least that must, the busiest rank's, and
    how long this job's last switch of the kind took. All ranks make the plan together at the next boundary at which they can,
    which changes nothing that trains, and keep it for the switch. The future has the exception LayoutRefused for a layout that
    cannot be, and RequestDropped if the job ended first.
    """
    return _session("plan()").request_cost(layout)


def current_layout() -> CurrentLayout:
    """The layout in which this rank trains now: (name, layout, sizes). Not collective, from any thread."""
    controller = _session("current_layout()", training=True).controller
    return CurrentLayout(controller.current, controller.registry.entries[controller.current].layout, controller.sizes)


def on_switch(before=None, after=None, refused=None):
    """Be called on this rank around every switch. Returns a function that takes the callbacks back.

    before(iteration, layout): the loop has stopped after `iteration`, and all ranks are about to switch to `layout`, a name or
    a `Layout`. What it takes is not part of the stall. If it raises on any rank, the switch is refused on all of them, and
    training goes on.
    after(report): the first step in the new layout is about to start. `report.iteration`, `.src`, `.dst` (names), `.dst_sizes`,
    `.stall_seconds`, `.phases`, `.totals.moved_bytes`; `report.event()` is what stands in report.jsonl.
    refused(iteration, layout, error): the switch did not come about, and the job is in the layout that it was in.

    May be called before training starts. To communicate in a callback, register it on all ranks in the same order.
    """
    running = _session("on_switch()")
    added = [(hooks, hook) for hooks, hook in ((running.before_switch, before), (running.after_switch, after),
                                               (running.after_refusal, refused)) if hook is not None]
    for hooks, hook in added:
        hooks.append(hook)

    def remove() -> None:
        for hooks, hook in added:
            if hook in hooks:
                hooks.remove(hook)

    return remove


def _session(caller: str, training: bool = False):
    """The session of this process. Raises ConfigError where there is none."""
    from megatron_dynatrain import session
    from megatron_dynatrain.errors import ConfigError

    running = session.current()
    if running is None:
        raise ConfigError(f"{caller} was called, but this process was not started by megatron_dynatrain.launch; start it "
                          "with `torchrun ... -m megatron_dynatrain.launch <script> --dynatrain-config <file>`")
    if training and running.controller is None:
        raise ConfigError(f"{caller} was called, but no job of megatron_dynatrain is training in this process; launch it with "
                          "--dynatrain-config and call from within training")
    return running


def __getattr__(name):
    if name == "Layout":
        from megatron_dynatrain.layout import Layout

        return Layout
    if name in ("SwitchCost", "SwitchReport"):  # these load torch
        from megatron_dynatrain import controller

        return getattr(controller, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
