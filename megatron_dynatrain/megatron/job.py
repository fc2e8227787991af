"""The running Megatron job, as the controller sees it: what can be asked of it and done to it, one method a step."""

import contextlib
import copy
import gc
import os
import sys
from argparse import Namespace
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import distributed_c10d

from megatron_dynatrain import late
from megatron_dynatrain.device_map import DeviceMap
from megatron_dynatrain.elastic import worlds
from megatron_dynatrain.elastic.joining import OF_PROCESS
from megatron_dynatrain.errors import DynaTrainError, LayoutRefused, reason
from megatron_dynatrain.layout import Layout
from megatron_dynatrain.megatron import alike, carry, conversation, describe, rng
from megatron_dynatrain.megatron.arguments import ArgumentBook, reconfigure_microbatches
from megatron_dynatrain.megatron.build import Recipe, release
from megatron_dynatrain.megatron.data import DataRecipe, shut_down
from megatron_dynatrain.megatron.dry import dry_world, idle_world
from megatron_dynatrain.megatron.groups import ParallelStates, WorldGroups, forget_groups
from megatron_dynatrain.megatron.writers import Writers
from megatron_dynatrain.space import Holdings, Memory


@dataclass(slots=True)
class Live:
    """The objects that Megatron's loop works with in one layout."""

    model: list
    optimizer: object
    scheduler: object
    iterators: dict[str, object]
    args: Namespace  # validated arguments of the layout (not the live namespace)


class MegatronJob:
    """The adapter between the controller and Megatron. Filled by the seams as Megatron starts, complete when `train` is
    entered."""

    def __init__(self):
        self.book: ArgumentBook | None = None
        self.recipe: Recipe | None = None
        self.data: DataRecipe | None = None
        self.states: ParallelStates | None = None
        self.reseed = None  # Megatron's `_set_random_seed` as the job called it, taking the seed
        self.live: Live | None = None
        self.writers = Writers()
        self._vocab_size: int | None = None
        self._next: Live | None = None
        self._next_state: describe.RankState | None = None
        self._validated: dict[str, Namespace] = {}
        self._said: dict[str, list] = {}  # what this rank said in a dry build of a layout (see `conversation`)
        self.answers: dict[str, list[list]] = {}  # what all ranks said, by layout
        self._device_type = "cuda"  # where parameters lie; "cpu" on the CPU backend
        self.waits = False  # whether this process holds no state: it has joined, or was sent back
        self.calls: dict[str, dict] = {}  # how Megatron makes the groups of a layout
        self.log_totals: dict | None = None  # in which Megatron's log adds up, over all segments
        self._carried_log: dict | None = None
        self._left: tuple | None = None  # groups, rank and number of ranks of the world that is being left
        self._eval_iters = None  # of the layout that is left
        self._streams: dict | None = None  # random states at the boundary

    # What is asked before anything is changed.

    def start(self, launch: str) -> None:
        """At the entry of the first `train`: nothing has been trained, everything is built."""
        self.complete(launch)
        self.calls[launch] = self.states.last_call
        self.states.remember(launch)
        self.live.args = self.book.launch

    def complete(self, launch: str) -> None:
        """Once Megatron is initialised: what its arguments did not say before. `launch` names the layout that they give."""
        from megatron.training import global_vars

        self._device_type = torch.empty(0, device=torch.cuda.current_device()).device.type
        self._vocab_size = getattr(global_vars._GLOBAL_TOKENIZER, "vocab_size", None)
        self.book.launch.padded_vocab_size = self.args.padded_vocab_size
        self._validated[launch] = self.book.launch

    def start_waiting(self, launch: str) -> None:
        """As `start`, on a process that does not train yet."""
        self.waits = True
        self.live.args = self.book.launch

    @property
    def args(self) -> Namespace:
        """Megatron's live arguments."""
        from megatron.training import get_args

        return get_args()

    def check(self, name: str, layout: Layout) -> None:
        """Raise LayoutRefused if Megatron cannot train `layout`. Not collective, changes nothing."""
        if name not in self._validated:
            self._validated[name] = self.book.validated(layout, self._vocab_size)

    def describe_dry(self, name: str, rank: int, world_size: int) -> Holdings:
        """What `rank` of `world_size` would hold in a checked layout, without building it for real. Not collective."""
        with self._dry(name, rank, world_size) as target:
            return describe.describe(*self._build_dry(name, target)).holdings

    def ranks_alike(self, name: str, world_size: int) -> list[list[int]]:
        """All ranks of a checked layout, in lists of those that build the same model. Not collective."""
        families = alike.Families()
        with self._dry(name, 0, world_size, families.recorded) as target:
            return families.ranks_alike(target)

    def describe_alike(self, name: str, ranks: list[int], world_size: int) -> dict[int, Holdings]:
        """What each of `ranks`, one list of `ranks_alike`, would hold: as `describe_dry` of each, from one build. Not
        collective."""
        families = alike.Families()
        with self._dry(name, ranks[-1], world_size, families.recorded) as target:
            with alike.recorded_optimizers() as constructions:
                model, optimizer = self._build_dry(name, target)
            described = alike.describe_alike(model, optimizer, constructions, families, ranks)
        return described or {rank: self.describe_dry(name, rank, world_size) for rank in ranks}

    def _build_dry(self, name: str, target: Namespace):
        """(model, optimizer) of the dry world that the process is in."""
        said = self._said[name] = []
        with conversation.monologue(said):
            return self.recipe.build(target, self.args)[:2]

    @contextlib.contextmanager
    def _dry(self, name: str, rank: int, world_size: int, while_groups_are_made=contextlib.nullcontext):
        """Inside, this process is `rank` of a dry world in a checked layout, whose arguments are yielded. What fails inside
        is a refusal. `while_groups_are_made`: a context in which Megatron makes its groups."""
        target = copy.copy(self._validated[name])
        target.rank, target.world_size = rank, world_size
        args = self.args
        kept = dict(vars(args))
        live_groups = self.states.capture()
        try:
            with dry_world(rank, world_size):
                self.book.apply(target, args)
                args.rank, args.world_size, args.use_gloo_process_groups = rank, world_size, False
                self.states.reset()
                with while_groups_are_made():
                    self.states.initialize()
                self.calls[name] = self.states.last_call
                yield target
        except DynaTrainError:
            raise
        except Exception as error:
            raise LayoutRefused(f"Megatron cannot build rank {rank} of it: {reason(error)}") from error
        finally:
            vars(args).update(kept)
            for name in vars(args).keys() - kept.keys():
                delattr(args, name)
            self.states.restore(live_groups)

    def said(self, name: str) -> list:
        """What this rank would say to others while building a described layout: to be gathered for `hear`."""
        return self._said.pop(name, [])

    def hear(self, name: str, said_by_rank: list[list]) -> None:
        """Take down what all ranks say in the build of a layout, so that `build` needs no communication."""
        self.answers.setdefault(name, [list(answers) for answers in zip(*said_by_rank, strict=True)])

    def describe_live(self) -> describe.RankState:
        """The state of this rank now."""
        describe.ensure_states(self.live.optimizer)
        return describe.describe(self.live.model, self.live.optimizer)

    def make_groups(self, name: str) -> None:
        """Create the process groups of a checked layout beside the live ones. Collective."""
        args = self.args
        try:
            self.book.apply(self._validated[name], args)
            self.states.make(name)
        finally:
            self.book.apply(self.live.args, args)

    @property
    def backend(self) -> str:
        """What ranks talk with."""
        return self.args.distributed_backend

    def build_hollow(self, launch: str) -> list:
        """On a process that does not train: the chunks of the launch layout without memory, for what Megatron asks of a model
        before it trains. Not collective."""
        self.complete(launch)
        with self._dry(launch, 0, self.book.launch.world_size) as target:
            model, _ = self._build_dry(launch, target)
        self._said.pop(launch)
        return model

    def get_ready(self, layouts: dict[str, tuple[Layout, int]]) -> None:
        """On a process that does not train: check {name: (layout, number of ranks)}, and learn how Megatron makes the groups of
        each. Raises LayoutRefused. Not collective."""
        for name, (layout, size) in layouts.items():
            self.check(name, layout)
            if name not in self.calls:
                with self._dry(name, 0, size):
                    pass

    @contextlib.contextmanager
    def in_thread(self):
        """Inside, another thread than the one that trains uses this process's device."""
        torch.cuda.set_device(self.args.local_rank)
        with DeviceMap("cpu") if self._device_type == "cpu" else contextlib.nullcontext():
            yield

    def make_groups_in(self, world, name: str, patience: timedelta) -> WorldGroups:
        """Create the process groups of a described layout in another world. Collective over its ranks; from any thread."""
        call = dict(self.calls[name])
        if "create_gloo_process_groups" in call:  # a description needs none
            call["create_gloo_process_groups"] = self._validated[name].use_gloo_process_groups
        groups = self.states.make_in(world, name, call, patience)
        self.trust(world)
        if self._device_type == "cuda":
            with worlds.entered(world):
                warm(world)
        return groups

    def trust(self, world) -> None:
        """From now on operations of a world's default group may take as long as Megatron lets them."""
        with worlds.entered(world):
            distributed_c10d._set_pg_timeout(timedelta(minutes=self.args.distributed_timeout_minutes), world.default_pg)

    def memory_limit(self, held: Memory) -> int | None:
        """What this rank could hold its state and the scratch of a switch in, given that it holds `held` now: bytes, or None
        where nothing bounds it but the host."""
        if not torch.cuda.is_available() or self._device_type != "cuda":
            return None
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return held.state_bytes + held.gradient_bytes + free

    # The steps of a switch, in order.

    def quiesce(self) -> None:
        """Make the old state complete and give back what is dead at the boundary: gradients. Collective."""
        from megatron.core.rerun_state_machine import get_rerun_state_machine
        from megatron.training.async_utils import maybe_finalize_async_save

        maybe_finalize_async_save(blocking=True)
        machine = get_rerun_state_machine()
        if getattr(machine, "state", None) is not None and machine.state.name != "NOT_RUNNING_YET":
            raise LayoutRefused(f"Megatron's rerun state machine is in state {machine.state.name}, about to run a step again")
        self._streams = rng.capture()
        for part in describe.leaf_optimizers(self.live.optimizer):  # with 16-bit gradients these are copies in fp32
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    param.grad = None
        _give_back_gradients(self.live.model)

    def progress(self) -> dict:
        """How far training has come: the arguments that Megatron changes while it trains."""
        return {name: value for name, value in vars(self.args).items()
                if name not in OF_PROCESS and isinstance(value, (int, float, str, type(None)))
                and (name not in self.live.args or getattr(self.live.args, name) != value)}

    def take_world(self, groups: WorldGroups, rank: int, world_size: int, progress: dict) -> None:
        """Be `rank` of another world from now on, as far as Megatron is concerned; `enter` follows. Not collective."""
        self._left = (self.states.live, self.args.rank, self.args.world_size)
        self._become(groups, rank, world_size)
        vars(self.args).update(progress)

    def _become(self, groups: WorldGroups | None, rank: int, world_size: int) -> None:
        self.states.take(groups)
        self.args.rank, self.args.world_size = rank, world_size
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))

    def enter(self, name: str) -> None:
        """Make arguments, process groups and micro-batches those of layout `name`. Not collective."""
        target = self._validated[name]
        self.book.apply(target, self.args)
        self.states.enter(name)
        reconfigure_microbatches(self.args)

    def build(self, name: str) -> describe.RankState:
        """Build the new model and optimizer beside the old ones, and describe them. Their tensors take their memory when they
        are filled (`late`), if that is possible for this model. Not collective."""
        try:
            with late.LateMemory(self._device_type) as memory:
                state = self._build(name)
                gradients = [buffer.grad_data.untyped_storage() for buffer in describe.grad_buffers(self._next.model)]
                memory.settle({storage._cdata for storage in (*state.allocations, *gradients)})
                return state
        except late.MemoryNeeded as error:
            print(f"[dynatrain] rank {torch.distributed.get_rank()}: layout {name!r} takes its memory at once, beside the old "
                  f"one's: {error}", file=sys.stderr, flush=True)
            self._next = None
            gc.collect()
            return self._build(name)

    def _build(self, name: str) -> describe.RankState:
        target = self._validated[name]
        with conversation.from_record(self.answers[name]):
            model, optimizer, scheduler = self.recipe.build(target, self.args)
        self._next = Live(model, optimizer, scheduler, {}, target)
        self._eval_iters = self.args.eval_iters
        _give_back_gradients(model)
        self._next_state = describe.describe(model, optimizer)
        return self._next_state

    def capture(self, state: describe.RankState) -> carry.Carried:
        """What this rank carries over besides tensors."""
        carried = carry.capture(self.live.optimizer, self.live.scheduler, state.owned)
        if self.args.rank == self.args.world_size - 1:
            carried.log = _on("cpu", self.log_totals)
        return carried

    def carry_over(self, gathered: list[carry.Carried]) -> None:
        """Set what all ranks carried over on the new objects."""
        self._carried_log = next((carried.log for carried in gathered if carried.log is not None), None)
        carry.apply(gathered, self._next.optimizer, self._next.scheduler, self._next_state.owned)

    def compare_carried(self, gathered: list[carry.Carried], after: carry.Carried) -> list[str]:
        """Differences between what was carried and what the new objects have, a sentence each."""
        return carry.differences(gathered, after)

    def capture_next(self) -> carry.Carried:
        """What the new objects would carry: for comparison."""
        return carry.capture(self._next.optimizer, self._next.scheduler, self._next_state.owned)

    def build_data(self) -> None:
        """Build the data iterators of the new layout, at the position of the samples consumed so far. Collective."""
        self._next.iterators = self.data.build(self.args)

    def commit(self, iteration: int, anew: bool = False) -> None:
        """The new objects take over and the old ones die; random state follows, derived `anew` where the ranks are others. Not
        collective."""
        old, new = self.live, self._next
        old_args = old.args
        _part_with(old)
        old.model[:] = new.model  # pretrain holds this very list
        new.model = old.model
        self.live, self._next, self._next_state = new, None, None
        self.waits, self._left = False, None
        if anew:
            self.log_totals = _on(self._device_type, self._carried_log)
        del old
        gc.collect()
        torch.cuda.empty_cache()
        _take_gradients(new.model)
        rng.settle(None if anew else self._streams, old_args, new.args,
                   lambda: self.reseed(rng.seed_after_switch(self.args.seed, iteration)))
        self._streams = None

    def retire(self) -> None:
        """This process trains no more: give everything back but what it needs to be taken in again. Not collective."""
        old = self.live
        _part_with(old)
        old.model[:] = []  # pretrain holds this very list
        self.live, self.waits, self._streams = Live(old.model, None, None, {}, old.args), True, None
        self.log_totals = None
        del old
        self.states.reset()
        self.states.take(None)
        worlds.take(idle_world())
        gc.collect()
        torch.cuda.empty_cache()

    def roll_back(self, name: str) -> None:
        """Back to layout `name`, whose objects are alive: everything is as it was before the switch. Not collective."""
        if self._next is not None:
            shut_down(list(self._next.iterators.values()))
            release(self._next.model, self._next.optimizer)
            self.args.eval_iters = self._eval_iters
        self._next, self._next_state = None, None
        gc.collect()  # the new state makes room before the old gradients come back
        torch.cuda.empty_cache()
        if self._left is not None:
            self._become(*self._left)
            self._left = None
        if self.waits:
            self.states.reset()
            return
        self.enter(name)
        if self._streams is not None:
            rng.restore(self._streams)
        self._streams = None
        _take_gradients(self.live.model)

    def forget(self, name: str) -> None:
        """Drop an undeclared layout: its arguments and the groups that only it uses. Collective."""
        self._validated.pop(name, None)
        self.answers.pop(name, None)
        self.states.forget(name)


def _part_with(old: Live) -> None:
    """Cut what would keep alive the objects of a layout that is left."""
    shut_down(list(old.iterators.values()))
    release(old.model, old.optimizer)
    forget_groups()


def _on(device: str, totals: dict | None) -> dict | None:
    return totals and {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in totals.items()}


def warm(world) -> None:
    """Set up the communicators of all groups of a world, where that would otherwise wait for their first use (NCCL); gloo has
    connected already. Collective over the world: all its ranks made the groups in one order."""
    device = torch.device("cuda", torch.cuda.current_device())
    for group in list(world.pg_map):
        with contextlib.suppress(RuntimeError):  # a group of gloo alone
            backend = group._get_backend(device)
            if hasattr(backend, "eager_connect_single_device"):
                backend.eager_connect_single_device(device)


def _give_back_gradients(model: list) -> None:
    """Free the memory of the gradient buffers, which are dead at the boundary: room for the state on its way."""
    for buffer in describe.grad_buffers(model):
        if late.is_late(buffer.grad_data):
            buffer.grad_data_size = buffer.grad_data.numel()  # as if it had been freed; it never had memory
    for chunk in model:
        if hasattr(chunk, "offload_grad_buffers"):
            chunk.offload_grad_buffers()


def _take_gradients(model: list) -> None:
    for chunk in model:
        if hasattr(chunk, "restore_grad_buffers"):
            chunk.restore_grad_buffers()
