"""The timeline of a history as one picture: layouts, loss and step times over iterations or time, the phases of each switch."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from megatron_dynatrain.report import in_sizes, phase_names  # noqa: E402
from megatron_dynatrain.timeline.history import Run, Step, Switch  # noqa: E402

_POINTS = 3000  # of a curve that are drawn one by one; more are put together
_MARKED = 60  # switches that are marked in the curves
_LABELLED = 30  # switches whose bar has a label
_COLOURS = plt.get_cmap("Pastel1").colors[:8]
_PHASE_COLOURS = plt.get_cmap("tab10").colors


@dataclass(frozen=True, slots=True)
class _Axis:
    """What the horizontal axis means: where a step, a switch, and the ends of a stretch lie on it."""

    label: str
    of_step: Callable[[Step], float]
    of_switch: Callable[[Switch], float]
    of_stretch: Callable


def _over_iterations(runs: list[Run]) -> _Axis:
    # A step lies at its number, and what happens between two steps lies between them.
    return _Axis("iteration", lambda step: step.iteration, lambda switch: switch.iteration + 0.5,
                 lambda stretch: (stretch.begin + 0.5, stretch.end + 0.5))


def _over_time(runs: list[Run]) -> _Axis:
    times = [time for run in runs for time in (run.start.time, *(step.time for step in run.steps), run.last_time) if time]
    first, last = min(times, default=0.0), max(times, default=0.0)
    unit, name = next(((u, n) for u, n in ((86400, "days"), (3600, "hours"), (60, "minutes")) if last - first > 2 * u),
                      (1, "seconds"))

    def place(time):
        return (time - first) / unit

    return _Axis(f"{name} since the start", lambda step: place(step.time), lambda switch: place(switch.began),
                 lambda stretch: (place(stretch.began or first), place(stretch.ended or first)))


def draw(runs: list[Run], path: str | Path, over: str = "iteration") -> None:
    """Draw the timeline into `path`, in the format that its suffix names. over: 'iteration' or 'time'."""
    axis = (_over_time if over == "time" else _over_iterations)(runs)
    switches = [switch for run in runs for switch in run.switches]
    heights = {"layouts": 0.5, "loss": 2.2, "steps": 2.2}
    if switches:
        heights["phases"] = 2.6
    figure, panels = plt.subplots(len(heights), 1, figsize=(11, 1.2 + sum(heights.values()) * 1.15),
                                  height_ratios=list(heights.values()), layout="constrained")
    panel = dict(zip(heights, panels, strict=True))
    for name in ("loss", "steps"):
        panel[name].sharex(panel["layouts"])
    _draw_layouts(panel["layouts"], runs, axis)
    _draw_loss(panel["loss"], runs, axis)
    _draw_steps(panel["steps"], runs, axis)
    for name in ("loss", "steps"):
        _mark(panel[name], runs, axis)
    panel["loss"].tick_params(labelbottom=False)
    panel["steps"].set_xlabel(axis.label)
    if switches:
        _draw_phases(panel["phases"], switches)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_layouts(axes, runs: list[Run], axis: _Axis) -> None:
    """A band: which layout was trained when; crosses where a switch was refused."""
    names = dict.fromkeys(stretch.name for run in runs for stretch in run.stretches)
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    spans = _spans(runs, axis)
    left, right = min(begin for _, begin, _ in spans), max(end for _, _, end in spans)
    crowded = len(spans) > _MARKED
    for stretch, begin, end in spans:
        axes.axvspan(begin, end, color=colours[stretch.name], linewidth=0)
        label = in_sizes(stretch.sizes) or stretch.layout
        if end - begin > 0.007 * len(label) * (right - left) and not crowded:
            axes.text((begin + end) / 2, 0.55, label, ha="center", va="center", fontsize=8, clip_on=True)
    refused = [event for run in runs for event in run.refused if event.kind]
    if refused:
        axes.scatter([_place(axis, event) for event in refused], [0.18] * len(refused), s=22, marker="x", color="tab:red",
                     zorder=3)
    keys = [Patch(color=colour, label=name) for name, colour in list(colours.items())[:8]]
    if refused:
        keys.append(plt.Line2D([], [], marker="x", color="tab:red", linestyle="", label="a switch was refused"))
    if len(runs) > 1:
        keys.append(plt.Line2D([], [], color="tab:red", linestyle=":", label="the job was started again"))
    axes.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=min(len(keys), 5), fontsize=8, frameon=False,
                borderaxespad=0)
    axes.set_yticks([])
    axes.set_ylim(0, 1)
    axes.set_ylabel("layout", rotation=0, ha="right", va="center")
    axes.tick_params(labelbottom=False)
    if right > left:
        axes.set_xlim(left, right)


def _spans(runs: list[Run], axis: _Axis) -> list[tuple]:
    """(stretch, begin, end) on the axis. What a later start trained again hides what was there before."""
    spans, hidden_from = [], float("inf")
    for run in reversed(runs):
        for stretch in run.stretches:
            begin, end = axis.of_stretch(stretch)
            spans.append((stretch, begin, max(min(end, hidden_from), begin)))
        hidden_from = min(hidden_from, axis.of_stretch(run.stretches[0])[0])
    return spans


def _place(axis: _Axis, event) -> float:
    """Where something between two steps lies that takes no time."""
    return axis.of_switch(Switch(iteration=event.iteration, time=event.time, src="", dst="", stall_seconds=0.0))


def _draw_loss(axes, runs: list[Run], axis: _Axis) -> None:
    name = next((next(iter(step.losses)) for run in runs for step in run.steps if step.losses), None)
    for run in runs:
        points = [(axis.of_step(step), step.losses[name]) for step in run.steps if name in step.losses]
        _curve(axes, points, "tab:blue")
    axes.set_ylabel(name or "loss")
    if name is None:
        _say_nothing(axes)


def _draw_steps(axes, runs: list[Run], axis: _Axis) -> None:
    times = []
    for run in runs:
        points = [(axis.of_step(step), step.seconds) for step in run.steps if step.seconds is not None]
        times += [seconds for _, seconds in points]
        _curve(axes, points, "tab:green", dots=True)
    axes.set_ylabel("step, seconds")
    if not times:
        return _say_nothing(axes)
    # The first step of a job may take as long as a thousand others; the others are what is looked at.
    top = min(1.1 * max(times), 1.6 * float(np.percentile(times, 90)))
    beyond = sum(seconds > top for seconds in times)
    axes.set_ylim(0, top)
    if beyond:
        longest = f"{max(times):.3g} s"
        axes.text(0.995, 0.96, f"above: one step of {longest}" if beyond == 1 else f"above: {beyond} steps of up to {longest}",
                  transform=axes.transAxes, ha="right", va="top", fontsize=8, color="0.35")


def _say_nothing(axes) -> None:
    axes.text(0.5, 0.5, "not in the report; `report_steps: true` writes it", transform=axes.transAxes, ha="center", va="center",
              color="0.4")
    axes.set_yticks([])


def _curve(axes, points: list[tuple[float, float]], colour: str, dots: bool = False) -> None:
    """A line through the points; where they are too many, through medians, with the range behind them."""
    if not points:
        return
    x, y = np.array(points, float).T
    if len(x) <= _POINTS:
        marker = "." if len(x) <= 200 else None
        axes.plot(x, y, color=colour, linewidth=0.8 if dots else 1.4, marker=marker, markersize=4)
        return
    parts = np.array_split(np.arange(len(x)), _POINTS // 3)
    middle = np.array([(np.median(x[part]), np.median(y[part]), y[part].min(), y[part].max()) for part in parts]).T
    axes.fill_between(middle[0], middle[2], middle[3], color=colour, alpha=0.25, linewidth=0)
    axes.plot(middle[0], middle[1], color=colour, linewidth=1.0)


def _mark(axes, runs: list[Run], axis: _Axis) -> None:
    """Lines at switches, and where a job was started again."""
    switches = [switch for run in runs for switch in run.switches]
    if len(switches) <= _MARKED:
        for switch in switches:
            axes.axvline(axis.of_switch(switch), color="0.35", linestyle="--", linewidth=0.8)
    for run in runs[1:]:
        axes.axvline(axis.of_stretch(run.stretches[0])[0], color="tab:red", linestyle=":", linewidth=1.2)
    axes.grid(axis="y", color="0.92")


def _draw_phases(axes, switches: list[Switch]) -> None:
    """One bar a switch, in the order in which they came."""
    names = phase_names(switch.phases for switch in switches)
    places = np.arange(len(switches))
    bottom = np.zeros(len(switches))
    few = len(switches) <= _LABELLED
    for i, name in enumerate(names):
        heights = np.array([switch.phases.get(name, 0.0) for switch in switches])
        axes.bar(places, heights, 0.7 if few else 1.0, bottom, label=name, color=_PHASE_COLOURS[i % len(_PHASE_COLOURS)],
                 linewidth=0)
        bottom += heights
    if few:
        for place, switch in zip(places, switches, strict=True):
            axes.annotate(f"{switch.stall_seconds:.3g} s", (place, bottom[place]), xytext=(0, 2), textcoords="offset points",
                          ha="center", fontsize=8)
        narrow = len(switches) > 8
        axes.set_xticks(places, [f"{s.iteration}" if narrow else f"after {s.iteration}\n{in_sizes(s.from_sizes) or s.src}\n"
                                 f"→ {in_sizes(s.to_sizes) or s.dst}" for s in switches], fontsize=8)
        axes.set_xlabel("switch after iteration" if narrow else "")
    else:
        axes.set_xlabel("switch, in order")
    axes.set_xlim(-0.5 - 0.5 * (len(switches) < 3), len(switches) - 0.5 + 0.5 * (len(switches) < 3))
    axes.set_ylim(0, 1.12 * max(bottom.max(), 1e-9))
    axes.set_ylabel("stall, seconds")
    axes.legend(loc="center left", bbox_to_anchor=(1.005, 0.5), fontsize=8, frameon=False, reverse=True)
