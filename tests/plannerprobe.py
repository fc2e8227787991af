"""Probes of the planner that need Megatron: each runs in a process of its own, forked from one that has loaded it."""

import json
import os
import sys

from megatron_dynatrain.layout import LAUNCH, Layout


def captured(argv, world):
    from megatron_dynatrain import session
    from megatron_dynatrain.megatron import offline

    return offline.capture(session.current(), argv, world)


def write(folder, name, records):
    with open(folder / f"{name}.000.jsonl", "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    os._exit(0)


def alike(rank, folder, world, layouts):
    """For every layout: how many lists of ranks alike there are, and the ranks whose description from the build of another
    differs from that of their own."""
    job = captured(sys.argv, world)
    records = []
    for name, sizes in {LAUNCH: {}, **layouts}.items():
        job.check(name, Layout(**sizes))
        lists = job.ranks_alike(name, world)
        wrong = [own for ranks in lists for own, holdings in job.describe_alike(name, ranks, world).items()
                 if holdings.digest() != job.describe_dry(name, own, world).digest()]
        records.append({"layout": name, "ranks": sorted(rank for ranks in lists for rank in ranks), "lists": len(lists),
                        "wrong": wrong})
    write(folder, "alike", records)


def num_parameters(rank, folder, model, launch, world):
    """The number of parameters of a model file: first and last pipeline stage together name every logical tensor."""
    from megatron_dynatrain.megatron import command_line, dry_pretrain

    arguments = command_line.completed({**model, **launch}, command_line.LOCAL)
    job = captured([dry_pretrain.__file__, *command_line.words(arguments, "test")], world)
    job.check(LAUNCH, Layout())
    tensors = {tensor for rank in (0, world - 1) for tensor in job.describe_dry(LAUNCH, rank, world).tensors}
    write(folder, "parameters", [sum(tensor.numel for tensor in tensors if tensor.field == "weight")])


def words(rank, folder, cases):
    """What each of `cases` becomes on a command line, or the error."""
    from megatron_dynatrain.errors import ConfigError
    from megatron_dynatrain.megatron import command_line

    def tried(arguments):
        try:
            return command_line.words(arguments, "--model m.yaml")
        except ConfigError as error:
            return str(error)

    write(folder, "words", [tried(arguments) for arguments in cases])
