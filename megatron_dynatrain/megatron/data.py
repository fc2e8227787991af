"""Data iterators: built again for each layout, at the position that the consumed samples give."""

import copy
import functools
from argparse import Namespace

from megatron_dynatrain.megatron.quiet import quiet


def is_of_stage(provider) -> bool:
    """Whether Megatron bound a dataset provider to one virtual pipeline stage."""
    return isinstance(provider, functools.partial) and "vp_stage" in provider.keywords


class DataRecipe:
    """How the job built its iterators: the dataset provider, and Megatron's function that makes iterators from it."""

    def __init__(self, build):
        self._build = build
        self.provider = None
        self._eval_iters = None

    def first(self, provider, args: Namespace):
        """Build for the launch layout, and remember the provider."""
        self.note(provider, args)
        return self._build(provider)

    def note(self, provider, args: Namespace) -> None:
        """Remember the provider. Without its virtual stage, where it has one."""
        if self.provider is None:
            self._eval_iters = copy.copy(args.eval_iters)  # --full-validation writes the length of what it built here
        self.provider = provider.func if is_of_stage(provider) else provider

    def build(self, args: Namespace) -> dict[str, object]:
        """{'train', 'valid', 'test'}: iterators of this rank; lists over virtual stages where there are any. Collective.

        `args` are the live arguments; the consumed samples in them are the position.
        """
        args.eval_iters = copy.copy(self._eval_iters)
        with quiet():
            stages = args.virtual_pipeline_model_parallel_size
            if stages is None:
                return dict(zip(("train", "valid", "test"), self._build(self.provider), strict=True))
            by_stage = []
            for stage in range(stages):
                provider = functools.partial(self.provider, vp_stage=stage)
                provider.is_distributed = getattr(self.provider, "is_distributed", False)
                by_stage.append(self._build(provider))
            return dict(zip(("train", "valid", "test"), map(list, zip(*by_stage, strict=True)), strict=True))


def shut_down(iterators) -> None:
    """End the worker processes of old iterators and let their data sets go; samples that were prefetched but not consumed
    will be drawn again."""
    from megatron.core.datasets import indexed_dataset

    indexed_dataset._IndexReader.__getitem__.cache_clear()  # it keeps the last readers, each with the file open
    _shut_down(iterators)


def _shut_down(iterators) -> None:
    if isinstance(iterators, (list, tuple)):
        for iterator in iterators:
            _shut_down(iterator)
        return
    inner = getattr(iterators, "iterable", iterators)  # RerunDataIterator wraps the loader's iterator
    frame = getattr(inner, "gi_frame", None)
    if frame is not None:  # cyclic_iter holds the loader's iterator in a local
        loader_iterator = frame.f_locals.get("iterator")
        inner.close()
        inner = loader_iterator
    shutdown = getattr(inner, "_shutdown_workers", None)
    if shutdown is not None:
        shutdown()
