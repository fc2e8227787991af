"""A job without its cluster: one process runs the user's script up to the model, and can then describe any rank of any layout.

The script believes that it is rank 0 of a world of the asked size (torch's fake process group). It is stopped where Megatron
would build the model; what was recorded on the way there is what a running job records too.
"""

import inspect
import os
import runpy
import sys

import torch.distributed as dist

from megatron_dynatrain.config import Config
from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.import_hooks import after_import
from megatron_dynatrain.layout import LAUNCH, Layout
from megatron_dynatrain.megatron.build import Recipe
from megatron_dynatrain.megatron.job import MegatronJob
from megatron_dynatrain.megatron.quiet import quiet
from megatron_dynatrain.space import World


class _AtTheModel(BaseException):
    """Leaves the script. No Exception, so that no handler of the script takes it for an error."""


def capture(session, script: list[str], world_size: int) -> MegatronJob:
    """Run `script` (path and arguments) as rank 0 of `world_size` ranks until it wants to build its model; its job.

    session: the one of this process, whose seams are installed. Not collective; once a process, since Megatron's globals
    stay as the script left them. Errors of the script pass.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    session.config = session.config or Config()
    after_import("megatron.training.training", lambda module: _stop_before_the_model(module, session.job))
    after_import("megatron.core.parallel_state", _all_groups_fake)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    sys.argv = list(script)
    try:
        with quiet():
            runpy.run_path(script[0], run_name="__main__")
    except _AtTheModel:
        session.job.complete(LAUNCH)
        return session.job
    raise ConfigError(f"{script[0]} ended without building a model; it must call megatron.training.pretrain")


def _all_groups_fake(module) -> None:
    """A gloo group would try to reach the other ranks."""
    create_group = module.create_group
    module.create_group = lambda ranks=None, timeout=None, backend=None, *args, **kwargs: create_group(
        ranks, timeout, None, *args, **kwargs)


def _stop_before_the_model(module, job: MegatronJob) -> None:
    original = inspect.unwrap(module.setup_model_and_optimizer)

    def setup_model_and_optimizer(*args, **kwargs):
        job.recipe = Recipe(original, args, kwargs, job.book.launch)
        raise _AtTheModel

    module.setup_model_and_optimizer = setup_model_and_optimizer


def describe_world(job: MegatronJob, name: str, layout: Layout, world_size: int) -> World:
    """What all ranks would hold in `layout`. Raises LayoutRefused. `name` tells layouts of the job apart."""
    job.check(name, layout)
    return World.assemble({rank: own for ranks in job.ranks_alike(name, world_size)
                           for rank, own in job.describe_alike(name, ranks, world_size).items()})
