"""Named tensors to and from a safetensors file, checked against the shapes that were expected.

Nothing is pickled. A file that is torn, of another model or of another type is a StateError that names it. torch is
imported only where tensors are read, so that a header can be looked at without it.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparseloco.bootstrap.errors import StateError

if TYPE_CHECKING:
    import torch

# A header lists the tensors; that of a model with 10,000 of them has about 1 MB.
_LONGEST_HEADER_BYTES = 100_000_000


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """A file's tensors, name -> {dtype, shape, ...}, and its notes, without reading any data; StateError if it has none."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _LONGEST_HEADER_BYTES)))
        notes = header.pop("__metadata__", {})
    except (OSError, struct.error, ValueError, AttributeError, TypeError) as error:
        raise StateError(f"{path}: not a readable safetensors file ({error})") from error
    return header, notes


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
    import torch
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
