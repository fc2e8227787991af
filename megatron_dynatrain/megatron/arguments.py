"""Megatron's arguments for each layout: derived and checked by Megatron itself.

`validate_args` turns parsed arguments into valid ones, derives dozens of fields on the way and cannot be run twice on the
same namespace. So the namespace is copied before its first validation; every layout is the copy with the layout's
arguments set, validated anew. What differs from the validated launch arguments are the fields that depend on the layout,
and they alone are set on the live namespace.
"""

import copy
import inspect
from argparse import Namespace

from megatron_dynatrain.errors import LayoutRefused, reason
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.megatron import versions
from megatron_dynatrain.megatron.quiet import quiet

_UNSHARDED = {"micro_batch_size": "", "data_parallel_size": " or with --no-data-sharding"}


class ArgumentBook:
    """Validated arguments of every layout of the job, and the fields in which they differ from the launch."""

    def __init__(self, raw: Namespace, defaults: dict, validate):
        """raw: a copy of the parsed arguments before validation. validate: Megatron's `validate_args`."""
        self.raw = raw
        self._defaults = defaults
        self._validate = validate
        self.launch = self._validated(raw)
        self._touched: set[str] = set()

    def _validated(self, raw: Namespace) -> Namespace:
        args = copy.deepcopy(raw)
        with quiet():
            self._validate(args, self._defaults)
        return args

    def validated(self, layout: Layout, vocab_size: int | None) -> Namespace:
        """The arguments of the job in `layout`. Raises LayoutRefused with Megatron's reason. Not collective.

        vocab_size: the tokenizer's, without padding. The padded size stays that of the launch wherever TP divides it.
        """
        raw = copy.deepcopy(self.raw)
        if getattr(raw, "step_batch_size_schedule", None) is None:
            raw.global_batch_size = self.launch.global_batch_size  # it must not follow the data-parallel size
        for name, value in layout.arguments().items():
            if name != "ranks":
                setattr(raw, name, value)
        raw.world_size = layout.num_ranks or raw.world_size
        try:
            args = self._validated(raw)
            self._check_batch(args)
            self._check_samples(args)
            versions.check_experts(args)
            args.padded_vocab_size = self._padded_vocab_size(args, vocab_size)
            with quiet():
                transformer_config(args)
        except (Exception, SystemExit) as error:
            raise LayoutRefused(f"({layout}) cannot be trained here: {reason(error)}") from error
        return args

    def _padded_vocab_size(self, args: Namespace, vocab_size: int | None) -> int:
        launched = self.launch.padded_vocab_size
        if launched % args.tensor_model_parallel_size == 0:
            return launched
        if vocab_size is None:
            raise LayoutRefused(f"the padded vocabulary of {launched} rows does not divide by tensor_model_parallel_size "
                                f"{args.tensor_model_parallel_size}, and no tokenizer says how many of them are padding")
        from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding

        return vocab_size_with_padding(vocab_size, args, logging_enabled=False)

    @staticmethod
    def _check_batch(args: Namespace) -> None:
        for kind in ("", "eval_"):
            batch = getattr(args, f"{kind}global_batch_size", None)
            micro = getattr(args, f"{kind}micro_batch_size", None) or args.micro_batch_size
            if batch and batch % (micro * args.data_parallel_size):
                raise LayoutRefused(f"{kind}global_batch_size {batch} does not divide by {kind}micro_batch_size {micro} * "
                                    f"data-parallel size {args.data_parallel_size}")

    def _check_samples(self, args: Namespace) -> None:
        """Refuse what would change which samples a step sees: the random sampler shuffles within a share of the data set for
        each data-parallel rank, or within whole micro batches (megatron-core 0.19: MegatronPretrainingRandomSampler)."""
        if args.dataloader_type != "cyclic":
            return
        names = ["micro_batch_size"] + (["data_parallel_size"] if args.data_sharding else [])
        for name in names:
            old, new = getattr(self.launch, name), getattr(args, name)
            if old != new:
                raise LayoutRefused(f"{name} would change from {old} to {new}, and with it the order in which --dataloader-type "
                                    f"cyclic draws samples; launch with --dataloader-type single{_UNSHARDED[name]}")

    def apply(self, target: Namespace, live: Namespace) -> None:
        """Set the layout-dependent fields of the live namespace to those of `target`. Which rank this is stays."""
        self._touched |= {name for name in vars(target)
                          if name != "rank" and not _equal(vars(self.launch).get(name), getattr(target, name))}
        for name in sorted(self._touched):
            setattr(live, name, copy.deepcopy(getattr(target, name)))


def _equal(a, b) -> bool:
    try:
        return bool(a == b)
    except Exception:  # values that cannot be compared do not come from a layout
        return a is b


def transformer_config(args: Namespace, config_class=None):
    """Megatron's model configuration from arguments; its `__post_init__` holds most of the legality checks."""
    from megatron.training import arguments as megatron_arguments

    return megatron_arguments.core_transformer_config_from_args(args, config_class)


def reconfigure_microbatches(args: Namespace) -> None:
    """Make the number of micro-batches that of `args`, at the samples consumed so far."""
    from megatron.core import num_microbatches_calculator as calculator

    values = dict(rank=args.rank, global_batch_size=args.global_batch_size, micro_batch_size=args.micro_batch_size,
                  data_parallel_size=args.data_parallel_size, rampup_batch_size=getattr(args, "rampup_batch_size", None),
                  decrease_batch_size_if_needed=args.decrease_batch_size_if_needed,
                  step_batch_size_schedule=getattr(args, "step_batch_size_schedule", None), seq_length=args.seq_length)
    accepted = inspect.signature(calculator.reconfigure_num_microbatches_calculator).parameters
    with quiet():
        calculator.reconfigure_num_microbatches_calculator(**{k: v for k, v in values.items() if k in accepted})
        calculator.update_num_microbatches(args.consumed_train_samples, consistency_check=False)
