"""Every case of the matrix (see `matrix`), trained through the real loop. One job walks a whole route; one test a change."""

import pytest
from matrix import ROUTES, STEPS, launch_of, yaml_of

CASES = [(name, index) for name, route in ROUTES.items() for index in range(1, len(route.layouts))]
CORE = ("gqa-swiglu-rope", "virtual-pipeline", "moe", "moe-shared-mixed-bias", "mtp-moe-mla")  # what runs on every release


@pytest.fixture(scope="module")
def walked(jobs, tmp_path_factory):
    """name of a route -> (the run without a switch, the run along the route); each is run once."""
    done = {}

    def walk(name):
        if name not in done:
            route, folder = ROUTES[name], tmp_path_factory.mktemp(name)
            arguments = {**route.model, **route.training, **launch_of(route), "train-iters": STEPS * len(route.layouts)}
            plain = jobs.run(folder / "plain", route.world_size, arguments, kind="plain", optimizer=route.optimizer)
            done[name] = plain, jobs.run(folder / "route", route.world_size, arguments, yaml_of(route), optimizer=route.optimizer)
        return done[name]

    return walk


def text(sizes):
    short = {"tensor_model_parallel_size": "tp", "pipeline_model_parallel_size": "pp", "context_parallel_size": "cp",
             "expert_model_parallel_size": "ep", "expert_tensor_parallel_size": "etp"}
    return ",".join(f"{short.get(key, key)}={value}" for key, value in sizes.items())


@pytest.mark.parametrize("name, index", [
    pytest.param(name, i, id=f"{name}: {text(ROUTES[name].layouts[i - 1])} -> {text(ROUTES[name].layouts[i])}",
                 marks=[pytest.mark.core] if name in CORE else []) for name, i in CASES])
def test_change(walked, name, index):
    route = ROUTES[name]
    plain, switched = (result.assert_ok() for result in walked(name))
    event = next(e for e in switched.events_of("switch") if e["iteration"] == STEPS * index)
    assert (event["to"], event["verify"]) == (f"l{index}", "ok")
    assert event["moved_bytes"] == event["minimum_bytes"]
    for iteration in range(STEPS * index + 1, STEPS * (index + 1) + 1):
        step, expected = switched.steps[iteration], plain.steps[iteration]
        for quantity in ("loss", "grad_norm"):
            assert step[quantity] == pytest.approx(expected[quantity], rel=route.tolerance, abs=0), (iteration, quantity)
        assert step["lr"] == expected["lr"]
        assert switched.samples[iteration] == plain.samples[iteration]


def test_there_are_enough_cases():
    assert len(CASES) >= 60
