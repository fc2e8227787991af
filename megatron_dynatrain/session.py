"""The running session: when to switch, what to say of it. One a process, made by the launcher."""

import dataclasses
import sys
import threading
import time
import uuid
from collections.abc import Callable

import torch.distributed as dist

from megatron_dynatrain import memory
from megatron_dynatrain.agenda import NEVER, Agenda, Cost, Dropped, Formed, Item, Switch, Unformed
from megatron_dynatrain.config import Config
from megatron_dynatrain.consensus import gather, together
from megatron_dynatrain.controller import Controller, SwitchReport
from megatron_dynatrain.device_manager import DeviceManager, JobEnded
from megatron_dynatrain.elastic import membership
from megatron_dynatrain.elastic.membership import Membership
from megatron_dynatrain.errors import ConfigError, DynaTrainError, LayoutRefused, RequestDropped, TransferError
from megatron_dynatrain.layout import LAUNCH, Layout
from megatron_dynatrain.passage import Passage
from megatron_dynatrain.promise import Promise
from megatron_dynatrain.registry import Registry
from megatron_dynatrain.report import Report, in_bytes, in_sizes
from megatron_dynatrain.requests import Position, Requests
from megatron_dynatrain.run_dir.files import Answer
from megatron_dynatrain.run_dir.watcher import Baton, Watcher, watch


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
        self.devices: DeviceManager | None = None  # where the ranks of the job may change
        self.waits_as: Membership | None = None  # of a process that does not train from the start
        self.launched = 0  # processes of the launch, with those that wait
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

    def start_waiting(self) -> None:
        """As `start`, on a process that does not train yet. Not collective. Raises LayoutRefused or ConfigError."""
        self._thread = threading.get_ident()
        self.controller = Controller(self.job, Registry(self.config.layouts), self.config)
        self.controller.begin(self.waits_as.launched)
        self.job.start_waiting(LAUNCH)
        self.job.get_ready({name: (entry.layout, self.controller.size_of(name)[0])
                            for name, entry in self.controller.registry.entries.items()})
        self.devices = DeviceManager(self.waits_as, self.controller, self._tell_all)

    def _watch(self) -> Watcher | None:
        """Take the run directory, on rank 0."""
        if dist.get_rank() != 0:
            return None
        return watch(self.config, dist.get_world_size(), self._agenda.train_iters, self.controller.current,
                     self.controller.sizes, lambda: self.iteration)

    def _start(self, iteration: int, train_iters: int) -> None:
        store = dist.distributed_c10d._get_default_store()
        if self.config.elastic is not None:
            self.devices = DeviceManager(self._membership(), self.controller, self._tell_all)
            store = self.devices.membership.store
        self.controller.start()
        self._open_report_file()
        self._report.event("start", iteration=iteration, world_size=dist.get_world_size(), train_iters=train_iters,
                           layout=self.controller.current, sizes=self.controller.sizes,
                           layouts={name: entry.layout.arguments() for name, entry in
                                    self.controller.registry.entries.items()},
                           schedule=[[switch.at_iteration, switch.layout] for switch in self.config.schedule])
        self._listen(Position(), store)
        self.at_boundary(iteration)  # what is due before the first step

    def _membership(self) -> Membership:
        """How this process belongs to the job, and on rank 0 what others need to join it. Collective."""
        def joined():
            own = membership.of_trainer(self.config, dist.get_rank(), dist.get_world_size(), self.launched or dist.get_world_size(),
                                        run, self.job.book.raw, self.job.args.dynatrain_config)
            if self._watcher is not None:
                self._watcher.update(store=own[1], ranks=list(range(dist.get_world_size())))
            return own[0]

        runs = gather(None if self._watcher is None else self._watcher.run)
        run = next((run for run in runs if run is not None), None) or uuid.uuid4().hex
        return together(ConfigError, "ranks cannot join this job", joined)

    def _open_report_file(self) -> None:
        is_writer = dist.get_rank() == dist.get_world_size() - 1  # where Megatron's own writers are
        path = self.config.report_path
        self._report = together(ConfigError, f"`dynatrain.{'report' if self.config.report else 'run_dir'}`: {path} cannot be "
                                "written; give a path on storage that the last rank can write to", Report,
                                path if is_writer else None)

    def _report_file_of_new_rank(self) -> Report:
        """After a change of ranks, which no file may stop any more."""
        try:
            return Report(self.config.report_path if dist.get_rank() == dist.get_world_size() - 1 else None)
        except OSError as error:
            print(f"[dynatrain] the report {self.config.report_path} cannot be written by the rank that is the last one now "
                  f"({error}): events are missing in it from here on; training goes on", file=sys.stderr, flush=True)
            return Report(None)

    def _listen(self, position: Position, store) -> None:
        """Hear what is asked from now on, as a rank that trains."""
        self._requests = Requests(store, dist.get_rank(), dist.get_world_size(), self._look_at_next_boundary,
                                  0 if self.devices is None else self.devices.generation, position)
        if self.devices is not None:
            self.devices.train(is_first=dist.get_rank() == 0)
        if self._watcher is not None:
            self._watcher.update(state="training")
            self._watcher.open(self._told_by_watcher(store))

    def _told_by_watcher(self, store=None) -> Callable:
        """How the watcher's thread tells all ranks, over a connection of its own."""
        requests, own_store = self._requests, (store or self.devices.membership.store).clone()
        return lambda message: requests.put(message, own_store)

    def _tell_all(self, message, store) -> None:
        """Tell all ranks, from another thread than the one that trains."""
        self._requests.put(message, store)

    def _look_at_next_boundary(self) -> None:
        self.boundary = 0

    def _set_boundary(self) -> None:
        """The next iteration of the agenda; every iteration while a message is on its way."""
        if self.devices is not None:
            self.devices.want(self._agenda.wishes)
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
        self.controller.check(entry)
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
                if isinstance(message, Formed | Unformed):
                    if message.base != self.devices.generation:
                        continue  # the ranks have changed meanwhile
                    if isinstance(message, Unformed):
                        self.devices.drop(message.generation, message.id)
                dropped += self._agenda.hear(message, iteration)
        self.pending, superseded = self._agenda.take(iteration)
        if self.devices is not None:
            self._sort_out()
        for drop in dropped + superseded:
            self._drop(drop, iteration)
        self._set_boundary()
        return bool(self.pending)

    def _sort_out(self) -> None:
        """Of what is due, what waits for other ranks goes back to the agenda; and ranks that nobody wants any more are let go."""
        self.pending = self._agenda.sort_out(self.pending, self._must_wait_for_ranks)
        # Who is ready for one thing cannot be made ready for another.
        next_wish = next((wish.key for wish in self._agenda.wishes if self._must_wait_for_ranks(wish.layout)), None)
        for key in self._agenda.formed.keys() - {next_wish, *(item.key for item in self.pending)}:
            self.devices.drop(self._agenda.formed.pop(key), key)

    def _must_wait_for_ranks(self, layout: str | Layout) -> bool:
        """Whether a layout needs other ranks. One that was not described yet is taken for one that does not: it is described at the
        boundary, outside of the loop."""
        return self.controller.changes_ranks(layout) and self.controller.is_described(layout)

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
        self._tell_state("switching")
        while self.pending and not self.job.waits:
            item = self.pending.pop(0)
            self.close_report()
            if item.kind == "cost":
                self._tell_cost(item, iteration)
            elif self.controller.changes_ranks(item.layout):
                self._change_ranks(item, iteration)
            else:
                self._switch_to(item, iteration)
            self._left_at = time.perf_counter()
        if self.job.waits:
            self.pending = []
            return
        self._set_boundary()
        if self.devices is not None:
            self.boundary = 0  # what waits may be possible now
        self._tell_state("training")

    def _change_ranks(self, item: Item, iteration: int) -> None:
        """Go on with other ranks, if they are ready; otherwise when they are."""
        number = self._agenda.formed.pop(item.key, None)
        if number is not None:
            self.devices.want([])  # whatever is begun now would be for ranks that are about to change
            self._attempt(item, iteration, lambda: self._cross(self.devices.call_roll(number, iteration), item, iteration))
            if self.devices.generation != number:
                self.devices.drop(number, item.key)
            return
        try:
            entry = self.controller.registry.find(item.layout)
            self.controller.describe(entry)
        except DynaTrainError as error:
            self._refuse(item, iteration, error)
            return
        self._agenda.wait(item)

    def _cross(self, passage: Passage, item: Item, iteration: int) -> SwitchReport:
        """As a rank that trains until now."""
        moved: list[Baton] = []

        def baton():
            if passage.record.new[0] != passage.record.old[0] and self._watcher is not None:
                moved.append(self._watcher.hand_over())
            return {"agenda": self._agenda, "position": self._requests.position, "items": self.pending, "item": item,
                    "stalls": self._stalls, "watcher": moved[0] if moved else None, "left_at": time.time() - (
                        time.perf_counter() - self._left_at)}

        try:
            report, said = self.controller.cross(passage, iteration, self._left_at, baton)
        except BaseException as error:
            if moved and not isinstance(error, TransferError) and self.controller.members == passage.record.old:
                self._watcher = moved[0].taken(self.config.run_dir, lambda: self.iteration)
                self._watcher.open(self._told_by_watcher())
            if not isinstance(error, TransferError) and self.controller.members == passage.record.old:
                passage.discard()
            raise
        if moved:
            self._watcher = None
        self._settle_in(passage, said)
        return report

    def _settle_in(self, passage: Passage, said: dict) -> None:
        """After a change of ranks, on every process of it."""
        requests, self._requests = self._requests, None
        if requests is not None:
            requests.stop()
            self.devices.afterwards(requests.close)
        if passage.own_src is not None:
            for key, ready in self._agenda.formed.items():
                self.devices.drop(ready, key)
        self._agenda.formed.clear()
        self.devices.settle_in(passage)
        self._report = Report(None)
        if self.job.waits:
            for message_id in set(self._promises) - set(said["item"].ids):
                self._answer((message_id,), "expired", self.iteration, reason="this rank does not train any more")
            return
        if dist.get_rank() == 0 and said["watcher"] is not None:
            self._watcher = said["watcher"].taken(self.config.run_dir, lambda: self.iteration)
        if self._watcher is not None:
            self._watcher.update(ranks=list(passage.record.new), world_size=len(passage.record.new))
        self._report = self._report_file_of_new_rank()
        self._listen(said["position"], self.devices.membership.store)

    def wait(self) -> int:
        """Wait until this process is taken in: the iteration after which it was. Ends the process (SystemExit) with the job."""
        while True:
            try:
                passage, iteration = self.devices.wait()
            except JobEnded as ended:
                print(f"[dynatrain] rank {self.devices.number} of the job, which waits, ends: {ended}", file=sys.stderr, flush=True)
                self.devices.depart()
                raise SystemExit(1 if ended.failed else 0) from None
            started = time.perf_counter()
            try:
                report, said = self.controller.cross(passage, iteration, started, None)
            except TransferError:
                raise
            except DynaTrainError as error:
                print(f"[dynatrain] rank {self.devices.number} of the job was not taken in after iteration {iteration}: {error}",
                      file=sys.stderr, flush=True)
                passage.discard()
                continue
            report.started = started - max(time.time() - said["left_at"] - (time.perf_counter() - started), 0.0)
            self.iteration = iteration
            self._agenda, self._stalls, self.pending = said["agenda"], said["stalls"], said["items"]
            self._settle_in(passage, said)
            self.open_report, self._open_ids = report, said["item"].ids
            self._left_at = time.perf_counter()
            return iteration

    def leave(self) -> None:
        """End this process, which the job does not need any more (SystemExit, code 0), if it is to end."""
        if self.devices.left_for_good:
            print(f"[dynatrain] rank {self.devices.number} of the job has handed over what it held and leaves", flush=True)
            raise SystemExit(0)

    def _switch_to(self, item: Item, iteration: int) -> None:
        self._attempt(item, iteration, lambda: self.controller.switch(item.layout, iteration, self._left_at))

    def _attempt(self, item: Item, iteration: int, switch: Callable[[], SwitchReport | None]) -> None:
        target = item.layout
        try:
            if self.controller.registry.find(target).name != self.controller.current or self.controller.changes_ranks(target):
                start = time.perf_counter()
                together(LayoutRefused, "a callback before the switch failed", self._call_before, iteration, target)
                self._left_at += time.perf_counter() - start
            self.open_report = switch()
        except TransferError:
            raise
        except DynaTrainError as error:
            self._refuse(item, iteration, error)
            return
        if self.job.waits:
            report, self.open_report = self.open_report, None
            self._answer(item.ids, "done", iteration, result=report)
        elif self.open_report is None:
            self._answer(item.ids, "unchanged", iteration, reason=f"the job is in layout {self.controller.current!r} already")
        else:
            self._open_ids = item.ids

    def _refuse(self, item: Item, iteration: int, error: DynaTrainError) -> None:
        """A switch that did not come about: say so, on every rank."""
        target = item.layout
        print(f"[dynatrain] rank {dist.get_rank()}: the switch to {_name(target)!r} after iteration {iteration} was "
              f"refused, training goes on in layout {self.controller.current!r}: {error}", file=sys.stderr, flush=True)
        self._report.event("refused", iteration=iteration, to=_name(target), reason=str(error), kind=type(error).__name__)
        refusal = LayoutRefused(str(error))  # without the frames of the error, in which the new state lives
        for hook in list(self.after_refusal):
            hook(iteration, target, refusal)
        self._answer(item.ids, "refused", iteration, error=refusal, reason=str(error))

    def _call_before(self, iteration: int, target: str | Layout) -> None:
        for hook in list(self.before_switch):
            hook(iteration, target)

    def _tell_cost(self, item: Item, iteration: int) -> None:
        start = time.perf_counter()
        try:
            cost = self.controller.cost(item.layout, lambda layout: self.devices.would_train(layout))
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
            gathered = gather((memory.peak_bytes(), report.phases if self._trained_before(report) else None))
            report.peak_memory_bytes = max((peak for peak, _ in gathered if peak is not None), default=None)
            report.stall_seconds = time.perf_counter() - report.started
            if not self._trained_before(report):  # it was waited for, and measures nothing of what was before
                report.phases = dict(next((phases for _, phases in gathered if phases is not None), report.phases))
            report.phases["resume"] = max(report.stall_seconds - sum(report.phases.values()), 0.0)
            self._tell(report)
            if self.devices is not None:
                self.devices.let_go()
        self.step_begins()

    def _trained_before(self, report: SwitchReport) -> bool:
        return self.devices is None or not report.src_ranks or self.devices.number in report.src_ranks

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
        if self.devices is not None and not self.job.waits:
            self.devices.stop()
            if dist.get_rank() == 0:
                self.devices.end(error or reason, failed=error is not None)
            self.devices.let_go(wait=True)
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
