"""Machines join a running job and leave it: real torchruns, one a machine."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from harness import CPU, MODEL, ROOT, TRAINING, free_ports, wait_until, words_of
from hosts import Hosts
from test_elastic import layout

LAYOUTS = {"four": layout(4, tp=2), "three": layout(3), "second": {"ranks": [2, 3], "tensor_model_parallel_size": 2},
           "nobody": {"ranks": [0, 9]}}


class Machine:
    """A torchrun of its own, its output in a file."""

    def __init__(self, cluster, name, num_ranks, *more, host=0):
        self.log = cluster.folder / f"{name}.log"
        port, = free_ports(1)
        prefix, of_host = cluster.hosts.command(host)
        words = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--master-addr",
                 cluster.hosts.address_of(host), "--master-port", str(port), "-m", "megatron_dynatrain.launch", "--cpu",
                 cluster.script, *words_of(cluster.arguments), *more]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "STEP_SECONDS": "0.1", "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore",
               "PYTHONPATH": str(ROOT), **of_host}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)

    def workers(self):
        """The process numbers of its ranks."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    found.append(int(folder.name))
            except OSError:
                continue
        return sorted(found)

    def ended(self, timeout=60):
        """Its exit code."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs still:\n{self.log.read_text()[-3000:]}") from None

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        for worker in self.workers():
            os.kill(worker, signal.SIGKILL)


class Cluster:
    """A job on machines that come and go."""

    def __init__(self, folder, data, cache, hosts, arguments=None, **elastic):
        self.folder, self.hosts, self.script, self.machines = folder, hosts, "tests/pretrain_slow.py", {}
        self.run_dir = folder / "run"
        self.port, = free_ports(1)
        self.store = None
        self.elastic = elastic
        self.config = {"layouts": LAYOUTS, "verify": "full", "run_dir": str(self.run_dir), "report_steps": True}
        self.arguments = {**MODEL, **TRAINING, **CPU, "data-path": data, "data-cache-path": cache, "global-batch-size": 12,
                          "train-iters": 150, "dynatrain-config": str(folder / "dynatrain.yaml"), **(arguments or {})}
        self.configure()

    def configure(self):
        text = yaml.safe_dump({"dynatrain": {**self.config, "elastic": self.elastic}})
        (self.folder / "dynatrain.yaml").write_text(text)

    def hold_store(self):
        self.store = subprocess.Popen([sys.executable, "-m", "megatron_dynatrain", "store", "--port", str(self.port)], cwd=ROOT,
                                      stdout=subprocess.PIPE, text=True)
        assert str(self.port) in self.store.stdout.readline()
        self.elastic["store"] = f"{self.hosts.address}:{self.port}"
        self.configure()

    def start(self, name, num_ranks, *more, **where):
        self.machines[name] = machine = Machine(self, name, num_ranks, *more, **where)
        return machine

    def status(self):
        path = self.run_dir / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def until(self, **fields):
        wait_until(lambda: all(self.status().get(name) == value for name, value in fields.items()),
                   lambda: f"{self.status()}\n" + "\n".join(m.log.read_text()[-1500:] for m in self.machines.values()), timeout=90)

    def until_waiting(self, number):
        """Until rank `number` of the job waits to be taken in."""
        wait_until(lambda: f"rank {number} of the job waits" in "".join(m.log.read_text() for m in self.machines.values()),
                   lambda: "\n".join(m.log.read_text()[-3000:] for m in self.machines.values()), timeout=90)

    def ask(self, layout, *more):
        """`request --layout ... --wait` as a user types it: its exit code and its answer."""
        done = subprocess.run([sys.executable, "-m", "megatron_dynatrain", "request", "--run-dir", str(self.run_dir), "--layout",
                               layout, "--wait", "--timeout", "60", "--json", *more], cwd=ROOT, capture_output=True, text=True)
        return done.returncode, json.loads(done.stdout)

    def events(self, kind):
        return [event for line in (self.run_dir / "report.jsonl").read_text().splitlines()
                if (event := json.loads(line))["event"] == kind]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for machine in self.machines.values():
            machine.kill()
        if self.store is not None:
            self.store.kill()
            self.store.wait()


@pytest.fixture
def cluster(jobs, tmp_path, request):
    with Hosts(getattr(request, "param", 0)) as hosts, Cluster(tmp_path, jobs.data, jobs.cache, hosts) as made:
        yield made


@pytest.mark.parametrize("cluster", [3], indirect=True, ids=["three-hosts"])
def test_machines_join_and_the_first_one_leaves(jobs, cluster):
    plain = jobs.run(cluster.folder / "plain", 2, {**cluster.arguments, "dynatrain-config": None}, kind="plain").assert_ok()
    cluster.hold_store()
    first = cluster.start("first", 2, host=0)
    cluster.until(state="training")
    second = cluster.start("second", 2, "--dynatrain-join", host=1)
    cluster.until_waiting(3)
    code, answer = cluster.ask("four")
    assert (code, answer["answer"]) == (0, "done"), answer
    assert answer["report"]["to_ranks"] == [0, 1, 2, 3]
    code, answer = cluster.ask("second")
    assert (code, answer["answer"]) == (0, "done"), answer
    assert first.ended() == 0
    cluster.hosts.remove(0)
    cluster.until(ranks=[2, 3], layout="second", state="training")
    third = cluster.start("third", 1, "--dynatrain-join", host=2)
    cluster.until_waiting(4)
    code, answer = cluster.ask("ranks=[3,4],pipeline_model_parallel_size=2")  # rank 2 is replaced
    assert (code, answer["answer"]) == (0, "done"), answer
    assert second.ended(180) == third.ended(180) == 0
    status = cluster.status()
    assert (status["state"], status["ranks"], status["iteration"]) == ("ended", [3, 4], cluster.arguments["train-iters"])
    steps = {event["iteration"]: event["losses"]["lm loss"] for event in cluster.events("step")}
    assert sorted(steps) == list(range(1, cluster.arguments["train-iters"] + 1))
    for iteration, step in plain.steps.items():
        assert steps[iteration] == pytest.approx(step["loss"], rel=2e-4), iteration


def test_what_cannot_be_is_answered_and_training_goes_on(cluster):
    cluster.arguments["train-iters"] = 250
    first = cluster.start("first", 2)
    cluster.until(state="training")
    code, answer = cluster.ask("nobody")
    assert (code, answer["answer"]) == (3, "refused") and "rank 9 is not there" in answer["reason"], answer
    stranger = cluster.start("stranger", 1, "--dynatrain-join", "--lr", "1e-3")
    dead = cluster.start("dead", 1, "--dynatrain-join")
    assert stranger.ended() != 0
    assert "does not belong to the job: --lr is 0.001 here and 0.002 in the job" in stranger.log.read_text()
    other = cluster.start("other", 1, "--dynatrain-join", "4711")
    cluster.until_waiting(2)
    dead.kill()
    code, answer = cluster.ask("three")
    assert (code, answer["answer"]) == (3, "refused") and "rank 2 of the job" in answer["reason"], answer
    assert other.ended() != 0 and "--dynatrain-join 4711: the job of" in other.log.read_text()
    guest = cluster.start("guest", 1, "--dynatrain-join")
    cluster.until_waiting(3)
    code, answer = cluster.ask("three")
    assert (code, answer["answer"]) == (0, "done") and answer["report"]["to_ranks"] == [0, 1, 3], answer
    # Two at once: the one that waits for ranks gives way to the newer one, for which the guest leaves.
    waiting = subprocess.Popen([sys.executable, "-m", "megatron_dynatrain", "request", "--run-dir", str(cluster.run_dir),
                                "--layout", "four", "--wait", "--json"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wait_until(lambda: cluster.status()["pending"], "the first request was not seen")
    code, answer = cluster.ask("launch")
    assert (code, answer["answer"], answer["report"]["to_ranks"]) == (0, "done", [0, 1]), answer
    superseded = json.loads(waiting.communicate(timeout=60)[0])
    assert (waiting.returncode, superseded["answer"], superseded["by"]) == (4, "superseded", answer["id"]), superseded
    assert guest.ended() == 0
    assert first.ended(240) == 0
    assert [event["iteration"] for event in cluster.events("step")] == list(range(1, 251))
