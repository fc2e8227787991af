"""What a switch carries besides tensors: step counts, settings of parameter groups, learning rate, loss scale.

Settings belong to parameters, not to positions: each parameter takes those of its group along, under a name that does not
depend on the layout (its checkpoint key and its layer or expert indices).
"""

from dataclasses import dataclass, field

import torch

from megatron_dynatrain.errors import SpaceError
from megatron_dynatrain.megatron.describe import OwnedParam, leaf_optimizers

_STEP = "step"
# What a group says of the layout and not of its parameters: at EP 1 experts are in the dense group.
_OF_LAYOUT = ("params", "is_expert_parallel")


@dataclass(slots=True)
class Carried:
    """What one rank contributes. Plain Python values, small, gathered over all ranks.

    settings: distinct dictionaries of group settings; `step` among them wherever the optimizer keeps it.
    of_param: the settings of each parameter, by number. scaler: state of the loss scaler, if there is one.
    scheduler: the values of the learning-rate scheduler. log: of the last rank, what Megatron's log has added up since its last
    line, where the ranks change.
    """

    settings: list[dict] = field(default_factory=list)
    of_param: dict[tuple, int] = field(default_factory=dict)
    scaler: dict | None = None
    scheduler: dict = field(default_factory=dict)
    log: dict | None = None


def identity(owned: OwnedParam) -> tuple:
    """The layout-independent name of a parameter: ('decoder.layers.mlp.linear_fc1.weight', (3,)) in layer 3."""
    first = min(owned.pieces, key=lambda piece: (piece.key, piece.global_offset))
    return first.key, first.global_offset[: first.num_prepended]


def capture(optimizer, scheduler, owned: list[OwnedParam]) -> Carried:
    """What this rank has to say. Not collective."""
    carried = Carried(scheduler={name: value for name, value in vars(scheduler).items() if name != "optimizer"})
    number: dict[str, int] = {}
    for param in owned:
        settings = {name: value for name, value in param.group.items() if name not in _OF_LAYOUT}
        step = param.optimizer.state.get(param.main_param, {}).get(_STEP)
        if step is not None:
            settings[_STEP] = float(step)
        text = repr(sorted(settings.items()))
        if text not in number:
            number[text] = len(carried.settings)
            carried.settings.append(settings)
        carried.of_param[identity(param)] = number[text]
    for part in leaf_optimizers(optimizer):
        if getattr(part, "grad_scaler", None) is not None:
            carried.scaler = {name: value.cpu() if isinstance(value, torch.Tensor) else value
                              for name, value in part.grad_scaler.state_dict().items()}
    return carried


def merge(gathered: list[Carried]) -> dict[tuple, dict]:
    """Settings by parameter over all ranks. Raises SpaceError where replicas of a parameter disagree."""
    merged: dict[tuple, dict] = {}
    for carried in gathered:
        for name, number in carried.of_param.items():
            settings = carried.settings[number]
            if merged.setdefault(name, settings) != settings:
                raise SpaceError(f"ranks disagree about the optimizer settings of {name[0]}{list(name[1])}: "
                                 f"{merged[name]} and {settings}")
    return merged


def apply(gathered: list[Carried], optimizer, scheduler, owned: list[OwnedParam]) -> None:
    """Set everything that was gathered on the new objects of this rank. Not collective; every rank gathered the same."""
    vars(scheduler).update(gathered[0].scheduler)
    scheduler.step(increment=0)  # groups in which this rank owns nothing get the rate by rule, the others below
    merged = merge(gathered)
    done: dict[int, tuple[str, dict]] = {}
    for param in owned:
        settings = dict(merged[identity(param)])
        state = param.optimizer.state.get(param.main_param, {})
        if isinstance(state.get(_STEP), torch.Tensor):
            state[_STEP].fill_(settings.pop(_STEP))
        other = done.setdefault(id(param.group), (param.name, settings))
        if other[1] != settings:
            raise SpaceError(f"{other[0]} and {param.name} share a parameter group in the new layout but came with different "
                             f"settings: {other[1]} and {settings}")
        param.group.update(settings)
    scaler = next((carried.scaler for carried in gathered if carried.scaler is not None), None)
    for part in leaf_optimizers(optimizer):
        if getattr(part, "grad_scaler", None) is not None and scaler is not None:
            part.grad_scaler.load_state_dict(scaler)


def differences(gathered: list[Carried], after: Carried) -> list[str]:
    """Where the settings of this rank's parameters after a switch are not those that were gathered before it."""
    merged = merge(gathered)
    found = []
    for name, number in after.of_param.items():
        before, now = merged.get(name), after.settings[number]
        wrong = sorted(key for key in (before or now) if before is None or now.get(key) != before[key])
        if wrong:
            found.append(f"{name[0]}{list(name[1])}: optimizer settings {', '.join(wrong)} differ after the switch")
    return found
