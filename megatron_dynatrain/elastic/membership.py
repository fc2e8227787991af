"""How a process belongs to an elastic job: its number, and the store of the job.

A process of the launch has its rank as its number. One that joins finds the job through its run directory, shows that it belongs
to it, and gets the next number. Both then have the same: a part of a store that is the job's alone, by the token of its run.
"""

import json
import os
import socket
import time
from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_dynatrain.config import Config, read_text
from megatron_dynatrain.elastic import job_store, joining, roster
from megatron_dynatrain.elastic.formation import Board
from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.run_dir.files import RunDir, Status
from megatron_dynatrain.run_dir.ownership import is_running, who


@dataclass(slots=True)
class Membership:
    """number: of this process in the job, for life. launched: ranks of the layout of the launch. store: of the job. keeps: the
    store of the launch, which a process may hold itself, and which would end with the world of the launch."""

    number: int
    launched: int
    store: object
    keeps: object = None

    @property
    def board(self) -> Board:
        return Board(self.store)

    def wait_in_line(self) -> roster.Pulse:
        """Say that this process waits to be taken in, and that it is alive, until the pulse is stopped."""
        roster.say(self.store, self.number, waits=True, host=socket.gethostname(), pid=os.getpid())
        return roster.Pulse(self.store, roster.pulse_key(self.number))

    def leave(self) -> None:
        """Say that this process ends."""
        roster.say(self.store, self.number, waits=False, host=socket.gethostname(), pid=os.getpid())


def _of_run(tcp_store, run: str):
    from torch.distributed import PrefixStore

    return PrefixStore(f"dynatrain/{run}", tcp_store)


def _launch_key() -> str:
    """Where the launched processes that do not train find the job; torchrun starts all of them anew after a failure."""
    return f"dynatrain/launch/{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def of_trainer(config: Config, rank: int, launched: int, processes: int, run: str, raw: Namespace,
               path: str) -> tuple[Membership, str]:
    """(membership, HOST:PORT of the store) of a rank that trains from the start. run: the token of the run, the same on all.

    Rank 0 publishes what others need to join. processes: how many were launched, with those that wait. raw: the arguments before
    their validation. path: of the configuration. Raises ConfigError.
    """
    at_launch = job_store.of_launch()
    address = config.elastic.store or at_launch
    store = _of_run(job_store.connect(address), run)
    if rank == 0:
        roster.found(store, processes)
        facts = {"launched": launched, "facts": joining.fingerprint(raw, read_text(path, f"--dynatrain-config {path}"))}
        store.set("job", json.dumps(facts))
        job_store.connect(at_launch).set(_launch_key(), json.dumps({"run": run, "store": address}))
    return Membership(rank, launched, store, dist.distributed_c10d._get_default_store()), address


def of_spare(config: Config, rank: int, launched: int) -> Membership:
    """Of a launched process that does not train from the start; waits for those that do. Raises ConfigError."""
    at_launch = job_store.connect(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}")
    at_launch.wait([_launch_key()], timedelta(days=1))
    found = json.loads(at_launch.get(_launch_key()))
    return Membership(rank, launched, _of_run(job_store.connect(found["store"]), found["run"]))


def of_joiner(config: Config, wanted: str, raw: Namespace, path: str) -> Membership:
    """Of a process that joins the job that runs on `config.run_dir`. wanted: the token of its run, or the scheduler's number of the
    job, if that was given. Raises ConfigError where there is no such job, or where this process does not belong to it."""
    status = _running(config)
    if wanted and wanted not in (status.run, status.job):
        raise ConfigError(f"--dynatrain-join {wanted}: the job of {config.run_dir} is another one ({who(status)}, run {status.run}"
                          "); give its number or its run, or leave the value out")
    store = _of_run(job_store.connect(status.store), status.run)
    job = json.loads(store.get("job"))
    joining.check(job["facts"], joining.fingerprint(raw, read_text(path, f"--dynatrain-config {path}")))
    return Membership(roster.enlist(store), job["launched"], store)


def _running(config: Config) -> Status:
    """The status of the job that runs on the run directory; it may be about to start."""
    run_dir, deadline = RunDir(config.run_dir), time.monotonic() + config.elastic.patience_seconds
    while True:
        status, runs = is_running(run_dir)
        if runs and status.store is not None and status.state != "starting":
            return status
        if time.monotonic() > deadline:
            raise ConfigError(f"--dynatrain-join: no job that ranks can join runs on `dynatrain.run_dir` {run_dir.path}; start one "
                              "with the same file first")
        time.sleep(0.5)
