"""Megatron on the CPU: everything that `python -m megatron_dynatrain.launch --cpu` replaces, and nothing without it.

Megatron's training loop asks for CUDA. This package answers in its place, so that the unmodified
`megatron.training.pretrain` of the installed release runs on gloo ranks: on a laptop, in tests, as a first step before
a cluster. It is switched on for a whole process, before Megatron is imported, and never off again.

What it replaces in torch (`stand_in`), because Megatron calls it on every step or at start:

* every CUDA device argument is mapped to the CPU, and `Tensor.type()` answers with CUDA names (`device_map`);
* `torch.cuda`: availability, one device, properties of an A100, streams and events that do nothing, memory counters
  that read zero, random state (the CPU generator stands for the CUDA one), the tensor types used in isinstance tests;
* data loaders get a generator of their own, since the default one stands for the GPU's;
* `torch.accelerator.is_available` and data loaders' `pin_memory`: false.

What it replaces in Megatron (`megatron_parts`), each because the original needs a compiled GPU extension:

* `compile_helpers`: skipped where the compiled helper is there already (the wheel ships it without a Makefile; a
  checkout without it borrows the one of the wheel);
* the torch norm of the local layer specs: carries the sequence-parallel flag instead of refusing it;
* the attention core of the local layer specs (`attention`): works over a context-parallel group, and with keys and values of
  different widths, instead of refusing both; elsewhere it computes what it did;
* the sizes of the token dispatcher's all-to-all: moved "to the CPU" and made numbers though they are there already;
* gathering and reduce-scattering pieces of different lengths, which gloo refuses (expert-tensor parallelism needs them);
* the interleaved schedule of 0.17: keeps outputs until backward, since it frees them while gloo may still be sending them;
* Adam and SGD of the optimizer module: classes with the interface of Apex's `FusedAdam` and `FusedSGD` (the step lives
  in the parameter group), so that a run takes the path that GPU users take. `--cpu-optimizer torch` keeps Megatron's
  own fallback, torch's AdamW.

Environment: TORCHDYNAMO_DISABLE=1, CUDA_DEVICE_MAX_CONNECTIONS=1 and THP_MEM_ALLOC_ENABLE=1 are set where they are not set
already; the last has torch ask for large pages, whose first touch costs a tenth of that of small ones.
"""

import os


def install(optimizer: str = "fused") -> None:
    """Replace what the package docstring lists, for the rest of this process. Not collective; call before Megatron loads.

    optimizer: 'fused' for Adam and SGD with Apex's interface, 'torch' for Megatron's own fallback.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    from megatron_dynatrain import gloo_threads
    from megatron_dynatrain.cpu import megatron_parts, stand_in

    gloo_threads.outlast()
    stand_in.install()
    megatron_parts.install(optimizer)
