"""The canonical bytes of a state, their fixed pieces, and the state digest that peers agree on.

The canonical form is the concatenation of the exchanged tensors in the order of their names, each as C-ordered fp32
little-endian bytes. It is cut into pieces of 4 MiB (the last one shorter), whatever the tensors' borders. The state
digest is SHA-256 over a domain tag, the total length as 8 little-endian bytes, and the pieces' SHA-256 digests: so
whoever knows the piece digests and checked them against the state digest can check every piece as it arrives.

The one rule: no copy of the state is made; pieces are hashed in place through memoryviews, for which hashlib releases
the GIL, so that hashing can run on a thread while the next round trains. The caller must not change the tensors
meanwhile.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence

import torch

from sparseloco.compression.layout import TensorSpec

PIECE_BYTES = 4 * 2**20
STATE_DOMAIN = b"sparseloco/state/1\0"


def total_bytes(theta: Mapping[str, torch.Tensor]) -> int:
    """Length of the canonical bytes."""
    return sum(tensor.numel() * 4 for tensor in theta.values())


def piece_count(length_bytes: int) -> int:
    """Pieces of a state of so many bytes."""
    return -(-length_bytes // PIECE_BYTES)


def piece_digests(theta: Mapping[str, torch.Tensor]) -> list[bytes]:
    """SHA-256 of every piece, in order."""
    views = _views(theta)
    return [_piece_digest(views, index) for index in range(piece_count(_length(views)))]


def digest_of_pieces(length_bytes: int, digests: Sequence[bytes]) -> bytes:
    """The state digest that belongs to a length and its piece digests; ValueError if they cannot belong together."""
    if len(digests) != piece_count(length_bytes) or any(len(digest) != 32 for digest in digests):
        raise ValueError(f"{len(digests)} piece digests cannot be those of {length_bytes} bytes")
    return hashlib.sha256(STATE_DOMAIN + struct.pack("<Q", length_bytes) + b"".join(digests)).digest()


def state_digest(theta: Mapping[str, torch.Tensor]) -> bytes:
    """The 32 bytes that name a state."""
    return digest_of_pieces(total_bytes(theta), piece_digests(theta))


def read_piece(theta: Mapping[str, torch.Tensor], index: int) -> bytes:
    """The bytes of one piece; IndexError if the state has no such piece."""
    views = _views(theta)
    _check_index(views, index)
    return b"".join(_spans(views, index))


def write_piece(theta: Mapping[str, torch.Tensor], index: int, data: bytes) -> None:
    """Put one piece's bytes into the tensors; ValueError if the length is not the piece's own.

    The caller has checked the piece's digest; a piece of a right length with wrong bytes is not noticed here.
    """
    views = _views(theta)
    _check_index(views, index)
    spans = list(_spans(views, index))
    if len(data) != sum(len(span) for span in spans):
        raise ValueError(f"piece {index} has {sum(map(len, spans))} bytes, not {len(data)}")
    offset = 0
    for span in spans:
        span[:] = data[offset : offset + len(span)]
        offset += len(span)


def empty_theta(specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """Zeros of the exchanged shapes, for a joiner to fill piece by piece, or as a first error feedback."""
    return {spec.name: torch.zeros(spec.shape, dtype=torch.float32) for spec in sorted(specs, key=lambda s: s.name)}


def _views(theta: Mapping[str, torch.Tensor]) -> list[memoryview]:
    """Writable byte views of the tensors in canonical order, sharing their memory."""
    if sys.byteorder != "little":
        raise RuntimeError("the canonical form is little-endian and is read in place; this machine is big-endian")
    views = []
    for name in sorted(theta):
        tensor = theta[name].detach()
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise ValueError(f"{name} must be a contiguous fp32 tensor on the CPU")
        views.append(memoryview(tensor.reshape(-1).numpy()).cast("B"))  # type: ignore[arg-type]
    return views


def _length(views: Sequence[memoryview]) -> int:
    return sum(len(view) for view in views)


def _check_index(views: Sequence[memoryview], index: int) -> None:
    if not 0 <= index < piece_count(_length(views)):
        raise IndexError(f"the state has {piece_count(_length(views))} pieces; there is no piece {index}")


def _spans(views: Sequence[memoryview], index: int) -> Iterator[memoryview]:
    """The stretches of the tensors that make up a piece, in order."""
    start, end = index * PIECE_BYTES, (index + 1) * PIECE_BYTES
    offset = 0
    for view in views:
        if offset >= end:
            return
        if offset + len(view) > start:
            yield view[max(start - offset, 0) : end - offset]
        offset += len(view)


def _piece_digest(views: Sequence[memoryview], index: int) -> bytes:
    digest = hashlib.sha256()
    for span in _spans(views, index):
        digest.update(span)
    return digest.digest()
