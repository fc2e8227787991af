"""Model files: what is trained, by Megatron's argument names, without a layout. See configs/models/."""

from megatron_dynatrain.config import read_text, read_yaml
from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.planner.survey import Job

_SCALARS = (bool, int, float, str, list, type(None))


def job_of(path: str, launch: Layout) -> Job:
    """The job that trains the model of a file in layout `launch`. Raises ConfigError; that every key is an argument of
    Megatron, with a value that it takes, is checked where Megatron is loaded."""
    source = f"--model {path}"
    data = read_yaml(read_text(path, source), source)
    if not isinstance(data, dict) or not data:
        raise ConfigError(f"{source}: the file holds {type(data).__name__}, not keys and values; write Megatron's argument "
                          "names and their values, as in `num_layers: 24`")
    for name, value in data.items():
        if not isinstance(name, str) or not isinstance(value, _SCALARS):
            raise ConfigError(f"{source}: `{name}`: {value!r} is no value of an argument; write true, false, a number, a text "
                              "or a list of them")
    return Job(source, data, launch)
