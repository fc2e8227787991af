"""The benchmark end to end on the smallest thing, and its arithmetic."""

import json
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from megatron_dynatrain.bench import cases, job, show

KEYS = {"model", "num_params", "src", "dst", "warm", "stall_seconds", "phases", "transfer_seconds", "raw_exchange_seconds",
        "checkpoint_seconds", "restart_seconds", "moved_bytes", "minimum_bytes", "max_rank_bytes", "balanced_max_rank_bytes",
        "peak_extra_bytes", "staging_bytes"}


def test_quick_run_measures_every_pair(tmp_path):
    out, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    done = subprocess.run([sys.executable, "-m", "megatron_dynatrain", "bench", "--quick", "--ranks", "2", "--no-checkpoint",
                           "--json", str(out), "--plot", str(picture)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = json.loads(out.read_text())
    assert [(record["src"], record["dst"], record["warm"]) for record in records] == [
        (src, dst, warm) for src, dst in (("TP2 PP1 DP1", "TP1 PP2 DP1"), ("TP1 PP2 DP1", "TP1 PP1 DP2"),
                                          ("TP1 PP1 DP2", "TP2 PP1 DP1")) for warm in (False, True)]
    for record in records:
        assert KEYS <= set(record) and record["verified"] and record["num_params"] == records[0]["num_params"]
        # The raw exchange moves what the plan moves, between the same ranks.
        sent, received = {}, {}
        for src, dst, size in record["raw_pair_bytes"]:
            sent[src], received[dst] = sent.get(src, 0) + size, received.get(dst, 0) + size
        assert sum(sent.values()) == record["moved_bytes"] == record["minimum_bytes"]
        assert max(*sent.values(), *received.values()) == record["max_rank_bytes"]
        assert sum(record["phases"].values()) == pytest.approx(record["stall_seconds"], abs=1e-4)
        assert 0 < record["raw_exchange_seconds"] and 0 < record["transfer_seconds"] < record["stall_seconds"]
        # A phase cannot cost more than all processors in it, where the ranks may be in it one after the other.
        process, system, pages = record["profile"]["transfer"]
        assert 0 <= process + system <= 2 * os.cpu_count() * record["transfer_seconds"] + 0.1 and pages == int(pages) >= 0
        assert min(record["raw_profile"]) >= 0
        assert record["checkpoint_seconds"] is None and record["restart_seconds"] is None
        assert record["refit_seconds"] > 0 and "refit" not in record["left_out"]
    assert picture.stat().st_size > 10_000
    assert "not measured: at least 100 x faster" in done.stdout and "pages handed out" in done.stdout


def test_use_of_the_processor_counts_pages_that_are_touched_first():
    before = job.usage()
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE)
    for page in range(64):
        memory[page * mmap.PAGESIZE] = 1
    process, system, pages = job.usage() - before
    assert pages >= 64 and process >= 0 and system >= 0


def test_targets_are_judged_as_measured():
    record = {"model": "300m", "src": "A", "dst": "B", "warm": True, "stall_seconds": 3.0, "transfer_seconds": 1.2,
              "raw_exchange_seconds": 1.0, "first_checkpoint_seconds": 130.0, "checkpoint_seconds": 30.0,
              "restart_seconds": None}
    states = [line.split(":")[0] for line in show.verdicts([record, {**record, "warm": False, "stall_seconds": 900.0}])]
    assert states == ["met", "MISSED", "met", "MISSED", "not measured"]
    assert show.verdicts([{**record, "model": "10m"}])[0].startswith("not measured")


@pytest.mark.parametrize("model", cases.MODELS)
@pytest.mark.parametrize("num_ranks", cases.RANKS)
def test_a_walk_visits_each_pair_and_ends_where_it_began(model, num_ranks):
    case = cases.Case(model, num_ranks, repeats=2)
    visits = case.visits
    assert [visit.iteration for visit in visits] == list(range(1, len(visits) + 1))
    assert visits[0].src == visits[-1].dst == "launch"
    assert all(a.dst == b.src for a, b in zip(visits, visits[1:]))
    for pair in case.pairs:
        kinds = [visit.kind for visit in visits if (visit.src, visit.dst) == pair]
        assert kinds == ["cold", "warm", "warm", "verified"]


def test_sizes_of_the_models_are_those_of_their_names():
    for name, millions in (("10m", 10), ("100m", 100), ("100m-moe", 115), ("300m", 310)):
        assert cases.parameters(name) / 1e6 == pytest.approx(millions, rel=0.02)


def test_cost_of_planning(monkeypatch):
    """In a world of TP 2, PP 8, EP 8 a rank holds half of the dense weights of 4 layers, and 8 of the 64 experts of each."""
    from megatron_dynatrain.bench import planning_cost

    monkeypatch.setattr(planning_cost, "RANKS", (64,))
    said = []
    record, = planning_cost.measure(said.append)
    assert record["world_size"] == 64 and record["plan_seconds_one_rank"] > 0 and len(said) == 1
    matrix = planning_cost.ROWS * planning_cost.COLUMNS
    world = planning_cost.world(64, tp=2, pp=8, ep=8)
    rows = (world.rank == 63) & (np.array([t.field for t in world.tensors])[world.boxes.tensor] == "weight")
    assert world.boxes.volume[rows].sum() == 4 * matrix // 2 + 4 * 64 // 8 * matrix
    # No rank needs less than what of its weights came from another stage.
    assert 0 < record["max_rank_bytes"] < record["moved_bytes"] < 64 * 14 * 4 * (matrix // 2 + 8 * matrix)
