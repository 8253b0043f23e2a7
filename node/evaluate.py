"""The held-out loss of a state: mean nats per token over the run's fixed held-out windows, per byte with byte tokens.

The one rule: evaluating disturbs nothing. The evaluator has a copy of the model without weights (on torch's meta
device), and runs it on the weights it is given; so it may run while the training model trains in another thread.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import nn

from sparseloco.node.device import autocast
from sparseloco.node.model import Theta, trainable_tensors
from sparseloco.node.windows import Indices

SEQUENCES_AT_ONCE = 16


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats per target token over `windows` windows; a document's end mark counts as a token."""

    loss: float
    windows: int

    @property
    def bits(self) -> float:
        """Bits per token: per byte of text, with byte tokens."""
        return self.loss / math.log(2)


class Evaluator:
    """Computes the held-out loss of any state of a model; used by one thread at a time."""

    def __init__(self, model: nn.Module, windows: Indices, device: torch.device) -> None:
        """`windows` are [windows, length + 1] tokens, from `windows.held_out_windows`; the model is left alone."""
        without_weights = {
            id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            for _, parameter in trainable_tensors(model)
        }
        self._model = copy.deepcopy(model, without_weights).eval()
        self._windows = torch.from_numpy(windows)
        self._device = device

    def __call__(self, theta: Theta) -> Evaluation:
        """The mean loss of a state; its tensors are only read."""
        total = 0.0
        weights = {name: tensor.detach().to(self._device) for name, tensor in theta.items()}
        with torch.no_grad():
            for part in torch.split(self._windows, SEQUENCES_AT_ONCE):
                tokens = part.to(self._device)
                with autocast(self._device):
                    output = torch.func.functional_call(self._model, weights, (), {"input_ids": tokens[:, :-1]})
                logits = output.logits.float().flatten(0, 1)  # [sequences * length, vocabulary]
                total += nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").item()
        count = len(self._windows)
        return Evaluation(loss=total / (count * (self._windows.shape[1] - 1)), windows=count)
