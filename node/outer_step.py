"""The outer step: what a round's committed contributions do to the agreed weights.

The one rule: the result is bitwise the same on every device, thread count and process, or replicas drift apart.
So contributions are added in manifest order, and every multiply, divide, add and subtract is its own elementwise
fp32 operation: no fused `alpha=`, no division by a Python number (on a GPU torch multiplies by the reciprocal
instead) and no atomic adds (they flush subnormals), but gather, add and scatter.

SparseLoCo (arXiv 2508.15706): theta(t+1) = theta(t) - alpha * Delta, alpha applied once, no outer momentum. The paper
writes Delta as the mean over contributors; released code divides each coordinate by the number of its senders. Both
rules exist and take very different alphas.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from sparseloco.compression.codec import DecodedTensor, decode
from sparseloco.compression.layout import PayloadLayout
from sparseloco.compression.validation import PayloadError

AggregationRule = Literal["mean", "contributor-mean"]
CPU_PART_ELEMENTS = 8192  # at k = 64 they spread over 2 MiB of weights, a core's second-level cache


@dataclass(frozen=True)
class ClipRule:
    """Shrink contributions whose norm exceeds `multiple` times the lower-middle median; raises ValueError if <= 0."""

    multiple: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.multiple) and self.multiple > 0):
            raise ValueError(f"clip multiple {self.multiple} must be finite and above 0: choose for example 3.0")


def lower_middle_median(values: Sequence[float]) -> float:
    """Return the middle of the sorted values, the lower of the two for an even number of them."""
    return sorted(values)[(len(values) - 1) // 2]


def clip_factors(norms: Sequence[float], rule: ClipRule | None) -> list[float]:
    """Return what to multiply each contribution with: at most 1, exactly representable in fp32.

    Norms come from `compression.codec.norm`, in manifest order. What a factor cuts off is not given back to its
    sender. Raises ValueError for a norm that is negative or not finite.
    """
    for value in norms:
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"norm {value} must be finite and at least 0: take it from a validated payload")
    if rule is None or not norms:
        return [1.0] * len(norms)
    threshold = rule.multiple * lower_middle_median(norms)
    return [1.0 if value <= threshold else float(np.float32(threshold / value)) for value in norms]


def aggregate(
    payloads: Sequence[bytes],
    layout: PayloadLayout,
    *,
    rule: AggregationRule,
    clip_factors: Sequence[float] | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[torch.Tensor]:
    """Yield the aggregated pseudo-gradient tensor by tensor: fp32, layout shapes and order, on `device`.

    Payloads are the committed contributions in manifest order; for the rule "mean" their number is the divisor.
    All payloads are validated before the first tensor comes: raises PayloadError, which is a sender's fault, with a
    note saying which one; ValueError for a bad argument.
    """
    if rule not in ("mean", "contributor-mean"):
        raise ValueError(f"aggregation rule {rule!r} is unknown: choose 'mean' or 'contributor-mean'")
    factors = [1.0] * len(payloads) if clip_factors is None else list(clip_factors)
    if len(factors) != len(payloads) or not all(0 <= factor <= 1 for factor in factors):
        raise ValueError(f"clip factors {factors} must be one per payload, from 0 to 1: {len(payloads)} payloads")
    decoded = [_decode(payloads, position, layout, device) for position in range(len(payloads))]
    return _aggregate_tensors(decoded, layout, rule, factors, torch.device(device))


def outer_step(
    theta: Sequence[torch.Tensor],
    payloads: Sequence[bytes],
    layout: PayloadLayout,
    *,
    rule: AggregationRule,
    alpha: float,
    clip_factors: Sequence[float] | None = None,
) -> list[torch.Tensor]:
    """Return the next round's weights as new fp32 tensors on theta's device, theta(t) - alpha * Delta.

    `theta` is in layout order and is not changed; alpha is rounded to fp32 before use. Without payloads the result
    is a copy of theta. Raises what `aggregate` raises, before anything is returned.
    """
    _check_theta(theta, layout)
    if not payloads:
        return [weights.detach().clone() for weights in theta]
    device = theta[0].device
    step = torch.tensor(alpha, dtype=torch.float32, device=device)
    deltas = aggregate(payloads, layout, rule=rule, clip_factors=clip_factors, device=device)
    return [torch.sub(weights.detach(), delta.mul_(step)) for weights, delta in zip(theta, deltas, strict=True)]


def _check_theta(theta: Sequence[torch.Tensor], layout: PayloadLayout) -> None:
    if len(theta) != len(layout.specs):
        raise ValueError(f"{len(theta)} weight tensors for {len(layout.specs)} in the layout: pass one each, in order")
    for weights, spec in zip(theta, layout.specs, strict=True):
        if tuple(weights.shape) != spec.shape or weights.dtype != torch.float32:
            raise ValueError(
                f"weights {spec.name!r} are {weights.dtype} {tuple(weights.shape)} instead of torch.float32 "
                f"{spec.shape}: pass fp32 master weights in layout order"
            )


def _decode(payloads: Sequence[bytes], position: int, layout: PayloadLayout, device: torch.device | str) -> Iterator[DecodedTensor]:
    try:
        return iter(decode(payloads[position], layout, device))
    except PayloadError as error:
        error.add_note(f"contribution {position} of {len(payloads)}, in manifest order")
        raise


def _aggregate_tensors(
    decoded: Sequence[Iterator[DecodedTensor]],
    layout: PayloadLayout,
    rule: AggregationRule,
    factors: Sequence[float],
    device: torch.device,
) -> Iterator[torch.Tensor]:
    for spec in layout.specs:
        total = torch.zeros(spec.elements, dtype=torch.float32, device=device)
        senders = torch.zeros_like(total) if rule == "contributor-mean" else None
        tensors = [next(contribution) for contribution in decoded]
        values = [
            tensor.values if factor == 1.0 else torch.mul(tensor.values, _fp32(factor, device))
            for tensor, factor in zip(tensors, factors, strict=True)
        ]
        for part in _parts(tensors):
            for tensor, scaled in zip(tensors, values, strict=True):
                _add_at(total, tensor.indices[part], scaled[part])
                if senders is not None:
                    _add_at(senders, tensor.indices[part], torch.ones_like(scaled[part]))
        divisor = _fp32(max(len(decoded), 1), device) if senders is None else senders.clamp_(min=1)
        yield total.div_(divisor).view(spec.shape)  # true division: the divisor is a tensor on the device


def _parts(tensors: Sequence[DecodedTensor]) -> list[slice]:
    """Cut one tensor's sent elements so that, on a CPU, what a part touches stays cached from payload to payload.

    Every payload has its n-th sent element in the same chunk, so a part means the same chunks to all of them.
    """
    if not tensors:
        return []
    sent = tensors[0].indices.numel()
    step = CPU_PART_ELEMENTS if tensors[0].indices.device.type == "cpu" else sent
    return [slice(start, start + step) for start in range(0, sent, step)]


def _add_at(total: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Add values to total at indices, in place; indices do not repeat."""
    total.index_copy_(0, indices, torch.add(total[indices], values))


def _fp32(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32, device=device)
