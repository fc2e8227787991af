"""The running session: when to switch, what to say of it. One a process, made by the launcher."""

import sys
import time
from collections.abc import Callable

import torch.distributed as dist

from megatron_dynatrain.config import Config, ScheduledSwitch
from megatron_dynatrain.controller import Controller, SwitchReport
from megatron_dynatrain.errors import ConfigError, DynaTrainError, TransferError
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.registry import Registry
from megatron_dynatrain.report import Report, in_bytes, in_sizes
from megatron_dynatrain.requests import Requests

NEVER = sys.maxsize


class Session:
    """Decides at iteration boundaries, hands switches to the controller, and reports them.

    boundary: the first iteration after whose end `at_boundary` has something to do. An idle step compares two integers.
    loop_asks: Megatron's loop asks at its boundaries itself, as it does in a patched checkout (see `checkout`).
    before_switch: called with (iteration, target) before each switch; the time that they take is not part of the stall.
    after_switch: called with the report of each switch, complete, when its stall is over.
    """

    def __init__(self, job):
        self.job = job
        self.config: Config | None = None  # None: the job was launched without --dynatrain-config
        self.boundary = NEVER
        self.loop_asks = False
        self.pending: list[str | Layout] = []
        self.controller: Controller | None = None
        self.open_report: SwitchReport | None = None
        self.before_switch: list[Callable] = []
        self.after_switch: list[Callable] = []
        self._scheduled: list[ScheduledSwitch] = []  # still to come
        self._train_iters = 0
        self._report = Report(None)
        self._requests: Requests | None = None
        self._left_at = 0.0

    @property
    def active(self) -> bool:
        return self.config is not None

    def start(self, iteration: int, train_iters: int) -> None:
        """Check everything and get ready, before the first step. Collective. Raises on every rank what cannot be."""
        for i, switch in enumerate(self.config.schedule):
            if switch.at_iteration < iteration:
                raise ConfigError(f"`dynatrain.schedule[{i}]`: at_iteration {switch.at_iteration} lies in the past, since "
                                  f"training starts after iteration {iteration}; remove the entry")
            if switch.at_iteration >= train_iters:
                self._say(f"`dynatrain.schedule[{i}]`: no step comes after at_iteration {switch.at_iteration}, since "
                          f"--train-iters is {train_iters}; there will be no switch")
        self._scheduled = [switch for switch in self.config.schedule if switch.at_iteration < train_iters]
        self._train_iters = train_iters
        self.controller = Controller(self.job, Registry(self.config.layouts), self.config)
        self.controller.start()
        is_writer = dist.get_rank() == dist.get_world_size() - 1  # where Megatron's own writers are
        self._report = Report(self.config.report if is_writer else None)
        self._report.event("start", iteration=iteration, world_size=dist.get_world_size(),
                           layouts={name: entry.layout.arguments() for name, entry in
                                    self.controller.registry.entries.items()},
                           schedule=[[switch.at_iteration, switch.layout] for switch in self.config.schedule])
        store = dist.distributed_c10d._get_default_store()
        self._requests = Requests(store, dist.get_rank(), dist.get_world_size(), self._look_at_next_boundary)
        self.at_boundary(iteration)  # what is due before the first step

    def _look_at_next_boundary(self) -> None:
        self.boundary = 0

    def _set_boundary(self) -> None:
        """The next iteration of the schedule; every iteration while a request is on its way."""
        self.boundary = self._scheduled[0].at_iteration if self._scheduled else NEVER
        if self._requests.is_armed:  # read after the assignment: a request that comes now sets it to 0 itself
            self.boundary = 0

    def request(self, target: str | Layout) -> None:
        """Ask for a switch at the next boundary at which all ranks can act. Any one rank or several, not collective.

        Raises ConfigError for an unknown name and LayoutRefused for a layout that Megatron cannot train, at once and
        only to the caller.
        """
        if self.controller is None:
            raise ConfigError("reconfigure() was called, but no job of megatron_dynatrain is training in this process; launch "
                              "it with --dynatrain-config and call from within training")
        entry = self.controller.registry.find(target)
        self.job.check(entry.name, entry.layout)
        self._requests.put(target if isinstance(target, str) else entry.layout)

    def at_boundary(self, iteration: int) -> bool:
        """Whether the loop must be left after `iteration`; the targets are then in `pending`. The same on every rank."""
        self._left_at = time.perf_counter()
        # An entry may lie on an iteration that Megatron skipped, at whose end nobody is asked.
        due = [switch for switch in self._scheduled if switch.at_iteration <= iteration]
        del self._scheduled[:len(due)]
        self.pending = [switch.layout for switch in due]
        if self._requests.is_armed and iteration < self._train_iters:
            due = self._requests.due(iteration)
            if due:
                for target in due[:-1]:
                    if target != due[-1]:
                        self._report.event("superseded", iteration=iteration, to=_name(target), by=_name(due[-1]))
                self.pending.append(due[-1])
        self._set_boundary()
        return bool(self.pending)

    def switch(self, iteration: int) -> None:
        """Carry out the pending switches, in order. Collective. A refusal is reported and leaves the layout as it is."""
        targets, self.pending = self.pending, []
        for target in targets:
            self.close_report()
            start = time.perf_counter()
            for hook in self.before_switch:
                hook(iteration, target)
            self._left_at += time.perf_counter() - start
            try:
                self.open_report = self.controller.switch(target, iteration, self._left_at)
            except TransferError:
                raise
            except DynaTrainError as error:
                print(f"[dynatrain] rank {dist.get_rank()}: the switch to {_name(target)!r} after iteration {iteration} was "
                      f"refused, training goes on in layout {self.controller.current!r}: {error}", file=sys.stderr, flush=True)
                self._report.event("refused", iteration=iteration, to=_name(target), reason=str(error),
                                   kind=type(error).__name__)
            self._left_at = time.perf_counter()

    def close_report(self) -> None:
        """The first new step starts now, or the next switch, or the end: the stall is over."""
        report, self.open_report = self.open_report, None
        if report is None:
            return
        report.stall_seconds = time.perf_counter() - report.started
        report.phases["resume"] = max(report.stall_seconds - sum(report.phases.values()), 0.0)
        self._report.event("switch", **report.event())
        src, dst = (f"{name} ({in_sizes(sizes)})" for name, sizes in ((report.src, report.src_sizes), (report.dst, report.dst_sizes)))
        self._say(f"after iteration {report.iteration}: {src} -> {dst}, stall {report.stall_seconds:.3f} s, moved "
                  f"{in_bytes(report.totals.moved_bytes)} (minimum {in_bytes(report.totals.minimum_bytes)}), verify {report.verify}")
        self._say("phases: " + ", ".join(f"{name} {seconds:.3f} s" for name, seconds in report.phases.items()))
        for hook in self.after_switch:
            hook(report)

    @property
    def reports_steps(self) -> bool:
        return self.active and self.config.report_steps

    def step(self, **fields) -> None:
        """A logged step, for the report."""
        self._report.event("step", **fields)

    @staticmethod
    def _say(text: str) -> None:
        if dist.get_rank() == 0:
            print(f"[dynatrain] {text}", flush=True)


def _name(target: str | Layout) -> str:
    return str(target)


_session: Session | None = None


def install(session: Session) -> None:
    """Make `session` the one of this process."""
    global _session
    _session = session


def current() -> Session | None:
    """The session of this process, if the launcher made one."""
    return _session
