"""Agreement between ranks: an error on one rank is an error on all, before anything is changed."""

import torch.distributed as dist


def gather(value) -> list:
    """`value` of every rank, in the order of ranks. Collective over the default process group; pickles small objects."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def together(kind: type[Exception], what: str, action, *args):
    """`action(*args)` on every rank; where it raises on any of them, `kind` is raised on all. Collective.

    The message starts with `what` and says which ranks failed and why; equal reasons are said once.
    """
    return share(kind, what, lambda: (action(*args), None))[0]


def share(kind: type[Exception], what: str, action) -> tuple:
    """As `together`, for an `action()` that returns (its result, something small for all ranks): (the result, what the action
    of every rank had for all, in the order of ranks)."""
    result, own, error = None, None, None
    try:
        result, own = action()
    except Exception as caught:
        error = caught
    gathered = gather((None if error is None else (str(error) or type(error).__name__), own))
    reasons: dict[str, list[int]] = {}
    for rank, (text, _) in enumerate(gathered):
        if text is not None:
            reasons.setdefault(text, []).append(rank)
    if reasons:
        say = "; ".join(f"{text} (on {ranks_in_words(ranks)})" for text, ranks in reasons.items())
        raise kind(f"{what}: {say}") from error
    return result, [shared for _, shared in gathered]


def ranks_in_words(ranks: list[int]) -> str:
    """'every rank', 'rank 3' or 'ranks 1, 2'."""
    if len(ranks) == dist.get_world_size():
        return "every rank"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
