"""The running session: when to switch, what to say of it. One a process, made by the launcher."""

import dataclasses
import sys
import threading
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from megatron_dynatrain import memory
from megatron_dynatrain.agenda import Agenda, Cost, Dropped, Item, NEVER, Switch
from megatron_dynatrain.config import Config
from megatron_dynatrain.consensus import gather, together
from megatron_dynatrain.controller import Controller, SwitchReport
from megatron_dynatrain.errors import ConfigError, DynaTrainError, LayoutRefused, RequestDropped, TransferError
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.promise import Promise
from megatron_dynatrain.registry import Registry
from megatron_dynatrain.report import Report, in_bytes, in_sizes
from megatron_dynatrain.requests import Requests
from megatron_dynatrain.run_dir.files import Answer
from megatron_dynatrain.run_dir.watcher import Watcher, watch


class Session:
    """Decides at iteration boundaries, hands switches to the controller, reports them, and answers who asked.

    boundary: the first iteration after whose end `at_boundary` has something to do. An idle step compares two integers.
    loop_asks: Megatron's loop asks at its boundaries itself, as it does in a patched checkout (see `checkout`).
    iteration: how many iterations have finished.
    before_switch: called with (iteration, target) before each switch; the time that they take is not part of the stall. What
    one of them raises on any rank refuses the switch on all.
    after_switch: called with the report of each switch, complete, when its stall is over.
    after_refusal: called with (iteration, target, error) when a switch was refused and the job is in the layout that it was in.
    """

    def __init__(self, job):
        self.job = job
        self.config: Config | None = None  # None: the job was launched without --dynatrain-config
        self.boundary = NEVER
        self.loop_asks = False
        self.iteration = 0
        self.pending: list[Item] = []
        self.controller: Controller | None = None
        self.open_report: SwitchReport | None = None
        self.before_switch: list[Callable] = []
        self.after_switch: list[Callable] = []
        self.after_refusal: list[Callable] = []
        self._agenda = Agenda([], 0)
        self._report = Report(None)
        self._requests: Requests | None = None  # while training can switch
        self._watcher: Watcher | None = None  # of the run directory, on rank 0
        self._promises: dict[str, Promise] = {}  # what this rank's own code was promised, by message
        self._open_ids: tuple[str, ...] = ()  # messages that asked for the switch of `open_report`
        self._stalls: dict[tuple[str, str], float] = {}  # the last of each pair of layouts, in seconds
        self._thread = 0  # that trains
        self._left_at = 0.0
        self._step_began = 0.0

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
        self.iteration = iteration
        self._agenda = Agenda(self.config.schedule, train_iters)
        self._thread = threading.get_ident()
        self.controller = Controller(self.job, Registry(self.config.layouts), self.config)
        if self.config.run_dir is not None:
            self._watcher = together(ConfigError, "megatron_dynatrain cannot start", self._watch)
        try:
            self._start(iteration, train_iters)
        except BaseException as error:
            self._close(f"the job did not start ({type(error).__name__}: {error})", str(error))
            raise

    def _watch(self) -> Watcher | None:
        """Take the run directory, on rank 0."""
        if dist.get_rank() != 0:
            return None
        return watch(self.config, dist.get_world_size(), self._agenda.train_iters, self.controller.current,
                     self.controller.sizes, lambda: self.iteration)

    def _start(self, iteration: int, train_iters: int) -> None:
        self.controller.start()
        is_writer = dist.get_rank() == dist.get_world_size() - 1  # where Megatron's own writers are
        path = self.config.report_path
        self._report = together(ConfigError, f"`dynatrain.{'report' if self.config.report else 'run_dir'}`: {path} cannot be "
                                "written; give a path on storage that the last rank can write to", Report,
                                path if is_writer else None)
        self._report.event("start", iteration=iteration, world_size=dist.get_world_size(), train_iters=train_iters,
                           layout=self.controller.current, sizes=self.controller.sizes,
                           layouts={name: entry.layout.arguments() for name, entry in
                                    self.controller.registry.entries.items()},
                           schedule=[[switch.at_iteration, switch.layout] for switch in self.config.schedule])
        store = dist.distributed_c10d._get_default_store()
        self._requests = requests = Requests(store, dist.get_rank(), dist.get_world_size(), self._look_at_next_boundary)
        if self._watcher is not None:
            own_store = store.clone()  # of the watcher's thread
            self._watcher.update(state="training")
            self._watcher.open(lambda message: requests.put(message, own_store))
        self.at_boundary(iteration)  # what is due before the first step

    def _look_at_next_boundary(self) -> None:
        self.boundary = 0

    def _set_boundary(self) -> None:
        """The next iteration of the agenda; every iteration while a message is on its way."""
        self.boundary = self._agenda.next_iteration
        if self._requests.is_armed:  # read after the assignment: a message that comes now sets it to 0 itself
            self.boundary = 0

    def request(self, target: str | Layout, at_iteration: int | None = None) -> Promise:
        """Ask for a switch, after `at_iteration` or at the next boundary at which all ranks can act. Any one rank or several,
        not collective. The promise is of the SwitchReport, or of None if the job is in that layout already.

        Raises ConfigError for an unknown name and LayoutRefused for a layout that Megatron cannot train, at once and
        only to the caller.
        """
        layout = self._checked("reconfigure()", target)
        if at_iteration is not None and not (type(at_iteration) is int and at_iteration >= 0):
            raise ConfigError(f"reconfigure(): at_iteration is {at_iteration!r}, but the number of an iteration is expected")
        return self._ask("reconfigure()", Switch(id=uuid.uuid4().hex, layout=layout, at_iteration=at_iteration))

    def request_cost(self, target: str | Layout) -> Promise:
        """Ask what a switch would cost. As `request`; the promise is of a SwitchCost."""
        return self._ask("plan()", Cost(id=uuid.uuid4().hex, layout=self._checked("plan()", target)))

    def _checked(self, what: str, target: str | Layout) -> str | Layout:
        if self._requests is None:
            raise ConfigError(f"{what} was called, but no job of megatron_dynatrain is training in this process; launch "
                              "it with --dynatrain-config and call from within training")
        entry = self.controller.registry.find(target)
        self.job.check(entry.name, entry.layout)
        return target if isinstance(target, str) else entry.layout

    def _ask(self, what: str, message: Switch | Cost) -> Promise:
        promise = self._promises[message.id] = Promise(what, self._thread)
        self._requests.put(message)
        return promise

    def at_boundary(self, iteration: int) -> bool:
        """Whether the loop must be left after `iteration`; what is to be done is then in `pending`. The same on every rank."""
        self._left_at = time.perf_counter()
        self.pending = []
        if iteration >= self._agenda.train_iters:
            return False  # no step comes; `end` answers
        dropped = []
        if self._requests.is_armed:
            for message in self._requests.due(iteration):
                dropped += self._agenda.hear(message, iteration)
        self.pending, superseded = self._agenda.take(iteration)
        for drop in dropped + superseded:
            self._drop(drop, iteration)
        self._set_boundary()
        return bool(self.pending)

    def _drop(self, drop: Dropped, iteration: int) -> None:
        """Say that a switch will not be carried out."""
        by = {} if drop.by is None else {"by": _name(drop.by.layout)}
        self._report.event(drop.answer, iteration=iteration, to=_name(drop.switch.layout), reason=drop.reason, **by)
        self._say(f"the request for {_name(drop.switch.layout)!r} is {drop.answer}: {drop.reason}")
        self._answer((drop.switch.id,), drop.answer, iteration, reason=drop.reason, by=drop.by and drop.by.id)

    def _answer(self, ids: tuple[str, ...], answer: str, iteration: int, result=None, error: Exception | None = None,
                reason: str | None = None, by: str | None = None) -> None:
        """Tell those who asked, if they are on this rank: the promises of its own code, and on rank 0 the run directory."""
        for message_id in ids:
            promise = self._promises.pop(message_id, None)
            if promise is not None and answer in ("done", "unchanged"):
                promise.set_result(result)
            elif promise is not None:
                promise.set_exception(error or RequestDropped(f"the request was {answer}: {reason}"))
            elif self._watcher is not None:
                self._watcher.answer(Answer(id=message_id, answer=answer, iteration=iteration, reason=reason, by=by,
                                            report=result.event() if isinstance(result, SwitchReport) else None))

    def switch(self, iteration: int) -> None:
        """Carry out what is pending, in order. Collective. A refusal is reported and leaves the layout as it is."""
        items, self.pending = self.pending, []
        self._tell_state("switching")
        for item in items:
            self.close_report()
            if item.kind == "cost":
                self._tell_cost(item, iteration)
            else:
                self._switch_to(item, iteration)
            self._left_at = time.perf_counter()
        self._tell_state("training")

    def _switch_to(self, item: Item, iteration: int) -> None:
        target = item.layout
        try:
            if self.controller.registry.find(target).name != self.controller.current:
                start = time.perf_counter()
                together(LayoutRefused, "a callback before the switch failed", self._call_before, iteration, target)
                self._left_at += time.perf_counter() - start
            self.open_report = self.controller.switch(target, iteration, self._left_at)
        except TransferError:
            raise
        except DynaTrainError as error:
            print(f"[dynatrain] rank {dist.get_rank()}: the switch to {_name(target)!r} after iteration {iteration} was "
                  f"refused, training goes on in layout {self.controller.current!r}: {error}", file=sys.stderr, flush=True)
            self._report.event("refused", iteration=iteration, to=_name(target), reason=str(error),
                               kind=type(error).__name__)
            refusal = LayoutRefused(str(error))  # without the frames of the error, in which the new state lives
            for hook in list(self.after_refusal):
                hook(iteration, target, refusal)
            self._answer(item.ids, "refused", iteration, error=refusal, reason=str(error))
            return
        if self.open_report is None:
            self._answer(item.ids, "unchanged", iteration, reason=f"the job is in layout {self.controller.current!r} already")
        else:
            self._open_ids = item.ids

    def _call_before(self, iteration: int, target: str | Layout) -> None:
        for hook in list(self.before_switch):
            hook(iteration, target)

    def _tell_cost(self, item: Item, iteration: int) -> None:
        start = time.perf_counter()
        try:
            cost = self.controller.cost(item.layout)
        except DynaTrainError as error:
            self._answer(item.ids, "refused", iteration, error=LayoutRefused(str(error)), reason=str(error))
            return
        self._report.event("cost", iteration=iteration, to=_name(item.layout), seconds=round(time.perf_counter() - start, 6),
                           moved_bytes=cost.moved_bytes, max_rank_bytes=cost.max_rank_bytes)
        cost = dataclasses.replace(cost, last_stall_seconds=self._stalls.get((cost.src, cost.dst)))
        self._answer(item.ids, "done", iteration, result=cost)

    def _tell_state(self, state: str) -> None:
        if self._watcher is not None:
            self._watcher.update(state=state, layout=self.controller.current, sizes=self.controller.sizes,
                                 schedule=self._agenda.schedule)

    def close_report(self) -> None:
        """The first new step starts now, or the next switch, or the end: the stall is over. Collective after a switch."""
        report, self.open_report = self.open_report, None
        if report is not None:
            report.peak_memory_bytes = max((peak for peak in gather(memory.peak_bytes()) if peak is not None), default=None)
            report.stall_seconds = time.perf_counter() - report.started
            report.phases["resume"] = max(report.stall_seconds - sum(report.phases.values()), 0.0)
            self._tell(report)
        self.step_begins()

    def _tell(self, report: SwitchReport) -> None:
        self._report.event("switch", **report.event())
        src, dst = (f"{name} ({in_sizes(sizes)})" for name, sizes in ((report.src, report.src_sizes),
                                                                      (report.dst, report.dst_sizes)))
        peak = "" if report.peak_memory_bytes is None else f", peak memory of a rank {in_bytes(report.peak_memory_bytes)}"
        self._say(f"after iteration {report.iteration}: {src} -> {dst}, stall {report.stall_seconds:.3f} s, moved "
                  f"{in_bytes(report.totals.moved_bytes)} (minimum {in_bytes(report.totals.minimum_bytes)}), verify "
                  f"{report.verify}{peak}", *_phase_lines(report))
        self._stalls[report.src, report.dst] = report.stall_seconds
        ids, self._open_ids = self._open_ids, ()
        self._answer(ids, "done", report.iteration, result=report)
        if self._watcher is not None:
            self._watcher.update(last_switch=report.event())
        for hook in list(self.after_switch):
            hook(report)

    @property
    def reports_steps(self) -> bool:
        return self.active and self.config.report_steps

    def step_begins(self) -> None:
        """The next step starts now, or, where it is not the first one of a layout, is the next thing to come."""
        self._step_began = time.perf_counter()

    def step(self, **fields) -> None:
        """A step that is complete, for the report."""
        self._report.event("step", seconds=round(time.perf_counter() - self._step_began, 6), **fields)

    def end(self, iteration: int | None, error: BaseException | None = None) -> None:
        """Training ends, after `iteration` or by `error`. Not collective. What was asked and not carried out has expired."""
        self.iteration = self.iteration if iteration is None else iteration
        failed = error is not None and not isinstance(error, SystemExit)
        reason = f"the job ended after iteration {self.iteration}"
        if failed:
            reason = f"the job failed after iteration {self.iteration} ({type(error).__name__})"
        for drop in self._agenda.close(reason) + ([] if failed else self._undecided(reason)):
            self._drop(drop, self.iteration)
        self._report.event("end", iteration=iteration, error=None if error is None else type(error).__name__)
        self._close(reason, f"{type(error).__name__}: {error}" if failed else None)

    def _undecided(self, reason: str) -> list[Dropped]:
        """Switches that were asked for too late for all ranks to act. Only the rank that reports looks for them."""
        if self._requests is None or dist.get_rank() != dist.get_world_size() - 1:
            return []
        try:
            return [Dropped(message, "expired", reason) for message in self._requests.undecided()
                    if isinstance(message, Switch)]
        except Exception:
            return []  # the store went with rank 0

    def _close(self, reason: str, error: str | None) -> None:
        """Nothing can be asked any more; whoever has no answer gets `reason`."""
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.close()
        for message_id in list(self._promises):
            self._answer((message_id,), "expired", self.iteration, reason=reason)
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close(reason, error)

    @staticmethod
    def _say(*lines: str) -> None:
        if dist.get_rank() == 0:  # in one piece: other ranks write to the same terminal
            print("".join(f"[dynatrain] {line}\n" for line in lines), end="", flush=True)


def _phase_lines(report: SwitchReport) -> list[str]:
    """One line for each phase of a switch: its time, its part of the stall."""
    totals, lines = report.totals, []
    for name, seconds in report.phases.items():
        lines.append(f"  {name:<9} {seconds:9.3f} s {100 * seconds / report.stall_seconds:4.0f} %")
        if name == "transfer":
            windows = "1 window" if totals.num_windows == 1 else f"{totals.num_windows} windows"
            lines[-1] += f"  busiest rank {in_bytes(totals.max_rank_bytes)}, {windows}"
    return lines


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
