"""What the CPU backend puts in the place of `torch.cuda`. See the package docstring for the list and the reasons."""

import contextlib
import types

import torch

from megatron_dynatrain.device_map import DeviceMap


class Stream:
    """A stream of work that is already done."""

    cuda_stream = 0
    priority = 0
    device = torch.device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        pass

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


class Event:
    """An event that has happened."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, stream=None):
        pass

    def wait(self, stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 0.0


_STREAM = Stream()


def _returns(value=None):
    """A function that takes anything and returns `value`; a new one each time, as torch._dynamo tells them apart by id."""
    return lambda *args, **kwargs: value


def _device_properties(device=None):
    return types.SimpleNamespace(name="CPU backend", major=8, minor=0, total_memory=0, multi_processor_count=1,
                                 warp_size=32)


class _NoDriver:
    """`torch.cuda.cudart()` for the profiler calls of the training loop."""

    def __getattr__(self, name):
        return _returns(0)


_REPLACEMENTS = {
    "is_available": _returns(True),
    "is_initialized": _returns(True),
    "is_bf16_supported": lambda *a, **k: True,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _returns(),
    "get_device_properties": _device_properties,
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_name": lambda device=None: "CPU backend",
    "synchronize": _returns(),
    "empty_cache": _returns(),
    "ipc_collect": _returns(),
    "Stream": Stream,
    "Event": Event,
    "stream": lambda stream: contextlib.nullcontext(),
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "set_stream": _returns(),
    "memory_allocated": _returns(0),
    "max_memory_allocated": _returns(0),
    "memory_reserved": _returns(0),
    "max_memory_reserved": _returns(0),
    "device_memory_used": _returns(0),
    "mem_get_info": lambda device=None: (0, 0),
    "memory_stats": lambda device=None: {},
    "reset_peak_memory_stats": _returns(),
    "reset_max_memory_allocated": _returns(),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
    "initial_seed": lambda: torch.default_generator.initial_seed(),
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    "cudart": _NoDriver,
    "check_error": _returns(),
    "_lazy_init": _returns(),
    "_lazy_call": lambda callable, **kwargs: callable(),
}

# Classes, since Megatron uses them on the right-hand side of isinstance.
_TENSOR_TYPES = ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor",
                 "ShortTensor", "CharTensor", "ByteTensor", "BoolTensor")


class _TensorType(type):
    def __instancecheck__(cls, value):
        return isinstance(value, torch.Tensor) and value.type() == f"torch.cuda.{cls.__name__}"


def install() -> None:
    """Put the stand-ins in place and enter the device map, both for the rest of this process (this thread)."""
    for name, replacement in _REPLACEMENTS.items():
        setattr(torch.cuda, name, replacement)
    for name in _TENSOR_TYPES:
        setattr(torch.cuda, name, _TensorType(name, (), {}))
    torch.cuda.random.get_rng_state = lambda device="cuda": torch.get_rng_state()
    torch.cuda.random.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _returns())
    torch.cuda.default_generators = (torch.default_generator,)
    torch.accelerator.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None
    _give_loaders_a_generator()
    DeviceMap("cpu").__enter__()


def _give_loaders_a_generator() -> None:
    """Data loaders draw a seed from the CPU generator, on some ranks only; here that one stands for the GPU's, whose streams
    Megatron keeps equal over those ranks."""
    from torch.utils.data import DataLoader

    construct = DataLoader.__init__

    def __init__(self, *args, **kwargs):
        construct(self, *args, **kwargs)
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(torch.initial_seed())

    DataLoader.__init__ = __init__
