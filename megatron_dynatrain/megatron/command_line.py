"""Arguments by Megatron's names, as the words of a command line: {'add_bias_linear': False} -> ['--disable-bias-linear'].

Names, types and choices come from Megatron's own parser, so a model file can set whatever a launch can set.
"""

import argparse
import importlib.util

from megatron_dynatrain.errors import ConfigError
from megatron_dynatrain.layout import nearest
from megatron_dynatrain.megatron import versions

# What does not change a description, where a model file leaves it out: no data, no tokenizer, no steps.
PLAIN = {"mock_data": True, "tokenizer_type": "NullTokenizer", "train_iters": 1, "lr": 1e-4, "eval_iters": 1,
         "eval_interval": 1}
# Megatron's layers in plain torch: their tensors have the same names and shapes as those of Transformer Engine.
LOCAL = {"transformer_impl": "local", "gradient_accumulation_fusion": False, "masked_softmax_fusion": False,
         "bias_swiglu_fusion": False, "bias_dropout_fusion": False, "apply_rope_fusion": False, "no_persist_layer_norm": True,
         "attention_backend": "unfused"}


def completed(model: dict, more: dict) -> dict:
    """The arguments of a model file with what it leaves out, and with `more`, which it overrides."""
    arguments = {**PLAIN, **more, **model}
    if "tokenizer_type" not in model and "vocab_size" in model:
        arguments["vocab_size"] = versions.null_vocab_size(model["vocab_size"])
    return arguments


def words(arguments: dict, source: str) -> list[str]:
    """The command line that sets `arguments`. `source` names them in messages. Raises ConfigError for an unknown name, and
    for a value that Megatron's parser does not take."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        if action.option_strings and action.default is not argparse.SUPPRESS:
            actions.setdefault(action.dest, []).append(action)
    line = []
    for name, value in arguments.items():
        if name not in actions:
            raise ConfigError(f"{source}: unknown key {name!r}{nearest(name, actions)}; the keys are Megatron's argument names")
        line += _words_of(name, value, actions[name], source)
    return line


def without_transformer_engine() -> dict:
    """The arguments to add where Transformer Engine is not installed."""
    return {} if importlib.util.find_spec("transformer_engine") else LOCAL


def _words_of(name: str, value, actions: list[argparse.Action], source: str) -> list[str]:
    default = actions[0].default
    if value is None or (value == default and type(value) is type(default)):
        return []
    takes_a_value = [action for action in actions if action.nargs != 0]
    if isinstance(value, bool):
        for action in actions:
            if isinstance(action, argparse.BooleanOptionalAction):
                return [next(o for o in action.option_strings if o.startswith("--no-") != value)]
            if action.nargs == 0 and action.const is value:
                return [action.option_strings[0]]
        expected = "a value" if takes_a_value else f"{not value}, or nothing"
    elif not takes_a_value:
        expected = "true or false"
    else:
        action = takes_a_value[0]
        texts = [str(item) for item in value] if isinstance(value, list) and action.nargs is not None else [str(value)]
        wrong = next((text for text in texts if not _taken(action, text)), None)
        if wrong is None:
            return [action.option_strings[0], *texts]
        kind = getattr(action.type, "__name__", "text")
        expected = f"one of {', '.join(map(str, action.choices))}" if action.choices else {"int": "a whole number",
                                                                                          "float": "a number"}.get(kind, kind)
    raise ConfigError(f"{source}: `{name}`: Megatron expects {expected}, got {value!r}")


def _taken(action: argparse.Action, text: str) -> bool:
    try:
        value = action.type(text) if action.type else text
    except (ValueError, TypeError, argparse.ArgumentTypeError, AssertionError):
        return False
    return action.choices is None or value in action.choices
