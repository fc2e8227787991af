"""The report of a run read back: from a real job, and from files as killed jobs and full disks leave them."""

import json
import math
import os
import subprocess
import sys

import pytest
from conftest import ROOT

from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.report import Report, read
from megatron_dynatrain.timeline import history, picture, show, summary

LAYOUTS = {"deep": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2},
           "wide": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1}}


@pytest.fixture(scope="module")
def job(jobs, tmp_path_factory):
    """A job whose first switch is refused, and that is started twice in one folder: anew, not from a checkpoint."""
    folder = tmp_path_factory.mktemp("job")
    schedule = [{"at_iteration": at, "layout": layout} for at, layout in ((2, "deep"), (4, "wide"), (7, "deep"))]
    for last in (4, 10):
        result = jobs.run(folder, 2, {"train-iters": last, "global-batch-size": 4}, {
            "layouts": LAYOUTS, "verify": "full", "report_steps": True, "schedule": schedule}, probe="probes:fail_on_one_rank",
            on_rank=1, step="build").assert_ok()
    return result


def report(*words):
    return subprocess.run([sys.executable, "-m", "megatron_dynatrain", "report", *map(str, words)], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})


def test_a_job_is_read_back(job):
    runs, num_bad = history.read(job.folder / "report.jsonl")
    assert num_bad == 0 and [(run.start.iteration, run.last_iteration, run.start.train_iters) for run in runs] == [
        (0, 4, 4), (0, 10, 10)]
    assert [run.end.iteration for run in runs] == [4, 10] and all(run.end.error is None for run in runs)
    for run in runs:
        assert [(event.iteration, event.dst, event.kind) for event in run.refused] == [(2, "deep", "LayoutRefused")]
        assert "no memory on this rank" in run.refused[0].reason
        assert run.start.sizes == {"TP": 1, "PP": 1, "DP": 2}
    last = runs[-1]
    assert [(s.layout, s.begin, s.end, [step.iteration for step in s.steps]) for s in last.stretches] == [
        ("launch", 0, 4, [1, 2, 3, 4]), ("wide", 4, 7, [5, 6, 7]), ("deep", 7, 10, [8, 9, 10])]
    assert [step.losses["lm loss"] for step in last.steps] == [job.steps[i]["loss"] for i in range(1, 11)]
    # Wall clock and durations agree: steps and stalls follow one another and none is longer than the time that it has.
    ends = [last.start.time]
    for event in sorted([*last.steps, *last.switches], key=lambda event: event.time):
        took = event.seconds if isinstance(event, history.Step) else event.stall_seconds
        assert 0 < took <= event.time - ends[-1] + 0.002, event  # times of day are rounded to milliseconds
        ends.append(event.time)
    assert all(switch.peak_memory_bytes > 10_000_000 for switch in last.switches)


def test_the_summary_of_a_job(job):
    runs, num_bad = history.read(job.folder / "report.jsonl")
    found = {of.layout: of for of in summary.of_layouts(runs)}
    assert {name: of.num_steps for name, of in found.items()} == {"launch": 8, "wide": 3, "deep": 3}
    for name, of in found.items():
        times = sorted(step.seconds for run in runs for s in run.stretches if s.layout == name for step in s.steps)
        assert times[0] <= of.median_step_seconds <= of.p95_step_seconds == times[-1]
        assert of.samples_per_second == pytest.approx(4 / of.median_step_seconds)
    stalls = [event["stall_seconds"] for event in job.events_of("switch")]
    total, part = summary.stalled(runs)
    assert total == pytest.approx(sum(stalls)) and 0 < part < 1


def test_the_command_prints_and_draws(job):
    done = report(job.folder)
    assert done.returncode == 0, done.stderr
    assert "start 2 of 2" in done.stdout and "iterations 1 to 10 of 10" in done.stdout
    assert "TP2 PP1 DP1" in done.stdout and "no memory on this rank" in done.stdout
    assert not set("│┃━") & set(done.stdout)  # no frames where no terminal is
    assert (job.folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    of_file = report(job.folder / "report.jsonl", "--json")
    assert of_file.returncode == 0, of_file.stderr
    numbers = json.loads(of_file.stdout)
    assert [(s["iteration"], s["from"], s["to"]) for s in numbers["runs"][1]["switches"]] == [
        (4, "launch", "wide"), (7, "wide", "deep")]
    assert numbers["runs"][1]["switches"][0]["phases"].keys() == job.events_of("switch")[0]["phases"].keys()
    assert [len(run["refused"]) for run in numbers["runs"]] == [1, 1]
    assert "steps" not in numbers["runs"][0]


def test_a_picture_is_drawn_where_it_is_asked_for_and_in_the_format_asked_for(job, tmp_path):
    done = report(job.folder, "--json", "--plot", tmp_path / "new" / "timeline.svg", "--over", "time")
    assert done.returncode == 0 and json.loads(done.stdout), done.stderr
    assert "<svg" in (tmp_path / "new" / "timeline.svg").read_text()
    (tmp_path / "file").write_text("")
    blocked = report(job.folder, "--plot", tmp_path / "file" / "timeline.png")
    assert blocked.returncode == 2 and "--plot" in blocked.stderr and "Traceback" not in blocked.stderr


# Files as they come. Events are written by hand from here on.

def step(iteration, seconds=0.5, loss=3.0, **more):
    return {"event": "step", "time": 1000.0 + iteration, "iteration": iteration, "seconds": seconds,
            "losses": {"lm loss": loss}, "consumed_samples": 8 * iteration, **more}


def switch(iteration, src="launch", dst="deep", stall=0.25, **more):
    return {"event": "switch", "time": 1000.5 + iteration, "iteration": iteration, "from": src, "to": dst,
            "from_sizes": {"TP": 2, "DP": 2}, "to_sizes": {"TP": 1, "DP": 4}, "stall_seconds": stall,
            "phases": {"transfer": 0.8 * stall, "resume": 0.2 * stall}, "moved_bytes": 100, "minimum_bytes": 100, **more}


START = {"event": "start", "time": 1000.0, "iteration": 0, "world_size": 4, "train_iters": 9, "layout": "launch",
         "sizes": {"TP": 2, "DP": 2}}


def written(folder, *events, tail=""):
    path = folder / "report.jsonl"
    path.write_text("".join(json.dumps(event) + "\n" for event in events) + tail)
    return path


def shown(path, **more):
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    show.show(*history.read(path), str(path), Console(file=out, width=200, markup=False), **more)
    return out.getvalue()


def everything(path, folder):
    """The tables of a report, after its JSON and its pictures were made."""
    runs, num_bad = history.read(path)
    json.dumps(summary.as_json(runs, num_bad, str(path)), allow_nan=False)
    for over in ("iteration", "time") if runs else ():
        picture.draw(runs, folder / f"{over}.png", over)
        assert (folder / f"{over}.png").stat().st_size > 5000
    return shown(path)


@pytest.mark.parametrize("events, tail, expected", [
    pytest.param([], "", ["holds no events of a run yet"], id="empty"),
    pytest.param([START], "", ["no switches", "no end is reported"], id="start-alone"),
    pytest.param([START, step(1), step(2)], "", ["iterations 1 to 2 of 9", "no switches"], id="no-switch"),
    pytest.param([START, step(1)], '{"event": "step", "iter', ["iterations 1 to 1", "1 line is no whole event"],
                 id="half-a-line"),
    pytest.param([START, step(1), switch(1),
                  {"event": "end", "time": 1004.0, "iteration": None, "error": "OutOfMemoryError"}], "",
                 ["ended by OutOfMemoryError", "1 switch stalled training for 250 ms, 6.2 % of the time"],
                 id="ended-by-an-error"),
    pytest.param([START, switch(3), switch(6, "deep", "launch")], "", ["launch TP2 DP2", "report_steps: true"], id="no-steps"),
    pytest.param([switch(3), step(4)], "", ["deep"], id="no-start"),
    pytest.param([step(5)], "", ["iterations 5 to 5"], id="a-step-alone"),
    pytest.param([START, step(1, loss=math.nan), step(2, loss=math.inf)], "", ["lm loss inf"], id="loss-is-no-number"),
    pytest.param([START, {"event": "refused", "time": 1001.0, "iteration": 1, "to": "deep", "kind": "LayoutRefused",
                          "reason": "[no] room"},
                  {"event": "superseded", "time": 1001.0, "iteration": 1, "to": "wide", "by": "deep"}], "",
                 ["Did not come about", "[no] room", "superseded by deep"], id="refused-and-superseded"),
    pytest.param([START, {"event": "expired", "time": 1001.0, "iteration": 4, "to": "deep", "reason": "iteration 3 has passed"},
                  {"event": "cancelled", "time": 1001.0, "iteration": 5, "to": "wide", "reason": "it was taken back"}], "",
                 ["Did not come about", "iteration 3 has passed", "it was taken back"], id="expired-and-cancelled"),
    pytest.param([START, {"event": "step", "time": 1, "iteration": "x"}, {"event": 3}, [1], "word", None, {"event": "lunch"},
                  {"event": "switch", "time": 1001.0, "iteration": 1}], "\x00\x00\n{}\n",
                 ["8 lines are no whole events", "nothing is reported after iteration 0 of 9"], id="hostile"),
])
def test_files_as_they_come(tmp_path, events, tail, expected):
    said = everything(written(tmp_path, *events, tail=tail), tmp_path)
    for text in expected:
        assert text in said, said


def test_several_starts_go_on_in_one_file(tmp_path):
    """As a queue starts a job again from its last checkpoint: iterations 3 and 4 are trained twice."""
    again = {**START, "iteration": 2, "time": 1100.0}
    path = written(tmp_path, START, *map(step, range(1, 5)), switch(4), again, *map(step, range(3, 6)))
    assert "start 1 of 2" in everything(path, tmp_path)
    runs, _ = history.read(path)
    assert [[(s.layout, s.begin, s.end) for s in run.stretches] for run in runs] == [
        [("launch", 0, 4), ("deep", 4, 4)], [("launch", 2, 5)]]
    assert {of.layout: of.num_steps for of in summary.of_layouts(runs)} == {"launch": 7, "deep": 0}


def test_without_step_events_the_switches_say_how_far_each_layout_went(tmp_path):
    runs, _ = history.read(written(tmp_path, START, switch(3), switch(7, "deep", "launch"), {"event": "end", "time": 1010.0,
                                                                                            "iteration": 9}))
    assert [(s.layout, s.begin, s.end) for s in runs[0].stretches] == [("launch", 0, 3), ("deep", 3, 7), ("launch", 7, 9)]
    assert [(s.began, s.ended) for s in runs[0].stretches] == [(1000.0, 1003.25), (1003.5, 1007.25), (1007.5, 1010.0)]
    assert [(of.layout, of.num_steps, of.median_step_seconds) for of in summary.of_layouts(runs)] == [
        ("launch", 3, None), ("deep", 4, None), ("launch", 2, None)]


def test_hundreds_of_switches_and_a_hundred_thousand_steps(tmp_path):
    events, layout = [START], "launch"
    for i in range(1, 100_001):
        events.append(step(i))
        if i % 250 == 0:
            other = "deep" if layout == "launch" else "launch"
            events.append(switch(i, layout, other, stall=0.001 * (i // 250)))
            layout = other
    path = written(tmp_path, *events)
    said = everything(path, tmp_path)
    assert len(said.splitlines()) < 40 and "400 switches stalled training" in said and "--all" in said
    pairs = summary.of_pairs([s for run in history.read(path)[0] for s in run.switches])
    assert [(p.src, p.dst, p.num_switches, p.max_stall_seconds) for p in pairs] == [
        ("launch", "deep", 200, 0.399), ("deep", "launch", 200, 0.4)]
    assert shown(path, list_all=True).count("\n") > 800  # the switches, and their phases


@pytest.mark.parametrize("words, message", [
    (["nowhere"], "there is no such file or directory"),
    (["."], "the directory holds no report.jsonl"),
    ([], "RUN_DIR"),
    (["x", "--over", "moon"], "--over"),
])
def test_what_is_asked_wrongly_is_explained(tmp_path, words, message):
    done = report(*(tmp_path / word if word in (".", "nowhere") else word for word in words))
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_without_rich_or_matplotlib_the_message_says_what_to_install(tmp_path):
    path = written(tmp_path, START, step(1))
    without = "import sys; sys.modules['{}'] = None; from megatron_dynatrain.cli import main; main(sys.argv[1:])"

    def run(module, *words):
        return subprocess.run([sys.executable, "-c", without.format(module), "report", str(path), *words], cwd=ROOT, text=True,
                              capture_output=True)

    tables = run("rich")
    assert tables.returncode == 2 and "need rich" in tables.stderr and "pip install" in tables.stderr
    assert run("rich", "--json").returncode == 0
    drawn = run("matplotlib")
    assert drawn.returncode == 0 and "no picture" in drawn.stderr and "pip install" in drawn.stderr
    assert run("matplotlib", "--plot", str(tmp_path / "a.png")).returncode == 2


# The writing end.

def test_a_report_goes_on_where_a_killed_job_left_it(tmp_path):
    path = written(tmp_path, {"event": "start"}, tail='{"event": "st')
    Report(str(path)).event("start", iteration=3)
    assert [event.get("iteration") for event in read(path)] == [None, 3]


def test_a_report_that_cannot_be_written_gives_one_warning_and_recovers(tmp_path, capsys):
    folder = tmp_path / "runs"
    writer = Report(str(folder / "report.jsonl"))
    writer.event("start")
    (folder / "report.jsonl").rename(tmp_path / "kept.jsonl")
    folder.rmdir()
    writer.event("lost")
    writer.event("lost")
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and "cannot be written" in warning and "training goes on" in warning
    folder.mkdir()
    writer.event("found")
    assert [event["event"] for event in read(folder / "report.jsonl")] == ["found"]


def test_a_report_of_a_folder_that_cannot_be_is_refused_on_every_rank(jobs, tmp_path):
    (tmp_path / "file").write_text("")
    result = jobs.run(tmp_path / "job", 2, {"train-iters": 2}, {"report": str(tmp_path / "file" / "report.jsonl")})
    assert 0 not in result.exit_codes
    for log in result.logs:
        assert "ConfigError" in log and "`dynatrain.report`" in log and "(on rank 1)" in log


def test_the_path_of_a_report_is_found_or_explained(tmp_path):
    path = written(tmp_path, START)
    assert history.report_of(tmp_path) == history.report_of(path) == path
    with pytest.raises(ConfigError, match="no such file"):
        history.report_of(tmp_path / "other")
