"""What planning costs from 64 to 4,096 ranks: the part of the benchmark that starts no ranks (`bench --planning`)."""

RANKS = (64, 256, 1024, 4096)


def measure(tell) -> list[dict]:
    """One record for each number of ranks. `tell` hears, in words, what is being done."""
    raise SystemExit("bench: the cost of planning is not measured yet; run the benchmark without --planning")
