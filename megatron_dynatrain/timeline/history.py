"""The events of a report, put together: one `Run` for each start of the job, in order."""

from pathlib import Path

import msgspec

from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.report import in_sizes, scan

REPORT = "report.jsonl"


class Start(msgspec.Struct, kw_only=True):
    """A job begins to train, after `iteration`."""

    iteration: int = 0
    time: float | None = None
    world_size: int | None = None
    train_iters: int | None = None
    layout: str = "launch"
    sizes: dict[str, int] = {}


class Step(msgspec.Struct, kw_only=True):
    """A step is complete. seconds: what it took, from its first forward pass to its log."""

    iteration: int
    time: float
    seconds: float | None = None
    losses: dict[str, float] = {}
    consumed_samples: int | None = None


class Switch(msgspec.Struct, kw_only=True):
    """A switch, complete: its stall ended at `time`, by the clock."""

    iteration: int
    time: float
    src: str = msgspec.field(name="from")
    dst: str = msgspec.field(name="to")
    from_sizes: dict[str, int] = {}
    to_sizes: dict[str, int] = {}
    stall_seconds: float
    phases: dict[str, float] = {}
    moved_bytes: int = 0
    minimum_bytes: int = 0
    max_rank_bytes: int = 0
    peak_memory_bytes: int | None = None
    verify: str = "off"

    @property
    def began(self) -> float:
        return self.time - self.stall_seconds


class Refused(msgspec.Struct, kw_only=True):
    """A switch that was asked for and did not come about: refused with an error of `kind`, or, without one, superseded by one
    to `by`, expired or taken back."""

    iteration: int
    time: float
    dst: str = msgspec.field(name="to")
    kind: str = ""
    reason: str = ""
    by: str = ""


class End(msgspec.Struct, kw_only=True):
    """Training has ended, after `iteration` where that is known; by an exception where `error` names one."""

    time: float
    iteration: int | None = None
    error: str | None = None


class Stretch(msgspec.Struct, kw_only=True):
    """A part of a run in one layout: the steps after iteration `begin`, up to and with `end`."""

    layout: str
    sizes: dict[str, int]
    begin: int
    end: int
    began: float | None
    ended: float | None
    steps: list[Step]

    @property
    def name(self) -> str:
        """The layout for people: 'deep (TP1 PP4 DP2)'."""
        return f"{self.layout} ({in_sizes(self.sizes)})" if self.sizes else self.layout


class Run(msgspec.Struct, kw_only=True):
    """One start of a job, to its end or to where the report stops."""

    start: Start
    stretches: list[Stretch]
    switches: list[Switch] = []
    refused: list[Refused] = []
    end: End | None = None
    last_time: float | None = None

    @property
    def steps(self) -> list[Step]:
        return [step for stretch in self.stretches for step in stretch.steps]

    @property
    def last_iteration(self) -> int:
        """The last iteration of which the report knows."""
        return self.stretches[-1].end

    @property
    def seconds(self) -> float | None:
        """From the start to the last event."""
        if self.start.time is None or self.last_time is None:
            return None
        return self.last_time - self.start.time


_KINDS = {"start": Start, "step": Step, "switch": Switch, "end": End,
          **dict.fromkeys(("refused", "superseded", "expired", "cancelled"), Refused)}


def report_of(path: str | Path) -> Path:
    """The report that is meant by a run directory, or by the path of the report itself. Raises ConfigError."""
    path = Path(path)
    if path.is_dir():
        if not (path / REPORT).is_file():
            raise ConfigError(f"report {path}: the directory holds no {REPORT}; give the directory of a run, or the file that "
                              "`dynatrain.report` of its configuration names")
        return path / REPORT
    if not path.is_file():
        raise ConfigError(f"report {path}: there is no such file or directory; give the directory of a run, or the file that "
                          "`dynatrain.report` of its configuration names")
    return path


def read(path: str | Path) -> tuple[list[Run], int]:
    """(the runs in a report, number of lines left out because they are no events). Raises ConfigError if it cannot be read."""
    try:
        events, num_bad = scan(path)
    except OSError as error:
        raise ConfigError(f"report {path}: the file cannot be read ({error}); give one that you may read") from None
    runs: list[Run] = []
    for event in events:
        kind = _KINDS.get(event["event"])
        if kind is None:
            continue  # of a later release, or a user's own
        try:
            _take(runs, msgspec.convert(event, kind))
        except msgspec.ValidationError:
            num_bad += 1
    return runs, num_bad


def _take(runs: list[Run], event) -> None:
    """Add an event to the run that it belongs to."""
    if isinstance(event, Start):
        runs.append(_begun(event))
    elif not runs:  # the beginning is missing
        first = getattr(event, "iteration", None) or 0
        runs.append(_begun(Start(iteration=first - isinstance(event, Step), time=event.time)))
    run = runs[-1]
    stretch = run.stretches[-1]
    if event.time is not None:
        run.last_time = stretch.ended = event.time
    if isinstance(event, Step):
        stretch.steps.append(event)
        stretch.end = event.iteration
    elif isinstance(event, Switch):
        _switched(run, event)
    elif isinstance(event, Refused):
        run.refused.append(event)
        stretch.end = max(stretch.end, event.iteration)
    elif isinstance(event, End):
        run.end = event
        stretch.end = max(stretch.end, event.iteration or 0)


def _begun(start: Start) -> Run:
    stretch = Stretch(layout=start.layout, sizes=start.sizes, begin=start.iteration, end=start.iteration, began=start.time,
                      ended=start.time, steps=[])
    return Run(start=start, stretches=[stretch], last_time=start.time)


def _switched(run: Run, switch: Switch) -> None:
    before = run.stretches[-1]
    before.layout, before.sizes = switch.src, switch.from_sizes or before.sizes
    before.end, before.ended = switch.iteration, switch.began
    run.switches.append(switch)
    run.stretches.append(Stretch(layout=switch.dst, sizes=switch.to_sizes, begin=switch.iteration, end=switch.iteration,
                                 began=switch.time, ended=switch.time, steps=[]))
