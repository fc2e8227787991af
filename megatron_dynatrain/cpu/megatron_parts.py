"""What the CPU backend replaces inside Megatron. See the package docstring for the list and the reasons."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from megatron_dynatrain.import_hooks import after_import


def install(optimizer: str) -> None:
    """Register the replacements; each takes effect when its Megatron module is imported."""
    after_import("megatron.core.datasets.utils", _skip_needless_compilation)
    after_import("megatron.core.transformer.torch_norm", _norm_with_sequence_parallel_flag)
    after_import("megatron.core.transformer.dot_product_attention", _attention_with_context_parallelism)
    if optimizer == "fused":
        after_import("megatron.core.optimizer.distrib_optimizer", _apex_interface_in_distributed_optimizer)
        after_import("megatron.core.optimizer", _apex_interface_in_optimizer_module)


def _skip_needless_compilation(module):
    compile_helpers = module.compile_helpers

    def compile_if_missing():
        if not _have_compiled_helpers():
            compile_helpers()

    module.compile_helpers = compile_if_missing
    _have_compiled_helpers()


def _have_compiled_helpers() -> bool:
    """Whether the dataset index builder can be imported; a checkout of Megatron borrows the one of an installed wheel."""
    name = "megatron.core.datasets.helpers_cpp"
    if importlib.util.find_spec(name) is not None:
        return True
    for folder in sys.path:
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            path = Path(folder, "megatron", "core", "datasets", "helpers_cpp" + suffix)
            if path.is_file():
                spec = importlib.util.spec_from_file_location(name, path)
                sys.modules[name] = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(sys.modules[name])
                return True
    return False


def _norm_with_sequence_parallel_flag(module):
    import torch

    build = module.WrappedTorchNorm.__new__

    def new(cls, config, hidden_size, eps=1e-5, *args, **kwargs):
        """The torch norm, its parameters marked for Megatron's sequence-parallel gradient all-reduce."""
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = build(cls, config, hidden_size, eps, *args, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for param in norm.parameters():
            param.sequence_parallel = sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = staticmethod(new)


def _attention_with_context_parallelism(module):
    from megatron_dynatrain.cpu import attention

    attention.extend(module)


def _apex_interface_in_distributed_optimizer(module):
    from megatron_dynatrain.cpu.optimizers import FusedAdam

    module.Adam = FusedAdam
    module.HAVE_APEX_OR_TE = module.USING_APEX_OPTIMIZER = True


def _apex_interface_in_optimizer_module(module):
    from megatron_dynatrain.cpu.optimizers import FusedAdam, FusedSGD

    module.Adam, module.SGD = FusedAdam, FusedSGD
    module.USING_PYTORCH_OPTIMIZER = False
