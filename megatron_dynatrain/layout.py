"""A layout: the Megatron arguments that say how a job is spread over its ranks."""

import difflib
import math
import re

import msgspec
from msgspec import UNSET, UnsetType

from megatron_dynatrain.errors import ConfigError


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Megatron's arguments for a parallel layout, by Megatron's names. What is not given stays as launched; None (null in
    YAML) takes back what the command line gave, where Megatron allows that.

    Example: `Layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)`. The data-parallel size follows from the
    others and the number of ranks, as in Megatron.

    world_size: how many ranks it wants; or ranks: which, by their numbers in the job (those that join later go on counting
    after those of the launch).
    """

    world_size: int | UnsetType = UNSET
    ranks: tuple[int, ...] | UnsetType = UNSET
    tensor_model_parallel_size: int | UnsetType = UNSET
    pipeline_model_parallel_size: int | UnsetType = UNSET
    num_layers_per_virtual_pipeline_stage: int | None | UnsetType = UNSET
    num_virtual_stages_per_pipeline_rank: int | None | UnsetType = UNSET
    decoder_first_pipeline_num_layers: int | None | UnsetType = UNSET
    decoder_last_pipeline_num_layers: int | None | UnsetType = UNSET
    pipeline_model_parallel_layout: str | None | UnsetType = UNSET
    context_parallel_size: int | UnsetType = UNSET
    expert_model_parallel_size: int | UnsetType = UNSET
    expert_tensor_parallel_size: int | None | UnsetType = UNSET
    sequence_parallel: bool | UnsetType = UNSET
    micro_batch_size: int | UnsetType = UNSET
    num_distributed_optimizer_instances: int | UnsetType = UNSET
    overlap_grad_reduce: bool | UnsetType = UNSET
    overlap_param_gather: bool | UnsetType = UNSET
    ddp_bucket_size: int | None | UnsetType = UNSET
    ddp_num_buckets: int | None | UnsetType = UNSET
    use_tp_pp_dp_mapping: bool | UnsetType = UNSET

    def __post_init__(self):
        for name, value in self.arguments().items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ConfigError(f"{name}: {value} was asked for, but it counts from 1; give a positive number")
        if self.ranks is not UNSET:
            self._check_ranks()
        if isinstance(self.pipeline_model_parallel_layout, str):
            _check_length(self.pipeline_model_parallel_layout)

    def _check_ranks(self) -> None:
        if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
            raise ConfigError(f"ranks: {list(self.ranks)} was asked for, but different numbers from 0 are expected")
        if self.world_size not in (UNSET, len(self.ranks)):
            raise ConfigError(f"ranks: {len(self.ranks)} were given beside world_size {self.world_size}; leave one of the two out")

    @property
    def num_ranks(self) -> int | None:
        """How many ranks it wants; None for as many as were launched."""
        if self.ranks is not UNSET:
            return len(self.ranks)
        return None if self.world_size is UNSET else self.world_size

    def arguments(self) -> dict[str, int | bool | str | None]:
        """The arguments that this layout sets, by name."""
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not UNSET}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.arguments().items()) or "as launched"


_MAX_WRITTEN_OUT = 1_000_000


def _check_length(text: str) -> None:
    """Megatron writes the repetitions of a pipeline layout out, one within another: a short text could fill the memory."""
    numbers = re.findall(r"\*(\d+)", text)
    factors = sorted((int(number) if len(number) < 10 else _MAX_WRITTEN_OUT for number in numbers), reverse=True)
    if len(text) * math.prod(factors[:2]) > _MAX_WRITTEN_OUT:
        raise ConfigError(f"pipeline_model_parallel_layout: {text[:60]!r} was asked for, which could stand for more than "
                          f"{_MAX_WRITTEN_OUT:,} layers; give one entry for each layer of the model")


LAUNCH = "launch"  # the name of the layout that the command line gives


def nearest(name: str, known) -> str:
    """A hint for a message: "; did you mean 'deep'?", or what there is to choose from."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known here: {', '.join(known)}"
