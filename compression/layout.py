"""Where every byte of a payload lies, computed from tensor shapes and k alone.

The one rule: both ends derive sizes from their own layout; the payload carries no lengths, names or dtypes, so a
receiver knows the exact size before it reads a byte. Next comes `codec.encode` or `codec.decode`.

Choices of the codec id `ef2-4096`, each a promise about bytes:

- Tensors follow one another in the order the caller gives them, which is the run's canonical order.
- A chunk is a flat run of 4096 elements of the tensor in C (row-major) order; chunks never span two tensors.
- A chunk with n >= k real elements is one *standard record* (`packing`); only the last chunk of a tensor can have
  n < 4096. A last chunk with n < k is one *tiny record*, which sends all n elements and no indices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

CHUNK = 4096
CODEC_ID = "ef2-4096"
MIN_K = 16  # below 16 the fields of a record stop being whole bytes
MAX_K = 512  # above 512 (12.5 %) sparse records stop paying for their indices
LEVELS_BYTES = 4  # lo and hi, two bf16
CODE_BITS = 2


@dataclass(frozen=True)
class TensorSpec:
    """Name and shape of one trainable tensor; raises ValueError for an empty name or an empty tensor."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("tensor name is empty: give every tensor the name the run file uses")
        if any(dimension < 1 for dimension in self.shape):
            raise ValueError(f"tensor {self.name!r} has shape {self.shape}; every dimension must be at least 1: leave it out")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """Codec id, chunk length (elements) and k, the elements kept per chunk; raises ValueError outside the rules."""

    codec_id: str = CODEC_ID
    chunk: int = CHUNK
    k: int = 64

    def __post_init__(self) -> None:
        if self.codec_id != CODEC_ID:
            raise ValueError(f"codec id {self.codec_id!r} is unknown; this version speaks {CODEC_ID!r}: use that one")
        if self.chunk != CHUNK:
            raise ValueError(f"chunk {self.chunk} does not fit codec {CODEC_ID!r}, whose chunk is {CHUNK}: set {CHUNK}")
        if not MIN_K <= self.k <= MAX_K or self.k & (self.k - 1):
            raise ValueError(f"k {self.k} must be a power of two from {MIN_K} to {MAX_K}: choose 16, 32, 64, 128, 256 or 512")

    @property
    def low_bits(self) -> int:
        """Bits of an index stored verbatim; the remaining log2(k) bits go to the upper bit-vector."""
        return (self.chunk // self.k).bit_length() - 1

    @property
    def low_bytes(self) -> int:
        return self.k * self.low_bits // 8

    @property
    def upper_bytes(self) -> int:
        return 2 * self.k // 8

    @property
    def codes_bytes(self) -> int:
        return self.k * CODE_BITS // 8

    @property
    def record_bytes(self) -> int:
        """Bytes of one standard record: low parts, upper bit-vector, codes, levels."""
        return self.low_bytes + self.upper_bytes + self.codes_bytes + LEVELS_BYTES


@dataclass(frozen=True)
class TensorLayout:
    """Byte span and records of one tensor inside a payload."""

    spec: TensorSpec
    codec: CodecSpec
    offset_bytes: int

    @property
    def tail_elements(self) -> int:
        """Elements in the tiny record, 0 when there is none."""
        remainder = self.spec.elements % self.codec.chunk
        return remainder if remainder < self.codec.k else 0

    @property
    def standard_records(self) -> int:
        return (self.spec.elements - self.tail_elements + self.codec.chunk - 1) // self.codec.chunk

    @property
    def standard_bytes(self) -> int:
        return self.standard_records * self.codec.record_bytes

    @property
    def tail_codes_bytes(self) -> int:
        return (CODE_BITS * self.tail_elements + 7) // 8

    @property
    def tail_bytes(self) -> int:
        return self.tail_codes_bytes + LEVELS_BYTES if self.tail_elements else 0

    @property
    def length_bytes(self) -> int:
        return self.standard_bytes + self.tail_bytes

    @property
    def sent_elements(self) -> int:
        """Elements this tensor sends in every payload."""
        return self.standard_records * self.codec.k + self.tail_elements


@dataclass(frozen=True)
class PayloadLayout:
    """All tensors of a run in canonical (given) order; raises ValueError for none, or for a repeated name."""

    specs: Sequence[TensorSpec]
    codec: CodecSpec
    tensors: tuple[TensorLayout, ...] = field(init=False, compare=False)
    total_bytes: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        specs = tuple(self.specs)
        if not specs:
            raise ValueError("layout has no tensors; it needs at least one: list the run's trainable tensors")
        seen: set[str] = set()
        tensors: list[TensorLayout] = []
        offset_bytes = 0
        for spec in specs:
            if spec.name in seen:
                raise ValueError(f"tensor {spec.name!r} is listed twice; names must differ: send tied weights once")
            seen.add(spec.name)
            tensors.append(TensorLayout(spec, self.codec, offset_bytes))
            offset_bytes += tensors[-1].length_bytes
        object.__setattr__(self, "specs", specs)
        object.__setattr__(self, "tensors", tuple(tensors))
        object.__setattr__(self, "total_bytes", offset_bytes)

    @property
    def parameters(self) -> int:
        return sum(spec.elements for spec in self.specs)

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.total_bytes / self.parameters
