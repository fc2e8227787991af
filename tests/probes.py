"""What tests put into ranks: recorders and faults. They wrap Megatron from outside and know nothing of the plugin, except
where a fault has to be put into it."""

import json
import os


def write(folder, name, rank, **record):
    with open(folder / f"{name}.{rank:03d}.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def alive(kind):
    """How many objects of a type there are. In one call from Python, so that no other thread runs while they are listed: a tuple
    that one is just making must not be referred to, or making it fails (SystemError, as in bpo-15108)."""
    import gc
    from itertools import chain, repeat

    return sum(map(issubclass, map(type, chain.from_iterable(map(gc.get_objects, [None]))), repeat(kind)))


def record(rank, folder):
    """Write every step (exact floats) and every training sample that is drawn."""
    import torch
    from megatron.core.datasets.gpt_dataset import GPTDataset
    from megatron.core.datasets.utils import Split
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import get_args, training

    log = training.training_log

    def training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, grad_norm, *args, **kw):
        if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:  # as it is now, where the ranks of the job change
            write(folder, "steps", rank, iteration=iteration, lr=learning_rate, skipped=skipped, loss_scale=loss_scale,
                  grad_norm=None if grad_norm is None else float(grad_norm),
                  loss={k: float(v) for k, v in loss_dict.items()}.get("lm loss"))
        return log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, flag, skipped, grad_norm, *args, **kw)

    training.training_log = training_log
    # A training sample carries its number, also through worker processes, and is counted where the loop takes it.
    get_item, take = GPTDataset.__getitem__, RerunDataIterator.__next__

    def __getitem__(self, index):
        item = get_item(self, index)
        return {**item, "sample": torch.tensor(-1 if index is None or self.index_split != Split.train else index)}

    def __next__(self):
        batch = take(self)
        for sample in batch["sample"].tolist():
            if sample >= 0:
                write(folder, "samples", rank, iteration=get_args().curr_iteration + 1, sample=sample)
        return batch

    GPTDataset.__getitem__, RerunDataIterator.__next__ = __getitem__, __next__


def paced(rank, folder, seconds):
    """As `record`, with steps that last at least so long."""
    import time

    from megatron.training import training

    record(rank, folder)
    step = training.train_step

    def train_step(*args, **kwargs):
        time.sleep(seconds)
        return step(*args, **kwargs)

    training.train_step = train_step


def die(rank, folder, on_rank, at, seconds=0.1):
    """As `paced`; one process is killed when it comes to `at`, 'module:Class.method'."""
    import importlib
    import signal

    paced(rank, folder, seconds)
    if rank == on_rank:
        module, _, path = at.partition(":")
        owner, _, name = path.rpartition(".")
        where = importlib.import_module(module)
        where = getattr(where, owner) if owner else where
        setattr(where, name, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))


def _coordinate_values(tree, offset, visit):
    """Call visit(model tensor) after writing, into every tensor of a sharded state dict, a value that names its global
    coordinate: a 23-bit hash of key and linear index, so that float32 holds it exactly. Knows only Megatron."""
    import zlib

    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    if isinstance(tree, ShardedTensorFactory):
        _coordinate_values(tree.build(), offset, visit)
    elif isinstance(tree, ShardedTensor):
        index = torch.zeros((), dtype=torch.int64)
        local_axes = tree.data.dim()
        for axis, (begin, size) in enumerate(zip(tree.global_offset, tree.global_shape)):
            index = index * size
            local = axis - (len(tree.global_shape) - local_axes)
            extent = tree.data.shape[local] if local >= 0 else 1
            steps = begin + torch.arange(extent)
            index = index.unsqueeze(-1) + steps if local >= 0 else index + begin
        values = (index * 2654435761 + zlib.crc32(tree.key.encode()) + offset * 40503) % (1 << 23)
        with torch.no_grad():
            visit(tree, values.to(torch.float32).view(tree.data.shape))
    elif isinstance(tree, dict):
        for value in tree.values():
            _coordinate_values(value, offset, visit)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            _coordinate_values(value, offset, visit)


def _named_states(model, optimizer):
    """(what, tensor, the tensor that it must be) for every weight, master and optimizer state of this rank."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}

    def full(offset):
        """What each parameter must be, by id: computed into the model's own memory and put back."""
        wanted = {}
        for chunk in unwrap_model(model):
            tensors = {id(t): t for t in [*chunk.parameters(), *chunk.buffers()]}
            kept = {i: t.detach().clone() for i, t in tensors.items()}
            _coordinate_values(chunk.sharded_state_dict(metadata=metadata), offset, lambda s, v: s.data.copy_(v))
            for identity, tensor in tensors.items():
                wanted[identity] = tensor.detach().clone()
                with torch.no_grad():
                    tensor.copy_(kept[identity])
        return wanted

    weights = full(0)
    for chunk in unwrap_model(model):
        persistent = set(chunk.state_dict().keys())
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name in persistent:
                yield name, tensor.data, weights[id(tensor)]
    fields = {"param": weights, "exp_avg": full(1), "exp_avg_sq": full(2), "momentum_buffer": full(3)}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if hasattr(part, "model_param_group_index_map"):
            owned = [(p, part.optimizer.param_groups[g]["params"][o], part._get_model_param_range_map(p)["param"])
                     for p, (g, o) in part.model_param_group_index_map.items()]
        elif hasattr(part, "float16_groups"):
            owned = [(p, m, None) for ps, ms in zip(part.float16_groups, part.fp32_from_float16_groups) for p, m in zip(ps, ms)]
        else:
            owned = [(p, p, None) for group in part.optimizer.param_groups for p in group["params"]]
        for param, main, owned_range in owned:
            for field, wanted in fields.items():
                tensor = main.data if field == "param" else part.optimizer.state[main].get(field)
                if tensor is not None:
                    expected = wanted[id(param)].float().view(-1)
                    if owned_range is not None:
                        expected = expected[owned_range.start:owned_range.end]
                    yield f"{field} of a parameter of shape {tuple(param.shape)}", tensor.view(-1), expected


def name_coordinates(rank, folder):
    """Before the first switch fill every state with values that name their coordinate; after each switch compare every
    element on every rank, and write how many were compared. Ends the job after them."""
    import torch
    from megatron_dynatrain import session as sessions

    record(rank, folder)
    session = sessions.current()
    switch = type(session).switch
    done = []

    def filled_switch(self, iteration):
        live = self.job.live
        if not done:
            for _, tensor, wanted in _named_states(live.model, live.optimizer):
                tensor.copy_(wanted)
            for part in getattr(live.optimizer, "chained_optimizers", [live.optimizer]):
                for group in part.optimizer.param_groups:
                    if "step" in group:
                        group["step"] = 77
                for state in part.optimizer.state.values():
                    if "step" in state:
                        state["step"].fill_(77.0)
        done.append(iteration)
        targets = list(self.pending)
        for target in targets:
            self.pending = [target]
            switch(self, iteration)
            _compare(self, iteration)
        torch.distributed.barrier()
        self.close_report()
        os._exit(0)  # the values are no model to train on

    def _compare(self, iteration):
        live, compared, steps = self.job.live, 0, set()
        for what, tensor, wanted in _named_states(live.model, live.optimizer):
            assert torch.equal(tensor.to(wanted.dtype), wanted.view(tensor.shape)), f"rank {rank}: {what} after {iteration}"
            compared += tensor.numel()
        for part in getattr(live.optimizer, "chained_optimizers", [live.optimizer]):
            steps |= {int(g["step"]) for g in part.optimizer.param_groups if "step" in g and g["params"]}
            steps |= {int(s["step"]) for s in part.optimizer.state.values() if "step" in s}
        write(folder, "compared", rank, iteration=iteration, elements=compared, steps=sorted(steps))

    type(session).switch = filled_switch


def corrupt(rank, folder, on_rank, piece):
    """Flip one bit of what one rank receives in the first switch, behind the transfer's back."""
    import torch
    from megatron_dynatrain import controller

    record(rank, folder)
    execute = controller.execute

    def faulty(plan, own_rank, src_storages, dst_storages, *args):
        received = execute(plan, own_rank, src_storages, dst_storages, *args)
        if own_rank == on_rank:
            dst_storages[piece].view(torch.int32)[3] ^= 1 << 20
        controller.execute = execute
        return received

    controller.execute = faulty


def fail_on_one_rank(rank, folder, on_rank, step):
    """Make one step of the first switch fail on one rank alone, or with -1 on all."""
    from megatron_dynatrain import session as sessions

    record(rank, folder)
    job = type(sessions.current().job)
    method = getattr(job, step)
    count = []

    def failing(self, *args):
        count.append(1)
        if on_rank in (rank, -1) and len(count) == 1:
            raise MemoryError("no memory on this rank")
        return method(self, *args)

    setattr(job, step, failing)


def ask(rank, folder, requests):
    """Call `megatron_dynatrain.reconfigure` from a rank's code, in the middle of a step.

    requests: [[rank or -1 for all, iteration, layout name or arguments], ...]; what is raised is written down.
    """
    import megatron_dynatrain
    from megatron.training import get_args, training

    record(rank, folder)
    step = training.train_step

    def train_step(*args, **kwargs):
        now = get_args().curr_iteration + 1
        for on_rank, iteration, layout in requests:
            if on_rank in (rank, -1) and iteration == now:
                try:
                    megatron_dynatrain.reconfigure(layout if isinstance(layout, str) else megatron_dynatrain.Layout(**layout))
                except Exception as error:
                    write(folder, "errors", rank, kind=type(error).__name__, text=str(error))
        return step(*args, **kwargs)

    training.train_step = train_step


def _descriptors():
    kinds = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}").split(":")[0]
        except OSError:
            continue  # the one that listed the folder
        kinds[target] = kinds.get(target, 0) + 1
    return kinds


def count_resources(rank, folder):
    """After each switch write what this process holds: groups, threads, descriptors, live tensors; and whether the old
    models are dead."""
    import gc
    import threading
    import weakref

    import torch
    from megatron_dynatrain import session as sessions

    record(rank, folder)
    session = sessions.current()
    switch = type(session).switch
    models = []

    def counted(self, iteration):
        models.append([weakref.ref(chunk) for chunk in self.job.live.model])
        switch(self, iteration)
        gc.collect()
        write(folder, "resources", rank, iteration=iteration, groups=len(torch.distributed.distributed_c10d._pg_map),
              threads=len(os.listdir("/proc/self/task")), python_threads=threading.active_count(),
              descriptors=_descriptors(),
              tensors=alive(torch.Tensor),
              dead=all(ref() is None for refs in models for ref in refs))

    type(session).switch = counted


def count_elastic(rank, folder):
    """Some steps after each change of ranks, where this process trains in the larger world, write what it holds: groups of all
    worlds, threads, descriptors, live tensors, memory."""
    import gc
    import threading

    import torch
    from megatron.training import training
    from megatron_dynatrain import memory
    from megatron_dynatrain import session as sessions
    from megatron_dynatrain.elastic.worlds import TorchWorld

    paced(rank, folder, 0.04)
    session = sessions.current()
    step = training.train_step
    seen = {}

    def train_step(*args, **kwargs):
        result = step(*args, **kwargs)
        if session.devices is not None and len(session.controller.members) == 4:
            seen[session.devices.generation] = seen.get(session.devices.generation, 0) + 1
            if seen[session.devices.generation] == 3:
                gc.collect()
                write(folder, "resources", rank, number=rank, worlds=alive(TorchWorld),
                      groups=len(torch.distributed.distributed_c10d._world.pg_map), threads=len(os.listdir("/proc/self/task")),
                      python_threads=threading.active_count(), descriptors=sum(_descriptors().values()),
                      resident=memory.resident_bytes(),
                      tensors=alive(torch.Tensor))
        return result

    training.train_step = train_step


def streams(rank, folder):
    """After each step write a hash of every random stream of this rank."""
    import hashlib

    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    from megatron.training import training

    record(rank, folder)
    log = training.training_log

    def training_log(*args, **kwargs):
        states = {"default": torch.get_rng_state(), **get_cuda_rng_tracker().get_states()}
        write(folder, "streams", rank, of_rank=rank, iteration=args[3] if len(args) > 3 else kwargs["iteration"],
              streams={name: hashlib.md5(state.numpy().tobytes()).hexdigest() for name, state in states.items()})
        return log(*args, **kwargs)

    training.training_log = training_log


def freeze(rank, folder, part):
    """A user's model in which parameters whose name contains `part` are not trained."""
    from megatron.core.models.gpt import GPTModel

    record(rank, folder)
    build = GPTModel.__init__

    def __init__(self, *args, **kwargs):
        build(self, *args, **kwargs)
        for name, param in self.named_parameters():
            param.requires_grad_(part not in name)

    GPTModel.__init__ = __init__


def wandb(rank, folder):
    """Stand in for the wandb package: what is logged is written down, with the step; of switches the values, too."""
    import sys
    import types

    module = types.ModuleType("wandb")
    module.init = lambda **kwargs: None
    module.finish = lambda: write(folder, "wandb", rank, finished=True)
    module.config = types.SimpleNamespace(update=lambda values, **kwargs: None)
    module.log = lambda values, step=None, **kwargs: write(
        folder, "wandb", rank, step=step, names=sorted(values),
        switch={name: value for name, value in values.items() if name.startswith("dynatrain/")})
    sys.modules["wandb"] = module
    record(rank, folder)


def hold(rank, folder, at):
    """Before the step of each iteration in `at` wait until the file go.<iteration> is there: time for requests from outside."""
    import time

    from megatron.training import get_args, training

    record(rank, folder)
    step = training.train_step

    def train_step(*args, **kwargs):
        now = get_args().curr_iteration + 1
        if now in at:
            (folder / f"held.{now}.{rank}").touch()
            while not (folder / f"go.{now}").exists():
                time.sleep(0.01)
        return step(*args, **kwargs)

    training.train_step = train_step


def fail_at(rank, folder, at, iteration):
    """`hold`, and every rank fails in the step of `iteration`."""
    from megatron.training import get_args, training

    hold(rank, folder, at)
    step = training.train_step

    def train_step(*args, **kwargs):
        if get_args().curr_iteration + 1 == iteration:
            raise RuntimeError("a fault of the script")
        return step(*args, **kwargs)

    training.train_step = train_step


def interface(rank, folder, asking):
    """Use the Python interface on rank `asking` as it is documented; what it says is written down.

    In step 3: the cost of three layouts and of two that cannot be, and a wait that would never end. In step 9: a switch after
    iteration 14, and one that is too late. In step 17: one that a callback refuses. In the last step: what nobody can answer
    any more. Callbacks on all ranks.
    """
    import megatron_dynatrain
    from megatron.training import get_args, training

    record(rank, folder)
    step = training.train_step

    def said(what, **fields):
        write(folder, "interface", rank, what=what, now=get_args().curr_iteration, layout=list(
            megatron_dynatrain.current_layout()[::2]), **fields)

    def outcome(what):
        def done(future):
            error = future.exception()
            said(what, error=error and f"{type(error).__name__}: {error}",
                 result=None if error else getattr(future.result(), "moved_bytes", None) or str(type(future.result()).__name__))

        return done

    megatron_dynatrain.on_switch(before=lambda iteration, layout: said("before", iteration=iteration, to=str(layout)),
                                 after=lambda report: said("after", iteration=report.iteration, to=report.dst,
                                                           moved=report.totals.moved_bytes))
    removed = megatron_dynatrain.on_switch(before=lambda *_: said("removed"), after=lambda *_: said("removed"))
    removed()

    def veto(iteration, layout):
        if rank == 1 and layout == "vetoed":
            raise RuntimeError("not now")

    megatron_dynatrain.on_switch(before=veto, refused=lambda iteration, layout, error: said(
        "refused", iteration=iteration, to=layout, error=str(error)))

    def train_step(*args, **kwargs):
        now = get_args().curr_iteration + 1
        if rank == asking and now == 3:
            for name in ("pipe", "launch"):
                megatron_dynatrain.plan(name).add_done_callback(outcome(f"cost of {name}"))
            four = megatron_dynatrain.plan(megatron_dynatrain.Layout(pipeline_model_parallel_size=2))
            four.add_done_callback(outcome("cost of an undeclared one"))
            for wrong in (lambda: megatron_dynatrain.plan("pip"), four.result,
                          lambda: megatron_dynatrain.plan(megatron_dynatrain.Layout(tensor_model_parallel_size=3)),
                          lambda: megatron_dynatrain.reconfigure(megatron_dynatrain.Layout(world_size=2))):
                try:
                    wrong()
                except Exception as error:
                    said("error", error=f"{type(error).__name__}: {error}")
        if rank == asking and now == 9:
            megatron_dynatrain.reconfigure("pipe", at_iteration=14).add_done_callback(outcome("switch"))
            megatron_dynatrain.reconfigure("pipe", at_iteration=2).add_done_callback(outcome("late"))
        if rank == asking and now == 17:
            megatron_dynatrain.reconfigure("vetoed").add_done_callback(outcome("vetoed"))
        if rank == asking and now == get_args().train_iters:
            megatron_dynatrain.reconfigure("launch").add_done_callback(outcome("last"))
            megatron_dynatrain.plan("launch").add_done_callback(outcome("last cost"))
        return step(*args, **kwargs)

    training.train_step = train_step


def count_memory(rank, folder, last):
    """What the allocator had given out when each switch began and ended, and at most in between, by its own events, which are
    recorded from before the model is there. Ends the job after iteration `last`."""
    import torch
    from megatron.training import training
    from megatron_dynatrain import controller
    from torch.profiler import ProfilerActivity, profile, record_function

    record(rank, folder)
    switch, step = controller.Controller.switch, training.train_step
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    profiler.start()

    def marked_switch(self, target, *args):
        torch.distributed.barrier()
        with record_function("switch"):
            return switch(self, target, *args)

    def train_step(*args, **kwargs):
        if kwargs.get("iteration", args[-1]) == last:
            profiler.stop()
            write_levels()
            torch.distributed.barrier()
            os._exit(0)
        return step(*args, **kwargs)

    def write_levels():
        events = profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]" and e.device_type().name == "CPU")
        for begin, end in sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in events if e.name() == "switch"):
            before = sum(nbytes for at, nbytes in changes if at < begin)
            level = peak = before
            for at, nbytes in changes:
                if begin <= at <= end:
                    level += nbytes
                    peak = max(peak, level)
            write(folder, "memory", rank, before=before, peak=peak, after=level)

    controller.Controller.switch, training.train_step = marked_switch, train_step


def ask_cost(rank, folder, layout, after=0, seconds=None):
    """Ask in the step after iteration `after` on rank 0 what a switch would cost; the answer is written down, with the step in
    which it came. seconds: that each step takes at least."""
    import megatron_dynatrain
    from megatron.training import get_args, training

    record(rank, folder) if seconds is None else paced(rank, folder, seconds)
    step = training.train_step

    def told(future):
        error = future.exception()
        names = () if error else ("moved_bytes", "plan_hash", "dst_ranks", "windows")
        cost = {name: getattr(future.result(), name) for name in names}
        write(folder, "costs", rank, iteration=get_args().curr_iteration + 1, error=error and str(error), **cost)

    def train_step(*args, **kwargs):
        if rank == 0 and get_args().curr_iteration == after:
            megatron_dynatrain.plan(layout).add_done_callback(told)
        return step(*args, **kwargs)

    training.train_step = train_step
