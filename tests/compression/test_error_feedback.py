"""Residuals are derived, in fp32, in separate steps."""

import numpy as np
import torch

from sparseloco.compression.codec import DecodedTensor
from sparseloco.compression.error_feedback import accumulate, pseudo_gradient, residual


def test_decay_comes_first_and_rounds_on_its_own():
    print("seed 1")
    generator = torch.Generator().manual_seed(1)
    e, old, new = (torch.randn(50, 70, generator=generator) for _ in range(3))
    a = accumulate(e, pseudo_gradient(old, new), 0.95)
    expected = np.float32(0.95) * e.numpy() + (old.numpy() - new.numpy())
    assert a.dtype == torch.float32
    assert a.numpy().tobytes() == expected.tobytes()


def test_arguments_stay_as_they_are():
    e, delta, a = torch.ones(4), torch.full((4,), 2.0), torch.arange(6.0).view(2, 3)
    accumulate(e, delta, 0.5)
    left = residual(a, DecodedTensor(torch.tensor([1, 5]), torch.tensor([0.25, 4.0])))
    assert torch.equal(e, torch.ones(4))
    assert torch.equal(delta, torch.full((4,), 2.0))
    assert torch.equal(a, torch.arange(6.0).view(2, 3))
    assert left.tolist() == [[0.0, 0.75, 2.0], [3.0, 4.0, 1.0]]


def test_residual_of_a_transposed_buffer_keeps_c_order():
    a = torch.arange(6.0).view(2, 3).t()
    left = residual(a, DecodedTensor(torch.tensor([1]), torch.tensor([3.0])))
    assert left.tolist() == [[0.0, 0.0], [1.0, 4.0], [2.0, 5.0]]
