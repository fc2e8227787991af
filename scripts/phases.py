"""Two phases take turns, each in the layout that suits it: in `generate` the model continues prompts, in `train` it does not.

    torchrun --nproc-per-node 4 -m megatron_dynatrain.launch --cpu scripts/phases.py <arguments as of pretrain_gpt.py> \\
        --dynatrain-config configs/phases.yaml

It is the skeleton of a reinforcement-learning loop in one job: where this one prints what was generated, that one would score
it and train on it. It uses the public functions of megatron_dynatrain alone: what a switch costs is asked with `plan`,
decided upon by rank 0, asked for with `reconfigure`, and followed with `on_switch`.
"""

import megatron_dynatrain
import pretrain_gpt
import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

STEPS = {"generate": 6, "train": 8}  # of a phase
MAX_STALL_SECONDS = 60.0  # a switch that took longer than this the last time is not worth it
PROMPTS = (b"def ", b"class ", b"import ", b"return ")  # one token a byte
NUM_NEW_TOKENS = 8


class Phases:
    """Where the loop is. Every rank has one; rank 0 decides."""

    def __init__(self):
        self.has_begun = False
        self.rollout_is_due = False
        megatron_dynatrain.on_switch(after=self.entered, refused=self.refused)

    def begin(self) -> None:
        """In the first step of all, in the layout of the launch, which counts as the first phase of training."""
        self.has_begun = True
        self.plan_next("generate", get_args().iteration + STEPS["train"])

    def entered(self, report: megatron_dynatrain.SwitchReport) -> None:
        """On every rank, before the first step of a phase."""
        self.rollout_is_due = report.dst == "generate"
        say(f"after iteration {report.iteration}: phase {report.dst!r}, stall {report.stall_seconds:.2f} s, moved "
            f"{report.totals.moved_bytes} bytes")
        self.plan_next("train" if report.dst == "generate" else "generate", report.iteration + STEPS[report.dst])

    def plan_next(self, phase: str, at_iteration: int) -> None:
        """Ask what the next switch costs, and in the answer decide. Nobody waits."""
        if dist.get_rank() == 0:
            megatron_dynatrain.plan(phase).add_done_callback(lambda planned: self.decide(phase, at_iteration, planned))

    def decide(self, phase: str, at_iteration: int, planned) -> None:
        if planned.exception() is not None:
            return say(f"phase {phase!r} cannot be: {planned.exception()}")
        cost = planned.result()
        say(f"phase {phase!r} would move {cost.moved_bytes} bytes, {cost.max_rank_bytes} on the busiest rank")
        if (cost.last_stall_seconds or 0.0) > MAX_STALL_SECONDS:
            return say(f"the phase stays: that took {cost.last_stall_seconds:.0f} s the last time")
        megatron_dynatrain.reconfigure(phase, at_iteration).add_done_callback(
            lambda switch: switch.exception() and say(f"phase {phase!r} does not come: {switch.exception()}"))

    def refused(self, iteration: int, layout, error: Exception) -> None:
        say(f"after iteration {iteration}: phase {layout!r} was refused, the phase stays")


phases = Phases()


def forward_step(data_iterator, model):
    if not phases.has_begun:
        phases.begin()
    if phases.rollout_is_due:
        phases.rollout_is_due = False
        for prompt, continuation in rollout(unwrap_model(model)):
            say(f"{megatron_dynatrain.current_layout().name}: {(prompt + continuation).decode(errors='replace')!r}")
    return pretrain_gpt.forward_step(data_iterator, model)


@torch.no_grad()
def rollout(model) -> list[tuple[bytes, bytes]]:
    """(prompt, its greedy continuation) for the prompts of this data-parallel rank. Collective over tensor-parallel groups; the
    model has one pipeline stage."""
    was_training = model.training
    model.eval()
    found = []
    for prompt in PROMPTS[mpu.get_data_parallel_rank()::mpu.get_data_parallel_world_size()]:
        tokens = torch.tensor([list(prompt)]).cuda()  # [1, length]
        for _ in range(NUM_NEW_TOKENS):
            length = tokens.shape[1]
            positions = torch.arange(length).unsqueeze(0).cuda()
            hidden_from = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1).cuda()  # True: may not be looked at
            logits = gather_from_tensor_model_parallel_region(model(tokens, positions, hidden_from))  # [1, length, vocabulary]
            tokens = torch.cat([tokens, logits[:, -1:, :256].argmax(-1)], dim=1)
        found.append((prompt, bytes(tokens[0, len(prompt):].tolist())))
    model.train(was_training)
    return found


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"[phases] {text}", flush=True)


if __name__ == "__main__":
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, pretrain_gpt.train_valid_test_datasets_provider, ModelType.encoder_or_decoder, forward_step)
