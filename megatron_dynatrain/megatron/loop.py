"""The wrappers around Megatron's functions (see `seams` for the table).

Megatron's `train()` stays as it is and runs in segments. At a boundary at which a switch is due it is made to return, by
setting `train_iters` to the iteration that it has reached; the controller switches; `train()` is entered again at the same
iteration with the new objects. `pretrain` keeps the old optimizer, scheduler and iterators in its own locals, so it is
given handles in their place; the functions to which it passes them resolve a handle to the current object.
"""

import copy
import functools
import gc
import inspect

from megatron_dynatrain import config as configuration
from megatron_dynatrain.layout import LAUNCH
from megatron_dynatrain.megatron import waiting
from megatron_dynatrain.megatron.arguments import ArgumentBook
from megatron_dynatrain.megatron.build import Recipe
from megatron_dynatrain.megatron.data import DataRecipe, is_of_stage
from megatron_dynatrain.megatron.groups import ParallelStates
from megatron_dynatrain.megatron.job import Live
from megatron_dynatrain.megatron.support import check_supported


class Handle:
    """Stands for an object of the current layout in the hands of `pretrain`; anything else that it is asked is passed on."""

    def __init__(self, session, kind: str):
        self._session, self._kind = session, kind

    def resolve(self):
        live = self._session.job.live
        return live.iterators[self._kind] if self._kind in live.iterators else getattr(live, self._kind)

    def __getattr__(self, name):
        return getattr(self.resolve(), name)


def add_flags(session, original):
    @functools.wraps(original)
    def add_megatron_arguments(parser):
        parser = original(parser)
        if "--dynatrain-config" in parser._option_string_actions:  # a patched checkout has it
            return add_join_flag(parser)
        group = parser.add_argument_group(title="megatron_dynatrain")
        group.add_argument("--dynatrain-config", type=str, default=None, metavar="FILE",
                           help="YAML file with the layouts between which this job switches, and when")
        return add_join_flag(parser)

    return add_megatron_arguments


def add_join_flag(parser):
    parser.add_argument("--dynatrain-join", nargs="?", const="", default=None, metavar="JOB",
                        help="join the job that runs on the run_dir of --dynatrain-config (of the scheduler's number, or the run, "
                        "JOB) and wait to be taken in")
    return parser


def record_arguments(session, original):
    @functools.wraps(original)
    def validate_args(args, defaults={}):  # noqa: B006 - Megatron's own signature
        path = getattr(args, "dynatrain_config", None)
        if path is not None:
            session.config = configuration.load(path)
        if not session.active:
            return original(args, defaults)
        check_supported(args)
        waiting.set_aside(session, args)
        raw = copy.deepcopy(args)
        validated = original(args, defaults)
        session.job.book = ArgumentBook(raw, defaults, original)
        check_supported(session.job.book.launch)
        return validated

    return validate_args


def pool_groups(session, original):
    from megatron.core import parallel_state

    states = session.job.states = ParallelStates(parallel_state, original)

    @functools.wraps(original)
    def create_group(*args, **kwargs):
        return states.create_group(*args, **kwargs) if session.active else original(*args, **kwargs)

    return create_group


def record_groups(session, original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def initialize_model_parallel(*args, **kwargs):
        session.job.states.last_call = dict(signature.bind(*args, **kwargs).arguments)
        return original(*args, **kwargs)

    return initialize_model_parallel


def record_initialization(session, original):
    @functools.wraps(original)
    def _initialize_distributed(*args, **kwargs):
        from megatron_dynatrain.megatron.quiet import quiet

        def again():
            with quiet():
                original(*args, **kwargs)

        session.job.states.initialize = again
        if session.waits_as is not None:
            return waiting.initialize(session, original, args, kwargs)
        return original(*args, **kwargs)

    return _initialize_distributed


def record_seeding(session, original):
    @functools.wraps(original)
    def _set_random_seed(seed_, *args, **kwargs):
        session.job.reseed = lambda seed: original(seed, *args, **kwargs)
        return original(seed_, *args, **kwargs)

    return _set_random_seed


def record_model(session, original):
    @functools.wraps(original)
    def setup_model_and_optimizer(*args, **kwargs):
        if not session.active:
            return original(*args, **kwargs)
        # The collection after a switch, which ends the old model, need not walk what was loaded before the first one.
        gc.collect()
        gc.freeze()
        session.job.recipe = Recipe(original, args, kwargs, session.job.book.launch)
        if session.waits_as is not None:
            session.job.live = Live(session.job.build_hollow(LAUNCH), None, None, {}, session.job.book.launch)
            return session.job.live.model, Handle(session, "optimizer"), Handle(session, "scheduler")
        model, optimizer, scheduler = original(*args, **kwargs)
        session.job.live = Live(model, optimizer, scheduler, {}, session.job.book.launch)
        return model, Handle(session, "optimizer"), Handle(session, "scheduler")

    return setup_model_and_optimizer


def record_data(session, original):
    kinds = ("train", "valid", "test")

    @functools.wraps(original)
    def build_train_valid_test_data_iterators(build_train_valid_test_datasets_provider):
        provider = build_train_valid_test_datasets_provider
        if not session.active:
            return original(provider)
        job = session.job
        job.data = job.data or DataRecipe(original)
        if session.waits_as is not None:
            job.data.note(provider, job.args)
            waiting.promise_data(job.args)
            return tuple(Handle(session, kind) for kind in kinds)
        iterators = dict(zip(kinds, job.data.first(provider, job.args), strict=True))
        if is_of_stage(provider):  # one call for each virtual pipeline stage
            for kind, iterator in iterators.items():
                job.live.iterators.setdefault(kind, []).append(iterator)
        else:
            job.live.iterators = iterators
        return tuple(Handle(session, kind) for kind in kinds)

    return build_train_valid_test_data_iterators


def train_in_segments(session, original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def train(*args, **kwargs):
        if not session.active:
            return original(*args, **kwargs)
        live_args = session.job.args
        if session.waits_as is not None:
            session.start_waiting()
        else:
            session.start(live_args.iteration, live_args.train_iters)
        session.job.writers.is_due = True  # the layout of the launch
        try:
            iteration, flops = _segments(session, original, signature, args, kwargs)
        except BaseException as error:  # SystemExit: Megatron's --exit-interval and the like
            session.end(None, error)
            raise
        session.close_report()
        if session.job.writers.is_due:
            session.job.writers.write(iteration, session.controller.current, session.controller.sizes)
        session.end(iteration)
        return iteration, flops

    return train


def _segments(session, original, signature, args, kwargs):
    """Run the loop, one segment a layout, to the end of training: what its last segment returns."""
    live_args = session.job.args
    train_iters = live_args.train_iters
    if not session.pending and not session.job.waits:
        _at_first_step(session.step_begins)
    while True:
        if session.pending or session.job.waits:
            _switch(session, live_args)
            train_iters = live_args.train_iters
            _as_before_training(session.job.live.model)
            _forget_strategies(signature.bind(*args, **kwargs).arguments.get("checkpointing_context"))
            _at_first_step(session.close_report)
        try:
            iteration, flops = _one_segment(session, original, signature, args, kwargs)
        finally:
            live_args.train_iters = train_iters
        if not session.pending:
            return iteration, flops
        live_args.iteration, live_args.num_floating_point_operations_so_far = iteration, flops
        _stop_timer("interval-time")


def _switch(session, live_args) -> None:
    """Carry out what is due; where this process then does not train, wait until it does. Ends it (SystemExit) if it never will."""
    if session.pending:
        session.switch(live_args.iteration)
    while session.job.waits:
        session.leave()
        session.switch(session.wait())


def _as_before_training(model: list) -> None:
    """Undo what the loop does to a model on entry and at its end: after a refusal it is entered with the same one."""
    from megatron.core.utils import get_model_config

    for chunk in model:
        config = get_model_config(chunk)
        config.no_sync_func = config.grad_sync_func = config.param_sync_func = None
        if getattr(chunk, "use_forward_hook", False) and not chunk.remove_forward_pre_hook_handles:
            chunk.enable_forward_pre_hook()


def _forget_strategies(checkpointing_context: dict | None) -> None:
    """Megatron keeps the strategy of the last save, with groups and a plan of the layout in which that was."""
    for name in ("save_strategy", "load_strategy"):
        (checkpointing_context or {}).pop(name, None)


def _one_segment(session, original, signature, args, kwargs):
    """Run the original loop on the current objects. Nothing but the call holds them, so that they can die after it."""
    return original(**_resolved(session, signature, args, kwargs))


def _resolved(session, signature, args, kwargs) -> dict:
    """The arguments of a call, by name, handles and the model's list and configuration replaced by what is current."""
    from megatron.core.utils import get_model_config

    live = session.job.live
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for name, value in arguments.items():
        if isinstance(value, Handle):
            arguments[name] = value.resolve()
        elif isinstance(value, list) and value and all(isinstance(item, Handle) for item in value):
            arguments[name] = value[0].resolve()  # one handle for each virtual stage of the launch layout
    if "model" in arguments:
        arguments["model"] = live.model
    if "config" in arguments:
        arguments["config"] = get_model_config(live.model[0])
    return arguments


def with_current_objects(session, original):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def on_current_objects(*args, **kwargs):
        if not session.active or session.job.live is None:  # while the first model is being built
            return original(*args, **kwargs)
        return original(**_resolved(session, signature, args, kwargs))

    return on_current_objects


def watch_boundary(session, original):
    @functools.wraps(original)
    def checkpoint_and_decide_exit(model, optimizer, opt_param_scheduler, iteration, *args, **kwargs):
        session.iteration = iteration
        if original(model, optimizer, opt_param_scheduler, iteration, *args, **kwargs):
            return True
        if iteration >= session.boundary and not session.loop_asks and session.at_boundary(iteration):
            session.job.args.train_iters = iteration  # ends the loop; put back as soon as it has returned
        if session.reports_steps:
            session.step_begins()
        return False

    return checkpoint_and_decide_exit


def keep_log(session, original):
    signature = inspect.signature(original)
    position = list(signature.parameters).index("iteration")
    writers = session.job.writers
    session.after_switch.append(writers.add)

    @functools.wraps(original)
    def training_log(*args, **kwargs):
        iteration = args[position] if len(args) > position else kwargs["iteration"]
        if writers.is_due:
            writers.write(iteration, session.controller.current, session.controller.sizes)
        report_memory = logged(iteration, args, kwargs)
        if writers.has_times and iteration % session.job.args.log_interval == 0:
            writers.log_timers(iteration)
        return report_memory

    def logged(iteration, args, kwargs):
        job = session.job
        if iteration < session.boundary and job.log_totals is None and not session.reports_steps:
            return original(*args, **kwargs)
        call = signature.bind(*args, **kwargs)
        if job.log_totals is None:
            job.log_totals = call.arguments["total_loss_dict"]
        if call.arguments["total_loss_dict"] is not job.log_totals:
            call.arguments["total_loss_dict"] = job.log_totals
            call.arguments["is_first_iteration"] = False
        if session.reports_steps:
            _report_step(session, call.arguments)
        return original(*call.args, **call.kwargs)

    return training_log


def write_arguments_later(session, original):
    @functools.wraps(original)
    def write_args_to_tensorboard(*args, **kwargs):
        if session.open_report is None:  # the loop is not entered in a stall
            return original(*args, **kwargs)
        session.job.writers.later.append(functools.partial(original, *args, **kwargs))

    return write_args_to_tensorboard


def _report_step(session, logged) -> None:
    losses = {name: float(value) for name, value in logged["loss_dict"].items()}
    if losses:
        norm = logged["grad_norm"]
        session.step(iteration=logged["iteration"], losses=losses, grad_norm=None if norm is None else float(norm),
                     learning_rate=logged["learning_rate"], consumed_samples=session.job.args.consumed_train_samples)


def _stop_timer(name: str) -> None:
    """Stop a timer that the loop leaves running, as the next segment starts it again."""
    from megatron.training import get_timers

    timer = get_timers()(name)
    if timer._started:
        timer.stop()


def _at_first_step(callback) -> None:
    """Call `callback` when the next step starts, and put Megatron's function back: an idle step pays nothing."""
    from megatron.training import training

    step = training.train_step

    def train_step(*args, **kwargs):
        training.train_step = step
        callback()
        return step(*args, **kwargs)

    training.train_step = train_step
