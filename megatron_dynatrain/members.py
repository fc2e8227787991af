"""Which ranks of a job train in a layout."""


class Unavailable(Exception):
    """The ranks that a layout names will never be there. The message says why."""


def choose(num_ranks: int, named: tuple[int, ...] | None, present: tuple[int, ...], waiting: list[int], roster_count: int,
           gone: tuple[int, ...] = ()) -> tuple[int, ...] | None:
    """The members of the next generation, ascending; None as long as there are too few. Pure.

    named: the very ranks that are wanted. Otherwise those that train stay, the lowest first, and those that wait are added, the
    lowest first. Raises Unavailable for ranks that nobody has or that have left.
    """
    if named is None:
        members = (*present[:num_ranks], *waiting[:max(num_ranks - len(present), 0)])
        return tuple(sorted(members)) if len(members) == num_ranks else None
    unknown = [rank for rank in named if rank >= roster_count or rank in gone]
    if unknown:
        raise Unavailable(f"rank {unknown[0]} is not there: " + (
            "it has left the job" if unknown[0] in gone else f"the job has ranks 0 to {roster_count - 1}")
            + ", and ranks that join get the next numbers")
    return tuple(sorted(named)) if set(named) <= {*present, *waiting} else None
