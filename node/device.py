"""Which device trains, and in which precision: what was asked for if this machine can do it, else a clear refusal."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from sparseloco.bootstrap.errors import HardwareError, UsageError, nearest

CHOICES = ("auto", "cpu", "cuda", "mps")


def pick_device(choice: str) -> torch.device:
    """The device of a --device choice; `auto` takes the best found. HardwareError says what was found instead."""
    if choice not in CHOICES:
        raise UsageError(f"--device {choice!r} is no device{nearest(choice, CHOICES)}")
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if choice == "auto":
        return torch.device(next(name for name, usable in found.items() if usable))
    if not found[choice]:
        raise HardwareError(
            f"--device {choice} is not usable: {_why_not(choice)}; found: "
            f"{', '.join(name for name, usable in found.items() if usable)}. Use --device auto"
        )
    return torch.device(choice)


def _why_not(choice: str) -> str:
    if choice == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} was built without CUDA"
    if choice == "mps" and not torch.backends.mps.is_built():
        return f"torch {torch.__version__} was built without MPS"
    return "torch sees no such device"


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """bf16 autocast over the fp32 master weights where the device is made for it (CUDA), fp32 elsewhere.

    On CPUs without bf16 units autocast is slower than fp32, and telling them apart is not worth a wrong guess.
    """
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return nullcontext()
