"""Build model, optimizer and scheduler for a layout, in the way in which the job built its first ones."""

import copy
import dataclasses
import inspect
from argparse import Namespace

import torch

from megatron_dynatrain.megatron import versions
from megatron_dynatrain.megatron.arguments import transformer_config
from megatron_dynatrain.megatron.describe import ensure_states, unwrap
from megatron_dynatrain.megatron.quiet import quiet


class Recipe:
    """How the job built its model: the call of `setup_model_and_optimizer`, and its configuration as it was before.

    Building fills the configuration with things of the layout (bucket sizes, functions of the optimizer), so it is copied
    first; for each layout the copy is taken again and the fields that the layout changes are set on it.
    """

    def __init__(self, setup, args, kwargs, launch: Namespace):
        self._setup = setup
        self._call = inspect.signature(setup).bind(*args, **kwargs)
        self._container = copy.deepcopy(self._call.arguments.get("cfg_container"))
        self._launch = launch
        self._call.arguments.pop("cfg_container", None)
        self._uses_groups = self._call.arguments.pop("pg_collection", None) is not None

    def build(self, target: Namespace, live: Namespace):
        """(model, optimizer, scheduler) for the layout of `target`, whose arguments are the live ones.

        Values of parameters mean nothing: every element is about to be written. No checkpoint is loaded. Optimizer states
        exist and are zero. `parallel_state` must be that of the layout. Collective, unless within `conversation`.
        """
        from megatron.core.process_groups_config import ProcessGroupCollection

        uninitialised = versions.uninitialised()
        call = copy.copy(self._call.arguments)
        if self._container is not None:
            call["cfg_container"] = container = self._container_for(target)
            if getattr(container, "model", None) is not None:
                vars(container.model.transformer).update(uninitialised)
        if self._uses_groups:
            call["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
        hidden = {"load": None, "pretrained_checkpoint": None, "moe_use_upcycling": False, "ckpt_convert_format": None,
                  **uninitialised}
        if live.train_samples is not None:
            hidden["train_iters"] = None  # derived from the samples after the first build, and mistaken for a flag by the next
        kept = {name: getattr(live, name, None)
                for name in (*hidden, "iteration", "num_floating_point_operations_so_far", "train_iters", "lr_decay_iters",
                             "lr_warmup_iters")}
        try:
            vars(live).update(hidden)
            with quiet():
                model, optimizer, scheduler = self._setup(**call)
        finally:
            vars(live).update(kept)
        for chunk in unwrap(model):
            vars(chunk.config).update({name: bool(kept[name]) for name in uninitialised})
        ensure_states(optimizer)
        return model, optimizer, scheduler

    def _container_for(self, target: Namespace):
        """The job's configuration container with the fields that the layout changes set as Megatron derives them."""
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        container = copy.deepcopy(self._container)
        with quiet():
            before, after = (pretrain_cfg_container_from_args(args) for args in (self._launch, target))
            _overlay(container, before, after)
            model = getattr(container, "model", None)
            if model is not None:
                kind = type(model.transformer)
                _overlay(model.transformer, transformer_config(self._launch, kind), transformer_config(target, kind))
                if hasattr(model, "should_pad_vocab"):  # Megatron would pad for the new TP size
                    model.vocab_size, model.should_pad_vocab = target.padded_vocab_size, False
        return container


def _overlay(target, before, after) -> None:
    """Set on dataclass `target` every field in which `after` differs from `before`, into nested dataclasses."""
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name, None), getattr(after, field.name, None)
        if dataclasses.is_dataclass(old) and dataclasses.is_dataclass(new) and getattr(target, field.name, None) is not None:
            _overlay(getattr(target, field.name), old, new)
        elif not _same(old, new):
            setattr(target, field.name, new)


def _same(a, b) -> bool:
    if callable(a) and callable(b):
        return True  # functions made from the arguments anew each time; no layout changes them
    try:
        return bool(a == b)
    except Exception:
        return False


def release(model: list, optimizer) -> None:
    """Cut the ties that would keep an old model alive: functions in its configuration, hooks, module caches, and the graph of
    the last forward pass, through which a model holds itself where the garbage collector cannot see it."""
    from megatron.core.utils import get_model_config

    for chunk in model:
        config = get_model_config(chunk)
        for name in ("grad_scale_func", "no_sync_func", "grad_sync_func", "param_sync_func", "finalize_model_grads_func",
                     "timers"):
            setattr(config, name, None)
    for chunk in unwrap(model):
        for module in chunk.modules():
            _let_go_of_graphs(module)
            clear = getattr(getattr(type(module), "forward", None), "cache_clear", None)
            if clear is not None:  # rotary embeddings cache their forward, and with it themselves
                clear()


def _let_go_of_graphs(holder, depth: int = 2) -> None:
    """Drop results of a forward pass that a module, or an object of Megatron's that belongs to it, keeps as attributes (the
    token dispatcher of a layer of experts keeps its probabilities)."""
    for name, value in list(vars(holder).items()):
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None:
                setattr(holder, name, None)
        elif depth and type(value).__module__.startswith("megatron.") and not isinstance(value, torch.nn.Module) and (
                hasattr(value, "__dict__")):
            _let_go_of_graphs(value, depth - 1)
