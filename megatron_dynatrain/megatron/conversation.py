"""What ranks say to one another while Megatron builds model and optimizer, so that a later build can be silent.

Building is collective in Megatron: ranks gather the keys of their parameter groups, and sum the tied embedding that they
have just initialised. A rank that fails in the middle would leave the others waiting. So what is said is written down
beforehand, in a dry build, and a switch builds from the record without a word: a failure is then one
that all ranks can agree upon afterwards. Sums and broadcasts of fresh parameters are left out, as all are about to be
written. (Calls in megatron-core 0.19: `optimizer._get_param_groups`, `LanguageModule.setup_embeddings_and_output_layer`.)
"""

import contextlib
import threading

import torch.distributed as dist
from torch.distributed import distributed_c10d

_NEEDLESS = ("all_reduce", "broadcast", "barrier")


@contextlib.contextmanager
def _replaced(**functions):
    """Inside, the calling thread has other functions of torch.distributed. Another one, which makes the next generation ready, has
    those that there are."""
    kept = {name: getattr(dist, name) for name in functions}
    try:
        for name, function in functions.items():
            of_thread = _in_this_thread(function, kept[name])
            setattr(dist, name, of_thread)
            setattr(distributed_c10d, name, of_thread)
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
            setattr(distributed_c10d, name, function)


def _in_this_thread(function, elsewhere):
    own = threading.get_ident()
    return lambda *args, **kwargs: (function if threading.get_ident() == own else elsewhere)(*args, **kwargs)


@contextlib.contextmanager
def monologue(spoken: list):
    """In a dry world: everyone else says what this rank says; it is appended to `spoken`."""

    def all_gather_object(object_list, obj, group=None):
        spoken.append(obj)
        object_list[:] = [obj] * len(object_list)

    with _replaced(all_gather_object=all_gather_object):
        yield


@contextlib.contextmanager
def from_record(answers: list[list]):
    """No word leaves the rank: gathers are answered from `answers`, in order; what has to do with values is left out.

    Raises RuntimeError inside where more is asked than was recorded.
    """
    remaining = iter(answers)

    def all_gather_object(object_list, obj, group=None):
        answer = next(remaining, None)
        if answer is None or len(answer) != len(object_list):
            raise RuntimeError("Megatron gathered something while building the layout that it did not gather before")
        object_list[:] = answer

    with _replaced(all_gather_object=all_gather_object, **{name: lambda *args, **kwargs: None for name in _NEEDLESS}):
        yield
