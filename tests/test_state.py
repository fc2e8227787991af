"""After a switch every element of every state is where it belongs, on every replica, bit for bit."""

import pytest

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp4": {"tensor_model_parallel_size": 4},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp4": {"pipeline_model_parallel_size": 4},
    "tp2pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
ROUTE = ("tp2", "pp4", "launch", "tp2pp2", "pp2", "tp4", "launch", "pp2", "tp2pp2", "tp4", "pp4", "tp2")


@pytest.mark.parametrize("arguments, optimizer", [
    pytest.param({"verify": "full"}, "fused", id="fp32", marks=pytest.mark.core),
    pytest.param({}, "fused", id="fp32-given-back"),
    pytest.param({"bf16": True}, "fused", id="bf16-given-back", marks=pytest.mark.core),
    pytest.param({"bf16": True, "verify": "digest"}, "torch", id="bf16-torch-adamw"),
    pytest.param({"bf16": True, "use-distributed-optimizer": None}, "fused", id="bf16-not-distributed-given-back"),
    pytest.param({"verify": "full", "untie-embeddings-and-output-weights": None, "disable-bias-linear": None,
                  "position-embedding-type": "learned_absolute"}, "fused", id="tied-bias-positions"),
    pytest.param({"verify": "full", "overlap-grad-reduce": True, "overlap-param-gather": True, "ddp-bucket-size": 3000}, "fused",
                 id="buckets"),
])
def test_every_element_names_its_coordinate(jobs, tmp_path, arguments, optimizer):
    """Where nothing is verified, the old state is given back while the new one is filled."""
    arguments = dict(arguments)
    verify = arguments.pop("verify", "off")
    result = jobs.run(tmp_path, 4, {**arguments, "train-iters": 20, "lr": 1e-30, "min-lr": 0.0, "weight-decay": 0.0},
                      {"layouts": LAYOUTS, "schedule": [{"at_iteration": 2, "layout": name} for name in ROUTE],
                       "verify": verify, "transfer": {"staging_bytes": 4096}},
                      optimizer=optimizer, probe="probes:name_coordinates").assert_ok()
    assert [event["to"] for event in result.events_of("switch")] == list(ROUTE)
    assert all(event["moved_bytes"] == event["minimum_bytes"] for event in result.events_of("switch"))
    compared = result.records("compared")
    assert len(compared) == 4 * len(ROUTE)
    for record in compared:
        assert record["steps"] == [77] and record["elements"] > 10_000


@pytest.mark.parametrize("verify", [pytest.param("full", marks=pytest.mark.core), "digest"])
def test_a_flipped_bit_is_found_and_the_old_layout_goes_on(jobs, tmp_path, verify):
    arguments = {"train-iters": 6}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    result = jobs.run(tmp_path / verify, 4, arguments,
                      {"layouts": LAYOUTS, "schedule": [{"at_iteration": 3, "layout": "pp2"}], "verify": verify},
                      probe="probes:corrupt", on_rank=2, piece=5).assert_ok()
    refused, = result.events_of("refused")
    assert refused["kind"] == "VerificationError" and "decoder.layers" in refused["reason"]
    if verify == "full":
        assert "rank 2" in refused["reason"] and "the first at (" in refused["reason"]
    assert not result.events_of("switch")
    assert all("VerificationError" in log or "differ" in log for log in result.logs)
    assert result.steps == plain.steps


def test_vocabulary_padding_comes_and_goes(jobs, tmp_path):
    """257 rows at TP 1, 258 at TP 2, 260 at TP 4: real rows stay as they were, so there and back is the identity."""
    arguments = {"make-vocab-size-divisible-by": 1, "train-iters": 6}
    layouts = {"tp2": {"tensor_model_parallel_size": 2}, "tp4": {"tensor_model_parallel_size": 4}}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    back = jobs.run(tmp_path / "back", 4, arguments,
                    {"layouts": layouts, "verify": "full",
                     "schedule": [{"at_iteration": 2, "layout": name} for name in ("tp4", "tp2", "launch")]}).assert_ok()
    assert [event["verify"] for event in back.events_of("switch")] == ["ok"] * 3
    assert back.steps == plain.steps
    stays = jobs.run(tmp_path / "stays", 4, arguments,
                     {"layouts": layouts, "verify": "digest", "schedule": [{"at_iteration": 2, "layout": "tp2"}]}).assert_ok()
    assert [event["verify"] for event in stays.events_of("switch")] == ["ok"]
    for iteration in (3, 4, 5, 6):  # one more row under the softmax, and that is all
        assert stays.steps[iteration]["loss"] == pytest.approx(plain.steps[iteration]["loss"], rel=1e-2)


def test_fifty_switches_leave_nothing_behind(jobs, tmp_path):
    names = ["pp2", "tp2", "launch", "tp2pp2"]
    route = [names[i % 4] for i in range(50)]
    result = jobs.run(tmp_path, 4, {"train-iters": 52},
                      {"layouts": LAYOUTS, "verify": "digest",
                       "schedule": [{"at_iteration": 1 + i, "layout": name} for i, name in enumerate(route)]},
                      probe="probes:count_resources").assert_ok()
    assert len(result.events_of("switch")) == 50
    for rank in range(4):
        counts = [r for r in result.records("resources")]
        counts = counts[rank * 50:(rank + 1) * 50]
        assert all(record["dead"] for record in counts)
        # The same layout later in the run: as after the first round.
        for later, first in zip(counts[-4:], (counts[i] for i in (46 % 4 + 4, 47 % 4 + 4, 48 % 4 + 4, 49 % 4 + 4))):
            for name in ("groups", "threads", "python_threads", "descriptors"):
                assert later[name] == first[name], (rank, name)
            assert later["tensors"] <= first["tensors"] * 1.02 + 20, rank


@pytest.mark.parametrize("dispatcher", [pytest.param("alltoall", marks=pytest.mark.core), "allgather"])
def test_models_with_experts_die_too(jobs, tmp_path, dispatcher):
    """Their token dispatchers keep the graph of the last step, which keeps the model."""
    experts = {"num-experts": 4, "moe-router-topk": 2, "moe-ffn-hidden-size": 32, "moe-token-dispatcher-type": dispatcher,
               "train-iters": 4}
    layouts = {f"ep{size}": {"expert_model_parallel_size": size} for size in (2, 4)}
    result = jobs.run(tmp_path, 4, experts, {"layouts": layouts, "schedule": [
        {"at_iteration": 1, "layout": "ep2"}, {"at_iteration": 2, "layout": "ep4"}, {"at_iteration": 3, "layout": "launch"}]},
        probe="probes:count_resources").assert_ok()
    assert len(result.events_of("switch")) == 3
    assert all(record["dead"] for record in result.records("resources"))
