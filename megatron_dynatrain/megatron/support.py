"""What can be switched and what is refused: the table that refusals and the README's support matrix both come from."""

from argparse import Namespace

from megatron_dynatrain.errors import LayoutRefused
from megatron_dynatrain.megatron import versions

# What was trained and switched by the tests, by topic.
SUPPORTED = {
    "Megatron": f"megatron-core {versions.names()}, wheel or checkout",
    "Parallelism": "TP, PP, virtual PP, CP, EP, expert-TP, DP, sequence parallelism, in any combination and both directions; "
                   "odd DP sizes; `--use-tp-pp-dp-mapping`; `num_distributed_optimizer_instances`",
    "Pipelines": "even, uneven (`decoder_first/last_pipeline_num_layers`, `pipeline_model_parallel_layout`), embedding and loss "
                 "accounted as layers",
    "Models": "whatever Megatron can save with `sharded_state_dict()`: tried with GQA, MLA, MTP, tied embeddings, learned "
              "positions, biases, QK norm, MoE with shared experts, mixed dense layers and router bias; a Mamba hybrid without its "
              "kernels, and Transformer Engine's layers with sequential and grouped experts, dry",
    "Vocabulary": "the padded size stays where TP divides it; otherwise real rows move and padding is dropped or zero",
    "Optimizers": "Adam (interface of Apex and Transformer Engine, or torch's AdamW) and SGD, with and without the distributed "
                  "optimizer; parameter groups; frozen parameters",
    "Precision": "fp32; bf16 and fp16 with fp32 masters, dynamic loss scale",
    "Layout settings": "`micro_batch_size`, `overlap_grad_reduce`, `overlap_param_gather`, `ddp_bucket_size`, `ddp_num_buckets`",
    "Loop": "evaluation, `--save`, `--load`, `--exit-interval`, batch-size ramp-up, `--iterations-to-skip`, several data loader "
            "workers",
    "Data": "`single` and mock data; `cyclic` where the samples of a step do not depend on the layout",
}

# Options under which a switch is refused at start, and why. Each is a test on the arguments.
REFUSED = {
    "--use-megatron-fsdp": (lambda a: a.use_megatron_fsdp, "FSDP shards parameters in a way that is not described yet"),
    "--use-torch-fsdp2": (lambda a: a.use_torch_fsdp2, "FSDP shards parameters in a way that is not described yet"),
    "--optimizer": (lambda a: a.optimizer not in ("adam", "sgd"),
                    "only adam and sgd keep states that are shaped like their parameters and independent of the layout"),
    "--optimizer-cpu-offload": (lambda a: a.optimizer_cpu_offload, "offloaded optimizer states are not described yet"),
    "--use-precision-aware-optimizer": (lambda a: a.use_precision_aware_optimizer,
                                        "its states are scaled and live in Transformer Engine"),
    "--fp8-format": (lambda a: getattr(a, "fp8", None), "quantised parameters and their scales are not moved yet"),
    "--fp4-format": (lambda a: getattr(a, "fp4", None), "quantised parameters and their scales are not moved yet"),
    "--cuda-graph-impl": (lambda a: getattr(a, "cuda_graph_impl", "none") != "none", "captured graphs hold old addresses"),
    "--nccl-ub": (lambda a: getattr(a, "nccl_ub", False), "registered buffers are bound to the old groups"),
    "--tp-comm-overlap": (lambda a: a.tp_comm_overlap, "Transformer Engine's user buffers are bound to the old groups"),
    "--use-pytorch-profiler": (lambda a: a.profile and a.use_pytorch_profiler, "its schedule counts steps of one loop"),
    "--perform-rl-step": (lambda a: getattr(a, "perform_rl_step", False), "the loop keeps a second model"),
    "--inprocess-restart": (lambda a: getattr(a, "inprocess_restart", False), "it rebuilds the world on its own"),
    "--tensor-parallel-num-weight-shards": (lambda a: getattr(a, "gtp_weight_remat_size", 1) != 1
                                            or getattr(a, "expert_gtp_weight_remat_size", 1) != 1,
                                            "rematerialised weight shards are not described yet"),
    "--dataloader-type external": (lambda a: a.dataloader_type == "external",
                                   "an iterator that Megatron did not build cannot be built again"),
    "--non-persistent-ckpt-type local": (lambda a: getattr(a, "non_persistent_ckpt_type", None) == "local",
                                         "its manager is bound to the old groups"),
    "--use-layer-wise-distributed-optimizer": (lambda a: getattr(a, "use_layer_wise_distributed_optimizer", False),
                                               "it owns whole parameters, which is not described yet"),
    "--moe-flex-dispatcher-backend": (lambda a: getattr(a, "moe_token_dispatcher_type", None) == "flex"
                                      and getattr(a, "moe_flex_dispatcher_backend", "deepep") != "deepep",
                                      "its buffers are bound to the first expert-parallel group"),
    "--moe-expert-rank-capacity-factor": (lambda a: getattr(a, "moe_expert_rank_capacity_factor", None) is not None,
                                          "its stash belongs to one model"),
    "--fine-grained-activation-offloading": (lambda a: getattr(a, "fine_grained_activation_offloading", False),
                                             "its manager belongs to one model"),
    "--optimizer-cuda-graph": (lambda a: getattr(a, "optimizer_cuda_graph", False), "captured graphs hold old addresses"),
    "--logits-save-dir": (lambda a: getattr(a, "logits_save_dir", None) is not None, "its hooks belong to one model"),
    "--logits-load-dir": (lambda a: getattr(a, "logits_load_dir", None) is not None, "its hooks belong to one model"),
    "--step-batch-size-schedule": (lambda a: getattr(a, "step_batch_size_schedule", None) is not None,
                                   "its batch sizes are not checked against layouts yet"),
    "--skip-train": (lambda a: a.skip_train, "there is no training to switch"),
}


def check_supported(args: Namespace) -> None:
    """Raise LayoutRefused if the job is launched with an option under which no switch is possible.

    args: Megatron's, before their validation (which may stop at such an option for reasons of its own) or after it.
    """
    for flag, (test, why) in REFUSED.items():
        if test(args):
            raise LayoutRefused(f"the job was launched with {flag}, under which its layout cannot be switched: {why}; "
                                "launch without it, or without megatron_dynatrain")


def matrix() -> str:
    """The support matrix as Markdown."""
    lines = ["| supported | |", "|---|---|"]
    lines += [f"| {topic} | {what} |" for topic, what in SUPPORTED.items()]
    lines += ["", "| refused at start | because |", "|---|---|"]
    lines += [f"| `{flag}` | {why} |" for flag, (_, why) in REFUSED.items()]
    return "\n".join(lines)
