"""What is measured: models, the circle of layouts that each walks through, and the visits of that walk."""

from dataclasses import dataclass

# Short steps, since a benchmark of switches has no use for the steps between them. No evaluation, no dropout.
TRAINING = {
    "seq-length": 16, "max-position-embeddings": 16, "micro-batch-size": 1, "global-batch-size": 8, "lr": 1e-4,
    "lr-decay-style": "constant", "weight-decay": 0.1, "clip-grad": 1.0,
    "attention-dropout": 0.0, "hidden-dropout": 0.0,
    "log-interval": 1, "eval-iters": 0, "eval-interval": 1000000, "seed": 1234, "use-distributed-optimizer": True,
    "tokenizer-type": "NullTokenizer", "split": "90,5,5", "num-workers": 0, "save-interval": 1000000,
    "ckpt-format": "torch_dist", "dist-ckpt-optim-fully-reshardable": True,
    "position-embedding-type": "rope", "normalization": "RMSNorm", "swiglu": True, "disable-bias-linear": True,
    "untie-embeddings-and-output-weights": True, "group-query-attention": True,
}
CPU = {
    "transformer-impl": "local", "distributed-backend": "gloo", "use-cpu-initialization": True,
    "no-gradient-accumulation-fusion": True, "no-masked-softmax-fusion": True, "no-bias-swiglu-fusion": True,
    "no-bias-dropout-fusion": True, "no-rope-fusion": True, "no-persist-layer-norm": True, "attention-backend": "unfused",
}


def dense(layers: int, hidden: int, ffn: int, heads: int, vocabulary: int) -> dict:
    """Megatron's arguments of a GPT with SwiGLU and grouped queries."""
    return {"num-layers": layers, "hidden-size": hidden, "ffn-hidden-size": ffn, "num-attention-heads": heads,
            "num-query-groups": 4, "vocab-size": vocabulary - 1, "make-vocab-size-divisible-by": 128}


def moe(experts: int, expert_ffn: int, **sizes) -> dict:
    """The same with `experts` in every layer, of which two work on a token."""
    return {**dense(**sizes), "num-experts": experts, "moe-ffn-hidden-size": expert_ffn, "moe-router-topk": 2,
            "moe-token-dispatcher-type": "alltoall", "moe-router-load-balancing-type": "aux_loss", "moe-aux-loss-coeff": 0.01}


MODELS = {
    "tiny": dense(4, 64, 128, 8, 1024),
    "10m": dense(8, 256, 1024, 8, 4096),
    "100m": dense(12, 768, 2048, 12, 16384),
    "100m-moe": moe(8, 1024, layers=8, hidden=512, ffn=1024, heads=8, vocabulary=8192),
    "300m": dense(16, 1024, 4096, 16, 32768),
}
DEFAULT_MODELS = ("10m", "100m", "100m-moe", "300m")
LARGE_MODELS = ("100m", "100m-moe", "300m")  # those for which the transfer has a target


def layout(tp=1, pp=1, ep=None) -> dict:
    """Megatron's arguments of a layout; with experts, each whole on one rank."""
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    if ep is not None:
        sizes.update(expert_model_parallel_size=ep, expert_tensor_parallel_size=1, sequence_parallel=tp > 1)
    return sizes


# The circle of layouts by number of ranks; the first is the one of the launch. What is left of the ranks is data-parallel.
DENSE_LAYOUTS = {
    2: (layout(2), layout(1, 2), layout()),
    4: (layout(2, 2), layout(1, 4), layout(2)),
    8: (layout(2, 2), layout(1, 4), layout(4, 2)),
}
MOE_LAYOUTS = {
    2: (layout(ep=2), layout(1, 2, ep=1), layout(2, ep=1)),
    4: (layout(1, 2, ep=2), layout(1, 4, ep=1), layout(2, 1, ep=4)),
    8: (layout(1, 2, ep=4), layout(1, 4, ep=2), layout(2, 2, ep=2)),
}
RANKS = tuple(DENSE_LAYOUTS)


@dataclass(frozen=True, slots=True)
class Visit:
    """One switch of the walk, after `iteration`.

    kind: 'cold' for the first time that the job makes this switch, 'warm' for later ones, 'verified' for one that compares
    every bit and is not timed. checkpoint, refit: whether Megatron's own ways are measured beside it.
    """

    iteration: int
    src: str
    dst: str
    kind: str
    checkpoint: bool = False
    refit: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One model and its walk: a cold round, `repeats` warm ones, then a verified one, one step between two switches.

    What may disturb the job comes last: the first save starts a process a rank, which stays.
    """

    model: str
    num_ranks: int
    repeats: int
    checkpoints: str = "one"  # of the first pair; or 'all', or 'none'
    refits: bool = True

    @property
    def layouts(self) -> dict[str, dict]:
        """By name; 'launch' is the first."""
        circle = (MOE_LAYOUTS if "num-experts" in MODELS[self.model] else DENSE_LAYOUTS)[self.num_ranks]
        return dict(zip(("launch", *(self.name_of(sizes) for sizes in circle[1:])), circle, strict=True))

    @staticmethod
    def name_of(sizes: dict) -> str:
        """{'tensor_model_parallel_size': 1, 'pipeline_model_parallel_size': 4} -> 'tp1-pp4'."""
        short = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "expert_model_parallel_size": "ep"}
        return "-".join(f"{short[name]}{size}" for name, size in sizes.items() if name in short)

    @property
    def pairs(self) -> list[tuple[str, str]]:
        names = list(self.layouts)
        return list(zip(names, names[1:] + names[:1], strict=True))

    @property
    def visits(self) -> list[Visit]:
        """The walk. It ends in the launch layout."""
        kinds = ["cold"] + ["warm"] * self.repeats + ["verified"]
        visits = []
        for kind in kinds:
            for number, (src, dst) in enumerate(self.pairs):
                beside = kind == "verified" and (self.checkpoints == "all" or self.checkpoints == "one" and number == 0)
                visits.append(Visit(len(visits) + 1, src, dst, kind, beside, kind == "verified" and self.refits))
        return visits

    def command_line(self, layout_name: str, last_iteration: int) -> list[str]:
        """Megatron's arguments for this model in one of its layouts, to the end of `last_iteration`. All jobs of a case plan
        for the same number of steps, so that Megatron takes the data and the schedule of one for those of the other."""
        sizes = {name.replace("_", "-"): value for name, value in self.layouts[layout_name].items()}
        return words({**TRAINING, **CPU, **MODELS[self.model], **sizes, "train-iters": len(self.visits) + 2,
                      "exit-interval": last_iteration})


def words(arguments: dict) -> list[str]:
    """{'swiglu': True, 'lr': 0.1, 'bf16': False} -> ['--swiglu', '--lr', '0.1']."""
    return [word for name, value in arguments.items() if value is not False and value is not None
            for word in ([f"--{name}"] if value is True else [f"--{name}", str(value)])]


def parameters(model: str) -> int:
    """About how many parameters a model has: what its matrices come to."""
    sizes = MODELS[model]
    hidden, groups, heads = sizes["hidden-size"], sizes["num-query-groups"], sizes["num-attention-heads"]
    attention = 2 * hidden * hidden + 2 * hidden * hidden * groups // heads
    mlp = 3 * hidden * sizes.get("moe-ffn-hidden-size", sizes["ffn-hidden-size"]) * sizes.get("num-experts", 1)
    return sizes["num-layers"] * (attention + mlp) + 2 * hidden * (sizes["vocab-size"] + 1)
