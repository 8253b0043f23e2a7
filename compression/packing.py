"""Records <-> bytes: fixed-size Elias-Fano indices, 2-bit codes, two bf16 levels.

The one rule: a well-formed record and its bytes determine each other. Everything is little-endian and LSB first.

A standard record, L = log2(4096 / k), indices ascending with rank 0 .. k - 1:

    [low parts: k x L bits]  [upper: 2k bits, bit (index >> L) + rank set]  [codes: k x 2 bits]  [lo, hi: bf16]

A tiny record of n < k elements: [codes: n x 2 bits, zero-padded to a byte] [lo, hi: bf16].

Away from the CPU all shapes are fixed and nothing waits for the device. `validation` decides what is well-formed.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from sparseloco.compression.layout import CODE_BITS, LEVELS_BYTES, CodecSpec

GROUP = 8  # any 8 values of w bits are w whole bytes


@dataclass(frozen=True)
class Records:
    """Content of `rows` records with m elements each."""

    indices: torch.Tensor  # int64 [rows, m], position within the chunk, ascending
    codes: torch.Tensor  # int32 or int64 [rows, m], 0 .. 3
    levels: torch.Tensor  # int32 [rows, 2], bf16 bits of lo and hi


@dataclass(frozen=True)
class Fields:
    """A standard record's byte fields: views into uint8 [rows, record_bytes]."""

    low: torch.Tensor
    upper: torch.Tensor
    codes: torch.Tensor
    levels: torch.Tensor


def split_fields(record_bytes: torch.Tensor, codec: CodecSpec) -> Fields:
    """Cut uint8 [rows, record_bytes] into its four fields."""
    sizes = [codec.low_bytes, codec.upper_bytes, codec.codes_bytes, LEVELS_BYTES]
    return Fields(*torch.split(record_bytes, sizes, dim=1))


def pack_bits(values: torch.Tensor, width: int) -> torch.Tensor:
    """Pack integers [rows, m] of `width` <= 8 bits each into uint8 [rows, m * width / 8]; m is a multiple of 8."""
    rows = values.shape[0]
    value_shifts, byte_shifts, word_dtype = _word(width, values.device)
    grouped = values.view(rows, -1, len(value_shifts)).to(word_dtype)
    words = (grouped << value_shifts).sum(dim=2, keepdim=True, dtype=word_dtype)  # disjoint bits: sum is or
    return ((words >> byte_shifts) & 0xFF).to(torch.uint8).view(rows, -1)


def unpack_bits(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Undo `pack_bits`: uint8 [rows, bytes] to int32 or int64 [rows, 8 * bytes / width]."""
    rows = packed.shape[0]
    value_shifts, byte_shifts, word_dtype = _word(width, packed.device)
    grouped = packed.reshape(rows, -1, len(byte_shifts)).to(word_dtype)
    words = (grouped << byte_shifts).sum(dim=2, keepdim=True, dtype=word_dtype)
    return ((words >> value_shifts) & ((1 << width) - 1)).view(rows, -1)


def _word(width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    """Return the bit offsets of values and of bytes in the shortest word that holds whole numbers of both."""
    bits = math.lcm(width, 8)
    dtype = torch.int32 if bits < 32 else torch.int64  # at most 56 bits, for widths 5 and 7
    value_shifts = torch.arange(0, bits, width, dtype=dtype, device=device)
    return value_shifts, torch.arange(0, bits, 8, dtype=dtype, device=device), dtype


def pack_levels(levels: torch.Tensor) -> torch.Tensor:
    """Pack bf16 bits int32 [rows, 2] into uint8 [rows, 4]."""
    return torch.stack([levels & 0xFF, levels >> 8], dim=2).to(torch.uint8).view(-1, LEVELS_BYTES)


def unpack_levels(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_levels`: int32 [rows, 2], each 0 .. 0xFFFF."""
    halves = packed.reshape(-1, 2, 2).to(torch.int32)
    return halves[:, :, 0] | (halves[:, :, 1] << 8)


def pack_standard(records: Records, codec: CodecSpec) -> torch.Tensor:
    """Return uint8 [rows, record_bytes] for records with k elements each."""
    rows = records.indices.shape[0]
    ranks = torch.arange(codec.k, device=records.indices.device)
    upper = torch.zeros((rows, 2 * codec.k), dtype=torch.int64, device=records.indices.device)
    upper.scatter_(1, (records.indices >> codec.low_bits) + ranks, 1)  # positions ascend strictly: none collide
    return torch.cat(
        [
            pack_bits(records.indices & ((1 << codec.low_bits) - 1), codec.low_bits),
            pack_bits(upper, 1),
            pack_bits(records.codes, CODE_BITS),
            pack_levels(records.levels),
        ],
        dim=1,
    )


def unpack_standard(record_bytes: torch.Tensor, codec: CodecSpec) -> Records:
    """Undo `pack_standard`; every upper bit-vector must have exactly k bits set."""
    fields = split_fields(record_bytes, codec)
    return Records(
        indices=unpack_indices(unpack_upper(fields.upper), fields.low, codec),
        codes=unpack_bits(fields.codes, CODE_BITS),
        levels=unpack_levels(fields.levels),
    )


def unpack_indices(upper: torch.Tensor, low: torch.Tensor, codec: CodecSpec) -> torch.Tensor:
    """Return indices int64 [rows, k] from upper bits uint8 [rows, 2k] with k ones each and the packed low parts."""
    ranks = torch.arange(codec.k, device=upper.device)
    high = positions_of_ones(upper, codec.k) - ranks
    return (high << codec.low_bits) | unpack_bits(low, codec.low_bits)


def unpack_upper(packed: torch.Tensor) -> torch.Tensor:
    """Unpack upper bit-vectors, uint8 [rows, 2k / 8], into uint8 [rows, 2k] of zeros and ones."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), axis=1, bitorder="little"))
    return unpack_bits(packed, 1).to(torch.uint8)


def positions_of_ones(bits: torch.Tensor, ones: int) -> torch.Tensor:
    """Return where uint8 [rows, 2k] is 1, ascending: int64 [rows, ones]; each row holds exactly `ones` ones."""
    if bits.device.type == "cpu":
        length = bits.shape[1]  # a power of two
        return torch.from_numpy(np.flatnonzero(bits.numpy().view(np.bool_)) & (length - 1)).view(-1, ones)
    return positions_of_ones_in_fixed_shape(bits, ones)


def positions_of_ones_in_fixed_shape(bits: torch.Tensor, ones: int) -> torch.Tensor:
    """Do what `positions_of_ones` does on any device, without waiting for it or writing one place twice.

    Every position is sent to its place in a permutation of the row that has the ones first and the zeros after.
    """
    positions = torch.arange(bits.shape[1], device=bits.device).expand_as(bits)
    ones_so_far = bits.cumsum(dim=1)
    slots = torch.where(bits == 1, ones_so_far - 1, ones + positions - ones_so_far)
    return torch.empty_like(slots).scatter_(1, slots, positions)[:, :ones]


def pack_tiny(records: Records) -> torch.Tensor:
    """Return uint8 [bytes] for one record that sends all its m < k elements."""
    elements = records.codes.shape[1]
    padded = torch.nn.functional.pad(records.codes, (0, -elements % GROUP))
    codes = pack_bits(padded, CODE_BITS)[0, : (CODE_BITS * elements + 7) // 8]
    return torch.cat([codes, pack_levels(records.levels)[0]])


def unpack_tiny(record_bytes: torch.Tensor, elements: int) -> Records:
    """Undo `pack_tiny`."""
    codes, _ = unpack_tiny_codes(record_bytes, elements)
    return Records(
        indices=torch.arange(elements, device=record_bytes.device)[None],
        codes=codes,
        levels=unpack_levels(record_bytes[-LEVELS_BYTES:]),
    )


def unpack_tiny_codes(record_bytes: torch.Tensor, elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tiny record's codes, [1, elements], and the padding after them in pairs of bits, [1, 0 .. 3]."""
    codes = unpack_bits(record_bytes[None, :-LEVELS_BYTES], CODE_BITS)
    return codes[:, :elements], codes[:, elements:]
