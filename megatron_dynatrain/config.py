"""The YAML configuration: what may be written in it, and errors that say where it is wrong.

    dynatrain:
      layouts:
        deep: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 4}
      schedule:
        - {at_iteration: 10, layout: deep}   # after iteration 10 has finished
      verify: full                           # off | digest | full
      run_dir: runs/demo                     # requests from outside, answers, status, report.jsonl
"""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml

from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.layout import LAUNCH, Layout, nearest


class ScheduledSwitch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One planned switch: to `layout`, after iteration `at_iteration` has finished; 0 is before the first step."""

    at_iteration: Annotated[int, msgspec.Meta(ge=0)]
    layout: str


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """staging_bytes: the scratch that a rank may use in a switch; one value for all ranks. timeout_seconds: how long a rank
    waits for the others in one window of the transfer. memory_limit_bytes: what a rank may hold at most during a switch, its
    state and the scratch; None for what is free on its GPU. keep_old_state: whether the old state stays in memory until the
    switch is verified, so that a failed verification goes back to it; None for whether anything is verified."""

    staging_bytes: Annotated[int, msgspec.Meta(ge=4096)] = 64 << 20
    timeout_seconds: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    memory_limit_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    keep_old_state: bool | None = None


class ElasticConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ranks of the job may change while it runs. Needs `run_dir`.

    world_size: how many of the launched ranks train in the layout of the launch; None for all. spares: how many ranks that a
    layout does not need wait to be taken in again; what is more leaves the job. store: HOST:PORT of `python -m
    megatron_dynatrain store`; None for the store of the launch. patience_seconds: how long a rank that does not answer, while the
    next world is made, is waited for.
    """

    world_size: Annotated[int, msgspec.Meta(gt=0)] | None = None
    spares: Annotated[int, msgspec.Meta(ge=0)] = 0
    store: Annotated[str, msgspec.Meta(pattern=r"^[^:\s]+:\d+$")] | None = None
    patience_seconds: Annotated[float, msgspec.Meta(gt=0)] = 30.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The value of the top-level key `dynatrain`.

    verify: 'off', 'digest' (layout-independent checksums) or 'full' (every bit of every replica).
    run_dir: a directory that all nodes see, through which a running job is asked from outside.
    report: path of a JSON-lines file of events, written by the last rank; report_steps adds one event per logged step.
    elastic: set if ranks may join and leave.
    """

    layouts: dict[str, Layout] = {}
    schedule: list[ScheduledSwitch] = []
    verify: Literal["off", "digest", "full"] = "off"
    run_dir: str | None = None
    report: str | None = None
    report_steps: bool = False
    transfer: TransferConfig = TransferConfig()
    elastic: ElasticConfig | None = None

    @property
    def keeps_old_state(self) -> bool:
        """Whether the old state stays in memory until a switch is over."""
        keep = self.transfer.keep_old_state
        return self.verify != "off" if keep is None else keep

    @property
    def report_path(self) -> str | None:
        """`report`, or the report of `run_dir`."""
        return self.report if self.report or not self.run_dir else str(Path(self.run_dir, "report.jsonl"))


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dynatrain: Config


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with two differences: a key given twice is an error and not silently the last one, and only
    true and false are booleans, as in YAML 1.2, so that `verify: off` is the word."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()}

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
                              list("tTfF"))


def load(path: str) -> Config:
    """Read and check a configuration file. Raises ConfigError, which names the file, the place and what to write."""
    return parse(read_text(path, f"--dynatrain-config {path}", " that every rank can read"), path)


def read_text(path: str, source: str, where: str = "") -> str:
    """The text of a YAML file. `source` names it in messages. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: the file cannot be read ({error}); give the path of a YAML file{where}") from None


def read_yaml(text: str, source: str):
    """The value that a YAML text stands for. `source` names it in messages. Raises ConfigError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None


def parse(text: str, source: str = "<text>") -> Config:
    """Check the text of a configuration. `source` names it in messages. Raises ConfigError."""
    data = read_yaml(text, f"--dynatrain-config {source}")
    path = "$"
    try:
        for name, layout in _layouts(data).items():  # one by one: only so does a message name the layout
            path = f"$.dynatrain.layouts.{name}"
            msgspec.convert(layout, Layout)
        path = "$"
        config = msgspec.convert(data, _File).dynatrain
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"--dynatrain-config {source}: {_explained(str(error), path)}") from None
    if config.verify == "full" and not config.keeps_old_state:
        raise ConfigError(f"--dynatrain-config {source}: `dynatrain.transfer.keep_old_state`: false was given, but `verify: full` "
                          "compares with the old state; write true, or `verify: digest`")
    if config.elastic is not None and config.run_dir is None:
        raise ConfigError(f"--dynatrain-config {source}: `dynatrain.elastic` needs `dynatrain.run_dir`, where ranks that join "
                          "find the job; name a directory that all machines see")
    named = [name for name, layout in config.layouts.items() if layout.num_ranks is not None]
    if config.elastic is None and named:
        raise ConfigError(f"--dynatrain-config {source}: `dynatrain.layouts.{named[0]}` says how many ranks it wants, and the "
                          "ranks of the job change with `dynatrain.elastic` alone; add it (`elastic: {}`), or leave world_size "
                          "and ranks out")
    if LAUNCH in config.layouts:
        raise ConfigError(f"--dynatrain-config {source}: `dynatrain.layouts.{LAUNCH}`: {LAUNCH!r} is the layout of the command "
                          "line and cannot be declared; choose another name")
    known = {LAUNCH, *config.layouts}
    previous = 0
    for i, switch in enumerate(config.schedule):
        where = f"--dynatrain-config {source}: `dynatrain.schedule[{i}]`"
        if switch.layout not in known:
            raise ConfigError(f"{where}: there is no layout {switch.layout!r}{nearest(switch.layout, known)}")
        if switch.at_iteration < previous:
            raise ConfigError(f"{where}: at_iteration {switch.at_iteration} comes after {previous} in the list but before it "
                              "in time; write the schedule in the order of iterations")
        previous = switch.at_iteration
    return config


def _layouts(data) -> dict:
    body = data.get("dynatrain") if isinstance(data, dict) else None
    layouts = body.get("layouts") if isinstance(body, dict) else None
    return layouts if isinstance(layouts, dict) else {}


def parse_layout(text: str, flag: str) -> Layout:
    """The layout that 'tensor_model_parallel_size=4,pipeline_model_parallel_size=8' stands for; values are YAML scalars.
    `flag` names it in messages. Raises ConfigError."""
    sizes = {}
    for part in filter(None, map(str.strip, re.split(r",(?=\s*\w+\s*=)", text))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name in sizes:
            raise ConfigError(f"{flag} {text!r}: {part!r} was given, but a layout is a list of different name=value, as in "
                              "'tensor_model_parallel_size=4,pipeline_model_parallel_size=8'")
        sizes[name] = read_yaml(value, f"{flag} {text!r}: `{name}`")
    try:
        return msgspec.convert(sizes, Layout)
    except (msgspec.ValidationError, ConfigError) as error:
        raise ConfigError(f"{flag} {text!r}: {_explained(str(error), '$', Layout)}") from None


_STRUCTS = {"dynatrain": Config, "transfer": TransferConfig, "elastic": ElasticConfig,
            "schedule": ScheduledSwitch, "layouts": Layout}


def _explained(message: str, base: str, top=_File) -> str:
    """msgspec's message about the value at `base`, with the path as a user writes it and the nearest known key. `top` is what
    the whole stands for."""
    match = re.fullmatch(r"(.*?)(?: - at `(.*)`)?", message, re.DOTALL)
    what, path = match[1], (base + (match[2] or "$").removeprefix("$")).removeprefix("$").removeprefix(".")
    unknown = re.search(r"unknown field `(.*)`", what)
    where = f"`{path}`: " if path else ""
    if not unknown:
        return f"{where}{what}"
    parts = [part for part in re.split(r"[.\[]", path) if part and not part.endswith("]")]
    known = next((_STRUCTS[part] for part in reversed(parts) if part in _STRUCTS), top).__struct_fields__
    hint = nearest(unknown[1], known)
    if unknown[1] == "data_parallel_size":
        hint = "; the data-parallel size follows from the other sizes and the number of ranks, as in Megatron"
    return f"{where}unknown key {unknown[1]!r}{hint}"
