"""Named tensors to and from a safetensors file, checked against the shapes that were expected.

Nothing is pickled. A file that is torn, of another model or of another type is a StateError that names it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from sparseloco.bootstrap.errors import StateError


def tensor_file_bytes(tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str] | None = None) -> bytes:
    """The content of a safetensors file; `notes` go into its header for people."""
    from safetensors.torch import save

    data: bytes = save(dict(tensors), metadata=dict(notes) if notes else None)
    return data


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file in place, without a second copy in memory; the caller fsyncs and publishes it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))  # it wraps what the system said into words
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def read_tensors(path: Path, shapes: Mapping[str, tuple[int, ...]] | None = None) -> dict[str, torch.Tensor]:
    """All tensors of a file, owned by the caller; StateError if it is unreadable or not of `shapes` in fp32."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        # Read rather than mapped: a flipped or shortened file must not change or kill a state that was checked.
        tensors: dict[str, torch.Tensor] = load(path.read_bytes())
    except FileNotFoundError:
        raise StateError(f"{path}: no such file") from None
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise StateError(f"{path}: not a readable safetensors file ({error})") from error
    if shapes is not None:
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} != dict(shapes):
            raise StateError(f"{path}: its tensors are not those of the run's [model]; it belongs to another run")
        if any(tensor.dtype != torch.float32 for tensor in tensors.values()):
            raise StateError(f"{path}: holds tensors that are not fp32")
    return {name: tensors[name] for name in sorted(tensors)}
