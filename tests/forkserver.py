"""A process that has imported torch and Megatron once and forks ranks from it: a job starts in well under a second.

    python tests/forkserver.py {plugin|plain} {fused|torch}

reads jobs from standard input, one JSON object a line, and answers each with one line when its ranks have ended:
{"world_size", "argv": [script, arguments...], "probe": "module:function" or null, "probe_arguments", "folder", "port",
"timeout", "grace"} -> {"exit_codes": [...]}. Rank r writes its output to `folder`/rank<r>.log.
"""

import argparse
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


def preload(kind: str, optimizer: str) -> None:
    from megatron_dynatrain import cpu

    cpu.install(optimizer)
    if kind == "plugin":
        from megatron_dynatrain import launch

        launch.install()
    import torch

    torch.set_num_threads(1)
    runpy.run_path(str(ROOT / "scripts" / "pretrain_gpt.py"), run_name="preload")
    import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401
    import torch.testing._internal.distributed.fake_pg  # noqa: F401
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    # Every job parses arguments, for whose help Megatron parses its own sources: once is enough.
    read, known = ArgumentGroupFactory._get_field_docstrings, {}

    def docstrings(self, config_class):
        if config_class not in known:
            known[config_class] = read(self, config_class)
        return dict(known[config_class])

    ArgumentGroupFactory._get_field_docstrings = docstrings
    add_megatron_arguments(argparse.ArgumentParser())

    gc.collect()
    gc.freeze()  # forked ranks neither walk nor copy what is loaded here


def run_rank(job: dict, rank: int) -> None:
    """In the child: become rank `rank` of the job. Does not return."""
    code = 1
    os.setpgid(0, 0)
    try:
        log = os.open(Path(job["folder"], f"rank{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world_size"]),
                          MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
        sys.argv = list(job["argv"])
        sys.path.insert(0, str(Path(job["argv"][0]).parent))  # as the launcher does
        if job["probe"]:
            module, function = job["probe"].split(":")
            getattr(__import__(module), function)(rank, Path(job["folder"]), **job["probe_arguments"])
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_job(job: dict) -> dict:
    children = {}
    for rank in range(job["world_size"]):
        pid = os.fork()
        if pid == 0:
            run_rank(job, rank)
        children[pid] = rank
    codes = [None] * job["world_size"]
    deadline = time.monotonic() + job["timeout"]
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            # A rank that failed leaves the others waiting for it, as under torchrun: give them a moment, then end them.
            if any(code not in (None, 0) for code in codes):
                deadline = min(deadline, time.monotonic() + job["grace"])
            if time.monotonic() > deadline:
                for child in children:
                    os.kill(child, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.01)
            continue
        codes[children.pop(pid)] = os.waitstatus_to_exitcode(status)
        try:
            os.killpg(pid, signal.SIGKILL)  # worker processes of checkpoints and data loaders
        except ProcessLookupError:
            pass
    return {"exit_codes": codes}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed while loading must not look like an answer
    preload(*sys.argv[1:3])
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), file=answers, flush=True)
