"""Refuse every payload that is not the one canonical byte string of its content.

The one rule: whatever this module lets through packs back to exactly the same bytes, so a digest names a content.
A refusal is the sender's fault and names the tensor, the chunk and one of `RULES`.

Checks run on the CPU, where payloads arrive: the length first, before anything is parsed or allocated, then tensor
by tensor in canonical order; within a tensor rule by rule, standard records before the tiny one. The first rule
broken is reported, at the first chunk that breaks it.
"""

import numpy as np
import torch

from sparseloco.compression.layout import CHUNK, CODE_BITS, LEVELS_BYTES, PayloadLayout, TensorLayout
from sparseloco.compression.levels import MAGNITUDE_BIT
from sparseloco.compression.packing import (
    split_fields,
    unpack_bits,
    unpack_indices,
    unpack_levels,
    unpack_tiny_codes,
    unpack_upper,
)

RULES = {
    "length": "the payload is exactly as long as the layout says",
    "popcount": "the upper bit-vector has exactly k bits set",
    "last-upper-bit": "the last bit of the upper bit-vector is 0",
    "index-order": "indices ascend strictly",
    "index-range": "indices are below the number of real elements in the chunk",
    "scale-finite": "lo and hi are finite",
    "scale-sign": "lo and hi have their sign bit clear",
    "scale-order": "lo <= hi",
    "zero-code": "codes are 0 where hi is 0",
    "magnitude-bit": "magnitude bits are 0 where lo = hi",
    "padding": "bits after the last code of a tiny record are 0",
}

BF16_EXPONENT = 0x7F80
BF16_SIGN = 0x8000


class PayloadError(Exception):
    """A peer's payload breaks a rule of the codec.

    `rule` is a key of `RULES`; `tensor` and `chunk` (position within the tensor) are None for the rule "length".
    """

    def __init__(self, rule: str, tensor: str | None, chunk: int | None, detail: str) -> None:
        self.rule = rule
        self.tensor = tensor
        self.chunk = chunk
        self.detail = detail
        where = "payload" if tensor is None else f"tensor {tensor!r} chunk {chunk}"
        super().__init__(f"{where} breaks rule {rule!r} ({RULES[rule]}): {detail}")


def check_length(payload: bytes, layout: PayloadLayout) -> None:
    """Raise PayloadError("length") unless the payload has exactly the layout's size."""
    if len(payload) != layout.total_bytes:
        raise PayloadError("length", None, None, f"{len(payload)} bytes instead of {layout.total_bytes}")


def validate(payload: bytes, layout: PayloadLayout) -> None:
    """Raise PayloadError unless the payload is well-formed and canonical for this layout."""
    check_length(payload, layout)
    for tensor in layout.tensors:
        if tensor.standard_records:
            _validate_standard(standard_bytes(payload, tensor), tensor)
        if tensor.tail_elements:
            _validate_tiny(tail_bytes(payload, tensor), tensor)


def standard_bytes(payload: bytes, tensor: TensorLayout) -> torch.Tensor:
    """Copy a tensor's standard records out of a payload of the right length: uint8 [standard_records, record_bytes]."""
    return _bytes_at(payload, tensor.offset_bytes, tensor.standard_bytes).view(-1, tensor.codec.record_bytes)


def tail_bytes(payload: bytes, tensor: TensorLayout) -> torch.Tensor:
    """Copy a tensor's tiny record out of a payload of the right length: uint8 [tail_bytes]."""
    return _bytes_at(payload, tensor.offset_bytes + tensor.standard_bytes, tensor.tail_bytes)


def _bytes_at(payload: bytes, offset_bytes: int, length_bytes: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(payload, np.uint8, length_bytes, offset_bytes).copy())


def _validate_standard(record_bytes: torch.Tensor, tensor: TensorLayout) -> None:
    codec, name = tensor.codec, tensor.spec.name
    fields = split_fields(record_bytes, codec)

    upper = unpack_upper(fields.upper)
    popcount = upper.sum(dim=1)
    _refuse("popcount", popcount != codec.k, name, 0, popcount)
    _refuse("last-upper-bit", upper[:, -1] != 0, name, 0, upper[:, -1])

    indices = unpack_indices(upper, fields.low, codec)
    _refuse("index-order", indices[:, 1:] <= indices[:, :-1], name, 0, indices)
    real_elements = torch.full((len(indices),), CHUNK)
    real_elements[-1] = tensor.spec.elements - tensor.tail_elements - (len(indices) - 1) * CHUNK
    _refuse("index-range", indices[:, -1] >= real_elements, name, 0, indices[:, -1])

    _check_levels(unpack_levels(fields.levels), unpack_bits(fields.codes, CODE_BITS), name, first_chunk=0)


def _validate_tiny(record_bytes: torch.Tensor, tensor: TensorLayout) -> None:
    codes, padding = unpack_tiny_codes(record_bytes, tensor.tail_elements)
    levels = unpack_levels(record_bytes[-LEVELS_BYTES:])
    _check_levels(levels, codes, tensor.spec.name, first_chunk=tensor.standard_records)
    _refuse("padding", padding != 0, tensor.spec.name, tensor.standard_records, padding)


def _check_levels(levels: torch.Tensor, codes: torch.Tensor, name: str, first_chunk: int) -> None:
    lo, hi = levels[:, 0], levels[:, 1]
    _refuse("scale-finite", (levels & BF16_EXPONENT) == BF16_EXPONENT, name, first_chunk, levels)
    _refuse("scale-sign", (levels & BF16_SIGN) != 0, name, first_chunk, levels)
    _refuse("scale-order", lo > hi, name, first_chunk, levels)  # bits of values >= 0 order as the values do
    _refuse("zero-code", (hi == 0)[:, None] & (codes != 0), name, first_chunk, codes)
    _refuse("magnitude-bit", (lo == hi)[:, None] & (codes >= MAGNITUDE_BIT), name, first_chunk, codes)


def _refuse(rule: str, broken: torch.Tensor, name: str, first_chunk: int, found: torch.Tensor) -> None:
    """Raise for the first True in `broken` (bool [rows] or [rows, m]), showing what `found` holds there."""
    if bool(broken.any()):
        row, column = broken.view(len(broken), -1).nonzero()[0].tolist()
        shown = found.view(len(found), -1)[row, column : column + 2].tolist()
        raise PayloadError(rule, name, first_chunk + row, f"found {shown} from element {column} of its field on")
