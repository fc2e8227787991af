"""Switches in the places where Megatron writes: TensorBoard, W&B, the one-logger, its timers.

All is written from Megatron's own log of the first step after a switch, when the stall is long over, by the rank that
has the writers. What happened in a switch stands at the iteration after which it was. The sizes of the layout are
curves: a value at an iteration is that of the layout in which this iteration was trained.
"""

import sys
from collections.abc import Callable

from megatron_dynatrain.report import in_sizes

_SIZES = ("TP", "PP", "VPP", "CP", "EP", "DP")  # always written, so that a curve does not end where a size becomes 1


class Writers:
    """What is still to be written.

    is_due: something is, when the next step is logged. has_times: there are times of switches for `log_timers`. An idle step
    looks at these two alone. later: calls of Megatron's own that write and can wait for that, too.
    """

    def __init__(self):
        self.is_due = False
        self.has_times = False
        self.later: list[Callable] = []
        self._reports: list = []
        self._timed: dict[str, None] = {}  # timers that are still to be logged, the same on all ranks
        self._warned: set[str] = set()

    def add(self, report) -> None:
        """Take the complete report of a switch. On every rank; not collective."""
        self._reports.append(report)
        self.is_due = True
        timers = _globals().get_timers()
        for name, seconds, level in (("dynatrain-switch", report.stall_seconds, 0),
                                     *((f"dynatrain-{phase}", seconds, 1) for phase, seconds in report.phases.items())):
            timer = timers(name, log_level=level)
            if hasattr(timer, "_elapsed"):  # not the dummy of a level that is not logged
                timer._elapsed += seconds  # as the timer itself adds up, until it is logged
                self._timed[name] = None
                self.has_times = True

    def write(self, iteration: int, name: str, sizes: dict[str, int]) -> None:
        """Write what is due, before Megatron writes its own values of `iteration`, which W&B takes in order alone.

        name, sizes: of the current layout, in which `iteration` was trained. Not collective.
        """
        reports, self._reports, self.is_due = self._reports, [], False
        if any(report.src_ranks != report.dst_ranks for report in reports):
            self._move()
        first = reports[0] if reports else None
        names = dict.fromkeys([*_SIZES, *sizes, *(key for report in reports for key in report.src_sizes)])
        if first is not None:
            self._write(first.iteration, _layout(first.src_sizes, names), {})
        for report in reports:
            src, dst = f"{report.src} ({in_sizes(report.src_sizes)})", f"{report.dst} ({in_sizes(report.dst_sizes)})"
            self._write(report.iteration, scalars(report),
                        {"dynatrain/switch": f"{src} -> {dst} after iteration {report.iteration}"})
        for action in self.later:
            self._guarded("TensorBoard", action)
        self.later.clear()
        if first is None or iteration > reports[-1].iteration:  # training may end right after a switch
            self._write(iteration, _layout(sizes, names), {"dynatrain/layout": f"{name} ({in_sizes(sizes)})"})

    def _move(self) -> None:
        """Where the ranks have changed, Megatron's writers go to the last rank as it is now, into the same places."""
        found = _globals()
        args = found.get_args()
        is_last = args.rank == args.world_size - 1
        for title, name, end in (("TensorBoard", "tensorboard_writer", lambda writer: writer.close()),
                                 ("W&B", "wandb_writer", lambda wandb: wandb.finish()), ("the one-logger", "one_logger", None)):
            writer = getattr(found, f"_GLOBAL_{name.upper()}")
            if writer is not None and not is_last:
                setattr(found, f"_GLOBAL_{name.upper()}", None)
                if end is not None:
                    self._guarded(title, end, writer)
            elif writer is None and is_last:
                self._guarded(title, getattr(found, f"_set_{name}"), args)

    def log_timers(self, iteration: int) -> None:
        """Have Megatron log the timers of the switches since the last time. Collective, as Megatron's own log of timers; call
        where that is."""
        names, self._timed, self.has_times = list(self._timed), {}, False
        found = _globals()
        timers, args = found.get_timers(), found.get_args()
        if args.log_timers_to_tensorboard:
            for title, writer in (("TensorBoard", found.get_tensorboard_writer()), ("W&B", found.get_wandb_writer())):
                self._guarded(title, timers.write, names, writer, iteration, reset=False)
        self._guarded("the log of timers", timers.log, names)

    def _write(self, step: int, values: dict[str, float], texts: dict[str, str]) -> None:
        found = _globals()
        board, wandb, one_logger = found.get_tensorboard_writer(), found.get_wandb_writer(), found.get_one_logger()
        if board:
            self._guarded("TensorBoard", _to_board, board, step, values, texts)
        if wandb:
            self._guarded("W&B", wandb.log, {**values, **texts}, step)
        if one_logger:
            self._guarded("the one-logger", _to_one_logger, one_logger, {**values, **texts})

    def _guarded(self, title: str, action: Callable, *args, **kwargs) -> None:
        try:
            action(*args, **kwargs)
        except Exception as error:
            if title not in self._warned:
                print(f"[dynatrain] {title} did not take the values of a switch ({type(error).__name__}: {error}): they are "
                      "missing there, perhaps later ones too; training goes on", file=sys.stderr, flush=True)
            self._warned.add(title)


def scalars(report) -> dict[str, float]:
    """The numbers of a switch, by the names under which they are plotted."""
    totals = report.totals
    values = {"stall_seconds": report.stall_seconds, "moved_bytes": totals.moved_bytes, "minimum_bytes": totals.minimum_bytes,
              "max_rank_bytes": totals.max_rank_bytes, "peak_memory_bytes": report.peak_memory_bytes,
              **{f"phase/{name}": seconds for name, seconds in report.phases.items()}}
    return {f"dynatrain/{name}": value for name, value in values.items() if value is not None}


def _layout(sizes: dict[str, int], names) -> dict[str, int]:
    """The sizes of a layout, by the names under which they are plotted; what it leaves out is 1, expert-TP is TP."""
    return {f"dynatrain/layout/{name}": sizes.get(name, sizes["TP"] if name == "ETP" else 1) for name in names}


def _to_board(writer, step: int, values: dict[str, float], texts: dict[str, str]) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)
    for name, text in texts.items():
        writer.add_text(name, text, step)


def _to_one_logger(one_logger, values: dict) -> None:
    with one_logger.get_context_manager():
        one_logger.log_metrics(values)


def _globals():
    from megatron.training import global_vars

    return global_vars
