"""The YAML file: what it may say, and what is said of it where it is wrong."""

import pytest

from megatron_dynatrain import config
from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.layout import Layout

GOOD = """
dynatrain:
  layouts:
    deep: {tensor_model_parallel_size: 1, pipeline_model_parallel_size: 4}
    wide: {tensor_model_parallel_size: 2, sequence_parallel: true, num_layers_per_virtual_pipeline_stage: null}
  schedule:
    - {at_iteration: 10, layout: deep}
    - {at_iteration: 20, layout: launch}
  verify: off
  report: runs/report.jsonl
"""


def test_everything_arrives():
    read = config.parse(GOOD)
    assert read.layouts["deep"] == Layout(tensor_model_parallel_size=1, pipeline_model_parallel_size=4)
    assert read.layouts["wide"].arguments() == {"tensor_model_parallel_size": 2, "sequence_parallel": True,
                                                "num_layers_per_virtual_pipeline_stage": None}
    assert [(s.at_iteration, s.layout) for s in read.schedule] == [(10, "deep"), (20, "launch")]
    assert (read.verify, read.report) == ("off", "runs/report.jsonl")


@pytest.mark.parametrize("text, messages", [
    ("dynatrain: {layouts: {a: {tensor_parallel_size: 2}}}",
     ["`dynatrain.layouts.a`: unknown key 'tensor_parallel_size'", "did you mean 'tensor_model_parallel_size'?"]),
    ("dynatrain: {layouts: {a: {data_parallel_size: 2}}}", ["the data-parallel size follows from the other sizes"]),
    ("dynatrain: {layouts: {a: {tensor_model_parallel_size: two}}}",
     ["`dynatrain.layouts.a.tensor_model_parallel_size`", "Expected `int"]),
    ("dynatrain: {layouts: {a: {tensor_model_parallel_size: 0}}}", ["tensor_model_parallel_size: 0 was asked for"]),
    ("dynatrain: {layout: {}}", ["`dynatrain`: unknown key 'layout'", "did you mean 'layouts'?"]),
    ("dyna_train: {}", ["unknown key 'dyna_train'", "did you mean 'dynatrain'?"]),
    ("dynatrain: {verify: ful}", ["`dynatrain.verify`", "'ful'"]),
    ("dynatrain: {schedule: [{at_iteration: 3, layout: dep}], layouts: {deep: {}}}",
     ["`dynatrain.schedule[0]`: there is no layout 'dep'", "did you mean 'deep'?"]),
    ("dynatrain: {schedule: [{at_iteration: -1, layout: launch}]}", ["`dynatrain.schedule[0].at_iteration`", ">= 0"]),
    ("dynatrain: {schedule: [{at_iteration: 5, layout: launch}, {at_iteration: 4, layout: launch}]}",
     ["`dynatrain.schedule[1]`: at_iteration 4 comes after 5"]),
    ("dynatrain: {schedule: [{iteration: 5, layout: launch}]}",
     ["`dynatrain.schedule[0]`: unknown key 'iteration'", "did you mean 'at_iteration'?"]),
    ("dynatrain: {layouts: {launch: {}}}", ["'launch' is the layout of the command line"]),
    ("dynatrain: {layouts: {a: {}, a: {}}}", ["the key 'a' is given twice"]),
    ("dynatrain: {transfer: {staging_bytes: 12}}", ["`dynatrain.transfer.staging_bytes`", ">= 4096"]),
    ("dynatrain: {transfer: {staging: 12}}", ["`dynatrain.transfer`: unknown key 'staging'", "staging_bytes"]),
    ("dynatrain: [", ["not valid YAML", "line 1"]),
    ("dynatrain: !!python/object/apply:os.system ['true']", ["not valid YAML"]),
    ("", ["`object`"]),
    ("dynatrain:", ["`dynatrain`"]),
])
def test_errors_name_the_place_and_the_remedy(text, messages):
    with pytest.raises(ConfigError) as caught:
        config.parse(text, "my.yaml")
    assert str(caught.value).startswith("--dynatrain-config my.yaml: ")
    for message in messages:
        assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"--dynatrain-config .*none.yaml: the file cannot be read"):
        config.load(str(tmp_path / "none.yaml"))


def test_files_in_configs_are_valid():
    from conftest import ROOT

    paths = sorted((ROOT / "configs").glob("*.yaml"))
    assert paths
    for path in paths:
        config.load(str(path))
