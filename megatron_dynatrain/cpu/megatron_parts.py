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
    after_import("megatron.core.transformer.moe.moe_utils", _split_sizes_as_numbers)
    after_import("megatron.core.tensor_parallel.mappings", _uneven_splits_over_gloo)
    after_import("megatron.core.pipeline_parallel.schedules", _outputs_kept_until_they_are_sent)
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


def _split_sizes_as_numbers(module):
    move = module.maybe_move_tensor_to_cpu

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, *args, **kwargs):
        moved = move(tensor, as_numpy, *args, **kwargs)
        return moved.numpy() if as_numpy and hasattr(moved, "numpy") else moved

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _uneven_splits_over_gloo(module):
    import torch
    import torch.distributed as dist

    gather, reduce_scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def _gather_along_first_dim(input_, group, output_split_sizes=None, *args, **kwargs):
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, *args, **kwargs)
        sizes = [int(size) for size in output_split_sizes]
        output = input_.new_empty(sum(sizes), *input_.shape[1:])
        dist.all_to_all_single(output, torch.cat([input_] * group.size()), sizes, [input_.shape[0]] * group.size(), group=group)
        return output

    def _reduce_scatter_along_first_dim(input_, group, input_split_sizes=None, *args, **kwargs):
        if input_split_sizes is None or group.size() == 1:
            return reduce_scatter(input_, group, input_split_sizes, *args, **kwargs)
        total = input_.clone()
        dist.all_reduce(total, group=group)
        return torch.split(total, [int(size) for size in input_split_sizes])[group.rank()].clone()

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = (
        _gather_along_first_dim, _reduce_scatter_along_first_dim)


def _outputs_kept_until_they_are_sent(module):
    from megatron.core.utils import get_model_config

    from megatron_dynatrain.megatron import versions

    if not versions.frees_outputs_early():
        return
    run = module.forward_backward_pipelining_with_interleaving

    def forward_backward_pipelining_with_interleaving(*, model, **kwargs):
        get_model_config(model[0]).deallocate_pipeline_outputs = False
        return run(model=model, **kwargs)

    module.forward_backward_pipelining_with_interleaving = forward_backward_pipelining_with_interleaving


def _apex_interface_in_distributed_optimizer(module):
    from megatron_dynatrain.cpu.optimizers import FusedAdam

    module.Adam = FusedAdam
    module.HAVE_APEX_OR_TE = module.USING_APEX_OPTIMIZER = True


def _apex_interface_in_optimizer_module(module):
    from megatron_dynatrain.cpu.optimizers import FusedAdam, FusedSGD

    module.Adam, module.SGD = FusedAdam, FusedSGD
    module.USING_PYTORCH_OPTIMIZER = False
