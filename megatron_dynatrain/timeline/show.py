"""A history as tables for people. Without a terminal the tables have no frames, so that other programs can read them."""

from datetime import datetime

from rich.console import Console
from rich.table import Table

from megatron_dynatrain.report import in_bytes, in_sizes, phase_names
from megatron_dynatrain.timeline import summary
from megatron_dynatrain.timeline.history import Run

LISTED = 20  # switches, refusals and starts of which each gets a row, unless all are asked for


def show(runs: list[Run], num_bad: int, path: str, console: Console, list_all: bool = False) -> None:
    """Print what became of the runs in the report at `path`."""
    if not runs:
        console.print(f"{path} holds no events of a run yet")
    for number, run in enumerate(runs, 1):
        if list_all or number > len(runs) - LISTED:
            console.print(_run_line(run, f"start {number} of {len(runs)}: " if len(runs) > 1 else "", path), soft_wrap=True)
    switches = [switch for run in runs for switch in run.switches]
    refused = [event for run in runs for event in run.refused]
    if runs:
        _print(console, _layouts(runs, console))
        if all(step.seconds is None for run in runs for step in run.steps):
            console.print("the report holds no step times; `report_steps: true` in the configuration writes them", style="dim")
    if switches:
        one_by_one = list_all or len(switches) <= LISTED
        _print(console, _switches(switches, console) if one_by_one else _pairs(switches, console))
        _print(console, _phases(switches, console, one_by_one))
        seconds, part = summary.stalled(runs)
        share = "" if part is None else f", {100 * part:.2g} % of the time"
        console.print()
        number = "1 switch" if len(switches) == 1 else f"{len(switches)} switches"
        console.print(f"{number} stalled training for {_time(seconds)}{share}")
        if not one_by_one:
            console.print("--all lists every switch", style="dim")
    elif runs:
        console.print("no switches")
    if refused:
        _print(console, _refused(refused if list_all else refused[-LISTED:], console, len(refused)))
    if num_bad:
        lines = "1 line is no whole event and was" if num_bad == 1 else f"{num_bad} lines are no whole events and were"
        console.print(f"{lines} left out", style="dim")


def _print(console: Console, table: Table) -> None:
    console.print()
    console.print(table)


def _run_line(run: Run, which: str, path: str) -> str:
    start = run.start
    ranks = f", {start.world_size} ranks" if start.world_size else ""
    began = f", began {datetime.fromtimestamp(start.time):%Y-%m-%d %H:%M:%S}" if start.time else ""
    of = f" of {start.train_iters}" if start.train_iters else ""
    iterations = (f"iterations {start.iteration + 1} to {run.last_iteration}{of}" if run.last_iteration > start.iteration
                  else f"nothing is reported after iteration {start.iteration}{of}")
    took = f" in {_time(run.seconds)}" if run.seconds is not None else ""
    loss = summary.last_loss(run.steps)
    ended = ("no end is reported: it is training, or was ended from outside" if run.end is None else
             "ended" if run.end.error is None else f"ended by {run.end.error}")
    return (f"{which}{path}{ranks}{began}; {iterations}{took}"
            f"{f', {loss[0]} {loss[1]:.4g}' if loss else ''}; {ended}")


def _table(title: str, console: Console, left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    frame = {} if console.is_terminal else {"box": None}
    table = Table(title=title, title_justify="left", **frame)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table


def _layouts(runs: list[Run], console: Console) -> Table:
    table = _table("Layouts", console, ("layout", "sizes"), ("steps", "median step", "95 % within", "samples/s"))
    for found in summary.of_layouts(runs):
        rate = "-" if found.samples_per_second is None else f"{found.samples_per_second:.3g}"
        table.add_row(found.layout, in_sizes(found.sizes), f"{found.num_steps:,}", _time(found.median_step_seconds),
                      _time(found.p95_step_seconds), rate)
    return table


def _switches(switches, console: Console) -> Table:
    table = _table("Switches", console, (), ("after", "from", "to", "stall", "moved", "minimum", "busiest rank", "peak memory",
                                             "verified"))
    for s in switches:
        table.add_row(str(s.iteration), _layout(s.src, s.from_sizes), _layout(s.dst, s.to_sizes), _time(s.stall_seconds),
                      in_bytes(s.moved_bytes), in_bytes(s.minimum_bytes), in_bytes(s.max_rank_bytes),
                      _bytes(s.peak_memory_bytes), s.verify)
    return table


def _pairs(switches, console: Console) -> Table:
    table = _table("Switches", console, (), ("from", "to", "number", "median stall", "longest", "moved", "peak memory"))
    for pair in summary.of_pairs(switches):
        table.add_row(_layout(pair.src, pair.from_sizes), _layout(pair.dst, pair.to_sizes), str(pair.num_switches),
                      _time(pair.median_stall_seconds), _time(pair.max_stall_seconds), in_bytes(pair.moved_bytes),
                      _bytes(pair.peak_memory_bytes))
    return table


def _phases(switches, console: Console, one_by_one: bool) -> Table:
    names = phase_names(switch.phases for switch in switches)
    title = "Phases, seconds" if one_by_one else "Phases, seconds, the median"
    table = _table(title, console, (), (*(("after", "to") if one_by_one else ("from", "to")), *names))
    rows = ([((str(s.iteration), s.dst), s.phases) for s in switches] if one_by_one else
            [((p.src, p.dst), p.median_phases) for p in summary.of_pairs(switches)])
    for head, phases in rows:
        table.add_row(*head, *(f"{phases[name]:.3f}" if name in phases else "-" for name in names))
    return table


def _refused(refused, console: Console, total: int) -> Table:
    which = "" if len(refused) == total else f", the last {len(refused)} of {total}"
    table = _table(f"Did not come about{which}", console, ("after", "to", "why"), ())
    for event in refused:
        why = event.reason or (f"superseded by {event.by}" if event.by else "")
        table.add_row(str(event.iteration), event.dst, why)
    return table


def _layout(name: str, sizes: dict[str, int]) -> str:
    return f"{name} {in_sizes(sizes)}" if sizes else name


def _bytes(count: int | None) -> str:
    return "-" if count is None else in_bytes(count)


def _time(seconds: float | None) -> str:
    """0.0123 -> '12.3 ms', 75 -> '75.0 s', 7265 -> '2 h 1 min', None -> '-'."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
