"""A forecast as tables for people."""

import numpy as np
from rich.console import Console
from rich.table import Table

from megatron_dynatrain.layout import Layout
from megatron_dynatrain.planner.forecast import Forecast
from megatron_dynatrain.report import in_bytes


def show(found: Forecast, src: Layout, dst: Layout, console: Console) -> None:
    """Print what the switch from layout `src` to `dst` would do."""
    plan, cluster = found.plan, found.cluster
    if found.from_ranks == found.to_ranks:
        console.print(f"{len(plan.src.ranks)} ranks, from ({src}) to ({dst})")
    else:
        before, after = {*found.from_ranks}, {*found.to_ranks}
        console.print(f"from {len(before)} ranks ({src}) to {len(after)} ranks ({dst}): {len(after - before)} are taken in, "
                      f"{len(before - after)} leave or wait")
    console.print(_bytes_per_rank(found))
    console.print(_by_field(found))
    console.print(_switch(found))
    console.print(
        f"bound and estimate: {cluster.gpus_per_node} GPUs a node; {in_bytes(cluster.gpu_link)}/s of network for each GPU, "
        f"{in_bytes(cluster.node_link)}/s for a node, shared; {in_bytes(cluster.nvlink)}/s for each GPU inside a node. "
        "The bound is the busiest link at full speed. The estimate adds "
        f"{cluster.window_seconds * 1e6:.0f} us to start each window, and packing at {in_bytes(cluster.gpu_memory_speed)}/s; "
        "ranks that wait for one another, and building the new model, groups and data, are not in it. Computed, not measured.", style="dim")
    if len(found.too_large):
        ranks = found.too_large
        console.print(
            f"does not fit: {len(ranks)} ranks (the first is {ranks[0]}) would hold up to {in_bytes(found.peak_bytes.max())} "
            f"in the switch, without activations, and --gpu-memory-gb is {cluster.gpu_memory / 1e9:g}; choose layouts with "
            "less state a rank, or smaller --staging-bytes", style="bold")


def refusal(reason: str, console: Console) -> None:
    """Print why there is no plan."""
    console.print(f"refused: {reason}", markup=False)


def _bytes_per_rank(found: Forecast) -> Table:
    table = Table(title="Bytes per rank")
    for column in ("", "min", "median", "max"):
        table.add_column(column, justify="left" if not column else "right")
    rows = (("sends", found.sent_bytes), ("receives", found.received_bytes),
            ("state before: weights, masters, optimizer", found.src.state_bytes), ("state after", found.dst.state_bytes),
            ("gradients before", found.src.gradient_bytes), ("gradients after", found.dst.gradient_bytes),
            ("peak in the switch", found.peak_bytes))
    for name, values in rows:
        table.add_row(name, *(in_bytes(int(value)) for value in (values.min(), np.median(values), values.max())))
    return table


def _by_field(found: Forecast) -> Table:
    table = Table(title="What stays, over all ranks")
    for column in ("", "needed", "stays", "moved", "stays, share"):
        table.add_column(column, justify="left" if not column else "right")
    names = {"weight": "weights", "param": "fp32 masters"}
    total = tuple(map(sum, zip(*found.by_field.values(), strict=True)))
    for name, (needed, stays, moved) in [*found.by_field.items(), ("all", total)]:
        table.add_row(names.get(name, name), in_bytes(needed), in_bytes(stays), in_bytes(moved),
                      f"{100 * stays / needed:.1f} %" if needed else "", end_section=name == list(found.by_field)[-1])
    return table


def _switch(found: Forecast) -> Table:
    plan, numbers = found.plan, found.numbers()
    table = Table(title="The switch", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("moved between ranks", in_bytes(plan.moved_bytes))
    table.add_row("minimum that any plan moves", in_bytes(plan.minimum_bytes))
    table.add_row("busiest rank, one direction", in_bytes(plan.max_rank_bytes))
    table.add_row("... no choice of sources gets below", in_bytes(numbers["balanced_max_rank_bytes"]))
    table.add_row("windows", f"{plan.num_windows:,}")
    table.add_row("messages", f"{found.num_messages:,}")
    table.add_row("copies, local ones among them", f"{len(plan):,}")
    table.add_row("lower bound of the transfer", in_seconds(found.bound_seconds))
    table.add_row("... set by", found.bound_by)
    table.add_row("estimate of the transfer", in_seconds(found.estimate_seconds))
    table.add_row("describing both layouts took", "nothing, kept from before" if not numbers["describe_seconds"]
                  else in_seconds(numbers["describe_seconds"]))
    table.add_row("planning took", in_seconds(found.plan_seconds))
    table.add_row("plan hash", plan.digest)
    return table


def in_seconds(seconds: float) -> str:
    """0.0123 -> '12.3 ms'."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"
