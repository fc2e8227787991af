"""The matrix: models with every feature that layouts cut, and for each a route through layouts. Every change of a route is
a case: state bit-equal (verify: full), the five steps after it as in the run without a switch, samples and learning rates too.

A route starts in the launch layout, which is the first entry. Between two switches lie STEPS steps.
"""

from dataclasses import dataclass, field

STEPS = 5

MOE = {"num-experts": 4, "moe-router-topk": 2, "moe-ffn-hidden-size": 32, "moe-token-dispatcher-type": "alltoall",
       "moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 0.01}
MLA = {"multi-latent-attention": True, "group-query-attention": None, "num-query-groups": None, "q-lora-rank": 16,
       "kv-lora-rank": 16, "qk-head-dim": 8, "qk-pos-emb-head-dim": 4, "v-head-dim": 12, "rope-type": "rope"}


def layout(tp=1, pp=1, **more):
    """Megatron's arguments; everything that a route touches is given, so that nothing is left over from the launch."""
    return {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, **more}


def cp(size, **more):
    return layout(context_parallel_size=size, **more)


def sp(tp, **more):
    return layout(tp, sequence_parallel=True, **more)


def moe(ep, etp=1, tp=1, **more):
    return layout(tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, sequence_parallel=tp > 1, **more)


@dataclass(frozen=True)
class Route:
    """One model and the layouts that one job goes through."""

    model: dict
    layouts: list[dict]
    world_size: int = 4
    tolerance: float = 1e-5
    training: dict = field(default_factory=dict)
    optimizer: str = "fused"


ROUTES = {
    # Dense models.
    "gqa-swiglu-rope": Route({}, [layout(), layout(2, 2), layout(1, 4), layout(2, 1), layout(1, 2), layout(4, 1), layout()]),
    "tied-biases-positions": Route(
        {"untie-embeddings-and-output-weights": None, "disable-bias-linear": None, "normalization": "LayerNorm",
         "position-embedding-type": "learned_absolute", "group-query-attention": None, "num-query-groups": None,
         "swiglu": None},
        [layout(1, 2), layout(1, 4), layout(2, 1), layout(2, 2), layout(), layout(1, 2)]),
    "qk-norm-sequence-parallel": Route(
        {"qk-layernorm": True, "num-layers": 2},
        [layout(), sp(2), layout(2), sp(4), sp(2, pp=2), layout(1, 2), layout()]),
    "context-parallel": Route(
        {"num-layers": 2}, [cp(1), cp(2, tp=2), cp(4), cp(2, pp=2), cp(1, tp=2), cp(2, tp=2, sequence_parallel=True), cp(1)]),
    "virtual-pipeline": Route(
        {"num-layers": 8},
        [layout(), layout(1, 2, num_layers_per_virtual_pipeline_stage=2), layout(1, 4, num_layers_per_virtual_pipeline_stage=1),
         layout(1, 2), layout(2, 2, num_virtual_stages_per_pipeline_rank=4), layout()]),
    "virtual-pipeline-launch": Route(
        {"num-layers": 4}, [layout(1, 2, num_layers_per_virtual_pipeline_stage=1),
                            layout(2, 1, num_layers_per_virtual_pipeline_stage=None),
                            layout(1, 2, num_layers_per_virtual_pipeline_stage=None),
                            layout(1, 2, num_layers_per_virtual_pipeline_stage=1)]),
    "seven-layers": Route(
        {"num-layers": 7},
        [layout(), layout(1, 2, decoder_first_pipeline_num_layers=4), layout(1, 3, decoder_last_pipeline_num_layers=1),
         layout(2, 1), layout(1, 2, pipeline_model_parallel_layout="Ettt|ttttL"),
         layout(1, 2, pipeline_model_parallel_layout="Et|tt|tt|ttL"), layout()],
        world_size=6, training={"global-batch-size": 6}),
    "account-for-embedding": Route(
        {"num-layers": 6, "account-for-embedding-in-pipeline-split": True, "account-for-loss-in-pipeline-split": True},
        [layout(1, 4), layout(1, 2), layout(2, 2), layout(1, 4)]),
    "odd-data-parallel": Route(
        {"num-layers": 2}, [layout(), layout(2, 1), layout(1, 2), layout(2, 1, use_tp_pp_dp_mapping=True), layout()],
        world_size=6, training={"global-batch-size": 6}),
    "mapping-buckets-instances": Route(
        {}, [layout(2, 1), layout(2, 2, use_tp_pp_dp_mapping=True), layout(2, 1, overlap_grad_reduce=True, ddp_bucket_size=3000),
             layout(1, 2, overlap_grad_reduce=True, overlap_param_gather=True), layout(2, 1, micro_batch_size=2),
             layout(1, 1, num_distributed_optimizer_instances=2, overlap_grad_reduce=True), layout(2, 1)]),
    "eight-ranks": Route({"num-layers": 4}, [layout(1, 1), layout(2, 2), layout(1, 2, context_parallel_size=2), layout(2, 2)],
                         world_size=8, training={"global-batch-size": 8}),
    # Mixtures of experts.
    "moe": Route(MOE, [moe(1), moe(2), moe(4), moe(2, pp=2), moe(1, pp=2), moe(2, 2, tp=2), moe(1)]),
    "moe-expert-tensor-parallel": Route(
        {**MOE, "num-layers": 2},
        [moe(1), moe(2, 2, tp=2), moe(2, 1, tp=2), moe(1, 4, tp=2), moe(1, 2, tp=1), moe(4, 1, tp=4), moe(1)]),
    "moe-shared-mixed-bias": Route(
        {**MOE, "moe-layer-freq": "[0,1,1,0]", "moe-shared-expert-intermediate-size": 32, "moe-router-score-function": "sigmoid",
         "moe-router-enable-expert-bias": True, "moe-router-bias-update-rate": 1e-2},
        [moe(2, pp=2), moe(1, pp=4), moe(4), moe(2, 2, tp=2), moe(2, context_parallel_size=2), moe(2, pp=2)]),
    "moe-virtual-pipeline": Route(
        MOE, [moe(2, pp=2), moe(2, pp=2, num_layers_per_virtual_pipeline_stage=1), moe(1, pp=4), moe(2, pp=2)]),
    # Other attention, other heads.
    # Megatron's local MLA has other gradients at TP 2 than at TP 1, also after a restart (test_loop compares with that), so
    # the steps are compared closely where TP stays.
    "mla": Route({**MLA, "qk-layernorm": True}, [layout(), layout(1, 2), cp(2), layout(1, 4), cp(2, pp=2), layout()]),
    "mla-tensor-parallel": Route({**MLA, "num-layers": 2}, [layout(), layout(2, 1), layout(1, 2), layout(4, 1), layout()],
                                 tolerance=2e-2),
    "mtp": Route({"mtp-num-layers": 1}, [layout(), layout(1, 2), layout(2, 2), layout(1, 4), layout(2, 1), layout()]),
    # Megatron cannot make a checkpoint of this one at PP > 1 (test_refusals).
    "mtp-tied": Route({"mtp-num-layers": 1, "untie-embeddings-and-output-weights": None, "num-layers": 2},
                      [layout(), layout(2, 1), layout(4, 1), layout()]),
    "mtp-moe-mla": Route({**MOE, **MLA, "mtp-num-layers": 1}, [moe(1), moe(2, pp=2), moe(4), moe(1, pp=2), moe(1)]),
}


def yaml_of(route: Route) -> dict:
    """The configuration that takes a job through the route."""
    names = [f"l{i}" for i in range(1, len(route.layouts))]
    return {"layouts": dict(zip(names, map(complete(route), route.layouts[1:]))), "verify": "full",
            "schedule": [{"at_iteration": STEPS * (i + 1), "layout": name} for i, name in enumerate(names)]}


def complete(route: Route):
    """Layouts with an explicit default for whatever another layout of the route sets."""
    defaults = {"context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1,
                "sequence_parallel": False, "overlap_grad_reduce": False, "overlap_param_gather": False, "ddp_bucket_size": None,
                "num_distributed_optimizer_instances": 1, "use_tp_pp_dp_mapping": False, "micro_batch_size": 1}
    touched = {key for sizes in route.layouts for key in sizes}
    return lambda sizes: {**{key: defaults.get(key) for key in touched}, **sizes}


def launch_of(route: Route) -> dict:
    """Command-line arguments of the route's first layout."""
    return {key.replace("_", "-"): value for key, value in route.layouts[0].items() if value not in (None, False)}
