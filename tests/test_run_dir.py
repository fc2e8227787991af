"""The run directory: its files and their thread without a job, the commands, and real jobs that are asked from outside."""

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from conftest import ROOT
from harness import wait_until

from megatron_dynatrain import cli, config
from megatron_dynatrain.agenda import Cancel, Switch
from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.run_dir import ownership
from megatron_dynatrain.run_dir import watcher as watchers
from megatron_dynatrain.run_dir.files import Answer, RequestFile, RunDir, Status, Unreadable, is_id, new_id, read
from megatron_dynatrain.run_dir.watcher import watch

PIPE = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}

until = functools.partial(wait_until, timeout=20, every=0.01)


class Job:
    """What is on the other side of a run directory: the watcher of a job that does not train."""

    def __init__(self, path):
        self.run_dir, self.iteration, self.told = RunDir(path), 5, []
        settings = config.Config(run_dir=str(path), layouts={"pipe": Layout(**PIPE)})
        self.watcher = watch(settings, 4, 20, "launch", {"TP": 2, "DP": 2}, lambda: self.iteration)
        self.watcher.update(state="training")
        self.watcher.open(self.told.append)

    def file(self, text, request_id=None):
        """Publish a request as a text; its ID."""
        request_id = request_id or new_id()
        path = self.run_dir.requests / f".{request_id}"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.rename(self.run_dir.requests / f"{request_id}.json")
        return request_id

    def answer_to(self, request_id):
        return until(lambda: self.run_dir.read_answer(request_id), f"the answer to {request_id}")

    def done(self, request_id, **more):
        self.watcher.answer(Answer(id=request_id, answer="done", iteration=6, report={"iteration": 6}, **more))

    def close(self):
        self.watcher.close("the job ended after iteration 20", None)


@pytest.fixture
def job(tmp_path):
    job = Job(tmp_path / "run")
    yield job
    job.close()


def command(*words):
    """(exit code, standard output, standard error) of a command, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code or 0, out.getvalue(), err.getvalue()


# Files.

def test_a_published_file_is_read_back_and_leaves_nothing_beside_it(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()
    for layout in ("deep", Layout(**PIPE), Layout(num_layers_per_virtual_pipeline_stage=None)):
        request = RequestFile(layout=layout, at_iteration=7, run="a", by="me", time=1.5)
        run_dir.publish(run_dir.requests / "x.json", request)
        assert read(run_dir.requests / "x.json", RequestFile) == request
    assert os.listdir(run_dir.requests) == ["x.json"] == run_dir.listed(run_dir.requests)


def test_a_file_that_cannot_be_published_is_not_there_at_all(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path / "run")
    run_dir.make()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        run_dir.publish(run_dir.requests / "x.json", RequestFile(layout="deep"))
    assert os.listdir(run_dir.requests) == []


@pytest.mark.parametrize("text", ["../../x", "a/b", "", ".x", "-x", "a b", "a.json", "é", "x" * 65, "a\0b", "a\n"])
def test_no_id_leads_out_of_the_folder(text):
    assert not is_id(text)


def test_new_ids_are_ids():
    assert len({new_id() for _ in range(100)}) == 100 and all(is_id(new_id()) for _ in range(3))


BAD = {
    "empty": (b"", "it is empty"),
    "half": (b'{"layout": "pi', "truncated"),
    "not-json": (b"\x80\x04\x95 pickled", "does not read as a request"),
    "not-utf8": (b'{"layout": "\xff\xfe"}', "does not read as a request"),
    "list": (b"[]", "Expected `object`"),
    "wrong-type": (b'{"layout": 3}', "$.layout"),
    "bad-iteration": (b'{"layout": "pipe", "at_iteration": -1}', ">= 0"),
    "unknown-key": (b'{"layout": "pipe", "exec": "rm"}', "unknown field `exec`"),
    "unknown-size": (b'{"layout": {"tensor_size": 2}}', "unknown field `tensor_size`"),
    "zero": (b'{"layout": {"tensor_model_parallel_size": 0}}', "it counts from 1"),
    "long-name": (json.dumps({"layout": "x" * 300}).encode(), "length <= 200"),
    "huge": (b'{"layout": "' + b"x" * 100_000 + b'"}', "larger than 65536 bytes"),
    "deep": (b'{"layout": ' + b"[" * 30_000 + b"]" * 30_000 + b"}", "does not read as a request"),
    "bomb": (json.dumps({"layout": {"pipeline_model_parallel_layout": "E(t*99999)*99999L"}}).encode(), "1,000,000 layers"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_request_says_why(tmp_path, name):
    (tmp_path / "x.json").write_bytes(BAD[name][0])
    with pytest.raises(Unreadable) as caught:
        read(tmp_path / "x.json", RequestFile)
    assert BAD[name][1] in str(caught.value)


def test_nothing_but_files_is_opened(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"layout": "pipe"}')
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(secret)
    for name, kind in (("fifo", "a FIFO"), ("folder", "a directory"), ("link", "a symbolic link")):
        with pytest.raises(Unreadable, match=kind):
            read(tmp_path / name, RequestFile)
    assert read(tmp_path / "none", RequestFile) is None


# The thread, without a job.

def test_requests_are_told_in_the_order_of_filing_and_answered(job):
    first = job.file('{"layout": "pipe", "at_iteration": 9}')
    until(lambda: len(job.told) == 1)
    second = job.file('{"layout": {"tensor_model_parallel_size": 4}}')
    until(lambda: len(job.told) == 2)
    assert job.told == [Switch(id=first, layout="pipe", at_iteration=9),
                        Switch(id=second, layout=Layout(tensor_model_parallel_size=4))]
    until(lambda: job.run_dir.read_status().pending == sorted([first, second]))
    job.done(first)
    assert job.answer_to(first).report == {"iteration": 6} and job.answer_to(first).request.at_iteration == 9
    until(lambda: job.run_dir.read_status().pending == [second])
    assert job.run_dir.listed(job.run_dir.requests) == [f"{second}.json"]
    assert job.run_dir.read_status().last_switch == {"iteration": 6}


@pytest.mark.parametrize("text, answer, reason", [
    ('{"layout": "pip"}', "refused", "there is no layout 'pip'; did you mean 'pipe'?"),
    ('{"layout": "pipe", "at_iteration": 4}', "expired", "iteration 4 had passed"),
    ('{"layout": "pipe", "at_iteration": 20}', "expired", "--train-iters is 20"),
    ('{"layout": "pipe", "run": "of yesterday"}', "expired", "an earlier run of this directory"),
])
def test_what_needs_no_other_rank_is_answered_at_once(job, text, answer, reason):
    found = job.answer_to(job.file(text))
    assert (found.answer, found.iteration) == (answer, 5) and reason in found.reason
    assert job.told == [] and found.run == job.run_dir.read_status().run


def test_what_is_no_request_is_moved_away_and_answered_where_it_has_a_name(job, monkeypatch, capsys):
    monkeypatch.setattr(watchers, "_GRACE_SECONDS", 0.5)
    folder = job.run_dir.requests
    ids = {name: job.file(content, f"bad-{name}") for name, (content, _) in BAD.items()}
    os.mkfifo(folder / "fifo.json")
    (folder / "folder.json").mkdir()
    (folder / "link.json").symlink_to("/etc/hostname")
    (folder / "no id.json").write_text('{"layout": "pipe"}')
    (folder / os.fsdecode(b"odd\xff.json")).write_text('{"layout": "pipe"}')
    (folder / "x.txt").write_text('{"layout": "pipe"}')
    (job.run_dir.cancels / "c.json").write_text("{{")
    good = job.file('{"layout": "pipe"}')
    for name, request_id in ids.items():
        answer = job.answer_to(request_id)
        assert answer.answer == "refused" and BAD[name][1] in answer.reason and "moved to" in answer.reason
    for name in ("fifo", "folder", "link"):
        assert job.answer_to(name).answer == "refused"
    until(lambda: job.run_dir.listed(folder) == [f"{good}.json"])
    until(lambda: job.run_dir.listed(job.run_dir.cancels) == [])
    assert job.told == [Switch(id=good, layout="pipe")]
    rejected = os.listdir(job.run_dir.rejected)
    assert len(rejected) == 2 * (len(BAD) + 7)  # with a reason beside each
    answered = [*ids.values(), "fifo", "folder", "link"]
    assert sorted(os.listdir(job.run_dir.answers)) == sorted(f"{name}.json" for name in answered)
    assert "x.txt" in capsys.readouterr().err


def test_a_file_that_is_still_being_copied_is_waited_for(job, monkeypatch):
    monkeypatch.setattr(watchers, "_GRACE_SECONDS", 60)
    path = job.run_dir.requests / "slow.json"
    path.write_text('{"layout": ')
    until(lambda: path in job.watcher._doubtful)
    path.write_text('{"layout": "pipe"}')
    until(lambda: job.told == [Switch(id="slow", layout="pipe")])


def test_an_id_is_answered_once(job):
    job.file('{"layout": "pipe"}', "a")
    until(lambda: job.told)
    job.done("a")
    answer = job.answer_to("a")
    until(lambda: job.run_dir.listed(job.run_dir.requests) == [])
    job.file('{"layout": "pipe"}', "a")
    until(lambda: any("-a.json" in name for name in os.listdir(job.run_dir.rejected)))
    assert job.run_dir.read_answer("a") == answer and len(job.told) == 1


def test_at_the_end_everything_is_answered_before_the_status_says_so(tmp_path, monkeypatch):
    job = Job(tmp_path / "run")
    told = job.file('{"layout": "pipe"}')
    until(lambda: job.told)
    published = []
    publish = RunDir.publish
    monkeypatch.setattr(RunDir, "publish", staticmethod(
        lambda path, content: (published.append(path.name), publish(path, content))))
    late = job.file('{"layout": "launch"}')
    job.close()
    for request_id in (told, late):
        assert job.run_dir.read_answer(request_id).reason == "the job ended after iteration 20"
    assert job.run_dir.read_status().state == "ended" and published[-1] == "status.json"
    assert job.run_dir.listed(job.run_dir.requests) == []
    assert not job.watcher._thread.is_alive()


def test_a_directory_that_vanishes_or_is_full_is_one_warning_and_comes_back(job, monkeypatch, capsys):
    request_id = job.file('{"layout": "pipe"}')
    until(lambda: job.told)
    away = job.run_dir.path.with_name("away")
    job.run_dir.path.rename(away)
    job.run_dir.path.write_text("something else is here")
    until(lambda: job.watcher._in_trouble)
    job.done(request_id)
    time.sleep(1)  # several looks
    job.run_dir.path.unlink()
    assert job.answer_to(request_id).answer == "done"  # in a directory that was made anew
    until(lambda: not job.watcher._in_trouble)
    publish = RunDir.publish

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDir, "publish", staticmethod(full))
    until(lambda: job.watcher._in_trouble)
    other = job.file('{"layout": "pipe"}')
    until(lambda: len(job.told) == 2)  # what can be read is still told
    job.done(other)
    monkeypatch.setattr(RunDir, "publish", staticmethod(publish))
    assert job.answer_to(other).answer == "done"
    until(lambda: not job.watcher._in_trouble)
    said = capsys.readouterr().err
    assert said.count("cannot be used at the moment") == 2 == said.count("works again")


def test_training_does_not_wait_for_a_file_system_that_hangs(job, monkeypatch):
    hangs, listed = threading.Event(), RunDir.listed
    inside = threading.Event()

    def hanging(folder):
        inside.set()
        hangs.wait()
        return listed(folder)

    monkeypatch.setattr(RunDir, "listed", staticmethod(hanging))
    until(inside.is_set)
    request_id = new_id()
    for _ in range(1000):
        job.watcher.update(state="switching")
        job.done(request_id)
    assert job.watcher._thread.is_alive() and not hangs.is_set()
    job.watcher.close("the job ended", None, timeout=0.05)
    hangs.set()
    until(lambda: not job.watcher._thread.is_alive())


# Ownership.

def status_of(run_dir, **changes):
    return msgspec.structs.replace(run_dir.read_status(), **changes)


def test_a_second_job_is_refused_while_the_first_lives(job):
    with pytest.raises(ConfigError) as caught:
        Job(job.run_dir.path)
    assert "a job is running here already" in str(caught.value) and f"process {os.getpid()}" in str(caught.value)
    assert "give each job a directory of its own" in str(caught.value)
    job.file('{"layout": "pipe"}')
    until(lambda: job.told)  # the first is unharmed


@pytest.mark.parametrize("changes", [
    pytest.param({"state": "ended"}, id="ended"),
    pytest.param({"pid_started": 1}, id="another-process-has-its-number"),
    pytest.param({"boot": "before the last boot", "time": 1.0}, id="silent"),
])
def test_a_dead_job_is_succeeded_and_what_it_left_expires(tmp_path, monkeypatch, changes):
    monkeypatch.setattr(ownership, "CLAIM_WATCH_SECONDS", 0.5)
    run_dir = RunDir(tmp_path / "run")
    Job(run_dir.path).close()
    run_dir.publish(run_dir.status, status_of(run_dir, **{"state": "training", **changes}))
    run_dir.publish(run_dir.requests / "old.json", RequestFile(layout="pipe"))
    (run_dir.requests / "broken.json").write_text("{")
    (run_dir.cancels / "old.json").write_text("{}")
    job = Job(run_dir.path)
    try:
        assert run_dir.read_answer("old").answer == "expired"
        assert run_dir.read_answer("old").reason == "it was filed before this job started"
        assert run_dir.read_answer("broken").answer == "expired"
        assert run_dir.listed(run_dir.requests) == [] == run_dir.listed(run_dir.cancels)
        new = job.file('{"layout": "pipe"}')
        until(lambda: job.told == [Switch(id=new, layout="pipe")])
    finally:
        job.close()


def test_a_job_on_another_host_with_another_clock_lives_as_long_as_its_heart_beats(tmp_path):
    run_dir = RunDir(tmp_path / "run")
    Job(run_dir.path).close()
    beats, stop = [1000.0], threading.Event()

    def beat():
        while not stop.wait(0.2):
            beats[0] += 1
            run_dir.publish(run_dir.status, status_of(run_dir, state="training", host="far", boot="", time=beats[0]))

    run_dir.publish(run_dir.status, status_of(run_dir, state="training", host="far", boot="", time=1000.0))
    assert ownership.is_running(run_dir, 0.5)[1] is False
    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert ownership.is_running(run_dir, 10)[1] is True
    finally:
        stop.set()
        thread.join()


def test_a_job_whose_directory_was_taken_lets_go_of_it(job, capsys):
    until(lambda: job.run_dir.read_status().state == "training")
    job.run_dir.publish(job.run_dir.status, status_of(job.run_dir, run="another", host="far"))
    until(lambda: not job.watcher._thread.is_alive())
    job.file('{"layout": "pipe"}')
    job.close()
    assert job.run_dir.read_status().run == "another" and job.told == []
    assert "now belongs to another job" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="`dynatrain.run_dir` .*the directory cannot be made or written"):
        Job(tmp_path / "file" / "run")


def test_the_report_stands_in_the_run_directory_unless_it_has_a_path():
    parse = lambda text: config.parse(f"dynatrain: {{{text}}}").report_path  # noqa: E731
    assert parse("run_dir: a/b") == "a/b/report.jsonl"
    assert parse("run_dir: a/b, report: c.jsonl") == "c.jsonl" == parse("report: c.jsonl")
    assert parse("verify: off") is None


# Commands.

def test_commands_load_neither_torch_nor_megatron(job):
    check = ("import sys; from megatron_dynatrain import cli\ntry:\n    cli.main(sys.argv[1:])\nexcept SystemExit as end:\n"
             "    print(end.code, [name for name in ('torch', 'megatron') if name in sys.modules])")
    done = subprocess.run([sys.executable, "-c", check, "status", "--run-dir", str(job.run_dir.path)], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.stdout.endswith("0 []\n"), done.stdout + done.stderr


def test_request_files_what_the_job_takes(job):
    until(lambda: job.run_dir.read_status().state == "training")
    code, out, _ = command("request", "--run-dir", job.run_dir.path, "--layout", "pipe", "--at-iteration", 9, "--json")
    filed = json.loads(out)
    assert code == 0 and filed["answer"] is None
    until(lambda: job.told == [Switch(id=filed["id"], layout="pipe", at_iteration=9)])
    code, out, _ = command("request", "--run-dir", job.run_dir.path, "--layout",
                           "tensor_model_parallel_size=1, pipeline_model_parallel_size=4")
    assert code == 0 and "filed request" in out
    until(lambda: len(job.told) == 2)
    assert job.told[1].layout == Layout(tensor_model_parallel_size=1, pipeline_model_parallel_size=4)


REPORT = {"iteration": 6, "from": "launch", "to": "pipe", "from_sizes": {"TP": 2}, "to_sizes": {"PP": 2}, "stall_seconds": 0.5,
          "moved_bytes": 1000, "verify": "ok"}


@pytest.mark.parametrize("answer, code, words", [
    ({"answer": "done", "report": REPORT}, 0,
     "done: after iteration 6: launch (TP2) -> pipe (PP2), stall 0.500 s, moved 1.0 kB"),
    ({"answer": "unchanged", "reason": "the job is in it"}, 0, "unchanged: the job is in it"),
    ({"answer": "refused", "reason": "no"}, 3, "refused: no"),
    ({"answer": "superseded", "by": "b"}, 4, "superseded by request b"),
    ({"answer": "expired", "reason": "late"}, 5, "expired: late"),
    ({"answer": "cancelled", "reason": "taken back"}, 6, "cancelled: taken back"),
])
@pytest.mark.parametrize("as_json", [False, True])
def test_wait_ends_with_the_answer_and_its_exit_code(job, answer, code, words, as_json):
    with ThreadPoolExecutor() as pool:
        def reply():
            message = until(lambda: job.told)[0]
            job.watcher.answer(Answer(id=message.id, **answer))

        replying = pool.submit(reply)
        found, out, _ = command("request", "--run-dir", job.run_dir.path, "--layout", "pipe", "--wait",
                                *(["--json"] if as_json else []))
        replying.result()
    assert found == code
    if as_json:
        printed = json.loads(out)
        assert {key: printed[key] for key in answer} == answer and printed["request"]["layout"] == "pipe"
    else:
        assert words in out


def test_cancel(job):
    request_id = job.file('{"layout": "pipe"}')
    until(lambda: job.told)
    with ThreadPoolExecutor() as pool:
        def reply():
            until(lambda: job.told[1:] == [Cancel(id=request_id)])
            job.watcher.answer(Answer(id=request_id, answer="cancelled", reason="it was taken back"))

        replying = pool.submit(reply)
        code, out, _ = command("cancel", "--run-dir", job.run_dir.path, request_id)
        replying.result()
    assert (code, out) == (0, f"request {request_id}: cancelled: it was taken back\n")
    assert command("cancel", "--run-dir", job.run_dir.path, request_id)[0] == 0  # it is
    done = job.file('{"layout": "pipe"}')
    until(lambda: len(job.told) == 3)
    job.watcher.answer(Answer(id=done, answer="done", report=REPORT))
    job.answer_to(done)
    code, out, _ = command("cancel", "--run-dir", job.run_dir.path, done)
    assert code == 9 and "done" in out
    for wrong, message in (("none", "there is no request none"), ("../x", "is not the ID of a request")):
        code, _, err = command("cancel", "--run-dir", job.run_dir.path, wrong)
        assert code == 2 and message in err


def test_nobody_answers_in_time(job):
    code, _, err = command("request", "--run-dir", job.run_dir.path, "--layout", "pipe", "--wait", "--timeout", "0.3")
    assert code == 7 and "has no answer after 0.3 s" in err
    assert len(job.run_dir.listed(job.run_dir.requests)) == 1


def test_a_job_that_dies_while_somebody_waits(job):
    with ThreadPoolExecutor() as pool:
        def die():
            until(lambda: job.told)
            job.watcher._lost = True  # the thread ends without a word
            until(lambda: not job.watcher._thread.is_alive())
            job.run_dir.publish(job.run_dir.status, status_of(job.run_dir, pid_started=1))

        dying = pool.submit(die)
        code, _, err = command("request", "--run-dir", job.run_dir.path, "--layout", "pipe", "--wait")
        dying.result()
    assert code == 8 and "no job is running here: the last heartbeat was" in err
    assert job.run_dir.listed(job.run_dir.requests) == []  # nobody will ever answer it


def test_where_no_job_is(tmp_path):
    for action in (["status"], ["request", "--layout", "pipe"], ["cancel", "x"]):
        code, out, err = command(action[0], "--run-dir", tmp_path / "none", *action[1:])
        assert code == 2 and "there is no such directory" in err and not out
        code, out, err = command(action[0], "--run-dir", tmp_path, *action[1:])
        assert code == 8 and "no job has used the directory" in err and not out
        code, out, _ = command(action[0], "--run-dir", tmp_path / "none", "--json", *action[1:])
        assert code == 2 and "there is no such directory" in json.loads(out)["error"]
    Job(tmp_path / "run").close()
    for action in (["status"], ["request", "--layout", "pipe", "--wait"]):
        code, _, err = command(action[0], "--run-dir", tmp_path / "run", *action[1:])
        assert code == 8 and "the last one ended" in err
    code, out, _ = command("status", "--run-dir", tmp_path / "run", "--json")
    assert code == 8 and json.loads(out)["running"] is False and json.loads(out)["status"]["state"] == "ended"


def test_status_says_what_the_job_is_doing(job):
    job.file('{"layout": "pipe"}', "mine")
    until(lambda: job.run_dir.read_status().pending == ["mine"])
    code, out, _ = command("status", "--run-dir", job.run_dir.path)
    assert code == 0
    for part in ("training: process", "iteration 5 of 20", "layout launch (TP2 DP2) on 4 ranks", "layouts: launch, pipe",
                 "pending requests: mine", "last switch: none"):
        assert part in out
    code, out, _ = command("status", "--run-dir", job.run_dir.path, "--json")
    printed = json.loads(out)
    assert code == 0 and printed["running"] is True
    assert msgspec.convert(printed["status"], Status).layouts == {"pipe": PIPE}


@pytest.mark.parametrize("words, message", [
    (["--layout", "pip"], "the job has no such layout; did you mean 'pipe'?"),
    (["--layout", "tensor_size=2"], "unknown key 'tensor_size'"),
    (["--layout", "tensor_model_parallel_size=0"], "counts from 1"),
    (["--layout", "pipe", "--timeout", "3"], "it bounds --wait"),
    (["--layout", "pipe", "--at-iteration", "-3"], "the number of an iteration is expected"),
    (["--layout", "pipe", "--wait", "--timeout", "soon"], "a number of seconds is expected"),
    ([], "--layout"),
])
def test_a_wrong_command_line_is_explained_and_files_nothing(job, words, message):
    code, out, err = command("request", "--run-dir", job.run_dir.path, *words)
    assert code == 2 and message in err and not out
    assert job.run_dir.listed(job.run_dir.requests) == []


@pytest.mark.parametrize("name", ["request", "status", "cancel"])
def test_help_lists_the_exit_codes(name):
    code, out, _ = command(name, "--help")
    assert code == 0 and "exit codes:" in out and "--run-dir" in out and "--json" in out


# Real jobs.

class Running:
    """A job that trains in the background and stops before certain iterations until it is told to go on."""

    def __init__(self, jobs, folder, holds, arguments, settings, world_size=4, **more):
        self.folder, self.run_dir, self.holds, self.world_size = folder, RunDir(settings["run_dir"]), holds, world_size
        self._pool = ThreadPoolExecutor(1)
        self._result = self._pool.submit(jobs.run, folder, world_size, arguments, {"report": None, **settings}, at=holds,
                                         **{"probe": "probes:hold", **more})

    def held(self, iteration):
        """Wait until every rank is about to start `iteration`."""
        until(lambda: self._result.done() or all((self.folder / f"held.{iteration}.{rank}").exists()
                                                 for rank in range(self.world_size)), f"iteration {iteration}", timeout=120)
        assert not self._result.done(), self._result.result().assert_ok()

    def go(self, iteration):
        (self.folder / f"go.{iteration}").touch()

    def ask(self, *words):
        """File a request with the command and see it taken by the job; its ID."""
        code, out, err = command("request", "--run-dir", self.run_dir.path, "--json", "--layout", *words)
        assert code == 0, err
        request_id = json.loads(out)["id"]
        until(lambda: request_id in self.run_dir.read_status().pending or self.run_dir.read_answer(request_id))
        return request_id

    def answer(self, request_id):
        return until(lambda: self._result.done() or self.run_dir.read_answer(request_id), timeout=60) and (
            self.run_dir.read_answer(request_id))

    def result(self):
        for iteration in self.holds:
            self.go(iteration)
        return self._result.result()


def test_a_job_is_asked_from_outside(jobs, tmp_path):
    arguments = {"tensor-model-parallel-size": 2, "train-iters": 40}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    job = Running(jobs, tmp_path / "asked", [3, 12, 39, 40], arguments, {
        "layouts": {"pipe": PIPE, "data": {"tensor_model_parallel_size": 1}}, "verify": "full",
        "run_dir": str(tmp_path / "run"), "schedule": [{"at_iteration": 30, "layout": "launch"}]})
    try:
        job.held(3)
        older, newer = job.ask("data"), job.ask("pipe")
        job.go(3)
        code, out, _ = command("request", "--run-dir", tmp_path / "run", "--layout", "pipe", "--at-iteration", "8", "--wait",
                               "--json", "--timeout", "60")
        unchanged = json.loads(out)
        job.held(12)
        status = until(lambda: (found := job.run_dir.read_status()).layout == "pipe" and found)
        timed, twin, undone = job.ask("data", "--at-iteration", "20"), None, job.ask("pipe", "--at-iteration", "25")
        refused = job.ask("tensor_model_parallel_size=3")
        twin = job.ask("tensor_model_parallel_size=2,pipeline_model_parallel_size=2", "--at-iteration", "25")
        (job.run_dir.requests / "hostile.json").write_text('{"layout": {"tensor_model_parallel_size": {"__reduce__": []}}}')
        past = job.ask("pipe", "--at-iteration", "2")
        (job.run_dir.cancels / f"{undone}.json").write_text("{}")
        until(lambda: not job.run_dir.listed(job.run_dir.cancels))
        job.go(12)
        job.held(39)
        late = job.ask("data")  # all ranks know of it before the last step, after which no other one comes
        job.go(39)
        job.held(40)
        last = job.ask("pipe")
        until(lambda: job.run_dir.read_status().iteration == 39)
        job.go(40)
    finally:
        result = job.result()
    result.assert_ok()
    assert code == 0 and unchanged["answer"] == "unchanged" and unchanged["iteration"] == 8
    assert (status.state, status.layout, status.sizes) == ("training", "pipe", {"TP": 1, "PP": 2, "DP": 2})
    switches = result_events(job, "switch")
    assert [(event["iteration"], event["from"], event["to"]) for event in switches[1:]] == [
        (20, "pipe", "data"), (25, "data", "tensor_model_parallel_size=2, pipeline_model_parallel_size=2"),
        (30, "tensor_model_parallel_size=2, pipeline_model_parallel_size=2", "launch")]
    assert switches[0]["to"] == "pipe" and 3 <= switches[0]["iteration"] <= 5
    # Two at once: the newer one, or both, one after the other, where a boundary came between them.
    assert job.answer(older).answer == "superseded" and job.answer(older).by == newer
    for request_id, event in ((newer, switches[0]), (timed, switches[1]), (twin, switches[2])):
        answer = job.answer(request_id)
        assert answer.answer == "done" and answer.request.run == status.run
        assert set(answer.report) == set(event) - {"event", "time"}
        same = ("iteration", "from", "to", "from_sizes", "to_sizes", "moved_bytes", "minimum_bytes", "plan_hash", "verify")
        assert {name: answer.report[name] for name in same} == {name: event[name] for name in same}
    assert job.answer(undone).answer == "cancelled"
    assert job.answer(refused).answer == "refused" and "not divisible" in job.answer(refused).reason
    assert job.answer("hostile").answer == "refused"
    assert job.answer(past).answer == "expired" and "iteration 2 had passed" in job.answer(past).reason
    for request_id in (late, last):
        assert job.answer(request_id).answer == "expired"
        assert job.answer(request_id).reason == "the job ended after iteration 40"
    assert [event["to"] for event in result_events(job, "expired")] == ["data", "pipe"]
    assert [event["to"] for event in result_events(job, "superseded")] == ["data"]
    ended = job.run_dir.read_status()
    assert (ended.state, ended.iteration, ended.layout, ended.pending) == ("ended", 40, "launch", [])
    assert ended.last_switch["iteration"] == 30
    # Training went on as if nothing had been asked.
    assert sorted(result.steps) == list(range(1, 41)) and result.samples == plain.samples
    for iteration, step in result.steps.items():
        assert step["loss"] == pytest.approx(plain.steps[iteration]["loss"], rel=1e-4)


def result_events(job, kind):
    return [event for event in map(json.loads, (job.run_dir.path / "report.jsonl").read_text().splitlines())
            if event["event"] == kind]


def test_the_directory_of_a_job_vanishes_and_the_next_job_of_it_fails(jobs, tmp_path):
    arguments = {"train-iters": 12}
    settings = {"layouts": {"wide": {"tensor_model_parallel_size": 2}}, "run_dir": str(tmp_path / "run")}
    job = Running(jobs, tmp_path / "first", [4, 8], arguments, settings, world_size=2)
    try:
        job.held(4)
        away = tmp_path / "away"
        (tmp_path / "run").rename(away)
        (tmp_path / "run").write_text("in the way")
        job.go(4)
        job.held(8)  # it trains on
        (tmp_path / "run").unlink()
        until(lambda: job.run_dir.status.exists())
        wide = job.ask("wide")
        job.go(8)
    finally:
        result = job.result()
    result.assert_ok()
    assert job.answer(wide).answer == "done"
    assert sorted(result.steps) == list(range(1, 13))
    assert result.logs[0].count("cannot be used at the moment") == 1 == result.logs[0].count("works again")

    job.run_dir.publish(job.run_dir.requests / "left.json", RequestFile(layout="wide", run=job.run_dir.read_status().run))
    job = Running(jobs, tmp_path / "second", [4], arguments, settings, world_size=2, probe="probes:fail_at", iteration=5)
    try:
        job.held(4)
        with pytest.raises(ConfigError, match="a job is running here already"):  # as a third would be told
            Job(tmp_path / "run")
        waiting = job.ask("wide", "--at-iteration", "9")
        job.go(4)
    finally:
        result = job.result()
    assert set(result.exit_codes) == {1}
    assert job.answer("left").answer == "expired" and job.answer("left").reason == "it was filed before this job started"
    assert job.answer(waiting).answer == "expired"
    assert job.answer(waiting).reason == "the job failed after iteration 4 (RuntimeError)"
    assert job.run_dir.read_status().state == "ended" and "a fault of the script" in job.run_dir.read_status().reason


@pytest.mark.parametrize("taken", [False, True], ids=["not-a-directory", "another-job-is-there"])
def test_a_run_directory_that_cannot_be_had_ends_the_job_on_every_rank_before_training(jobs, tmp_path, taken):
    other = Job(tmp_path / "run") if taken else (tmp_path / "run").write_text("")
    result = jobs.run(tmp_path / "job", 2, {}, {"run_dir": str(tmp_path / "run")})
    if taken:
        other.close()
    assert 0 not in result.exit_codes and not result.steps
    for log in result.logs:
        last = log.strip().splitlines()[-1]
        assert "ConfigError" in last and "`dynatrain.run_dir`" in last and "(on rank 0)" in last
        assert ("a job is running here already" if taken else "cannot be made or written") in last
