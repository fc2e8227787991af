"""What a switch holds at its peak, counted by the allocator's own events and not by the plugin."""

import pytest
from matrix import MOE, layout, moe

STAGING = 256 << 10
DENSE = {"tp2pp2": layout(2, 2), "pp4": layout(1, 4), "tp4": layout(4), "tp2": layout(2)}
EXPERTS = {"tp2pp2": moe(2, tp=2, pipeline_model_parallel_size=2), "pp4": layout(1, 4), "tp4": moe(4, tp=4), "tp2": moe(2, tp=2)}
ROUTE = ("tp2pp2", "pp4", "tp4", "launch", "tp2", "pp4")
# Large enough that the states are many times the scratch, and what else a switch allocates is small beside them.
LARGE = {"num-layers": 8, "hidden-size": 256, "ffn-hidden-size": 512, "bf16": True, "train-iters": 8}


@pytest.mark.parametrize("arguments, bounded", [
    pytest.param({}, {}, id="dense"),
    pytest.param({"use-distributed-optimizer": None}, {}, id="not-distributed"),
    pytest.param({**MOE}, {}, id="moe"),
    pytest.param({}, {"verify": "digest", "keep_old_state": False}, id="digest"),
])
def test_a_switch_stays_within_the_larger_state_and_the_budget(jobs, tmp_path, arguments, bounded):
    verify, layouts = bounded.get("verify", "off"), EXPERTS if "num-experts" in arguments else DENSE
    result = jobs.run(tmp_path, 4, {**LARGE, **arguments},
                      {"layouts": layouts, "verify": verify,
                       "schedule": [{"at_iteration": i, "layout": name} for i, name in enumerate(ROUTE, 1)],
                       "transfer": {"staging_bytes": STAGING, "keep_old_state": bounded.get("keep_old_state")}},
                      probe="probes:count_memory", last=len(ROUTE) + 1, timeout=300).assert_ok()
    records = result.records("memory")
    assert len(records) == 4 * len(ROUTE)
    for record in records:
        assert record["peak"] <= 1.05 * max(record["before"], record["after"]) + STAGING, record
    for event in result.events_of("switch"):  # what was known before
        assert event["peak_extra_bytes"] <= 0.05 * event["peak_bytes"] + STAGING


def test_with_the_old_state_kept_both_are_held(jobs, tmp_path):
    result = jobs.run(tmp_path, 4, LARGE, {"layouts": DENSE, "schedule": [{"at_iteration": 1, "layout": "pp4"}],
                                           "verify": "full", "transfer": {"staging_bytes": STAGING}},
                      probe="probes:count_memory", last=2, timeout=300).assert_ok()
    assert len(result.events_of("switch")) == 1
    for record in result.records("memory"):
        assert record["peak"] > 1.1 * max(record["before"], record["after"]) + STAGING


@pytest.mark.parametrize("limit, fits", [(1_000_000, False), (100_000_000, True)])
def test_what_does_not_fit_is_refused_with_the_numbers(jobs, tmp_path, limit, fits):
    arguments = {"bf16": True, "hidden-size": 128, "train-iters": 4}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    result = jobs.run(tmp_path / "limited", 4, arguments,
                      {"layouts": DENSE, "schedule": [{"at_iteration": 2, "layout": "tp2"}],
                       "transfer": {"staging_bytes": STAGING, "memory_limit_bytes": limit}}).assert_ok()
    assert len(result.events_of("switch")) == fits
    if not fits:
        refused, = result.events_of("refused")
        assert "does not fit into memory" in refused["reason"]
        assert "`transfer.memory_limit_bytes` allows 1.0 MB" in refused["reason"]
        assert result.steps == plain.steps
