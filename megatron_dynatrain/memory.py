"""How much memory this process holds, and the most that it held: on its GPU, or as resident set where there is none."""

import os
from pathlib import Path

import torch


def forget_peak() -> None:
    """Count the peak anew from here on. Not collective. Megatron's own "max allocated" then counts from here, too."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak of the resident set, see proc(5)
    except OSError:
        pass


def peak_bytes() -> int | None:
    """The most bytes that were held since `forget_peak`; None where the system does not say it. Not collective."""
    on_gpu = torch.cuda.max_memory_allocated()  # 0 on the CPU backend
    return on_gpu or _in_status("VmHWM")


def resident_bytes() -> int | None:
    """Memory that this process holds now; None where the system does not say it in the way of Linux."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _in_status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
