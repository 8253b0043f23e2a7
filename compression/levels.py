"""Two bf16 magnitudes per chunk for the kept values, and the codes that point at them.

The one rule: every step is exact or rounds in one fixed way. Choices of the codec id `ef2-4096`:

- Split: the first ceil(m / 2) of a record's m kept elements by rank (`topk`) form the upper class, the rest the
  lower one; no further Lloyd iteration.
- hi and lo are the class means of |v|: summed in float64 by ascending index from 0, divided by the class size, then
  rounded once to bf16, to nearest even. What would round to infinity becomes the largest finite bf16.
- An empty lower class (m = 1) takes hi as its level.
- A code is `sign + 2 * magnitude`: sign is the element's fp32 sign bit, magnitude is 1 for the upper class. Where
  lo = hi every magnitude bit is 0, where hi = 0 the whole code is 0.

lo <= hi without a check: let m be the smallest upper value. Rounded sums and quotients are monotone in each term and
exact for equal terms (24 bits + 9 for up to 512 terms fit float64), so hi >= bf16(m) >= lo.
"""

import torch

BF16_MAX_BITS = 0x7F7F
BF16_MIN_NORMAL = 2.0**-126
BF16_QUANTUM = 2.0**-133  # spacing of subnormal bf16
DROPPED_BITS = 45  # float64 keeps 52 fraction bits, bf16 7
SIGN_BIT = 1
MAGNITUDE_BIT = 2


def two_levels(magnitudes: torch.Tensor, upper_half: torch.Tensor) -> torch.Tensor:
    """Return (lo, hi) as bf16 bits: int32 [rows, 2], from |v| [rows, m] fp32 and the split [rows, m] bool."""
    rows, m = magnitudes.shape
    exact = magnitudes.to(torch.float64)
    zero = exact.new_zeros(())
    by_class = torch.stack([torch.where(upper_half, zero, exact), torch.where(upper_half, exact, zero)])
    columns = by_class.permute(2, 0, 1).contiguous()  # [m, 2, rows]; adding the other class's zeros changes nothing
    sums = exact.new_zeros((2, rows))
    for column in columns:  # a library reduction would pick its own order
        sums += column
    upper_count = (m + 1) // 2
    counts = torch.tensor([[max(m - upper_count, 1)], [upper_count]], dtype=torch.float64, device=sums.device)
    lo, hi = round_to_bf16_bits(sums / counts)
    return torch.stack([hi if m == 1 else lo, hi], dim=1)


def round_to_bf16_bits(values: torch.Tensor) -> torch.Tensor:
    """Round float64 >= 0 to bf16 once, to nearest even, saturating at the largest finite bf16; int32 bits.

    torch's own conversion goes through fp32 and would round twice.
    """
    bits = values.view(torch.int64)
    half_less_one = (1 << (DROPPED_BITS - 1)) - 1
    rounded = bits + half_less_one + ((bits >> DROPPED_BITS) & 1)
    normal = ((rounded >> DROPPED_BITS) << DROPPED_BITS).view(torch.float64)
    subnormal = torch.round(values / BF16_QUANTUM) * BF16_QUANTUM  # exact but for the round, which is half to even
    nearest = torch.where(values < BF16_MIN_NORMAL, subnormal, normal)
    return (nearest.to(torch.float32).view(torch.int32) >> 16).clamp(max=BF16_MAX_BITS)


def make_codes(negative: torch.Tensor, upper_half: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return canonical codes, int64 [rows, m], from sign bits and split (bool [rows, m]) and levels int32 [rows, 2]."""
    lo, hi = levels[:, :1], levels[:, 1:]
    magnitude = upper_half & (lo != hi)
    return ((negative * SIGN_BIT) + (magnitude * MAGNITUDE_BIT)) * (hi != 0).to(torch.int64)


def dequantise(codes: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values [rows, m] that codes [rows, m] and levels int32 [rows, 2] stand for, exactly."""
    lo, hi = (levels << 16).view(torch.float32).unbind(dim=1)
    return torch.stack([lo, -lo, hi, -hi], dim=1).gather(1, codes.to(torch.int64))
