"""What cannot be is refused with one clear message on every rank: at start, or at the boundary with training going on."""

import pytest

TP2 = {"tensor-model-parallel-size": 2}


@pytest.mark.core
@pytest.mark.parametrize("arguments, layout, message", [
    pytest.param({}, {"tensor_model_parallel_size": 3}, "not divisible", id="world-size"),
    pytest.param({"num-attention-heads": 2}, {"tensor_model_parallel_size": 4}, "heads", id="heads"),
    pytest.param({}, {"pipeline_model_parallel_size": 8}, "world size", id="world-size-pp"),
    pytest.param({"num-layers": 6}, {"pipeline_model_parallel_size": 4}, "layers", id="layers"),
    pytest.param({**TP2, "global-batch-size": 2}, {"tensor_model_parallel_size": 1},
                 "global_batch_size", id="global-batch"),
    pytest.param({"mtp-num-layers": 1, "untie-embeddings-and-output-weights": None}, {"pipeline_model_parallel_size": 2},
                 "cannot make a sharded_state_dict of this model", id="what-megatron-cannot-checkpoint"),
    pytest.param({"dataloader-type": "cyclic"}, {"tensor_model_parallel_size": 2},
                 "data_parallel_size would change from 4 to 2", id="cyclic-samples"),
    pytest.param({}, {"micro_batch_size": 3}, "micro_batch_size", id="micro-batch"),
])
def test_declared_layouts_that_cannot_be_end_the_job_at_start(jobs, tmp_path, arguments, layout, message):
    result = jobs.run(tmp_path, 4, {**arguments, "train-iters": 2}, {"layouts": {"bad": layout}})
    assert 0 not in result.exit_codes
    assert not result.steps
    for log in result.logs:
        last = log.strip().splitlines()[-1]
        assert "LayoutRefused" in last and "layout 'bad' is refused" in last and message in last


@pytest.mark.core
@pytest.mark.parametrize("arguments, flag", [
    ({"use-megatron-fsdp": True, "ckpt-format": "fsdp_dtensor", "no-gradient-accumulation-fusion": True}, "--use-megatron-fsdp"),
    ({"dataloader-type": "external"}, "--dataloader-type external"),
    ({"optimizer": "lion"}, "--optimizer"),
])
def test_unsupported_options_are_refused_by_name_before_anything_starts(jobs, tmp_path, arguments, flag):
    result = jobs.run(tmp_path, 2, arguments, {})
    assert 0 not in result.exit_codes
    for log in result.logs:
        last = log.strip().splitlines()[-1]
        assert "LayoutRefused" in last and f"launched with {flag}" in last and "cannot be switched" in last


def test_a_vocabulary_of_which_nothing_is_known_to_be_padding_is_refused():
    from argparse import Namespace

    from megatron_dynatrain.errors import LayoutRefused
    from megatron_dynatrain.megatron.arguments import ArgumentBook

    book = ArgumentBook(Namespace(padded_vocab_size=258), {}, lambda args, defaults: args)
    assert book._padded_vocab_size(Namespace(tensor_model_parallel_size=2), None) == 258
    with pytest.raises(LayoutRefused, match="padded vocabulary of 258 rows does not divide by tensor_model_parallel_size 4"):
        book._padded_vocab_size(Namespace(tensor_model_parallel_size=4), None)


@pytest.mark.parametrize("config, message", [
    ("dynatrain: {layouts: {a: {tensor_size: 2}}}", "unknown key 'tensor_size'"),
    ("dynatrain: [", "not valid YAML"),
    ("dynatrain: {schedule: [{at_iteration: 2, layout: wide}]}", "there is no layout 'wide'"),
])
def test_a_wrong_file_ends_the_job_on_every_rank(jobs, tmp_path, config, message):
    result = jobs.run(tmp_path, 2, {}, config)
    assert 0 not in result.exit_codes
    for log in result.logs:
        last = log.strip().splitlines()[-1]
        assert "ConfigError: --dynatrain-config" in last and message in log


OVERLAP = {"overlap-grad-reduce": True, "overlap-param-gather": True, "ddp-bucket-size": 4000}


@pytest.mark.parametrize("step, on_rank, options", [
    ("quiesce", 3, {}), ("capture", 3, {}), pytest.param("build", 3, OVERLAP, marks=pytest.mark.core), ("carry_over", 3, {}),
    ("build_data", -1, OVERLAP)])
def test_a_failure_on_one_rank_is_a_refusal_on_all_and_training_goes_on(jobs, tmp_path, step, on_rank, options):
    arguments = {**TP2, "train-iters": 6, **options}
    plain = jobs.run(tmp_path / "plain", 4, arguments, kind="plain").assert_ok()
    result = jobs.run(tmp_path / step, 4, arguments,
                      {"layouts": {"pp2": {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2}},
                       "schedule": [{"at_iteration": 2, "layout": "pp2"}, {"at_iteration": 4, "layout": "pp2"}],
                       "verify": "full"},
                      probe="probes:fail_on_one_rank", on_rank=on_rank, step=step).assert_ok()
    refused, = result.events_of("refused")
    assert (refused["iteration"], refused["to"]) == (2, "pp2")
    expected = f"no memory on this rank (on {'rank 3' if on_rank == 3 else 'every rank'})"
    assert expected in refused["reason"]
    assert all(expected in log for log in result.logs)
    # Bit for bit as if nothing had been asked, and the next request is carried out.
    assert {i: s for i, s in result.steps.items() if i <= 4} == {i: s for i, s in plain.steps.items() if i <= 4}
    assert [e["iteration"] for e in result.events_of("switch")] == [4]
    assert sorted(result.steps) == sorted(plain.steps)
