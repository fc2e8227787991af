"""What a switch holds at its peak, counted by the allocator's own events and not by the plugin."""

import pytest
from matrix import MOE

STAGING = 256 << 10
LAYOUTS = {
    "tp2pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "pp4": {"pipeline_model_parallel_size": 4},
    "tp4": {"tensor_model_parallel_size": 4},
    "tp2": {"tensor_model_parallel_size": 2},
}
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
    verify = bounded.get("verify", "off")
    result = jobs.run(tmp_path, 4, {**LARGE, **arguments},
                      {"layouts": LAYOUTS, "schedule": [{"at_iteration": 2, "layout": name} for name in ROUTE], "verify": verify,
                       "transfer": {"staging_bytes": STAGING, "keep_old_state": bounded.get("keep_old_state")}},
                      probe="probes:count_memory", timeout=300).assert_ok()
    print(result.records("memory"))
    assert 0
