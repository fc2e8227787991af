"""A history as numbers: what the tables show and what `--json` gives."""

import math
from statistics import median

import msgspec

from megatron_dynatrain.report import in_sizes, phase_names
from megatron_dynatrain.timeline.history import Run, Step, Switch

class OfLayout(msgspec.Struct, kw_only=True):
    """The steps of one layout, over all its stretches. Times in seconds, None where no step says it."""

    layout: str
    sizes: dict[str, int]
    num_steps: int
    median_step_seconds: float | None
    p95_step_seconds: float | None
    samples_per_second: float | None


class OfPair(msgspec.Struct, kw_only=True):
    """The switches from one layout to another."""

    src: str = msgspec.field(name="from")
    dst: str = msgspec.field(name="to")
    from_sizes: dict[str, int]
    to_sizes: dict[str, int]
    num_switches: int
    median_stall_seconds: float
    max_stall_seconds: float
    median_phases: dict[str, float]
    moved_bytes: int  # of one switch, the most
    peak_memory_bytes: int | None


def of_layouts(runs: list[Run]) -> list[OfLayout]:
    """One record for each layout, in the order in which they came."""
    groups: dict[str, list] = {}
    for run in runs:
        for stretch in run.stretches:
            groups.setdefault(stretch.name, []).append(stretch)
    found = []
    for stretches in groups.values():
        steps = [step for stretch in stretches for step in stretch.steps]
        seconds = sorted(step.seconds for step in steps if step.seconds is not None)
        samples = [later.consumed_samples - step.consumed_samples for stretch in stretches
                   for step, later in zip(stretch.steps, stretch.steps[1:])
                   if step.consumed_samples is not None and later.consumed_samples is not None]
        middle = median(seconds) if seconds else None
        found.append(OfLayout(
            layout=stretches[0].layout, sizes=stretches[0].sizes, num_steps=_num_steps(stretches), median_step_seconds=middle,
            p95_step_seconds=seconds[math.ceil(0.95 * len(seconds)) - 1] if seconds else None,
            samples_per_second=median(samples) / middle if samples and middle else None))
    return found


def _num_steps(stretches) -> int:
    """Also where steps are not reported one by one."""
    return sum(len(stretch.steps) or stretch.end - stretch.begin for stretch in stretches)


def of_pairs(switches: list[Switch]) -> list[OfPair]:
    """One record for each pair of layouts, in the order in which they came."""
    groups: dict[tuple, list[Switch]] = {}
    for switch in switches:
        groups.setdefault((switch.src, switch.dst, in_sizes(switch.from_sizes), in_sizes(switch.to_sizes)), []).append(switch)
    return [OfPair(src=group[0].src, dst=group[0].dst, from_sizes=group[0].from_sizes, to_sizes=group[0].to_sizes,
                   num_switches=len(group), median_stall_seconds=median(s.stall_seconds for s in group),
                   max_stall_seconds=max(s.stall_seconds for s in group),
                   median_phases={name: median(s.phases.get(name, 0.0) for s in group)
                                  for name in phase_names(s.phases for s in group)},
                   moved_bytes=max(s.moved_bytes for s in group),
                   peak_memory_bytes=max((s.peak_memory_bytes for s in group if s.peak_memory_bytes), default=None))
            for group in groups.values()]


def stalled(runs: list[Run]) -> tuple[float, float | None]:
    """(seconds of all stalls, their part of the time of the runs, or None where that is not known)."""
    total = sum(switch.stall_seconds for run in runs for switch in run.switches)
    seconds = sum(run.seconds or 0.0 for run in runs)
    return total, total / seconds if seconds > 0 else None


def last_loss(steps: list[Step]) -> tuple[str, float] | None:
    """(name, value) of the first loss of the last step that has one."""
    return next((next(iter(step.losses.items())) for step in reversed(steps) if step.losses), None)


def as_json(runs: list[Run], num_bad: int, path: str) -> dict:
    """Everything that the tables show, for machines. What is no number, as the loss of a step that overflowed, is null."""
    seconds, part = stalled(runs)
    switches = [switch for run in runs for switch in run.switches]
    return _finite(msgspec.to_builtins({
        "report": path, "lines_left_out": num_bad, "stall_seconds": seconds, "stall_part": part,
        "layouts": of_layouts(runs), "pairs": of_pairs(switches),
        "runs": [{"start": run.start, "end": run.end, "last_iteration": run.last_iteration, "seconds": run.seconds,
                  "last_loss": dict([loss]) if (loss := last_loss(run.steps)) else None, "switches": run.switches,
                  "refused": run.refused} for run in runs]}))


def _finite(value):
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
