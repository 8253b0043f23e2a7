"""Error feedback: what a payload leaves out is kept and offered again in later rounds (SparseLoCo, arXiv 2508.15706).

The one rule: residuals are derived, never edited. A residual is always `a - D`, of one buffer a and of what the
receivers decode from the payload made of it; if that payload was not committed, D = 0 and the residual is a itself.
The functions here are pure: they return new tensors, leave their arguments alone, work in fp32 on any device, and
multiply and add in separate steps, so their bits are the same everywhere.
"""

import torch

from sparseloco.compression.codec import DecodedTensor


def pseudo_gradient(theta_old: torch.Tensor, theta_new: torch.Tensor) -> torch.Tensor:
    """Return the agreed weights minus the locally trained ones (fp32), the direction an outer step subtracts."""
    return torch.sub(theta_old, theta_new)


def accumulate(residual: torch.Tensor, pseudo_gradient: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the buffer to encode, a = beta * residual + pseudo_gradient; beta is rounded to fp32 first."""
    decayed = torch.mul(residual, torch.tensor(beta, dtype=torch.float32, device=residual.device))
    return torch.add(decayed, pseudo_gradient)


def residual(a: torch.Tensor, decoded: DecodedTensor) -> torch.Tensor:
    """Return a - D, where D is what receivers decode; next round's `accumulate` takes it."""
    flat = a.flatten()
    left = torch.sub(flat[decoded.indices], decoded.values)
    return flat.index_put((decoded.indices,), left).view(a.shape)  # out of place; indices do not repeat


def add_back(residual: torch.Tensor, decoded: DecodedTensor) -> torch.Tensor:
    """Return e + D: a contribution that counted on a branch that lost, given back; equal up to rounding to never subtracting it."""
    flat = residual.flatten()
    more = torch.add(flat[decoded.indices], decoded.values)
    return flat.index_put((decoded.indices,), more).view(residual.shape)
