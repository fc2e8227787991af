"""scripts/slurm: what the batch files would run, and jobs on a real Slurm of three nodes on this machine."""

import json
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack

import pytest
import yaml
from conftest import ROOT
from harness import CPU, MODEL, TRAINING, words_of
from slurm_cluster import NODES, TRIED, NotUp, SlurmCluster, free_ports, missing, release, wait_until

from megatron_dynatrain.report import read
from megatron_dynatrain.run_dir.files import RunDir

TRAIN = ROOT / "scripts" / "slurm" / "train.sbatch"
SWITCH = ROOT / "scripts" / "slurm" / "switch_on_signal.sbatch"
JOIN = ROOT / "scripts" / "slurm" / "join.sbatch"
WORDS = ["--cpu", "my script.py", "--data-path", "0.5 'a b' \"c\"", "$HOME", "*", ""]

# In place of Python. As torchrun it writes down what it was given, waits for the file `go` and ends as EXIT_CODE says; on the
# node FAIL_ON it ends with 3 once the others have started, and where it is told to end, with 1, as torchrun does. As `request`
# it writes down what was asked.
STAND_IN = """\
#!/usr/bin/env bash
case "$*" in
    *" request --help") exit "${CANNOT_ASK:-0}" ;;
    *" request "*) printf '%s\\n' "$*" >> "$FOLDER/requests"; exit "${REFUSED:-0}" ;;
esac
trap 'exit 1' TERM
printf '%s\\0' "$@" > "$FOLDER/words.$SLURMD_NODENAME"
if [ "${FAIL_ON:-}" = "$SLURMD_NODENAME" ]; then
    until [ -e "$FOLDER/words.node1" ] && [ -e "$FOLDER/words.node2" ] && [ -e "$FOLDER/words.node3" ]; do sleep 0.1; done
    exit 3
fi
until [ -e "$FOLDER/go" ]; do sleep 0.1; done
exit "${EXIT_CODE:-0}"
"""


@pytest.fixture
def stand_in(tmp_path):
    """A folder with a space in its name, and the environment of a job that runs the stand-in there."""
    folder = tmp_path / "a job"
    folder.mkdir()
    python = folder / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return folder, {"PYTHON": python, "FOLDER": folder, "LOG_DIR": folder / "logs", "RUN_DIR": folder / "run"}


@pytest.fixture(scope="module")
def slurm():
    if absent := missing():
        pytest.skip(f"there is no Slurm here (no {', '.join(absent)}); `scripts/setup.sh slurm` tries to install it")
    with ExitStack() as stack:
        try:
            running = stack.enter_context(SlurmCluster())
        except NotUp as error:
            if release() == TRIED:
                raise
            pytest.skip(f"Slurm {release()} does not come up with a configuration that was tried with {TRIED}: {error}")
        yield running
    assert not running.members() and not running.folder.exists()


@pytest.fixture
def cluster(slurm):
    """A cluster without jobs; a job that a failed test leaves does not stand in the way of the next."""
    yield slurm
    slurm.end_jobs()


def dry(script, *words, env=None):
    return subprocess.run(["bash", script, *words], capture_output=True, text=True, cwd=ROOT, env={
        **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
        "PYTHON": "python3", "DRY_RUN": "1", **{name: str(value) for name, value in (env or {}).items()}})


def flags_of(printed):
    """{flag: value} of all --flag=value of a printed command, and its words."""
    words = shlex.split(printed)
    return dict(word.split("=", 1) for word in words if word.startswith("--") and "=" in word), words


class TestDryRun:
    ALLOCATION = {"SLURM_JOB_ID": 40123, "SLURM_JOB_NUM_NODES": 16, "SLURM_JOB_NODELIST": "gpu[07-22]"}

    @pytest.fixture
    def allocation(self, tmp_path):
        scontrol = tmp_path / "scontrol"
        scontrol.write_text("#!/usr/bin/env bash\n[ \"$*\" = 'show hostnames gpu[07-22]' ] && printf 'gpu%02d\\n' {7..22}\n")
        scontrol.chmod(0o755)
        return {**self.ALLOCATION, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def test_values_follow_from_the_allocation(self, allocation):
        done = dry(TRAIN, *WORDS, env=allocation)
        assert done.returncode == 0, done.stderr
        flags, words = flags_of(done.stdout)
        assert {name: flags[name] for name in ("--nodes", "--ntasks", "--ntasks-per-node", "--nnodes", "--nproc-per-node",
                                               "--master-addr", "--master-port", "--output", "--kill-on-bad-exit")} == {
            "--nodes": "16", "--ntasks": "16", "--ntasks-per-node": "1", "--nnodes": "16", "--nproc-per-node": "gpu",
            "--master-addr": "gpu07", "--master-port": "10123", "--output": "runs/slurm-40123/node%n.log",
            "--kill-on-bad-exit": "1"}
        assert words[0] == "CUDA_DEVICE_MAX_CONNECTIONS=1" and "--cpus-per-task" not in flags
        assert words[-len(WORDS) - 2:] == ["-m", "megatron_dynatrain.launch", *WORDS]

    @pytest.mark.parametrize("env, expected", [
        ({"NNODES": 4}, {"--nodes": "4", "--ntasks": "4", "--nnodes": "4"}),
        ({"NPROC_PER_NODE": 2}, {"--nproc-per-node": "2"}),
        ({"MASTER_ADDR": "10.0.0.7"}, {"--master-addr": "10.0.0.7"}),
        ({"MASTER_PORT": 29500}, {"--master-port": "29500"}),
        ({"LOG_DIR": "/my logs"}, {"--output": "/my logs/node%n.log"}),
        ({"SRUN_ARGS": "--container-image=a.sqsh\n--mpi=none"}, {"--container-image": "a.sqsh", "--mpi": "none"}),
        ({"TORCHRUN_ARGS": "--max-restarts=1 --tee=3"}, {"--max-restarts": "1", "--tee": "3"}),
        ({"SLURM_CPUS_PER_TASK": 96}, {"--cpus-per-task": "96"}),
    ])
    def test_the_environment_overrides(self, allocation, env, expected):
        flags, _ = flags_of(dry(TRAIN, "pretrain_gpt.py", env={**allocation, **env}).stdout)
        assert {name: flags[name] for name in expected} == expected

    def test_it_shows_a_command_outside_of_slurm_and_runs_nothing(self, tmp_path):
        done = dry(TRAIN, "pretrain_gpt.py", env={"NNODES": 3, "LOG_DIR": tmp_path / "logs"})
        assert done.returncode == 0 and "this is no Slurm job" in done.stderr and not (tmp_path / "logs").exists()
        assert flags_of(done.stdout)[0]["--nnodes"] == "3"

    def test_switch_on_signal_shows_its_requests_and_the_training(self, tmp_path):
        done = dry(SWITCH, "pretrain_gpt.py", env={
            "REQUEST_PYTHON": "my python", "RUN_DIR": "/my run", "SWITCH_LAYOUTS": "deep launch"})
        assert done.returncode == 0, done.stderr
        first, second, training = done.stdout.splitlines()
        for line, layout in ((first, "deep"), (second, "launch")):
            assert shlex.split(line) == [
                "on", "USR2:", "my python", "-m", "megatron_dynatrain", "request", "--run-dir", "/my run", "--layout", layout]
        assert training == dry(TRAIN, "pretrain_gpt.py").stdout.strip()

    def test_join_is_training_with_a_torchrun_a_node(self):
        words = shlex.split(dry(JOIN, "pretrain_gpt.py", "--lr", "1", env={"JOIN_JOB": "4711"}).stdout)
        torchrun = words[words.index("python3"):]
        assert words[-5:] == ["pretrain_gpt.py", "--lr", "1", "--dynatrain-join", "4711"]
        last = dict(flag.split("=") for flag in torchrun if flag.startswith(("--n", "--master")))
        assert (last["--nnodes"], last["--node-rank"], last["--master-addr"]) == ("1", "0", "127.0.0.1")
        assert words.index("--kill-on-bad-exit=1") < words.index("--kill-on-bad-exit=0")


@pytest.mark.parametrize("script, words, env, message", [
    (TRAIN, ["pretrain_gpt.py"], {"DRY_RUN": "0"}, "this is no Slurm job; submit it with sbatch, or set DRY_RUN=1"),
    (TRAIN, [], {}, "no pretraining script was given"),
    (JOIN, [], {}, "no pretraining script was given"),
    (TRAIN, ["pretrain_gpt.py"], {"PYTHON": ""},
     "torch and megatron_dynatrain. Submit from an environment that has them"),
    (SWITCH, ["pretrain_gpt.py"], {"SWITCH_LAYOUTS": "deep"}, "set RUN_DIR to the run_dir of the file"),
    (SWITCH, ["pretrain_gpt.py"], {"RUN_DIR": "run"}, "set SWITCH_LAYOUTS to the layouts to ask for"),
    (SWITCH, ["pretrain_gpt.py"], {"RUN_DIR": "run", "SWITCH_LAYOUTS": " \n"}, "set SWITCH_LAYOUTS to the layouts to ask for"),
    (SWITCH, ["pretrain_gpt.py"], {"RUN_DIR": "run", "SWITCH_LAYOUTS": "deep", "PYTHON": ""},
     "runs `python -m megatron_dynatrain request`; name one"),
])
def test_what_is_missing_is_named(tmp_path, script, words, env, message):
    for name in ("python3.12", "python3", "python"):  # no Python of this machine is good enough
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "VIRTUAL_ENV", "CONDA"))}
    done = subprocess.run(["bash", script, *words], capture_output=True, text=True, cwd=tmp_path, env={
        **outside, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python3", "REQUEST_PYTHON": "",
        "DRY_RUN": "1", **env})
    assert done.returncode == 2 and message in done.stderr, (done.returncode, done.stderr)
    assert not done.stdout


def finished(cluster, job):
    """The state and exit code of a job that has ended."""
    wait_until(lambda: cluster.field(job, "JobState") not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"),
               lambda: cluster.run("scontrol", "show", "job", job).stdout)
    return cluster.field(job, "JobState"), cluster.field(job, "ExitCode")


def words_given(folder):
    """{node: words} of the stand-ins that have started."""
    return {path.suffix[1:]: path.read_text().split("\0")[:-1] for path in folder.glob("words.*")}


def asked(folder):
    """The requests of stand-ins, in order."""
    path = folder / "requests"
    return path.read_text().splitlines() if path.exists() else []


def logs(folder):
    return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
                     for path in [*folder.glob("slurm-*.out"), *folder.glob("logs/*.log")])


class TestOnSlurm:
    def test_each_node_gets_the_same_words_and_its_own_rank(self, cluster, stand_in):
        folder, env = stand_in
        (folder / "go").touch()
        job = cluster.submit("--nodes=3", TRAIN, *WORDS, cwd=folder, NPROC_PER_NODE=2, **env)
        assert finished(cluster, job) == ("COMPLETED", "0:0")
        given = words_given(folder)
        assert sorted(given) == list(NODES)
        for rank, node in enumerate(NODES):
            assert given[node] == ["-m", "torch.distributed.run", f"--node-rank={rank}", "--nnodes=3", "--nproc-per-node=2",
                                   "--master-addr=node1", f"--master-port={10000 + int(job) % 20000}",
                                   "-m", "megatron_dynatrain.launch", *WORDS]
        assert sorted(path.name for path in (folder / "logs").iterdir()) == ["node0.log", "node1.log", "node2.log"]

    def test_fewer_nodes_than_allocated_are_the_first(self, cluster, stand_in):
        folder, env = stand_in
        (folder / "go").touch()
        job = cluster.submit("--nodes=3", TRAIN, "pretrain_gpt.py", cwd=folder, NNODES=2, **env)
        assert finished(cluster, job) == ("COMPLETED", "0:0")
        assert {node: words[2:4] for node, words in words_given(folder).items()} == {
            "node1": ["--node-rank=0", "--nnodes=2"], "node2": ["--node-rank=1", "--nnodes=2"]}

    @pytest.mark.parametrize("script", [TRAIN, SWITCH], ids=lambda script: script.stem)
    def test_a_node_that_fails_ends_the_job_with_its_code(self, cluster, stand_in, script):
        folder, env = stand_in
        job = cluster.submit("--nodes=3", script, "pretrain_gpt.py", cwd=folder, FAIL_ON="node2", SWITCH_LAYOUTS="deep", **env)
        # The others would wait forever.
        assert finished(cluster, job) == ("FAILED", "3:0")

    @pytest.mark.parametrize("refused, layouts", [(0, ("deep", "launch", "deep")), (1, ("deep", "deep", "deep"))],
                             ids=["filed", "not-filed"])
    def test_each_signal_asks_for_a_layout_while_training_goes_on(self, cluster, stand_in, refused, layouts):
        folder, env = stand_in
        job = cluster.submit("--nodes=3", SWITCH, "pretrain_gpt.py", cwd=folder, SWITCH_LAYOUTS="deep launch", EXIT_CODE=5,
                             REFUSED=refused, **env)
        wait_until(lambda: len(words_given(folder)) == 3, "the stand-ins have not started")
        for count in (1, 2, 3):
            cluster.run("scancel", "--signal=USR2", "--batch", job)
            wait_until(lambda: len(asked(folder)) == count, lambda: f"after signal {count}: {asked(folder)}")
        assert asked(folder) == [f"-m megatron_dynatrain request --run-dir {folder / 'run'} --layout {layout}"
                                 for layout in layouts]
        assert cluster.field(job, "JobState") == "RUNNING"
        (folder / "go").touch()
        assert finished(cluster, job) == ("FAILED", "5:0")
        assert (folder / f"slurm-{job}.out").read_text().count("could not be filed (see above)") == 3 * refused

    def test_the_signal_comes_before_the_time_limit(self, cluster, stand_in):
        folder, env = stand_in
        job = cluster.submit("--nodes=1", "--time=2", SWITCH, "pretrain_gpt.py", cwd=folder, SWITCH_LAYOUTS="deep", **env)
        wait_until(lambda: len(asked(folder)) == 1, lambda: (folder / f"slurm-{job}.out").read_text())
        (folder / "go").touch()
        assert finished(cluster, job) == ("COMPLETED", "0:0")


class TestTraining:
    """Megatron on three nodes. It stands still after iteration 3 until its request is pending (`pretrain_paced`)."""

    LAYOUTS = {"deep": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 3}}

    @pytest.fixture
    def paced(self, jobs, tmp_path):
        """The words of a training job of three layers, and its environment."""
        config = tmp_path / "switch.yaml"
        config.write_text(yaml.safe_dump({"dynatrain": {
            "layouts": self.LAYOUTS, "verify": "full", "run_dir": str(tmp_path / "run")}}))
        arguments = {**MODEL, **TRAINING, **CPU, "num-layers": 3, "global-batch-size": 6, "train-iters": 30,
                     "data-path": jobs.data, "data-cache-path": jobs.cache, "dynatrain-config": config}
        words = ["--cpu", ROOT / "tests" / "pretrain_paced.py", *words_of(arguments)]
        # The names of these nodes are known to Slurm alone; and nobody else may have the port.
        return words, {"PYTHON": sys.executable, "PYTHONPATH": ROOT, "NPROC_PER_NODE": 1, "OMP_NUM_THREADS": 1,
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0], "LOG_DIR": tmp_path / "logs",
                       "RUN_DIR": tmp_path / "run", "PAUSE_AFTER": 3, "GATE": tmp_path / "go"}

    def stands_still(self, job, folder):
        """Wait until the job has come to where it waits for its request."""
        now = wait_until(lambda: (now := RunDir(folder / "run").read_status()) and now.iteration == 3 and now,
                         lambda: logs(folder), timeout=120)
        assert (now.job, now.world_size, now.pending) == (job, 3, [])

    def goes_on_with_one_request(self, cluster, job, folder):
        """Let training go on once it knows of a request, to its end; the report of its one switch."""
        wait_until(lambda: RunDir(folder / "run").read_status().pending, lambda: logs(folder))
        (folder / "go").touch()
        assert finished(cluster, job) == ("COMPLETED", "0:0"), logs(folder)
        events = read(folder / "run" / "report.jsonl")
        [switch] = [event for event in events if event["event"] == "switch"]
        assert (switch["from"], switch["to"], switch["verify"]) == ("launch", "deep", "ok") and 3 < switch["iteration"] < 30
        return switch

    def test_a_request_from_outside_switches_the_job(self, cluster, paced, tmp_path):
        words, env = paced
        job = cluster.submit("--nodes=3", TRAIN, *words, cwd=tmp_path, **env)
        self.stands_still(job, tmp_path)
        asking = subprocess.Popen([sys.executable, "-m", "megatron_dynatrain", "request", "--run-dir", tmp_path / "run",
                                   "--layout", "deep", "--wait", "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        switch = self.goes_on_with_one_request(cluster, job, tmp_path)
        answer = json.loads(asking.communicate(timeout=60)[0])
        assert asking.returncode == 0 and answer["answer"] == "done" and answer["iteration"] == switch["iteration"]

    def test_a_signal_to_the_batch_shell_switches_the_job(self, cluster, paced, tmp_path):
        words, env = paced
        job = cluster.submit("--nodes=3", SWITCH, *words, cwd=tmp_path, SWITCH_LAYOUTS="deep", **env)
        self.stands_still(job, tmp_path)
        cluster.run("scancel", "--signal=USR2", "--batch", job)
        self.goes_on_with_one_request(cluster, job, tmp_path)
        assert "USR2: asking for layout deep" in (tmp_path / f"slurm-{job}.out").read_text()


    def test_a_second_job_joins_and_is_given_back(self, cluster, jobs, tmp_path):
        (tmp_path / "switch.yaml").write_text(yaml.safe_dump({"dynatrain": {
            "layouts": {"grown": {"world_size": 4, "tensor_model_parallel_size": 2}}, "verify": "full", "elastic": {},
            "run_dir": str(tmp_path / "run")}}))
        arguments = {**MODEL, **TRAINING, **CPU, "global-batch-size": 4, "train-iters": 250, "data-path": jobs.data,
                     "data-cache-path": jobs.cache, "dynatrain-config": tmp_path / "switch.yaml"}
        words = ["--cpu", ROOT / "tests" / "pretrain_slow.py", *words_of(arguments)]
        env = {"PYTHON": sys.executable, "PYTHONPATH": ROOT, "NPROC_PER_NODE": 2, "OMP_NUM_THREADS": 1, "STEP_SECONDS": 0.1}
        first_port, second_port = free_ports(2)
        first = cluster.submit("--nodes=1", TRAIN, *words, cwd=tmp_path, MASTER_ADDR="127.0.0.1", MASTER_PORT=first_port,
                               LOG_DIR=tmp_path / "logs", **env)
        wait_until(lambda: (now := RunDir(tmp_path / "run").read_status()) and now.state == "training", lambda: logs(tmp_path),
                   timeout=120)
        second = cluster.submit("--nodes=1", JOIN, *words, cwd=tmp_path, MASTER_PORT=second_port, JOIN_JOB=first,
                                LOG_DIR=tmp_path / "more" / "logs", **env)
        wait_until(lambda: "rank 3 of the job waits" in logs(tmp_path / "more"), lambda: logs(tmp_path / "more"), timeout=120)
        for layout, ranks in (("grown", [0, 1, 2, 3]), ("launch", [0, 1])):
            done = subprocess.run([sys.executable, "-m", "megatron_dynatrain", "request", "--run-dir", tmp_path / "run", "--layout",
                                   layout, "--wait", "--json"], capture_output=True, text=True, cwd=ROOT)
            answer = json.loads(done.stdout)
            assert (done.returncode, answer["answer"], answer["report"]["to_ranks"]) == (0, "done", ranks), answer
        assert finished(cluster, second) == ("COMPLETED", "0:0"), logs(tmp_path / "more")
        assert cluster.field(first, "JobState") == "RUNNING"
        assert finished(cluster, first) == ("COMPLETED", "0:0"), logs(tmp_path)
