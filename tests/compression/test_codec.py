"""Encoder and decoder against the oracle, and the laws that hold for every tensor."""

import random
import threading

import numpy as np
import pytest
import torch

from sparseloco.compression import topk
from sparseloco.compression.codec import NonFiniteError, decode, encode, norm, tensor_norms
from sparseloco.compression.error_feedback import residual
from sparseloco.compression.layout import CodecSpec, PayloadLayout, TensorSpec
from sparseloco.compression.packing import positions_of_ones, positions_of_ones_in_fixed_shape
from sparseloco.compression.validation import validate

ALL_K = [16, 32, 64, 128, 256, 512]
FP32_MAX = 3.4028234663852886e38
SMALLEST = 2.0**-149


def layout_of(tensors, k):
    return PayloadLayout([TensorSpec(f"t{i}", tuple(t.shape)) for i, t in enumerate(tensors)], CodecSpec(k=k))


def seeded(seed):
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)


def bits(tensor):
    return tensor.contiguous().view(torch.int32)


def adversarial_tensors():
    """Named tensors that have broken encoders before, or could."""
    ramp = torch.arange(4096 + 100, dtype=torch.float32)
    lone = torch.zeros(5000)
    lone[[3, 4095, 4096, 4999]] = torch.tensor([1.0, -2.0, -0.5, 3.0])
    ties = torch.ones(4096)
    ties[::3] = -1.0
    signed_zeros = torch.zeros(300)
    signed_zeros[::2] = -0.0
    signed_zeros[7] = 1e-3
    crowded_group = torch.full((4096,), 1e-3)
    crowded_group[: 4096 // 8] = torch.arange(512) + 1.0
    return {
        "zeros": torch.zeros(4097),
        "negative zeros": -torch.zeros(700),
        "few of many": lone,
        "all equal": torch.full((4096 + 70,), -0.1),
        "ties of both signs": ties,
        "zeros of both signs among the kept": signed_zeros,
        "ascending": ramp,
        "descending": -ramp.flip(0),
        "largest in one group": crowded_group,
        "subnormal": torch.arange(4100) % 37 * SMALLEST,
        "smallest subnormal": torch.full((4096,), SMALLEST),
        "around the smallest normal": (torch.arange(4096) - 2000.0) * 2.0**-137,
        "largest": torch.full((4096 + 20,), FP32_MAX),
        "largest and smallest": torch.tensor([FP32_MAX, -SMALLEST, -FP32_MAX, SMALLEST, 1.0] * 900),
        "one tie step apart": torch.tensor([1.0, 1.0 + 2.0**-23] * 2048),
    }


@pytest.mark.parametrize("k", ALL_K)
def test_random_tensors_encode_and_decode_as_the_oracle_says(oracle, k):
    generator = seeded(k)
    shapes = [(1,), (k - 1,), (k,), (k + 1,), (4095,), (4096,), (4097,), (65, 127), (), (2, 3, 5)]
    tensors = [torch.randn(shape, generator=generator) ** 3 for shape in shapes]
    layout = layout_of(tensors, k)
    payload = encode(tensors, layout).payload
    assert payload == oracle.encode([t.flatten().tolist() for t in tensors], k)
    check_decoded(oracle, payload, layout)


@pytest.mark.parametrize("name", adversarial_tensors())
@pytest.mark.parametrize("k", [16, 64, 512])
def test_adversarial_tensors_encode_and_decode_as_the_oracle_says(oracle, name, k):
    tensor = adversarial_tensors()[name]
    layout = layout_of([tensor], k)
    payload = encode([tensor], layout).payload
    assert payload == oracle.encode([tensor.tolist()], k)
    check_decoded(oracle, payload, layout)


def check_decoded(oracle, payload, layout):
    records = oracle.decode(payload, [spec.elements for spec in layout.specs], layout.codec.k)
    decoded = list(decode(payload, layout))
    assert len(decoded) == len(records)
    for tensor, expected, placed in zip(decoded, records, layout.tensors, strict=True):
        indices, values = oracle.sparse(expected)
        assert tensor.indices.tolist() == indices
        assert tensor.indices.numel() == placed.sent_elements
        assert tensor.values.dtype == torch.float32
        assert torch.equal(bits(tensor.values), bits(torch.tensor(values)))
    assert norm(payload, layout) == oracle.norm(records)
    assert tensor_norms(payload, layout) == [oracle.norm([expected]) for expected in records]


@pytest.mark.parametrize("name", adversarial_tensors())
def test_residual_is_what_the_payload_leaves_out(name):
    a = adversarial_tensors()[name]
    layout = layout_of([a], 64)
    encoded = encode([a], layout)
    (decoded,) = encoded.decoded()
    dense = torch.zeros_like(a)
    dense[decoded.indices] = decoded.values
    assert torch.equal(bits(residual(a, decoded)), bits(a - dense))
    assert bool(torch.isfinite(residual(a, decoded)).all())


def test_sending_and_keeping_add_up_exactly_where_fp32_can_say_so():
    # All kept values equal a bf16 number, so nothing is rounded and residual + decoded gives the buffer back.
    a = torch.full((4096,), 2.0**-70)
    a[::16] = -0.75
    encoded = encode([a], layout_of([a], 64))
    (decoded,) = encoded.decoded()
    rebuilt = residual(a, decoded)
    rebuilt[decoded.indices] += decoded.values
    assert torch.equal(rebuilt, a)


def test_ties_go_to_the_lower_index():
    a = torch.ones(4096)
    a[4000] = 2.0
    (decoded,) = encode([a], layout_of([a], 16)).decoded()
    assert decoded.indices.tolist() == [*range(15), 4000]


def test_padding_of_a_short_chunk_is_never_selected():
    a = torch.zeros(4096 + 64)
    (decoded,) = encode([a], layout_of([a], 64)).decoded()
    assert decoded.indices.tolist() == [*range(64), *range(4096, 4096 + 64)]


def test_chunks_are_flat_runs_of_the_c_ordered_tensor():
    a = torch.arange(128 * 64, dtype=torch.float32).view(64, 128)
    layout = layout_of([a.t()], 16)
    assert encode([a.t()], layout).payload == encode([a.t().contiguous()], layout).payload
    assert encode([a.t()], layout).payload != encode([a.view(128, 64)], layout).payload


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("position", [0, 4095, 4096, 4096 + 9])
def test_a_buffer_that_is_not_finite_is_refused_by_name(bad, position):
    tensors = [torch.ones(5000), torch.ones(4096 + 10), torch.full((3,), float("nan"))]
    tensors[1][position] = bad
    with pytest.raises(NonFiniteError, match="'t1'") as refusal:
        encode(tensors, layout_of(tensors, 16))
    assert refusal.value.tensor_name == "t1"


def test_buffers_that_do_not_fit_the_layout_are_the_callers_fault():
    layout = layout_of([torch.ones(5, 3)], 16)
    for buffers in ([], [torch.ones(5, 3)] * 2, [torch.ones(3, 5)], [torch.ones(5, 3, dtype=torch.bfloat16)]):
        with pytest.raises(ValueError, match=r"layout order|one per tensor"):
            encode(buffers, layout)


def test_encoding_leaves_the_buffer_alone_and_ignores_autograd():
    a = torch.nn.Parameter(torch.randn(9000, generator=seeded(3)))
    before = a.detach().clone()
    encode([a], layout_of([a], 64))
    assert torch.equal(a, before)


def test_payload_does_not_depend_on_threads():
    tensors = [torch.randn(300, 1000, generator=seeded(5)), torch.randn(77, generator=seeded(6))]
    layout = layout_of(tensors, 64)
    threads_before = torch.get_num_threads()
    results = {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            payload = encode(tensors, layout).payload
            values = [t.values.numpy().tobytes() for t in decode(payload, layout)]
            results[threads] = (payload, values, norm(payload, layout))
    finally:
        torch.set_num_threads(threads_before)
    worker = threading.Thread(target=lambda: results.update(other=encode(tensors, layout).payload))
    worker.start()
    worker.join()
    assert results[1] == results[2]
    assert results["other"] == results[1][0]


@pytest.mark.parametrize("name", adversarial_tensors())
@pytest.mark.parametrize("k", [16, 64, 256])
def test_accelerator_selection_agrees_with_the_pruned_one(name, k):
    flat = adversarial_tensors()[name]
    if len(flat) % 4096 < k:
        flat = flat[: len(flat) - len(flat) % 4096]  # what a tiny record would take
    rows = -(-len(flat) // 4096)
    pruned = topk.select(flat, rows, k)
    plain = topk._by_index(topk.first_ranked(flat, rows, k))
    for field in ("indices", "magnitudes", "upper_half"):
        assert torch.equal(getattr(pruned, field), getattr(plain, field)), field


def test_accelerator_unpacking_agrees_with_the_other_one():
    source = random.Random(11)
    print("seed 11")
    rows = []
    for _ in range(50):
        row = [1] * 64 + [0] * 64
        source.shuffle(row)
        rows.append(row)
    upper = torch.tensor(rows, dtype=torch.uint8)
    expected = positions_of_ones(upper, 64)
    assert torch.equal(positions_of_ones_in_fixed_shape(upper, 64), expected)
    assert expected.tolist() == [[at for at, bit in enumerate(row) if bit] for row in rows]


def test_whatever_the_encoder_makes_is_valid_and_its_norm_is_the_values_norm():
    generator = seeded(8)
    for exponent in (-140, -60, 0, 60, 120):
        a = torch.randn(3 * 4096 + 33, generator=generator) * 2.0**exponent
        layout = layout_of([a], 64)
        payload = encode([a], layout).payload
        validate(payload, layout)
        (decoded,) = decode(payload, layout)
        assert norm(payload, layout) == pytest.approx(np.linalg.norm(decoded.values.double().numpy()), rel=1e-12)
