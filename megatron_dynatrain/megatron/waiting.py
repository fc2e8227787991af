"""A process that does not train from the start: it has joined, or was launched beside those that train.

It goes through Megatron's own start, in a world of its own in which nobody answers, with a model that has no memory: so it has
everything that the others have (arguments, tokenizer, how model and data are built) when `train` is called, and disturbs nobody.
"""

import os
from argparse import Namespace

from megatron_dynatrain.elastic import membership, worlds
from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.megatron.dry import fake_world

_NUMBER = 1_000_010  # of the world of such a process until it is taken in for the first time
_NOBODY = -1  # as rank: neither the first nor the last one, which write


def set_aside(session, args: Namespace) -> None:
    """Before the arguments are validated: find out whether this process trains from the start. Where it does not, and where others
    do not, make the world of the arguments that of those who do."""
    elastic, wanted = session.config.elastic, getattr(args, "dynatrain_join", None)
    if wanted is not None:
        if elastic is None:
            raise ConfigError("--dynatrain-join was given, but the file of --dynatrain-config has no `dynatrain.elastic`; a job "
                              "that ranks can join needs it")
        session.waits_as = membership.of_joiner(session.config, wanted, args, args.dynatrain_config)
        args.rank, args.world_size = _NOBODY, session.waits_as.launched
        return
    session.launched = args.world_size
    if elastic is None or elastic.world_size in (None, args.world_size):
        return
    size = elastic.world_size
    if size > args.world_size or args.world_size - size > elastic.spares:
        raise ConfigError(f"`dynatrain.elastic`: world_size {size} and spares {elastic.spares} were given, but {args.world_size} "
                          f"ranks were launched; launch from {size} to {size + elastic.spares}")
    if args.rank >= size:
        session.waits_as = membership.of_spare(session.config, args.rank, size)
        args.rank = _NOBODY
    args.world_size = size
    os.environ["WORLD_SIZE"] = str(size)


def initialize(session, original, args: tuple, kwargs: dict):
    """In place of Megatron's initialisation: groups in which nobody answers."""
    from megatron.training import get_args

    live = get_args()
    size, gloo = live.world_size, live.use_gloo_process_groups
    worlds.take(fake_world(_NUMBER, min(1, size - 1), size))
    live.use_gloo_process_groups = False
    try:
        return original(*args, **kwargs)
    finally:
        live.rank, live.use_gloo_process_groups = _NOBODY, gloo


def promise_data(args: Namespace) -> None:
    """There is something to train on, but it is not built before this process trains."""
    args.do_train, args.do_valid, args.do_test = True, False, False
    args.train_iters = args.train_iters or 1  # where it follows from the samples, the job says it later
