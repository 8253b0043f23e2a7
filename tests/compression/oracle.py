"""The codec once more, written plainly from its specification, to test the real one against.

It shares no code with it: chunks are Python lists, order comes from `sorted`, rounding from exact fractions, bits
from `bitarray`. Slow, and meant to be read.
"""

import math
import struct
from dataclasses import dataclass
from fractions import Fraction

from bitarray import bitarray
from bitarray.util import ba2int, int2ba

CHUNK = 4096
BF16_MAX = 0x7F7F


@dataclass(frozen=True)
class Record:
    """One chunk's content; `n` real elements."""

    n: int
    indices: list[int]
    codes: list[int]
    lo: int  # bf16 bits
    hi: int


def fp32_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bf16_value(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def nearest_bf16(value: float) -> int:
    """Bits of the bf16 nearest to a float64 >= 0, ties to even, at most the largest finite one."""
    if value >= bf16_value(BF16_MAX):
        return BF16_MAX
    below = 0
    step = 1 << 14
    while step:  # largest bf16 <= value, by bisection over the bit patterns
        if below + step <= BF16_MAX and bf16_value(below + step) <= value:
            below += step
        step >>= 1
    to_below = Fraction(value) - Fraction(bf16_value(below))
    to_above = Fraction(bf16_value(below + 1)) - Fraction(value)
    if to_below == to_above:
        return below + below % 2
    return below if to_below < to_above else below + 1


def quantise(chunk: list[float], k: int) -> Record:
    """Top-k and two levels of one chunk of fp32 values."""
    bits = [fp32_bits(value) for value in chunk]
    by_rank = sorted(range(len(chunk)), key=lambda index: (-(bits[index] & 0x7FFFFFFF), index))[:k]
    upper = set(by_rank[: math.ceil(len(by_rank) / 2)])
    indices = sorted(by_rank)
    sums = {True: 0.0, False: 0.0}
    for index in indices:
        sums[index in upper] += abs(chunk[index])
    hi = nearest_bf16(sums[True] / len(upper))
    lo = nearest_bf16(sums[False] / (len(indices) - len(upper))) if len(indices) > 1 else hi
    codes = []
    for index in indices:
        sign = bits[index] >> 31
        magnitude = int(index in upper and lo != hi)
        codes.append(0 if hi == 0 else sign + 2 * magnitude)
    return Record(len(chunk), indices, codes, lo, hi)


def pack(record: Record, k: int) -> bytes:
    stream = bitarray(endian="little")
    if record.n >= k:
        low_bits = int(math.log2(CHUNK // k))
        upper = bitarray(2 * k, endian="little")
        upper.setall(0)
        for rank, index in enumerate(record.indices):
            stream.extend(int2ba(index % (1 << low_bits), low_bits, endian="little"))
            upper[(index >> low_bits) + rank] = 1
        stream.extend(upper)
    for code in record.codes:
        stream.extend(int2ba(code, 2, endian="little"))
    while len(stream) % 8:
        stream.append(0)
    return stream.tobytes() + struct.pack("<HH", record.lo, record.hi)


def unpack(data: bytes, n: int, k: int) -> tuple[Record, bytes]:
    """The first record of `data`, and what follows it."""
    m = min(n, k)
    low_bits = int(math.log2(CHUNK // k))
    index_bits = k * low_bits + 2 * k if n >= k else 0
    code_bytes = (index_bits + 2 * m + 7) // 8
    stream = bitarray(endian="little")
    stream.frombytes(data[:code_bytes])
    indices = list(range(m))
    if n >= k:
        highs = [at - rank for rank, at in enumerate(stream[k * low_bits : index_bits].search(bitarray("1")))]
        lows = [ba2int(stream[rank * low_bits : (rank + 1) * low_bits]) for rank in range(k)]
        indices = [(high << low_bits) + low for high, low in zip(highs, lows, strict=True)]
    codes = [ba2int(stream[index_bits + 2 * rank : index_bits + 2 * rank + 2]) for rank in range(m)]
    lo, hi = struct.unpack("<HH", data[code_bytes : code_bytes + 4])
    return Record(n, indices, codes, lo, hi), data[code_bytes + 4 :]


def values(record: Record) -> list[float]:
    table = [bf16_value(record.lo), -bf16_value(record.lo), bf16_value(record.hi), -bf16_value(record.hi)]
    return [table[code] for code in record.codes]


def chunk_sizes(elements: int) -> list[int]:
    return [min(CHUNK, elements - start) for start in range(0, elements, CHUNK)]


def encode(tensors: list[list[float]], k: int) -> bytes:
    """The payload of flat tensors."""
    payload = b""
    for flat in tensors:
        for start in range(0, len(flat), CHUNK):
            payload += pack(quantise(flat[start : start + CHUNK], k), k)
    return payload


def decode(payload: bytes, elements: list[int], k: int) -> list[list[Record]]:
    """The records of every tensor, given the tensors' element counts."""
    tensors = []
    for count in elements:
        records = []
        for n in chunk_sizes(count):
            record, payload = unpack(payload, n, k)
            records.append(record)
        tensors.append(records)
    assert payload == b""
    return tensors


def sparse(records: list[Record]) -> tuple[list[int], list[float]]:
    """A tensor's flat indices and values."""
    indices = [CHUNK * chunk + index for chunk, record in enumerate(records) for index in record.indices]
    return indices, [value for record in records for value in values(record)]


def norm(tensors: list[list[Record]]) -> float:
    total = 0.0
    for record in (record for records in tensors for record in records):
        n_hi = sum(code >= 2 for code in record.codes)
        n_lo = len(record.codes) - n_hi
        lo, hi = bf16_value(record.lo), bf16_value(record.hi)
        total += n_lo * lo**2 + n_hi * hi**2
    return math.sqrt(total)
