"""Every payload that is not the canonical bytes of a content is refused, by rule, tensor and chunk."""

import dataclasses
import random

import pytest
import torch

from sparseloco.compression import packing
from sparseloco.compression.codec import decode, encode, norm
from sparseloco.compression.layout import CodecSpec, PayloadLayout, TensorSpec
from sparseloco.compression.validation import RULES, PayloadError, standard_bytes, tail_bytes, validate

K = 16
LO, HI = 0x3F00, 0x3F80
# "plain" has two full chunks, a standard remainder of 20 elements; "tailed" a full chunk and a tiny record of 5.
LAYOUT = PayloadLayout([TensorSpec("plain", (2 * 4096 + 20,)), TensorSpec("tailed", (4096 + 5,))], CodecSpec(k=K))
SIZES = [4096, 4096, 20, 4096, 5]
RECORD_BYTES = 28
UPPER_AT = 16  # byte offsets inside a record of k = 16
CODES_AT = 20
LEVELS_AT = 24


@pytest.fixture
def records(oracle):
    """Five valid records, plain and tailed, to be broken one at a time."""
    made = [
        oracle.Record(n, [n // K * rank for rank in range(min(n, K))], [rank % 4 for rank in range(min(n, K))], LO, HI)
        for n in SIZES
    ]
    validate(joined(oracle, made), LAYOUT)
    return made


def joined(oracle, records):
    return b"".join(oracle.pack(record, K) for record in records)


def refusal_of(payload):
    with pytest.raises(PayloadError) as refusal:
        validate(payload, LAYOUT)
    for reader in (decode, norm):
        with pytest.raises(PayloadError):
            reader(payload, LAYOUT)
    error = refusal.value
    assert error.rule in RULES
    assert error.rule in str(error)
    return error.rule, error.tensor, error.chunk


def broken(oracle, records, position, **changes):
    return joined(
        oracle,
        [dataclasses.replace(r, **changes) if i == position else r for i, r in enumerate(records)],
    )


@pytest.mark.parametrize("change", [lambda p: p[:-1], lambda p: p + b"\0", lambda p: b"", lambda p: p * 2])
def test_wrong_length_is_refused(oracle, records, change):
    assert refusal_of(change(joined(oracle, records))) == ("length", None, None)


def test_wrong_length_is_refused_before_anything_is_parsed(monkeypatch):
    monkeypatch.setattr("numpy.frombuffer", lambda *a: pytest.fail("parsed"))
    with pytest.raises(PayloadError, match="length"):
        validate(b"x" * (LAYOUT.total_bytes - 1), LAYOUT)


@pytest.mark.parametrize(("position", "tensor", "chunk"), [(0, "plain", 0), (2, "plain", 2), (3, "tailed", 0)])
@pytest.mark.parametrize("mask", [0b1, 0b10])
def test_wrong_number_of_upper_bits_is_refused(oracle, records, position, tensor, chunk, mask):
    payload = bytearray(joined(oracle, records))
    payload[position * RECORD_BYTES + UPPER_AT] ^= mask  # clears one bit or sets one
    assert refusal_of(bytes(payload)) == ("popcount", tensor, chunk)


def test_last_upper_bit_is_refused(oracle, records):
    payload = bytearray(joined(oracle, records))
    payload[UPPER_AT : UPPER_AT + 4] = (0xFFFF << 16).to_bytes(4, "little")
    assert refusal_of(bytes(payload)) == ("last-upper-bit", "plain", 0)


def test_duplicate_index_is_refused(oracle, records):
    indices = [0, 7, 7, *range(300, 313)]
    assert refusal_of(broken(oracle, records, 1, indices=indices)) == ("index-order", "plain", 1)


def test_descending_index_is_refused(oracle, records):
    indices = [0, 9, 7, *range(300, 313)]  # 9 and 7 share their upper part
    assert refusal_of(broken(oracle, records, 3, indices=indices)) == ("index-order", "tailed", 0)


def test_index_past_the_end_of_a_short_chunk_is_refused(oracle, records):
    assert refusal_of(broken(oracle, records, 2, indices=[*range(15), 20])) == ("index-range", "plain", 2)
    validate(broken(oracle, records, 2, indices=[*range(15), 19]), LAYOUT)


@pytest.mark.parametrize(("position", "tensor", "chunk"), [(0, "plain", 0), (2, "plain", 2), (4, "tailed", 1)])
@pytest.mark.parametrize(
    ("lo", "hi", "rule"),
    [
        (LO, 0x7F80, "scale-finite"),  # inf
        (LO, 0x7FC0, "scale-finite"),  # NaN
        (0x7F81, HI, "scale-finite"),
        (0xFF80, HI, "scale-finite"),  # -inf
        (0x8000, HI, "scale-sign"),  # -0
        (LO, HI | 0x8000, "scale-sign"),
        (HI, LO, "scale-order"),
        (1, 0, "scale-order"),
        (0, 0, "zero-code"),
        (HI, HI, "magnitude-bit"),
    ],
)
def test_levels_outside_the_rules_are_refused(oracle, records, position, tensor, chunk, lo, hi, rule):
    assert refusal_of(broken(oracle, records, position, lo=lo, hi=hi)) == (rule, tensor, chunk)


@pytest.mark.parametrize("position", [1, 4])
def test_a_sign_alone_is_allowed_on_equal_levels_and_refused_on_zero(oracle, records, position):
    signs = [rank % 2 for rank in range(len(records[position].codes))]
    validate(broken(oracle, records, position, lo=HI, hi=HI, codes=signs), LAYOUT)
    validate(broken(oracle, records, position, lo=0, hi=HI), LAYOUT)
    validate(broken(oracle, records, position, lo=0, hi=0, codes=[0] * len(signs)), LAYOUT)
    assert refusal_of(broken(oracle, records, position, lo=0, hi=0, codes=signs))[0] == "zero-code"


@pytest.mark.parametrize("bit", [2, 3, 4, 5, 6, 7])
def test_padding_after_a_tiny_record_is_refused(oracle, records, bit):
    payload = bytearray(joined(oracle, records))
    payload[-5] |= 1 << bit  # five codes take ten bits
    assert refusal_of(bytes(payload)) == ("padding", "tailed", 1)


def test_first_broken_chunk_of_a_rule_is_named(oracle, records):
    twice = [dataclasses.replace(r, lo=HI, hi=LO) if i in (1, 2) else r for i, r in enumerate(records)]
    assert refusal_of(joined(oracle, twice)) == ("scale-order", "plain", 1)


def repacked(payload, layout):
    """Unpack all records and pack them again."""
    pieces = []
    for tensor in layout.tensors:
        if tensor.standard_records:
            content = packing.unpack_standard(standard_bytes(payload, tensor), tensor.codec)
            pieces.append(packing.pack_standard(content, tensor.codec).view(-1))
        if tensor.tail_elements:
            pieces.append(packing.pack_tiny(packing.unpack_tiny(tail_bytes(payload, tensor), tensor.tail_elements)))
    return torch.cat(pieces).numpy().tobytes()


def random_record(oracle, source, n, k):
    m = min(n, k)
    lo, hi = sorted(source.choices([0, 0, 1, LO, HI, 0x7F7F, source.randrange(0x7F80)], k=2))
    codes = [source.randrange(4) for _ in range(m)]
    if lo == hi:
        codes = [code % 2 for code in codes]
    if hi == 0:
        codes = [0] * m
    return oracle.Record(n, sorted(source.sample(range(n), m)), codes, lo, hi)


@pytest.mark.parametrize("k", [16, 32, 64, 128, 256, 512])
def test_every_valid_byte_string_repacks_to_itself(oracle, k):
    source = random.Random(k)
    print(f"seed {k}")
    elements = [3 * 4096, 4096 + k, 4096 + k - 1, k, 1, source.randrange(1, 9000)]
    layout = PayloadLayout([TensorSpec(str(i), (n,)) for i, n in enumerate(elements)], CodecSpec(k=k))
    for _ in range(20):
        sizes = [n for count in elements for n in oracle.chunk_sizes(count)]
        payload = b"".join(oracle.pack(random_record(oracle, source, n, k), k) for n in sizes)
        validate(payload, layout)
        assert repacked(payload, layout) == payload


def test_every_flipped_bit_is_refused_or_means_something_else(oracle):
    print("seed 21")
    a = torch.randn(4096 + 21, generator=torch.Generator().manual_seed(21))
    tiny = torch.randn(5, generator=torch.Generator().manual_seed(22))
    layout = PayloadLayout([TensorSpec("a", (4096 + 21,)), TensorSpec("tiny", (5,))], CodecSpec(k=K))
    payload = encode([a, tiny], layout).payload
    original = oracle.decode(payload, [4096 + 21, 5], K)
    refused = 0
    for bit in range(8 * len(payload)):
        flipped = bytearray(payload)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            validate(bytes(flipped), layout)
        except PayloadError:
            refused += 1
            continue
        assert repacked(bytes(flipped), layout) == flipped
        assert oracle.decode(bytes(flipped), [4096 + 21, 5], K) != original
    assert refused > 2 * 32  # at least every single flip of an upper bit


def test_random_bytes_never_crash_the_validator():
    source = random.Random(31)
    print("seed 31")
    for _ in range(300):
        with pytest.raises(PayloadError):
            validate(source.randbytes(LAYOUT.total_bytes), LAYOUT)
