"""TensorBoard, W&B and timers across switches: Megatron's own writers go on as if nothing had happened, and show them."""

import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from megatron_dynatrain.megatron import writers as writers_module
from megatron_dynatrain.megatron.writers import Writers

pytest.importorskip("tensorboard")

LAYOUTS = {"deep": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 4},
           "wide": {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 1}}
CONFIG = {"layouts": LAYOUTS, "verify": "full",
          "schedule": [{"at_iteration": 2, "layout": "deep"}, {"at_iteration": 4, "layout": "wide"}]}


def events_below(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalars(folder):
    """{tag: [(step, value)]} of all event files below a folder."""
    events = events_below(folder)
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def texts(folder):
    """{tag: [(step, text)]} of all event files below a folder."""
    events = events_below(folder)
    return {tag.removesuffix("/text_summary"): [(event.step, event.tensor_proto.string_val[0].decode())
                                                for event in events.Tensors(tag)] for tag in events.Tags()["tensors"]
            if tag.endswith("/text_summary")}


def run(jobs, folder, **more):
    arguments = {"train-iters": 6, "tensorboard-dir": str(folder / "tensorboard"), "tensorboard-log-interval": 1,
                 "log-timers-to-tensorboard": True, "timing-log-level": 1, "logging-level": 20, "wandb-project": "p",
                 "wandb-exp-name": "e", "wandb-save-dir": str(folder / "wandb")}
    return jobs.run(folder, 4, arguments, probe="probes:wandb", **more).assert_ok()


@pytest.fixture(scope="module")
def plain(jobs, tmp_path_factory):
    return run(jobs, tmp_path_factory.mktemp("plain"), kind="plain")


@pytest.fixture(scope="module")
def switched(jobs, tmp_path_factory):
    result = run(jobs, tmp_path_factory.mktemp("switched"), config=CONFIG)
    assert [event["to"] for event in result.events_of("switch")] == ["deep", "wide"]
    return result


def test_curves_are_those_of_a_run_without_a_switch(plain, switched):
    curves, expected = scalars(switched.folder / "tensorboard"), scalars(plain.folder / "tensorboard")
    assert curves.keys() >= expected.keys() >= {"lm loss", "grad-norm", "learning-rate", "batch-size"}
    assert all("dynatrain" in tag for tag in curves.keys() - expected.keys())
    for tag in ("lm loss", "grad-norm", "learning-rate", "batch-size"):
        assert [step for step, _ in curves[tag]] == [step for step, _ in expected[tag]], tag
        assert [v for _, v in curves[tag]] == pytest.approx([v for _, v in expected[tag]], rel=1e-5, abs=0), tag
    assert [step for step, _ in curves["lm loss"]] == [1, 2, 3, 4, 5, 6]
    # One rank writes to W&B, from the first step to the end.
    logged = switched.records("wandb")
    assert [record for record in logged if not any("dynatrain" in name for name in record.get("names", ()))
            ] == plain.records("wandb")
    assert logged[-1] == {"finished": True}


def test_switches_are_in_tensorboard(switched):
    curves = scalars(switched.folder / "tensorboard")
    for event in switched.events_of("switch"):
        at = event["iteration"]
        expected = {"stall_seconds": event["stall_seconds"], "moved_bytes": event["moved_bytes"],
                    "minimum_bytes": event["minimum_bytes"], "max_rank_bytes": event["max_rank_bytes"],
                    "peak_memory_bytes": event["peak_memory_bytes"],
                    **{f"phase/{name}": seconds for name, seconds in event["phases"].items()}}
        assert {"phase/transfer", "phase/build", "phase/verify"} < expected.keys()
        for name, value in expected.items():
            assert dict(curves[f"dynatrain/{name}"])[at] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    assert len(curves["dynatrain/stall_seconds"]) == 2
    # The sizes are those with which an iteration was trained: those of its layout at its first and its last one.
    assert {size: curves[f"dynatrain/layout/{size}"] for size in ("TP", "PP", "DP", "EP")} == {
        "TP": [(1, 1), (2, 1), (3, 1), (4, 1), (5, 4)], "PP": [(1, 1), (2, 1), (3, 4), (4, 4), (5, 1)],
        "DP": [(1, 4), (2, 4), (3, 1), (4, 1), (5, 1)], "EP": [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1)]}
    assert {tag: said for tag, said in texts(switched.folder / "tensorboard").items() if "dynatrain/" in tag} == {
        "dynatrain/layout": [(1, "launch (TP1 PP1 DP4)"), (3, "deep (TP1 PP4 DP1)"), (5, "wide (TP4 PP1 DP1)")],
        "dynatrain/switch": [(2, "launch (TP1 PP1 DP4) -> deep (TP1 PP4 DP1) after iteration 2"),
                             (4, "deep (TP1 PP4 DP1) -> wide (TP4 PP1 DP1) after iteration 4")]}


def test_nothing_is_written_during_a_stall(switched):
    """Megatron writes its arguments, a text each, when its loop is entered; after a switch they come with the switch."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    path, = (switched.folder / "tensorboard").glob("events*")
    written = [(value.tag, event.step) for event in EventFileLoader(str(path)).Load() for value in event.summary.value]
    for iteration in (2, 4):
        last = max(i for i, (tag, step) in enumerate(written) if step == iteration and tag == "optimizer-time")
        switch = written.index(("dynatrain/layout/TP", iteration))
        arguments = written.index(("tensor_model_parallel_size/text_summary", iteration))
        first = written.index(("lm loss", iteration + 1))
        assert last + 1 == switch < arguments < first


def test_switches_are_in_wandb_in_the_order_that_it_takes(switched):
    records = [record for record in switched.records("wandb") if "step" in record]
    steps = [record["step"] for record in records]
    assert steps == sorted(steps)  # W&B drops what comes for an earlier step
    stalls = [(record["step"], record["switch"]["dynatrain/stall_seconds"]) for record in records
              if "dynatrain/stall_seconds" in record["switch"]]
    assert stalls == [(event["iteration"], pytest.approx(event["stall_seconds"], abs=1e-6))
                      for event in switched.events_of("switch")]
    assert [record["switch"]["dynatrain/layout"] for record in records if "dynatrain/layout" in record["switch"]] == [
        "launch (TP1 PP1 DP4)", "deep (TP1 PP4 DP1)", "wide (TP4 PP1 DP1)"]


def test_switches_are_in_megatrons_timers(plain, switched):
    curves, expected = (scalars(result.folder / "tensorboard") for result in (switched, plain))
    events = switched.events_of("switch")
    assert "dynatrain-switch-time" not in expected
    # The slowest rank's, at the first log after the switch, and once.
    assert [step for step, _ in curves["dynatrain-switch-time"]] == [3, 5]
    for (_, slowest), event in zip(curves["dynatrain-switch-time"], events, strict=True):
        assert slowest > event["stall_seconds"] * (1 - 1e-5)
    assert {f"dynatrain-{phase}-time" for phase in events[0]["phases"]} <= curves.keys()
    logged = re.findall(r"dynatrain-switch \.+: \(([\d.]+), ([\d.]+)\)", switched.logs[-1])
    assert len(logged) == 2 and all(float(low) <= float(high) for low, high in logged)
    for tag in ("forward-backward-time", "optimizer-time"):
        assert [step for step, _ in curves[tag]] == [step for step, _ in expected[tag]], tag


def test_rank_0_says_one_line_a_phase(switched):
    events = switched.events_of("switch")
    lines = [line for line in switched.logs[0].splitlines() if line.startswith("[dynatrain]")]
    assert not any("[dynatrain]" in log for log in switched.logs[1:])
    blocks = [i for i, line in enumerate(lines) if "after iteration" in line]
    assert len(blocks) == len(events) == 2
    for begin, event in zip(blocks, events, strict=True):
        said = [re.fullmatch(r"\[dynatrain\]   (\w+) +[\d.]+ s +\d+ %.*", line) for line in
                lines[begin + 1:begin + 1 + len(event["phases"])]]
        assert [match and match[1] for match in said] == list(event["phases"])


# The rest needs no job.

def report(iteration, src, dst, **more):
    return SimpleNamespace(iteration=iteration, src="a", dst="b", src_sizes=src, dst_sizes=dst, src_ranks=(), dst_ranks=(),
                           stall_seconds=1.5, phases={"transfer": 1.0}, peak_memory_bytes=None,
                           totals=SimpleNamespace(moved_bytes=8, minimum_bytes=8, max_rank_bytes=4), **more)


class Timers:
    """Megatron's timers of log level 0."""

    def __init__(self):
        self.known, self.logged = {}, []

    def __call__(self, name, log_level):
        return SimpleNamespace() if log_level else self.known.setdefault(name, SimpleNamespace(_elapsed=0.0))

    def log(self, names):
        self.logged.append({name: self.known[name]._elapsed for name in names})


@pytest.fixture
def found(monkeypatch):
    """Stands for Megatron's global writers; `calls` are what they were given."""
    found = SimpleNamespace(calls=[], timers=Timers(), board=None, wandb=None, one_logger=None)
    found.get_timers, found.get_args = lambda: found.timers, lambda: SimpleNamespace(log_timers_to_tensorboard=False)
    found.get_tensorboard_writer, found.get_wandb_writer = lambda: found.board, lambda: found.wandb
    found.get_one_logger = lambda: found.one_logger
    found.log = lambda values, step=None: found.calls.append((step, values))
    monkeypatch.setattr(writers_module, "_globals", lambda: found)
    return found


def test_several_switches_at_one_boundary_keep_the_order_of_steps(found):
    found.wandb = SimpleNamespace(log=found.log)
    writers = Writers()
    writers.add(report(3, {"TP": 1, "DP": 4}, {"TP": 2, "DP": 2}))
    writers.add(report(3, {"TP": 2, "DP": 2}, {"TP": 2, "EP": 2, "DP": 2}))
    assert writers.is_due
    writers.write(4, "b", {"TP": 2, "EP": 2, "DP": 2})
    assert not writers.is_due
    assert [(step, values.get("dynatrain/layout/TP"), values.get("dynatrain/layout/EP")) for step, values in found.calls] == [
        (3, 1, 1), (3, None, None), (3, None, None), (4, 2, 2)]
    assert found.calls[1][1]["dynatrain/stall_seconds"] == 1.5
    assert "dynatrain/peak_memory_bytes" not in found.calls[1][1]  # the system did not say


def test_timers_add_up_until_they_are_logged(found):
    writers = Writers()
    writers.add(report(3, {"TP": 1}, {"TP": 2}))
    writers.add(report(3, {"TP": 2}, {"TP": 1}))
    assert writers.has_times
    writers.log_timers(4)
    assert found.timers.logged == [{"dynatrain-switch": 3.0}] and not writers.has_times  # no phases at log level 0


def test_the_one_logger_gets_the_numbers(found):
    found.one_logger = SimpleNamespace(get_context_manager=nullcontext, log_metrics=found.log)
    writers = Writers()
    writers.add(report(3, {"TP": 1}, {"TP": 2}))
    writers.write(4, "b", {"TP": 2})
    assert {"dynatrain/stall_seconds": 1.5, "dynatrain/moved_bytes": 8}.items() <= found.calls[1][1].items()


def test_a_failing_writer_gives_one_warning(found, capsys):
    def full(*args):
        raise OSError("no space left on device")

    found.board, found.wandb = SimpleNamespace(add_scalar=full, add_text=full), SimpleNamespace(log=found.log)
    writers = Writers()
    for iteration in (3, 5):
        writers.add(report(iteration, {"TP": 1}, {"TP": 2}))
        writers.write(iteration + 1, "b", {"TP": 2})
    warnings = capsys.readouterr().err
    assert warnings.count("\n") == 1 and "TensorBoard did not take" in warnings and "no space left on device" in warnings
    assert [step for step, _ in found.calls] == [3, 3, 4, 5, 5, 6]  # the other writer has it all
