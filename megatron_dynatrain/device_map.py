"""A torch function mode under which code written for CUDA puts its tensors on another device.

The CPU backend maps CUDA to the CPU, a dry world (see `megatron.dry`) maps it to the meta device. It lives on its
own because the two use it for different ends: the first replaces the hardware, the second the memory.
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors


class DeviceMap(TorchFunctionMode):
    """Redirects every CUDA device argument to `target` ('cpu' or 'meta').

    `Tensor.type()` keeps answering with CUDA names ('torch.cuda.FloatTensor'), because Megatron's optimizers compare
    that string; pinned memory and stream bookkeeping become no-ops.
    """

    def __init__(self, target: str, by_default: bool = False):
        """by_default: tensors for which no device is asked are put on the target, too."""
        super().__init__()
        self.target = torch.device(target)
        self._constructors = _device_constructors() if by_default else ()

    def _mapped(self, device):
        if isinstance(device, int) and not isinstance(device, bool):
            return self.target
        if isinstance(device, str) and device.startswith("cuda"):
            return self.target
        if isinstance(device, torch.device) and device.type == "cuda":
            return self.target
        return device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _SPECIAL:
            if func is torch.Tensor.cuda:
                return args[0] if args[0].device == self.target else args[0].to(self.target)
            if func is torch.Tensor.type and len(args) == 1 and not kwargs:
                return cuda_type_name(args[0].dtype)
            if func is torch.Tensor.pin_memory or func is torch.Tensor.record_stream:
                return args[0]
            if func is torch.Tensor.to:
                args = (args[0], *(self._mapped(a) for a in args[1:2]), *args[2:])
        if kwargs:
            kwargs = dict(kwargs)
            if kwargs.get("device") is not None:
                kwargs["device"] = self._mapped(kwargs["device"])
            kwargs.pop("pin_memory", None)
        if func in self._constructors and (kwargs is None or kwargs.get("device") is None):
            kwargs = {**(kwargs or {}), "device": self.target}
        return func(*args, **(kwargs or {}))


_SPECIAL = {torch.Tensor.cuda, torch.Tensor.type, torch.Tensor.pin_memory, torch.Tensor.record_stream, torch.Tensor.to}


def cuda_type_name(dtype: torch.dtype) -> str:
    """The name that a CUDA tensor of `dtype` answers to `.type()`: torch.float32 -> 'torch.cuda.FloatTensor'."""
    names = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float64: "Double",
             torch.int64: "Long", torch.int32: "Int", torch.int16: "Short", torch.int8: "Char", torch.uint8: "Byte",
             torch.bool: "Bool"}
    return f"torch.cuda.{names.get(dtype, str(dtype).removeprefix('torch.'))}Tensor"
