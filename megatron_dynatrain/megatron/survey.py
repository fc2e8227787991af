"""One process of several that describe a world: it captures the job once and describes its share of the ranks.

    python -m megatron_dynatrain.megatron.survey <folder> <number of this process> <how many processes>

The folder holds `task.json` (see `planner.survey`); `<number>.<which layout>.npz` and `<number>.json` are written into it. What
is wrong with the job or with a layout is written down as well, for the process that asked.
"""

import json
import os
import sys
import traceback
from pathlib import Path

from megatron_dynatrain import archive, session
from megatron_dynatrain.errors import DynaTrainError, reason
from megatron_dynatrain.layout import Layout


def main(folder: Path, number: int, count: int) -> None:
    task = json.loads((folder / "task.json").read_text())
    answer = {"refused": None}
    try:
        job = _job(task)
        for i, (name, sizes) in enumerate(task["layouts"].items()):
            described = _describe(job, name, Layout(**sizes), task["world_size"], number, count)
            archive.write(folder / f"{number}.{i}.npz", described)
    except DynaTrainError as error:
        answer["refused"] = {"kind": type(error).__name__, "reason": str(error)}
    except SystemExit:
        answer["refused"] = {"kind": "ConfigError", "reason": "the script ended at its arguments; its messages are above"}
    except Exception as error:
        traceback.print_exc()
        answer["refused"] = {"kind": "ConfigError", "reason": f"the script failed before it built a model: {reason(error)}"}
    (folder / f"{number}.json").write_text(json.dumps(answer))


def _job(task: dict):
    """The job of the task, captured in this process."""
    from megatron_dynatrain import cpu, launch

    cpu.install()
    launch.install()
    import torch

    torch.set_num_threads(1)
    from megatron_dynatrain.megatron import command_line, dry_pretrain, offline

    local = command_line.without_transformer_engine()
    if task["script"]:
        script = [*task["script"], *command_line.words(local, "the arguments without Transformer Engine")]
        sys.path[0] = str(Path(script[0]).resolve().parent)
    else:
        arguments = command_line.completed({**task["model"], **task["launch"]}, local)
        script = [dry_pretrain.__file__, *command_line.words(arguments, task["source"])]
    return offline.capture(session.current(), script, task["world_size"])


def _describe(job, name: str, layout: Layout, world_size: int, number: int, count: int):
    """{rank: Holdings} of this process's share: every `count`-th list of ranks alike. world_size: of the launch."""
    size = layout.num_ranks or world_size
    try:
        job.check(name, layout)
        return {rank: held for ranks in job.ranks_alike(name, size)[number::count]
                for rank, held in job.describe_alike(name, ranks, size).items()}
    except DynaTrainError as error:
        raise type(error)(f"layout {name!r}: {error}") from error


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a fake process group need not be torn down
