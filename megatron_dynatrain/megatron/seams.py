"""Every Megatron name that is wrapped, in one table: what, why, in which releases, and what it must look like.

A wrapper takes what the original takes and calls it. A module that does not have the name, or has it with other
parameters, is refused before communication is set up. Nothing is wrapped but by `install`.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from megatron_dynatrain.errors import UnsupportedMegatron
from megatron_dynatrain.import_hooks import after_import
from megatron_dynatrain.megatron import loop, versions


@dataclass(frozen=True, slots=True)
class Seam:
    """One wrapped function. `parameters` are those that the wrapper reads or sets, checked when the module is imported.

    first, last: the releases, both included, that have it so; None is no limit.
    """

    module: str
    name: str
    why: str
    parameters: tuple[str, ...]
    wrap: Callable  # (session, original) -> replacement
    first: tuple[int, int] | None = None
    last: tuple[int, int] | None = None

    def is_of(self, release: tuple[int, int]) -> bool:
        return (self.first is None or self.first <= release) and (self.last is None or release <= self.last)


SEAMS = (
    Seam("megatron.training.arguments", "add_megatron_arguments", "adds --dynatrain-config", ("parser",),
         loop.add_flags),
    Seam("megatron.training.arguments", "validate_args", "keeps a copy of the arguments from before the validation, from "
         "which those of other layouts are derived", ("args", "defaults"), loop.record_arguments, first=(0, 18)),
    Seam("megatron.training.initialize", "validate_args", "the same, where it is called from there",
         ("args", "defaults"), loop.record_arguments, last=(0, 17)),
    Seam("megatron.core.parallel_state", "create_group", "hands out groups that exist already",
         ("ranks", "timeout", "backend"), loop.pool_groups),
    Seam("megatron.core.parallel_state", "initialize_model_parallel", "records which groups a layout has",
         ("tensor_model_parallel_size", "distributed_timeout_minutes"), loop.record_groups),
    Seam("megatron.training.initialize", "_initialize_distributed", "records how groups were made", (),
         loop.record_initialization),
    Seam("megatron.training.initialize", "_set_random_seed", "records how streams were seeded", ("seed_",),
         loop.record_seeding),
    Seam("megatron.training.training", "setup_model_and_optimizer", "records how the model was built",
         ("model_type", "model_provider_func", "cfg_container", "pg_collection"), loop.record_model, first=(0, 19)),
    Seam("megatron.training.training", "setup_model_and_optimizer", "records how the model was built",
         ("model_type", "model_provider_func"), loop.record_model, last=(0, 18)),
    Seam("megatron.training.training", "build_train_valid_test_data_iterators", "records the dataset provider",
         ("build_train_valid_test_datasets_provider",), loop.record_data),
    Seam("megatron.training.training", "train", "runs the loop in segments, one a layout",
         ("model", "optimizer", "opt_param_scheduler", "train_data_iterator", "valid_data_iterator", "config"),
         loop.train_in_segments),
    Seam("megatron.training.training", "checkpoint_and_decide_exit", "is the iteration boundary", ("iteration",),
         loop.watch_boundary),
    Seam("megatron.training.training", "training_log", "keeps the averages of the log across segments",
         ("loss_dict", "total_loss_dict", "learning_rate", "iteration", "grad_norm", "is_first_iteration"), loop.keep_log),
    Seam("megatron.training.training", "write_args_to_tensorboard", "writes hundreds of texts when the loop is entered; "
         "after a switch no longer in the stall", (), loop.write_arguments_later),
    Seam("megatron.training.training", "save_checkpoint_and_time", "saves the objects of the current layout",
         ("model", "optimizer", "opt_param_scheduler"), loop.with_current_objects),
    Seam("megatron.training.training", "save_checkpoint", "the same, after the last step",
         ("model", "optimizer", "opt_param_scheduler"), loop.with_current_objects, last=(0, 17)),
    Seam("megatron.training.training", "evaluate_and_print_results", "evaluates the model of the current layout",
         ("data_iterator", "model", "config"), loop.with_current_objects),
)


def install(session) -> None:
    """Wrap every seam of Megatron when its module is imported. Not collective; call before Megatron is imported."""
    after_import("megatron.core.package_info", versions.check)
    for module in dict.fromkeys(seam.module for seam in SEAMS):
        after_import(module, lambda loaded, name=module: _wrap_all(loaded, name, session, versions.release()))


def _wrap_all(module, name: str, session, release: tuple[int, int]) -> None:
    for seam in SEAMS:
        if seam.module == name and seam.is_of(release):
            original = getattr(module, seam.name, None)
            parameters = inspect.signature(original).parameters if callable(original) else {}
            missing = [parameter for parameter in seam.parameters if parameter not in parameters]
            if not callable(original) or missing:
                what = f"has no parameter {', '.join(missing)}" if callable(original) else "does not exist"
                raise UnsupportedMegatron(f"{seam.module}.{seam.name} {what} in this Megatron, which megatron_dynatrain was not "
                                          f"tested with; install a tested release ({versions.names()}), or launch without "
                                          "megatron_dynatrain")
            setattr(module, seam.name, seam.wrap(session, original))
