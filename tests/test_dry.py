"""Layout pairs without ranks: every model family against every axis in worlds of 8, and random ones in worlds up to 64."""

import importlib.util
import itertools
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from harness import CPU, MODEL, TRAINING, words_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from matrix import MLA, MOE, layout, moe

DENSE = {
    "tp2": layout(2), "tp4": layout(4), "pp2": layout(1, 2), "pp4": layout(1, 4), "tp2-pp2": layout(2, 2),
    "cp2-tp2": layout(2, context_parallel_size=2), "cp4": layout(1, context_parallel_size=4),
    "sp-tp4-pp2": layout(4, 2, sequence_parallel=True), "vpp2": layout(1, 2, num_layers_per_virtual_pipeline_stage=2),
    "vpp4-tp2": layout(2, 4, num_virtual_stages_per_pipeline_rank=2), "mapping": layout(2, 2, use_tp_pp_dp_mapping=True),
    "instances": layout(1, 2, num_distributed_optimizer_instances=2, overlap_grad_reduce=True),
    "uneven": layout(1, 2, decoder_first_pipeline_num_layers=3),
}
EXPERTS = {
    "ep2": moe(2), "ep4": moe(4), "ep8": moe(8), "ep2-pp2": moe(2, pp=2), "ep4-tp2": moe(4, tp=2), "ep2-etp2-tp2": moe(2, 2, tp=2),
    "etp4-tp2": moe(1, 4, tp=2), "etp2-tp4": moe(2, 2, tp=4), "ep2-pp4": moe(2, pp=4), "ep2-cp2": moe(2, context_parallel_size=2),
    "ep2-vpp2": moe(2, pp=2, num_layers_per_virtual_pipeline_stage=2), "ep4-cp2-tp2": moe(4, tp=2, context_parallel_size=2),
}
EIGHT = {"num-layers": 8, "global-batch-size": 8}
MODELS = {
    "gqa": ({}, DENSE),
    "one-query-group": ({"num-query-groups": 1}, DENSE),
    "tied-biases-positions": ({"untie-embeddings-and-output-weights": None, "disable-bias-linear": None,
                               "position-embedding-type": "learned_absolute", "swiglu": None}, DENSE),
    "bf16-masters": ({"bf16": True, "qk-layernorm": True}, DENSE),
    "not-distributed": ({"bf16": True, "use-distributed-optimizer": None},
                        {name: sizes for name, sizes in DENSE.items() if name != "instances"}),
    "mla": (MLA, DENSE),
    "mtp": ({"mtp-num-layers": 1}, DENSE),
    "moe": ({**MOE, "num-experts": 8}, EXPERTS),
    "moe-shared-mixed-bias": ({**MOE, "num-experts": 8, "moe-layer-freq": "[0,1,1,1,0,1,1,1]",
                               "moe-shared-expert-intermediate-size": 32, "moe-router-score-function": "sigmoid",
                               "moe-router-enable-expert-bias": True}, EXPERTS),
    "moe-mla-mtp-bf16": ({**MOE, **MLA, "num-experts": 8, "mtp-num-layers": 1, "bf16": True}, EXPERTS),
}


def pairs_of(layouts):
    """From every layout to the next one, and from every other one to the fifth after it."""
    names = list(layouts)
    ring = {i: names[i % len(names)] for i in range(2 * len(names))}
    return [(ring[i], ring[i + 1]) for i in range(len(names))] + [(ring[i], ring[i + 5]) for i in range(0, len(names), 2)]


CASES = [(model, *pair) for model, (_, layouts) in MODELS.items() for pair in pairs_of(layouts)]


@pytest.fixture(scope="module")
def described(jobs, tmp_path_factory):
    """model -> {(src, dst): record}; each model is described once."""
    done = {}

    def describe(model):
        if model not in done:
            arguments, layouts = MODELS[model]
            result = jobs.run(tmp_path_factory.mktemp(model), 1, {**EIGHT, **arguments}, probe="dryprobe:run", world=8,
                              layouts=layouts, pairs=pairs_of(layouts), timeout=600).assert_ok()
            done[model] = {(record["src"], record["dst"]): record for record in result.records("pairs")}
        return done[model]

    return describe


@pytest.mark.parametrize("model, src, dst", CASES, ids=["{}: {} -> {}".format(*case) for case in CASES])
def test_pair(described, model, src, dst):
    record = described(model)[src, dst]
    assert record["refused"] is None
    assert record["wrong"] is None


def test_there_are_enough_cases():
    assert len(CASES) >= 150


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("more", [{}, {"moe-shared-expert-intermediate-size": 32, "moe-layer-freq": "[0,1,1,1,0,1,1,1]"},
                                  {"moe-grouped-gemm": None}], ids=["grouped", "grouped-shared-mixed", "sequential"])
def test_experts_of_transformer_engine(jobs, tmp_path, more):
    """Its layers and its grouped experts are built and described, in every layout and between them, like everything else."""
    arguments = {**EIGHT, **MOE, "num-experts": 8, "bf16": True, "transformer-impl": "transformer_engine",
                 "moe-grouped-gemm": True, "attention-backend": "auto", **more}
    result = jobs.run(tmp_path, 1, arguments, probe="dryprobe:run", world=8, layouts=EXPERTS, pairs=pairs_of(EXPERTS),
                      timeout=600).assert_ok()
    records = result.records("pairs")
    assert len(records) == len(pairs_of(EXPERTS))
    assert all(record["refused"] is None and record["wrong"] is None for record in records), records


def test_hybrid_model(tmp_path):
    """Mamba, attention and MLP layers: described and planned like everything else."""
    arguments = {**MODEL, **TRAINING, **CPU, "num-layers": None, "hybrid-layer-pattern": "M-M*-M-M", "mamba-state-dim": 8,
                 "mamba-head-dim": 8, "mamba-num-groups": 4, "mamba-num-heads": 8, "global-batch-size": 8,
                 "position-embedding-type": "none", "mock-data": True}
    layouts = {name: DENSE[name] for name in ("tp2", "tp4", "pp2", "tp2-pp2", "pp4")}
    pairs = list(itertools.permutations(layouts, 2))
    done = subprocess.run([sys.executable, str(ROOT / "tests" / "dry_hybrid.py"), str(tmp_path), json.dumps(layouts),
                           json.dumps(pairs), *words_of(arguments)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    records = [json.loads(line) for line in (tmp_path / "pairs.000.jsonl").read_text().splitlines()]
    assert len(records) == len(pairs)
    assert all(record["refused"] is None and record["wrong"] is None for record in records), records


@st.composite
def sizes(draw, world_size, model):
    """A layout that divides the world, and often but not always the model."""
    powers = [n for n in (1, 2, 4, 8) if world_size % n == 0]
    tp = draw(st.sampled_from([n for n in powers if model["num-attention-heads"] % n == 0]))
    pp = draw(st.sampled_from([n for n in (1, 2, 3, 4) if world_size % (n * tp) == 0 and model["num-layers"] % n == 0]))
    cp = draw(st.sampled_from([n for n in (1, 2) if world_size % (n * tp * pp) == 0]))
    found = layout(tp, pp, context_parallel_size=cp, sequence_parallel=draw(st.booleans()) and tp > 1)
    stages = [n for n in (1, 2) if pp > 1 and model["num-layers"] % (n * pp) == 0 and model["num-layers"] > n * pp]
    if stages and draw(st.booleans()):
        found["num_layers_per_virtual_pipeline_stage"] = draw(st.sampled_from(stages))
    if "num-experts" in model:
        grid = world_size // pp
        ep = draw(st.sampled_from([n for n in (1, 2, 4) if grid % n == 0 and model["num-experts"] % n == 0]))
        etp = draw(st.sampled_from([n for n in (1, 2, 4) if grid % (n * ep) == 0]))
        found.update(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, sequence_parallel=tp > 1)
    return found


@st.composite
def jobs_and_layouts(draw):
    """(world size, model arguments, two layouts)."""
    world_size = draw(st.sampled_from([2, 4, 6, 8, 12, 16, 64] if LONG else [2, 4, 6, 8]))
    heads = draw(st.sampled_from([4, 8]))
    model = {"num-layers": draw(st.sampled_from([2, 4, 6])), "num-attention-heads": heads, "hidden-size": 8 * heads,
             "num-query-groups": draw(st.sampled_from([1, 2, heads])), "ffn-hidden-size": draw(st.sampled_from([16, 48])),
             "swiglu": draw(st.booleans()), "untie-embeddings-and-output-weights": draw(st.booleans()),
             "disable-bias-linear": draw(st.booleans()), "bf16": draw(st.booleans()),
             "use-distributed-optimizer": draw(st.booleans()), "global-batch-size": 192, "make-vocab-size-divisible-by": 320}
    if draw(st.booleans()):
        model.update(MOE, **{"num-experts": draw(st.sampled_from([2, 4])), "disable-bias-linear": True})
    return world_size, model, [draw(sizes(world_size, model)) for _ in range(2)]


LONG = "DYNATRAIN_EXAMPLES" in os.environ  # a long run also draws larger worlds


@settings(max_examples=int(os.environ.get("DYNATRAIN_EXAMPLES", 12)), deadline=None, derandomize=not LONG,
          suppress_health_check=list(HealthCheck))
@given(drawn=jobs_and_layouts())
def test_random_pairs(jobs, tmp_path_factory, drawn):
    world_size, model, (a, b) = drawn
    result = jobs.run(tmp_path_factory.mktemp("random"), 1, model, probe="dryprobe:run", world=world_size,
                      layouts={"a": a, "b": b}, pairs=[("a", "b")], timeout=900).assert_ok()
    record, = result.records("pairs")
    assert record["wrong"] is None
    assert record["refused"] is None or "cannot be trained here" in record["refused"]


def test_another_thread_keeps_the_functions_that_one_thread_replaces():
    """The next generation is made ready in a thread while a switch may build from its record."""
    from threading import Thread

    import torch.distributed as dist

    from megatron_dynatrain.megatron.conversation import from_record

    original, seen = dist.broadcast, []
    dist.broadcast = lambda *args: seen.append(args)
    try:
        with from_record([]):
            dist.broadcast("here")
            thread = Thread(target=lambda: dist.broadcast("there"))
            thread.start()
            thread.join()
    finally:
        dist.broadcast = original
    assert seen == [("there",)]
