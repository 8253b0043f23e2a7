"""The outer step against ALGORITHM steps 2 to 7 written out in numpy, bit for bit.

The reference has its own Top-k, quantiser, clip and sum; it knows nothing of payloads.
"""

import math
import struct

import numpy as np
import pytest
import torch

from sparseloco.compression.codec import decode, encode, norm
from sparseloco.compression.error_feedback import accumulate, pseudo_gradient, residual
from sparseloco.compression.layout import CodecSpec, PayloadLayout, TensorSpec
from sparseloco.compression.validation import PayloadError
from sparseloco.node.outer_step import ClipRule, aggregate, clip_factors, lower_middle_median, outer_step

K = 64
SHAPES = [(33, 257), (64,), (17,), (4096,), (4096 + 40,)]
LAYOUT = PayloadLayout([TensorSpec(f"t{i}", shape) for i, shape in enumerate(SHAPES)], CodecSpec(k=K))
BETA = 0.95


# ---- the reference -------------------------------------------------------------------------------------------------


def reference_bf16(value):
    """Round a float64 >= 0 of ordinary size to bf16: 8 significant bits, half to even."""
    if value == 0.0:
        return np.float32(0)
    fraction, exponent = math.frexp(value)
    return np.float32(math.ldexp(round(fraction * 256), exponent - 8))


def reference_decoded(a):
    """D = decode(encode(a)) of one fp32 tensor, dense, and where it was sent."""
    flat, decoded, sent = a.reshape(-1), np.zeros(a.size, np.float32), np.zeros(a.size, bool)
    for start in range(0, a.size, 4096):
        chunk = flat[start : start + 4096]
        order = np.lexsort((np.arange(chunk.size), -np.abs(chunk.astype(np.float64))))[:K]
        half = (order.size + 1) // 2
        levels = {}
        for members, name in ((sorted(order[:half]), "hi"), (sorted(order[half:]), "lo")):
            total = 0.0
            for member in members:
                total += float(abs(chunk[member]))
            levels[name] = reference_bf16(total / len(members)) if members else None
        for rank, index in enumerate(order):
            level = levels["hi"] if rank < half else levels["lo"]
            decoded[start + index] = -level if np.signbit(chunk[index]) else level
            sent[start + index] = True
    return decoded.reshape(a.shape), sent.reshape(a.shape)


def reference_round(theta, workers, residuals, committed, rule, alpha):
    """ALGORITHM steps 2 to 7: theta, every theta_r and e_r, as lists of fp32 arrays; returns theta(t+1) and all e_r."""
    delta = [np.zeros_like(t) for t in theta]
    senders = [np.zeros(t.shape, np.float32) for t in theta]
    new_residuals = []
    for r, (worker, e) in enumerate(zip(workers, residuals, strict=True)):
        a = [np.float32(BETA) * e_i + (t - w) for e_i, t, w in zip(e, theta, worker, strict=True)]
        if r not in committed:
            new_residuals.append(a)
            continue
        decoded = [reference_decoded(a_i) for a_i in a]
        new_residuals.append([a_i - d for a_i, (d, _) in zip(a, decoded, strict=True)])
        for i, (d, sent) in enumerate(decoded):
            delta[i] = delta[i] + d
            senders[i] = senders[i] + sent.astype(np.float32)
    for i in range(len(theta)):
        divisor = np.float32(max(len(committed), 1)) if rule == "mean" else np.maximum(senders[i], np.float32(1))
        delta[i] = delta[i] / divisor
    return [t - np.float32(alpha) * d for t, d in zip(theta, delta, strict=True)], new_residuals


# ---- the real thing ------------------------------------------------------------------------------------------------


def our_round(theta, workers, residuals, committed, rule, alpha):
    buffers = [
        [accumulate(e, pseudo_gradient(t, w), BETA) for e, t, w in zip(es, theta, ws, strict=True)]
        for es, ws in zip(residuals, workers, strict=True)
    ]
    encoded = [encode(a, LAYOUT) for a in buffers]
    payloads = [encoded[r].payload for r in committed]
    new_theta = outer_step(theta, payloads, LAYOUT, rule=rule, alpha=alpha)
    new_residuals = [
        [residual(a, d) for a, d in zip(buffers[r], encoded[r].decoded(), strict=True)] if r in committed else buffers[r]
        for r in range(len(workers))
    ]
    return new_theta, new_residuals


def make_round(count, seed):
    """Theta, theta_r and e_r of `count` workers as fp32 arrays; workers share part of their drift, so sends overlap."""
    print(f"seed {seed}")
    generator = np.random.default_rng(seed)

    def draw(scale):
        return [(generator.standard_normal(shape) * scale).astype(np.float32) for shape in SHAPES]

    theta, drift = draw(1.0), draw(0.02)
    workers = [[t + d + n for t, d, n in zip(theta, drift, draw(0.01), strict=True)] for _ in range(count)]
    return theta, workers, [draw(0.01) for _ in range(count)]


def tensors(nested):
    return [tensors(x) if isinstance(x, list) else torch.from_numpy(x.copy()) for x in nested]


def same_bits(ours, reference):
    return all(a.dtype == torch.float32 and a.numpy().tobytes() == b.tobytes() for a, b in zip(ours, reference, strict=True))


def some_payloads(count, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [encode([torch.randn(s, generator=generator) * scale for s in SHAPES], LAYOUT).payload for _ in range(count)]


def some_theta():
    return [torch.randn(shape, generator=torch.Generator().manual_seed(40)) for shape in SHAPES]


@pytest.mark.parametrize("rule", ["mean", "contributor-mean"])
@pytest.mark.parametrize("count", [1, 3, 8])
@pytest.mark.parametrize("left_out", [None, 0, 2])
def test_round_equals_the_reference_bit_for_bit(rule, count, left_out):
    theta, workers, residuals = make_round(count, seed=100 * count)
    committed = [r for r in range(count) if r != left_out]
    expected, kept = reference_round(theta, workers, residuals, committed, rule, alpha=0.7)
    new_theta, new_residuals = our_round(tensors(theta), tensors(workers), tensors(residuals), committed, rule, alpha=0.7)
    assert same_bits(new_theta, expected)
    for ours, reference in zip(new_residuals, kept, strict=True):
        assert same_bits(ours, reference)


@pytest.mark.parametrize("rule", ["mean", "contributor-mean"])
def test_three_rounds_in_a_row_stay_equal(rule):
    theta, workers, residuals = make_round(3, seed=7)
    ours_theta, ours_residuals = tensors(theta), tensors(residuals)
    for lost in (None, 1, 0):
        committed = [r for r in range(3) if r != lost]
        drift = [[w - t for w, t in zip(worker, theta, strict=True)] for worker in workers]
        theta, residuals = reference_round(theta, workers, residuals, committed, rule, alpha=0.9)
        ours_theta, ours_residuals = our_round(ours_theta, tensors(workers), ours_residuals, committed, rule, alpha=0.9)
        workers = [[t + d for t, d in zip(theta, step, strict=True)] for step in drift]
    assert same_bits(ours_theta, theta)
    for ours, reference in zip(ours_residuals, residuals, strict=True):
        assert same_bits(ours, reference)


@pytest.mark.parametrize("rule", ["mean", "contributor-mean"])
def test_thread_count_does_not_change_a_bit(rule):
    theta, payloads = some_theta(), some_payloads(5, seed=41)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(outer_step(theta, payloads, LAYOUT, rule=rule, alpha=0.3))
    finally:
        torch.set_num_threads(before)
    assert same_bits(results[0], [t.numpy() for t in results[1]])


def test_arrival_order_does_not_matter_once_sorted_by_the_manifest():
    payloads = dict(zip("abcde", some_payloads(5, seed=42), strict=True))
    manifest = ["d", "a", "e", "b", "c"]
    results = []
    for arrival in ("abcde", "edcba"):
        store = {name: payloads[name] for name in arrival}
        results.append(outer_step(some_theta(), [store[name] for name in manifest], LAYOUT, rule="mean", alpha=1.0))
    assert same_bits(results[0], [t.numpy() for t in results[1]])


def test_theta_is_not_changed_and_the_result_is_new():
    theta = some_theta()
    before = [t.clone() for t in theta]
    for payloads in ([], some_payloads(2, seed=43)):
        result = outer_step(theta, payloads, LAYOUT, rule="mean", alpha=1.0)
        assert all(torch.equal(t, b) for t, b in zip(theta, before, strict=True))
        assert not {t.data_ptr() for t in theta} & {t.data_ptr() for t in result}


def test_without_payloads_theta_stays():
    theta = [t.numpy() for t in some_theta()]
    assert same_bits(outer_step(some_theta(), [], LAYOUT, rule="mean", alpha=1.0), theta)
    assert all(not d.any() for d in aggregate([], LAYOUT, rule="mean"))


def test_mean_divides_by_contributions_and_contributor_mean_by_senders():
    layout = PayloadLayout([TensorSpec("t", (4096,))], CodecSpec(k=16))
    buffers = [torch.zeros(4096) for _ in range(3)]
    for buffer, places in zip(buffers, (slice(0, 16), slice(0, 16), slice(8, 24)), strict=True):
        buffer[places] = 3.0
    payloads = [encode([buffer], layout).payload for buffer in buffers]
    (mean,) = aggregate(payloads, layout, rule="mean")
    (by_sender,) = aggregate(payloads, layout, rule="contributor-mean")
    assert mean[[0, 8, 16, 24]].tolist() == [2.0, 3.0, 1.0, 0.0]
    assert by_sender[[0, 8, 16, 24]].tolist() == [3.0, 3.0, 3.0, 0.0]


def test_subnormal_values_are_summed_not_flushed():
    layout = PayloadLayout([TensorSpec("t", (3,))], CodecSpec(k=16))
    tiny = torch.full((3,), 2.0**-133)
    payload = encode([tiny], layout).payload
    (total,) = aggregate([payload, payload], layout, rule="contributor-mean")
    assert torch.equal(total, tiny)


def test_division_is_true_division():
    # 1/41 rounded to fp32 times 41 is not 1: a reciprocal would show.
    layout = PayloadLayout([TensorSpec("t", (1,))], CodecSpec(k=16))
    (delta,) = aggregate([encode([torch.ones(1)], layout).payload] * 41, layout, rule="mean")
    assert np.float32(41) * (np.float32(1) / np.float32(41)) != 1
    assert delta.item() == 1.0


def test_a_refused_payload_says_which_contribution_it_was():
    payloads = some_payloads(3, seed=44)
    payloads[1] = payloads[1][:-1]
    with pytest.raises(PayloadError) as refusal:
        outer_step(some_theta(), payloads, LAYOUT, rule="mean", alpha=1.0)
    assert refusal.value.rule == "length"
    assert refusal.value.__notes__ == ["contribution 1 of 3, in manifest order"]


def test_aggregate_validates_every_payload_before_the_first_tensor():
    with pytest.raises(PayloadError):
        aggregate([*some_payloads(2, seed=45), b""], LAYOUT, rule="mean")


def test_bad_arguments_are_the_callers_fault():
    theta, payloads = some_theta(), some_payloads(2, seed=46)
    with pytest.raises(ValueError, match="'median' is unknown"):
        outer_step(theta, payloads, LAYOUT, rule="median", alpha=1.0)
    with pytest.raises(ValueError, match="clip factors"):
        outer_step(theta, payloads, LAYOUT, rule="mean", alpha=1.0, clip_factors=[1.0])
    with pytest.raises(ValueError, match="clip factors"):
        outer_step(theta, payloads, LAYOUT, rule="mean", alpha=1.0, clip_factors=[1.0, 1.5])
    with pytest.raises(ValueError, match="layout order"):
        outer_step(theta[::-1], payloads, LAYOUT, rule="mean", alpha=1.0)
    with pytest.raises(ValueError, match="in order"):
        outer_step(theta[1:], payloads, LAYOUT, rule="mean", alpha=1.0)


# ---- clipping ------------------------------------------------------------------------------------------------------


def test_median_takes_the_lower_middle():
    assert [lower_middle_median(v) for v in ([3.0], [4.0, 1.0], [9.0, 1.0, 2.0], [4.0, 3.0, 2.0, 1.0])] == [3, 1, 2, 2]


def test_clip_only_shrinks_and_only_what_exceeds_the_threshold():
    assert clip_factors([1.0, 2.0, 3.0, 400.0, 0.0], ClipRule(multiple=1.5)) == [1.0, 1.0, 1.0, _f32(3 / 400), 1.0]
    assert clip_factors([5.0, 1.0], None) == [1.0, 1.0]
    assert clip_factors([], ClipRule(multiple=2.0)) == []


def _f32(value):
    return struct.unpack("<f", struct.pack("<f", value))[0]


def test_clipped_contribution_is_scaled_in_fp32():
    small, large = some_payloads(2, seed=47), some_payloads(1, seed=48, scale=100.0)
    payloads = [*small, *large]
    factors = clip_factors([norm(p, LAYOUT) for p in payloads], ClipRule(multiple=2.0))
    assert factors[:2] == [1.0, 1.0]
    assert 0.01 < factors[2] < 0.03
    for i, delta in enumerate(aggregate(payloads, LAYOUT, rule="mean", clip_factors=factors)):
        expected = np.zeros(math.prod(SHAPES[i]), np.float32)
        for payload, factor in zip(payloads, factors, strict=True):
            tensor = list(decode(payload, LAYOUT))[i]
            expected[tensor.indices.numpy()] += tensor.values.numpy() * np.float32(factor)
        assert delta.numpy().tobytes() == (expected / np.float32(3)).tobytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_a_norm_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="norm"):
        clip_factors([1.0, bad], ClipRule(multiple=2.0))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_clip_multiple_must_be_positive(bad):
    with pytest.raises(ValueError, match="multiple"):
        ClipRule(multiple=bad)
