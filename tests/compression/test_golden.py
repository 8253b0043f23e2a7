"""Golden bytes of the codec id `ef2-4096`: a change to any of them is a new codec id, not a new golden file."""

from pathlib import Path

import pytest
import torch

from sparseloco.compression.codec import decode, encode, norm
from sparseloco.compression.layout import CodecSpec, PayloadLayout, TensorSpec

GOLDEN = Path(__file__).parent / "golden"
NORMS = {16: "0x1.bbcbd3c57253bp+4", 64: "0x1.a2d6f588635cfp+5", 512: "0x1.8613d90083ee7p+6"}


def golden_tensors(k):
    """Tensors of every kind of record, from a generator that fits one line: exact fp32 on any machine."""
    state = 1
    tensors = {}
    for name, elements in {
        "one": 1,
        "all but one of k": k - 1,
        "exactly k": k,
        "full chunk": 4096,
        "full chunk and remainder": 4096 + k + 5,
        "full chunk and tail": 4096 + 3,
    }.items():
        values = []
        for _ in range(elements):
            state = (1664525 * state + 1013904223) % 2**32
            values.append(((state >> 8) / 2**24 - 0.5) * 2.0 ** ((state >> 4 & 7) - 4))
        tensors[name] = torch.tensor(values, dtype=torch.float32)
    tensors["zeros"] = torch.zeros(k + 1)
    return tensors


def golden_layout(k):
    return PayloadLayout([TensorSpec(n, tuple(t.shape)) for n, t in golden_tensors(k).items()], CodecSpec(k=k))


def golden_bytes(k):
    return bytes.fromhex((GOLDEN / f"ef2-4096-k{k}.hex").read_text())


@pytest.mark.parametrize("k", NORMS)
def test_encoder_makes_the_golden_bytes(k):
    assert encode(list(golden_tensors(k).values()), golden_layout(k)).payload == golden_bytes(k)


@pytest.mark.parametrize("k", NORMS)
def test_oracle_makes_the_golden_bytes(oracle, k):
    assert oracle.encode([t.tolist() for t in golden_tensors(k).values()], k) == golden_bytes(k)


@pytest.mark.parametrize("k", NORMS)
def test_golden_bytes_decode_to_the_oracles_values(oracle, k):
    layout = golden_layout(k)
    expected = oracle.decode(golden_bytes(k), [spec.elements for spec in layout.specs], k)
    for tensor, records in zip(decode(golden_bytes(k), layout), expected, strict=True):
        indices, values = oracle.sparse(records)
        assert tensor.indices.tolist() == indices
        assert tensor.values.tolist() == values


@pytest.mark.parametrize("k", NORMS)
def test_golden_norm(k):
    assert norm(golden_bytes(k), golden_layout(k)).hex() == NORMS[k]
