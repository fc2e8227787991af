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
from test_elastic import layout

LAYOUTS = {"four": layout(4, tp=2), "three": layout(3), "second": {"ranks": [2, 3], "tensor_model_parallel_size": 2},
           "nobody": {"ranks": [0, 9]}}


class Machine:
    """A torchrun of its own, its output in a file."""

    def __init__(self, cluster, name, num_ranks, *more, prefix=()):
        self.log = cluster.folder / f"{name}.log"
        port, = free_ports(1)
        words = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks), "--master-addr",
                 cluster.address, "--master-port", str(port), "-m", "megatron_dynatrain.launch", "--cpu", cluster.script,
                 *words_of(cluster.arguments), *more]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "STEP_SECONDS": "0.1", "TORCHDYNAMO_DISABLE": "1", "PYTHONWARNINGS": "ignore",
               "PYTHONPATH": str(ROOT)}
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

    def __init__(self, folder, data, cache, arguments=None, address="127.0.0.1", script="tests/pretrain_slow.py", **elastic):
        self.folder, self.address, self.script, self.machines = folder, address, script, {}
        self.run_dir = folder / "run"
        self.port, = free_ports(1)
        self.store = None
        self.config = {"layouts": LAYOUTS, "verify": "full", "run_dir": str(self.run_dir), "report_steps": True,
                       "elastic": {"store": f"{address}:{self.port}", **elastic}}
        path = folder / "dynatrain.yaml"
        path.write_text(yaml.safe_dump({"dynatrain": self.config}))
        self.arguments = {**MODEL, **TRAINING, **CPU, "data-path": data, "data-cache-path": cache, "global-batch-size": 12,
                          "train-iters": 100, "dynatrain-config": str(path), **(arguments or {})}

    def hold_store(self, *prefix):
        self.store = subprocess.Popen([*prefix, sys.executable, "-m", "megatron_dynatrain", "store", "--port", str(self.port)],
                                      cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert str(self.port) in self.store.stdout.readline()

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
        done = subprocess.run([sys.executable, "-m", "megatron_dynatrain", "request", "--run-dir", str(self.run_dir), "--layout", layout,
                               "--wait", "--timeout", "60", "--json", *more], cwd=ROOT, capture_output=True, text=True)
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
def cluster(jobs, tmp_path):
    with Cluster(tmp_path, jobs.data, jobs.cache) as made:
        yield made


def test_a_machine_joins_and_the_first_one_leaves(jobs, cluster):
    plain = jobs.run(cluster.folder / "plain", 2, {**cluster.arguments, "dynatrain-config": None}, kind="plain").assert_ok()
    cluster.hold_store()
    first = cluster.start("first", 2)
    cluster.until(state="training")
    second = cluster.start("second", 2, "--dynatrain-join")
    cluster.until_waiting(3)
    code, answer = cluster.ask("four")
    assert (code, answer["answer"]) == (0, "done"), answer
    assert answer["report"]["to_ranks"] == [0, 1, 2, 3]
    code, answer = cluster.ask("second")
    assert (code, answer["answer"]) == (0, "done"), answer
    assert first.ended() == 0
    cluster.until(ranks=[2, 3], layout="second", state="training")
    assert second.ended() == 0
    assert cluster.status()["state"] == "ended"
    steps = {event["iteration"]: event["losses"]["lm loss"] for event in cluster.events("step")}
    assert sorted(steps) == list(range(1, 101))
    for iteration, step in plain.steps.items():
        assert steps[iteration] == pytest.approx(step["loss"], rel=2e-4), iteration
