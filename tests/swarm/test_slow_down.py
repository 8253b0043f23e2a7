"""A node that is made slow: each inner step takes its factor longer, and stopping does not wait for it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparseloco.node.inner_loop import InnerLoop, InnerSettings

SETTINGS = InnerSettings(inner_steps=3, total_steps=30, learning_rate=1e-3)


class Clock:
    """A clock that moves when somebody sleeps, and by 2 s whenever a batch is drawn: what a step takes."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def batch(self, step: int) -> torch.Tensor:
        self.now += 2.0
        return torch.zeros(2, 9, dtype=torch.int64).numpy()


class OneMatrix(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(4, 4)

    def forward(self, input_ids: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.table(input_ids))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    stand_in = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleep)
    monkeypatch.setattr("sparseloco.node.inner_loop.time", stand_in)
    return clock


def loop(slow_down: float) -> InnerLoop:
    return InnerLoop(OneMatrix(), SETTINGS, torch.device("cpu"), slow_down=slow_down)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_steps_take_the_factor_times_as_long(clock: Clock, factor: float) -> None:
    result = loop(factor).train_round(0, clock, lambda: False)
    assert result.steps == 3
    assert result.seconds == pytest.approx(3 * 2.0 * factor)


def test_slow_step_ends_early_when_training_shall_stop(clock: Clock) -> None:
    result = loop(1000.0).train_round(0, clock, lambda: clock.now > 10.0)
    assert result.steps == 1  # the step itself counts
    assert result.seconds == pytest.approx(10.0, abs=0.2)
