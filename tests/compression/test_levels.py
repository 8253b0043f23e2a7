"""Rounding to bf16, once and to nearest even, and the quality the two levels must reach."""

import torch

from sparseloco.compression.codec import encode
from sparseloco.compression.layout import CodecSpec, PayloadLayout, TensorSpec
from sparseloco.compression.levels import round_to_bf16_bits, two_levels


def test_rounding_matches_exact_fractions_over_the_whole_range(oracle):
    print("seed 2")
    generator = torch.Generator().manual_seed(2)
    patterns = torch.randint(0, 0x7F80, (2000,), generator=generator)
    below = torch.tensor([oracle.bf16_value(p) for p in patterns.tolist()], dtype=torch.float64)
    above = torch.tensor([oracle.bf16_value(p + 1) for p in patterns.clamp(max=0x7F7E).tolist()], dtype=torch.float64)
    middle = (below + above) / 2
    nudge = 1 + 2.0**-50
    cases = torch.cat([below, middle, middle * nudge, middle / nudge, below * nudge, torch.zeros(1).double()])
    assert round_to_bf16_bits(cases).tolist() == [oracle.nearest_bf16(value) for value in cases.tolist()]


def test_a_value_just_above_a_tie_is_not_rounded_twice():
    # Through fp32 this becomes the tie itself and then rounds down to even.
    value = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_to_bf16_bits(value).tolist() == [0x3F81]


def test_what_would_overflow_becomes_the_largest_finite_level():
    assert round_to_bf16_bits(torch.tensor([3.4028234663852886e38], dtype=torch.float64)).tolist() == [0x7F7F]


def test_means_that_vanish_in_bf16_become_zero():
    assert round_to_bf16_bits(torch.tensor([2.0**-134, 2.0**-134 * 1.01], dtype=torch.float64)).tolist() == [0, 1]


def test_a_single_element_has_one_level():
    assert two_levels(torch.tensor([[1.5]]), torch.tensor([[True]])).tolist() == [[0x3FC0, 0x3FC0]]


def test_lower_level_never_exceeds_the_upper_one():
    print("seed 4")
    generator = torch.Generator().manual_seed(4)
    steps = torch.randint(0, 3, (500, 64), generator=generator).sort(dim=1).values
    magnitudes = (torch.full((500, 64), 0x3F800000, dtype=torch.int32) + steps.int()).view(torch.float32)
    lo, hi = two_levels(magnitudes, torch.arange(64).expand(500, 64) >= 32).unbind(dim=1)
    assert bool((lo <= hi).all())


def test_two_levels_leave_less_than_half_the_error_of_one():
    print("seed 9")
    a = torch.randn(64 * 4096, generator=torch.Generator().manual_seed(9))
    (decoded,) = encode([a], PayloadLayout([TensorSpec("a", (64 * 4096,))], CodecSpec(k=64))).decoded()
    kept = a[decoded.indices].abs().view(64, 64)
    two = (kept - decoded.values.abs().view(64, 64)).square().sum()
    one = (kept - kept.mean(dim=1, keepdim=True)).square().sum()
    assert two < one / 2
