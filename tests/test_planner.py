"""`python -m megatron_dynatrain plan`: descriptions, links, numbers, and the live job's plan."""

import json
import subprocess
import sys

import numpy as np
import pytest
import yaml
from conftest import ROOT
from harness import CPU, MODEL, TRAINING, words_of
from matrix import MOE, layout, moe
from test_dry import EIGHT, MODELS

from megatron_dynatrain import archive
from megatron_dynatrain.config import parse_layout
from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.geometry import Box
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.planner.cluster import Cluster
from megatron_dynatrain.planning import make_plan
from megatron_dynatrain.space import Holdings, LogicalTensor, Memory, Piece, Storage, World

# One build for all ranks that differ in their data-parallel seat alone.


@pytest.mark.parametrize("model, layouts", [
    ("gqa", ["tp2", "tp2-pp2", "cp2-tp2", "vpp2", "mapping", "instances"]),
    ("tied-biases-positions", ["pp2"]),
    ("bf16-masters", ["tp2", "cp4"]),
    ("not-distributed", ["tp2", "pp2"]),
    ("moe", ["ep2", "ep2-pp2", "ep2-etp2-tp2", "etp4-tp2", "ep2-cp2"]),
    ("moe-shared-mixed-bias", ["ep4", "ep2-vpp2"]),
])
def test_ranks_alike_are_described_as_each_by_itself(jobs, tmp_path, model, layouts):
    arguments, known = MODELS[model]
    result = jobs.run(tmp_path, 1, {**EIGHT, **arguments}, probe="plannerprobe:alike", world=8,
                      layouts={name: known[name] for name in layouts}).assert_ok()
    records = result.records("alike")
    assert [record["layout"] for record in records] == ["launch", *layouts]
    for record in records:
        assert record["wrong"] == [] and record["ranks"] == list(range(8)), record
        assert (record["lists"] < 8) == (record["layout"] != "instances"), record


# Model files.

PUBLISHED = {  # parameters of the published weights; of GPT-3, the formula of arXiv 2104.04473 and its padded vocabulary
    "gpt3-1.3b": 24 * (12 * 2048**2 + 13 * 2048) + (50304 + 2048 + 2) * 2048,
    "gpt3-6.7b": 32 * (12 * 4096**2 + 13 * 4096) + (50304 + 2048 + 2) * 4096,
    "llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560,
}


def test_every_model_file_is_checked():
    assert {path.stem for path in (ROOT / "configs" / "models").glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_model_files_have_the_published_number_of_parameters(jobs, tmp_path, name):
    model = yaml.safe_load((ROOT / "configs" / "models" / f"{name}.yaml").read_text())
    experts = {"expert_model_parallel_size": 64} if "num_experts" in model else {}
    launch = {"pipeline_model_parallel_size": 8, **experts}
    result = jobs.run(tmp_path, 1, probe="plannerprobe:num_parameters", model=model, launch=launch,
                      world=512 if experts else 8).assert_ok()
    assert result.records("parameters") == [PUBLISHED[name]]


def test_arguments_become_the_words_of_a_command_line(jobs, tmp_path):
    cases = [{"num_layers": 4, "swiglu": True, "add_bias_linear": False, "moe_layer_freq": "[0,1]"},
             {"swiglu": False, "kv_channels": None, "optimizer": "adam"},
             {"num_layer": 4}, {"num_layers": "four"}, {"position_embedding_type": "ropes"},
             {"num_layers": True}, {"swiglu": 3}]
    *fine, unknown, kind, choice, boolean, number = jobs.run(tmp_path, 1, probe="plannerprobe:words",
                                                             cases=cases).assert_ok().records("words")
    assert fine == [["--num-layers", "4", "--swiglu", "--disable-bias-linear", "--moe-layer-freq", "[0,1]"], []]
    assert unknown.startswith("--model m.yaml: unknown key 'num_layer'; did you mean 'num_layers'?; the keys are Megatron's ")
    assert kind == "--model m.yaml: `num_layers`: Megatron expects a whole number, got 'four'"
    assert choice.startswith("--model m.yaml: `position_embedding_type`: Megatron expects one of learned_absolute, rope, ")
    assert boolean == "--model m.yaml: `num_layers`: Megatron expects a value, got True"
    assert number == "--model m.yaml: `swiglu`: Megatron expects true or false, got 3"


# Layouts on the command line.


def test_layouts_are_read_as_in_the_configuration():
    assert parse_layout("", "--to") == Layout()
    text = "tensor_model_parallel_size=4, sequence_parallel=true,expert_tensor_parallel_size=null"
    assert parse_layout(text, "--to") == Layout(tensor_model_parallel_size=4, sequence_parallel=True,
                                                expert_tensor_parallel_size=None)
    assert parse_layout("pipeline_model_parallel_layout=Et*3|t,t|L,tensor_model_parallel_size=2", "--to") == Layout(
        pipeline_model_parallel_layout="Et*3|t,t|L", tensor_model_parallel_size=2)


@pytest.mark.parametrize("text, message", [
    ("tensor_parallel_size=2", "--to 'tensor_parallel_size=2': unknown key 'tensor_parallel_size'; did you mean "
                               "'tensor_model_parallel_size'?"),
    ("tensor_model_parallel_size=two", "`tensor_model_parallel_size`: Expected `int`, got `str`"),
    ("tensor_model_parallel_size=0", "tensor_model_parallel_size: 0 was asked for, but it counts from 1"),
    ("tensor_model_parallel_size", "is a list of different name=value"),
    ("micro_batch_size=1,micro_batch_size=2", "is a list of different name=value"),
])
def test_what_is_no_layout(text, message):
    with pytest.raises(ConfigError) as caught:
        parse_layout(text, "--to")
    assert message in str(caught.value)


# Files of descriptions, links: on small worlds by hand.


def holdings_of(pieces, memory=None):
    """[(tensor, box, is_main)] -> Holdings, each piece in a storage of its own."""
    return Holdings.from_pieces(
        [Piece(tensor, box, i, 0, tuple([1] * len(box.shape)), is_main) for i, (tensor, box, is_main) in enumerate(pieces)],
        [Storage(f"storage {i}", 7 + i, tensor.dtype) for i, (tensor, *_) in enumerate(pieces)], memory)


BIG = LogicalTensor("a.weight", "weight", (4, 1 << 20), "bfloat16", 2)
DEEP = LogicalTensor("experts", "exp_avg", (2, 3, 70_000), "float32", 4, True)


def test_holdings_come_back_from_a_file(tmp_path):
    held = {0: holdings_of([(BIG, Box((0, 0), (4, 1 << 20)), True)]), 7: holdings_of([]),
            3: holdings_of([(BIG, Box((1, 5), (1, 70_000)), False), (DEEP, Box((1, 2, 300), (1, 1, 69_000)), True)],
                            Memory(np.array([1, 1]), np.array([3, 1 << 40]), 1 << 41))}
    archive.write(tmp_path / "a.npz", held)
    found = archive.read(tmp_path / "a.npz")
    assert {rank: own.digest() for rank, own in found.items()} == {rank: own.digest() for rank, own in held.items()}
    for rank, own in found.items():
        assert own.memory.of_storage.tolist() == held[rank].memory.of_storage.tolist()
        assert own.memory.nbytes.tolist() == held[rank].memory.nbytes.tolist()
        assert own.memory.gradient_bytes == held[rank].memory.gradient_bytes
    archive.write(tmp_path / "b.npz", {9: held[3]})
    archive.merge([tmp_path / "a.npz", tmp_path / "b.npz"], tmp_path / "c.npz")
    found = archive.read(tmp_path / "c.npz")
    assert list(found) == [0, 3, 7, 9] and found[9].digest() == held[3].digest()


def rows_on(ranks_of_rows):
    """A world of 16 ranks in which the rows of BIG, 2 MiB each, are held by the ranks given; the first is the main copy."""
    held = {rank: [] for rank in range(16)}
    for row, ranks in enumerate(ranks_of_rows):
        for i, rank in enumerate(ranks):
            held[rank].append((BIG, Box((row, 0), (1, 1 << 20)), i == 0))
    return World.assemble({rank: holdings_of(pieces) for rank, pieces in held.items()})


@pytest.mark.parametrize("before, after, seconds, by", [
    # Two rows from node 0 to node 1: 4 MiB over 8 cards of 1 GB/s, though two ranks alone send.
    ([[0], [1], [2], [3]], [[8], [9], [2], [3]], (4 << 20) / 8e9, "the network of node 0 sends"),
    # Both ways at once costs as one way.
    ([[0], [8], [2], [3]], [[8], [0], [2], [3]], (2 << 20) / 8e9, "the network of node 0 sends"),
    # Inside a node: what one rank receives, 3 rows of 2 MiB at 100 GB/s.
    ([[0], [1], [2], [3]], [[5], [5], [5], [3]], (6 << 20) / 100e9, "NVLink of rank 5 receives"),
    ([[0], [1], [2], [3]], [[0], [1], [2], [3]], 0.0, "nothing moves"),
])
def test_the_bound_is_the_busiest_link(before, after, seconds, by):
    cluster = Cluster(8, 1e9, 100e9, 80e9, 1e12, 0.5)
    plan = make_plan(rows_on(before), rows_on(after))
    assert cluster.bound(plan) == (pytest.approx(seconds), by)
    # One window of half a second, its links, and packing: at most three rows are read and written.
    packing = 2 * (6 << 20) / 1e12
    assert cluster.estimate(plan) == pytest.approx(seconds + 0.5 * bool(seconds) + packing, abs=packing)


# The command.

SMALL = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 2,
         "ffn_hidden_size": 64, "swiglu": True, "position_embedding_type": "rope", "normalization": "RMSNorm",
         "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "seq_length": 16, "max_position_embeddings": 16,
         "vocab_size": 320, "make_vocab_size_divisible_by": 80, "micro_batch_size": 1, "global_batch_size": 4, "bf16": True}


def plan(*words, code=0):
    done = subprocess.run([sys.executable, "-m", "megatron_dynatrain", "plan", *map(str, words)], cwd=ROOT, capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done


def test_help_names_every_flag_and_loads_nothing():
    from megatron_dynatrain.cli import main

    text = plan("--help").stdout
    for flag in ("--model", "--from", "--to", "--world-size", "--link-gbps", "--nvlink-gbs", "--gpus-per-node",
                 "--gpu-memory-gb", "--json", "--plot", "--no-cache"):
        assert flag in text
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--to", "micro_batch_size=1", "--world-size", "0"])
    assert caught.value.code == 2


def test_bytes_counted_by_hand(tmp_path):
    """TP 2 to TP 1 on two ranks without the distributed optimizer: each needs the half that the other has of everything that
    TP cuts, as weight (2 bytes), master and two moments (12)."""
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    flags = ("--model", tmp_path / "small.yaml", "--world-size", 2, "--cache", tmp_path / "cache", "--json",
             tmp_path / "plan.json")
    shown = plan(*flags, "--from", "tensor_model_parallel_size=2", "--to", "tensor_model_parallel_size=1", "--plot",
                 tmp_path / "plots", "--gpu-memory-gb", "0.001").stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    attention = 32 * (32 + 2 * 16) + 32 * 32  # queries, keys and values of two groups; projection
    cut = 2 * 320 * 32 + 4 * (attention + 3 * 32 * 64)  # both vocabularies; SwiGLU has two matrices in and one out
    norms = (2 * 4 + 1) * 32
    assert found["moved_bytes"] == found["minimum_bytes"] == 14 * cut
    assert found["max_rank_bytes"] == found["balanced_max_rank_bytes"] == 14 * cut // 2
    assert found["needed_bytes"] == 14 * 2 * (cut + norms) and found["stays_bytes"] == 14 * (cut + 2 * norms)
    assert found["state_bytes_before"]["max"] == 14 * (cut // 2 + norms)
    assert found["state_bytes_after"]["max"] == 14 * (cut + norms)
    assert found["bound_seconds"] == pytest.approx(14 * cut / 2 / 400e9) and found["estimate_seconds"] > found["bound_seconds"]
    assert found["by_field"]["weight"]["moved_bytes"] == 2 * cut
    assert found["world_size"] == 2 and found["describe_seconds"] > 0
    assert found["fits_in_memory"] is False and "does not fit: 2 ranks" in shown
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"traffic.png", "ranks.png", "tensor.png", "layers.png"}
    refused = plan(*flags, "--from", "tensor_model_parallel_size=2", "--to", "tensor_model_parallel_size=3", code=2)
    assert refused.stdout.startswith("refused: layout 'to': (tensor_model_parallel_size=3) cannot be trained here: ")
    assert json.loads((tmp_path / "plan.json").read_text())["refused"]["kind"] == "LayoutRefused"


@pytest.mark.parametrize("kind", ["dense, from its script", "experts, from a model file"])
def test_the_plan_is_that_of_the_live_job(jobs, tmp_path, kind):
    if kind.startswith("dense"):
        arguments, launch, target = {"bf16": True}, layout(2, 1), layout(1, 2)
    else:
        arguments, launch, target = {**MOE}, moe(4), moe(2, pp=2)
    flags = {name.replace("_", "-"): value for name, value in launch.items()}
    live = jobs.run(tmp_path / "live", 4, {**arguments, **flags, "train-iters": 2},
                    {"layouts": {"next": target}, "schedule": [{"at_iteration": 1, "layout": "next"}]}).assert_ok()
    event, = live.events_of("switch")

    def text(sizes):
        return ",".join(f"{name}={json.dumps(value)}" for name, value in sizes.items())

    common = ("--world-size", 4, "--to", text(target), "--no-cache", "--json", tmp_path / "plan.json")
    if kind.startswith("dense"):
        merged = {**MODEL, **TRAINING, **CPU, "mock-data": True, **arguments, **flags}
        plan(*common, "--", ROOT / "scripts" / "pretrain_gpt.py", *words_of(merged))
    else:
        model = {name.replace("-", "_"): value for name, value in {**MODEL, **arguments}.items()}
        del model["disable_bias_linear"]
        model.update(add_bias_linear=False, vocab_size=257, make_vocab_size_divisible_by=80, use_distributed_optimizer=True,
                     micro_batch_size=1, global_batch_size=4)
        (tmp_path / "moe.yaml").write_text(yaml.safe_dump(model))
        plan(*common, "--model", tmp_path / "moe.yaml", "--from", text(launch))
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["plan_hash"] == event["plan_hash"]
    assert (found["moved_bytes"], found["num_windows"]) == (event["moved_bytes"], event["windows"])


def test_the_plan_of_a_change_of_ranks_is_that_of_the_live_job(jobs, tmp_path):
    """Ranks 0 and 1 train, 2 and 3 wait; then 1, 2 and 3 train."""
    target = {"ranks": [1, 2, 3], "tensor_model_parallel_size": 1}
    arguments = {"tensor-model-parallel-size": 2, "global-batch-size": 12, "bf16": True}
    live = jobs.run(tmp_path / "live", 4, {**arguments, "train-iters": 40}, {
        "layouts": {"others": target}, "schedule": [{"at_iteration": 2, "layout": "others"}], "run_dir": str(tmp_path / "run"),
        "elastic": {"world_size": 2, "spares": 2}}, probe="probes:paced", seconds=0.1).assert_ok()
    event, = live.events_of("switch")
    merged = {**MODEL, **TRAINING, **CPU, "mock-data": True, **arguments}
    shown = plan("--world-size", 2, "--to", "ranks=[1,2,3],tensor_model_parallel_size=1", "--no-cache", "--json",
                 tmp_path / "plan.json", "--", ROOT / "scripts" / "pretrain_gpt.py", *words_of(merged)).stdout
    found = json.loads((tmp_path / "plan.json").read_text())
    for name in ("plan_hash", "moved_bytes", "from_ranks", "to_ranks"):
        assert found[name] == event[name], name
    assert (found["num_windows"], found["world_size"], found["world_size_after"]) == (event["windows"], 2, 3)
    assert "2 are taken in, 1 leave or wait" in shown
