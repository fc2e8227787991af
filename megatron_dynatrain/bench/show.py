"""The records of a benchmark for people: a table with ratios, the targets as met or missed, and a plot."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_dynatrain.bench.cases import LARGE_MODELS
from megatron_dynatrain.report import in_bytes, phase_names

# What the plot compares: name in a record, label, color, marker.
OTHER_WAYS = (
    ("restart_seconds", "stop + restart", "tab:red", "s"),
    ("first_checkpoint_seconds", "save + load in process, the first", "navajowhite", "D"),
    ("checkpoint_seconds", "save + load in process, the second", "tab:orange", "D"),
    ("stall_seconds", "stall of the switch", "tab:blue", "o"),
    ("transfer_seconds", "its transfer", "tab:cyan", "o"),
    ("refit_seconds", "Megatron's refit, weights alone", "tab:green", "^"),
    ("raw_exchange_seconds", "raw exchange", "0.5", "|"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """What a ratio of two times of one record should be: at most `limit`, or at least."""

    text: str
    over: str
    under: str
    limit: float
    at_least: bool = False
    models: tuple[str, ...] | None = None  # None for all

    def ratios(self, records: list[dict]) -> Iterator[tuple[str, float]]:
        """(what, ratio) for the warm records that have both times."""
        for record in records:
            applies = record["warm"] and (self.models is None or record["model"] in self.models)
            if applies and record[self.over] is not None and record[self.under]:
                yield f"{record['model']} {record['src']} -> {record['dst']}", record[self.over] / record[self.under]

    def is_met(self, ratio: float) -> bool:
        return ratio >= self.limit if self.at_least else ratio <= self.limit


TARGETS = (
    Target("transfer phase at most 1.3 x the raw exchange (100M and 300M models)", "transfer_seconds", "raw_exchange_seconds",
           1.3, models=LARGE_MODELS),
    Target("whole stall at most 2 x the raw exchange (300M model)", "stall_seconds", "raw_exchange_seconds", 2.0,
           models=("300m",)),
    Target("at least 40 x faster than save + load in process, the first in a job", "first_checkpoint_seconds", "stall_seconds",
           40, at_least=True),
    Target("at least 40 x faster than save + load in process, the second in a job", "checkpoint_seconds", "stall_seconds", 40,
           at_least=True),
    Target("at least 100 x faster than stop + restart", "restart_seconds", "stall_seconds", 100, at_least=True),
)


def verdicts(records: list[dict]) -> list[str]:
    """A line for each target: met, missed or not measured, and the ratios as measured."""
    lines = []
    for target in TARGETS:
        found = list(target.ratios(records))
        state = "not measured" if not found else "met" if all(target.is_met(ratio) for _, ratio in found) else "MISSED"
        measured = "; ".join(f"{what}: {ratio:.2f}" if ratio < 10 else f"{what}: {ratio:.0f}" for what, ratio in found)
        lines.append(f"{state}: {target.text}{' (' + measured + ')' if measured else ''}")
    return lines


def table(records: list[dict]):
    """A rich table with one row a record. Times in seconds; in brackets how many times as long it took as what it is
    compared with."""
    from rich.table import Table

    shown = Table(title="Switches. Times in seconds, of the slowest rank; warm: the visit with the median stall")
    for column in ("model", "from", "to", "", "stall", "transfer", "raw exchange", "save + load", "restart", "refit",
                   "moved", "most of a rank"):
        shown.add_column(column, justify="right")
    previous = None
    for record in records:
        if previous is not None and previous != record["model"]:
            shown.add_section()
        previous, raw, stall = record["model"], record["raw_exchange_seconds"], record["stall_seconds"]
        shown.add_row(
            record["model"], record["src"], record["dst"], "warm" if record["warm"] else "cold",
            f"{seconds(stall)} ({stall / raw:.1f} x raw)",
            f"{seconds(record['transfer_seconds'])} ({record['transfer_seconds'] / raw:.2f} x raw)", seconds(raw),
            _beside_stall(record["checkpoint_seconds"], stall), _beside_stall(record["restart_seconds"], stall),
            seconds(record["refit_seconds"]), in_bytes(record["moved_bytes"]), in_bytes(record["max_rank_bytes"]))
    return shown


def phases_table(records: list[dict]):
    """A rich table of the phases of the warm records, of the rank with the longest stall."""
    from rich.table import Table

    names = phase_names(record["phases"] for record in records)
    shown = Table(title="Phases of the slowest rank, seconds")
    for column in ("model", "from", "to", "", *names):
        shown.add_column(column, justify="right")
    for record in records:
        shown.add_row(record["model"], record["src"], record["dst"], "warm" if record["warm"] else "cold",
                      *(seconds(record["phases"].get(name)) for name in names))
    return shown


def profile_table(records: list[dict]):
    """A rich table of what the transfer of the warm records cost the processors, beside the raw exchange: where the time is.

    A page is handed out, cleared, when memory is first touched; the raw exchange works in memory that was touched before.
    """
    from rich.table import Table

    shown = Table(title="What it cost the processors, all ranks together: seconds in the process + in the system, pages handed out")
    columns = ("transfer", "raw exchange", "build", "data", "quiesce", "finish")
    for column in ("model", "from", "to", *columns):
        shown.add_column(column, justify="right")
    for record in records:
        if record["warm"]:
            costs = {**record["profile"], "raw exchange": record["raw_profile"]}
            shown.add_row(record["model"], record["src"], record["dst"], *(_cost(costs.get(name)) for name in columns))
    return shown


def _cost(cost: list[float] | None) -> str:
    """[1.25, 0.5, 12000] -> '1.25 + 0.50, 12,000'."""
    return "-" if cost is None else f"{cost[0]:.2f} + {cost[1]:.2f}, {cost[2]:,.0f}"


def seconds(value: float | None) -> str:
    """0.01234 -> '0.012', 12.34 -> '12.3', None -> '-'."""
    return "-" if value is None else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _beside_stall(value: float | None, stall: float) -> str:
    return "-" if value is None else f"{value:.1f} ({value / stall:.0f} x)"


def plot(records: list[dict], path: str) -> None:
    """Left: the phases of each switch stacked, beside the raw exchange of the same bytes. Right: the stall beside
    everything else that does the same, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    rows = [record for record in records if record["warm"]] or records
    names = phase_names(record["phases"] for record in rows)
    labels = [f"{record['model']}\n{record['src']} → {record['dst']}" for record in rows]
    places = list(range(len(rows)))[::-1]  # the first record on top
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 1.6 + 0.62 * len(rows)), sharey=True, layout="constrained")
    colors = dict(zip(names, plt.get_cmap("tab10").colors, strict=False))
    begin = [0.0] * len(rows)
    for name in names:
        widths = [record["phases"].get(name, 0.0) / record["stall_seconds"] for record in rows]
        left.barh([place + 0.17 for place in places], widths, 0.34, begin, label=name, color=colors.get(name, "0.5"))
        begin = [a + b for a, b in zip(begin, widths, strict=True)]
    left.barh([place - 0.19 for place in places],
              [record["raw_exchange_seconds"] / record["stall_seconds"] for record in rows], 0.3, color="0.75",
              label="raw exchange")
    for place, record in zip(places, rows, strict=True):
        left.annotate(f"{seconds(record['stall_seconds'])} s", (1.01, place + 0.17), va="center", fontsize=8)
    left.set_xlim(0, 1.13)
    left.set_xlabel("part of the stall")
    left.set_title("phases of a warm switch, and the raw exchange of the same bytes")
    left.set_yticks(places, labels, fontsize=8)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=6, fontsize=8)
    for name, label, color, marker in OTHER_WAYS:
        found = [(record[name], place) for record, place in zip(rows, places, strict=True) if record[name] is not None]
        if found:
            right.scatter(*zip(*found, strict=True), label=label, color=color, marker=marker, s=70, zorder=3)
    for place, record in zip(places, rows, strict=True):
        longest = max(record[name] or 0 for name, *_ in OTHER_WAYS)
        right.plot([record["raw_exchange_seconds"], longest], [place, place], color="0.85", linewidth=1, zorder=1)
    right.set_xscale("log")
    right.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    right.xaxis.set_major_formatter("{x:g}")
    right.xaxis.set_minor_formatter(ticker.NullFormatter())
    right.grid(axis="x", color="0.92")
    right.set_xlabel("seconds")
    right.set_title("the same change in other ways")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3, fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
