"""The inner loop: AdamW on the peer's own data between two exchanges (SparseLoCo, arXiv 2508.15706, step 1).

The one rule: everything that decides the next weights is either agreed (the weights a round starts from, put in by
copy), a function of the global inner step (learning rate) or of (run, round, member, position) (the batch), or kept by
this object across rounds (AdamW's two moments, which are never averaged or reset). So a restart from `state_tensors`
goes on bit for bit, and a round that was cut short shifts nobody's schedule.

Weight decay falls on matrices (embeddings included) and not on vectors: norm gains and biases, which have no
direction to shrink, are left alone, as is common.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sparseloco.bootstrap.errors import HardwareError, StateError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.device import autocast
from sparseloco.node.model import Theta, load_theta, trainable_tensors
from sparseloco.node.windows import Indices

ADAM_EPS = 1e-8
# A joiner's moments start at zero in the middle of the schedule; its first steps are shortened so that they do not
# throw the agreed weights about. Founders have the run's own warm-up.
JOIN_RAMP_STEPS = 10
SLOW_SLICE_SECONDS = 0.1  # a machine made slow still looks so often whether to stop
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class InnerSettings:
    """The inner optimizer's part of `[algorithm]`; `total_steps` is rounds x H, where the schedule ends."""

    inner_steps: int
    total_steps: int
    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 30
    schedule: str = "cosine"
    final_fraction: float = 0.1

    @classmethod
    def from_run(cls, run: RunFile) -> InnerSettings:
        """What a run file says about the inner loop."""
        algorithm = run.algorithm
        return cls(
            inner_steps=algorithm.inner_steps,
            total_steps=run.run.rounds * algorithm.inner_steps,
            learning_rate=algorithm.learning_rate,
            betas=algorithm.adam_betas,
            weight_decay=algorithm.weight_decay,
            clip_norm=algorithm.clip_norm,
            warmup_steps=algorithm.warmup_steps,
            schedule=algorithm.schedule,
            final_fraction=algorithm.final_learning_rate_fraction,
        )


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """What one round's training came to. Losses are nats per token, NaN without a step; `steps` were applied,
    `skipped_steps` drew their batch but had a non-finite gradient; `next_step` is where the data goes on. `finite` is
    False if the weights are not, or if most steps were skipped: the peer then withholds its contribution."""

    steps: int
    skipped_steps: int
    next_step: int
    tokens: int
    loss_mean: float
    loss_last: float
    seconds: float
    finite: bool


class Batches(Protocol):
    """Where batches come from; see `windows.MemberData`."""

    def batch(self, step: int, /) -> Indices: ...


def learning_rate_at(settings: InnerSettings, global_step: int) -> float:
    """The learning rate of a global inner step (round * H + step, 0-based): linear warm-up, then the schedule."""
    peak, final = settings.learning_rate, settings.learning_rate * settings.final_fraction
    if global_step < settings.warmup_steps:
        return peak * (global_step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return peak
    progress = (global_step - settings.warmup_steps) / max(settings.total_steps - settings.warmup_steps, 1)
    progress = min(progress, 1.0)
    if settings.schedule == "linear":
        return peak + (final - peak) * progress
    return final + (peak - final) * (1 + math.cos(math.pi * progress)) / 2


class InnerLoop:
    """A model, its AdamW and the number of steps that AdamW has taken; used by one thread at a time."""

    def __init__(
        self,
        model: nn.Module,
        settings: InnerSettings,
        device: torch.device,
        micro_batch: int | None = None,
        slow_down: float = 1.0,
    ) -> None:
        """`micro_batch` sequences at once (None: the whole batch); it is halved when a GPU runs out of memory.

        Each step takes `slow_down` times as long as it would: a slow machine, to see what the group makes of it.
        """
        self._slow_down = slow_down
        self.model = model.to(device).train()
        self.settings = settings
        self.device = device
        self.micro_batch = micro_batch
        self.adam_steps = 0
        self._named = trainable_tensors(self.model)
        self._parameters = [parameter for _, parameter in self._named]
        matrices = [parameter for parameter in self._parameters if parameter.dim() >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.dim() < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": group, "weight_decay": decay}
                for group, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
                if group
            ],
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=ADAM_EPS,
            foreach=True,
        )

    def train_round(
        self,
        round_number: int,
        batches: Batches,
        should_stop: Callable[[], bool],
        *,
        first_step: int = 0,
        last_step: int | None = None,
    ) -> RoundResult:
        """Train from `first_step` (0-based in the round) up to H or `last_step`, or until `should_stop()`.

        The model holds the round's agreed weights at step 0. Runs in a worker thread; `should_stop` is asked before
        every step. HardwareError if even one sequence does not fit the GPU's memory. Next: the pseudo-gradient.
        """
        started = time.monotonic()
        losses: list[float] = []
        tokens = skipped = 0
        step = first_step
        end = self.settings.inner_steps if last_step is None else min(last_step, self.settings.inner_steps)
        with torch.random.fork_rng(devices=[]):
            while step < end and not should_stop():
                global_step = round_number * self.settings.inner_steps + step
                torch.manual_seed(global_step)  # dropout, where a model has it, must repeat after a restart
                step_started = time.monotonic()
                batch = torch.from_numpy(batches.batch(step)).to(self.device)  # [batch, length + 1]
                loss = self._gradient(batch)
                step += 1
                if not self._clip():
                    skipped += 1
                    continue
                self._apply(global_step)
                self._wait_as_slow(time.monotonic() - step_started, should_stop)
                losses.append(loss)
                tokens += batch.shape[0] * (batch.shape[1] - 1)
        self._optimizer.zero_grad()
        return RoundResult(
            steps=len(losses),
            skipped_steps=skipped,
            next_step=step,
            tokens=tokens,
            loss_mean=math.fsum(losses) / len(losses) if losses else math.nan,
            loss_last=losses[-1] if losses else math.nan,
            seconds=time.monotonic() - started,
            finite=skipped <= len(losses) and all(bool(p.isfinite().all()) for p in self._parameters),
        )

    def _wait_as_slow(self, step_seconds: float, should_stop: Callable[[], bool]) -> None:
        """What `slow_down` adds to a step that took so long; ends early when training shall stop."""
        until = time.monotonic() + (self._slow_down - 1) * step_seconds
        while (left := until - time.monotonic()) > 0 and not should_stop():
            time.sleep(min(left, SLOW_SLICE_SECONDS))

    def put_back(self, theta: Theta) -> None:
        """Copy the agreed weights in; AdamW's moments stay."""
        load_theta(self.model, theta)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """AdamW's moments and step count as named CPU tensors, for a safetensors file; independent copies."""
        state = {"adam_steps": torch.tensor(self.adam_steps, dtype=torch.int64)}
        for name, parameter in self._named:
            moments = self._optimizer.state.get(parameter, {})
            for moment in MOMENTS:
                tensor = moments.get(moment)
                tensor = torch.zeros_like(parameter) if tensor is None else tensor
                state[f"{moment}.{name}"] = tensor.detach().to("cpu", copy=True).contiguous()
        return state

    def load_state_tensors(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what `state_tensors` gave; StateError if it belongs to another model."""
        expected = {f"{moment}.{name}": p.shape for name, p in self._named for moment in MOMENTS}
        found = {key: tensor.shape for key, tensor in state.items() if key != "adam_steps"}
        if "adam_steps" not in state or expected != found:
            raise StateError("the saved optimizer state is of another model; remove it, or use the run's own state")
        self.adam_steps = int(state["adam_steps"])
        for name, parameter in self._named:
            moments = {moment: state[f"{moment}.{name}"].to(self.device, copy=True) for moment in MOMENTS}
            step = torch.tensor(float(self.adam_steps))
            self._optimizer.state[parameter] = {"step": step, **moments} if self.adam_steps else {}

    def _gradient(self, batch: torch.Tensor) -> float:
        """Leave the mean loss's gradient in the parameters and return the loss; halves the micro-batch if it must."""
        while True:
            micro_batch = min(self.micro_batch or batch.shape[0], batch.shape[0])
            try:
                return self._accumulate(batch, micro_batch)
            except torch.cuda.OutOfMemoryError as error:
                if micro_batch == 1:
                    raise HardwareError(
                        f"{self.device}: one sequence of {batch.shape[1] - 1} tokens does not fit the device's memory; "
                        "use a larger device or --device cpu"
                    ) from error
                self.micro_batch = micro_batch // 2
            torch.cuda.empty_cache()

    def _accumulate(self, batch: torch.Tensor, micro_batch: int) -> float:
        self._optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for part in torch.split(batch, micro_batch):
            with autocast(self.device):
                logits = self.model(input_ids=part[:, :-1]).logits  # [micro, length, vocabulary]
            summed = nn.functional.cross_entropy(logits.float().flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
            loss = summed / (batch.shape[0] * (batch.shape[1] - 1))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total.item()

    def _clip(self) -> bool:
        """Shrink the gradient to the norm allowed; False if it is not finite, and then it must not be applied."""
        norm = nn.utils.clip_grad_norm_(self._parameters, self.settings.clip_norm, foreach=True)
        return math.isfinite(norm.item())

    def _apply(self, global_step: int) -> None:
        rate = learning_rate_at(self.settings, global_step)
        if self.adam_steps < min(JOIN_RAMP_STEPS, global_step):  # fewer steps than the run: this is a joiner
            rate = min(rate, self.settings.learning_rate * (self.adam_steps + 1) / JOIN_RAMP_STEPS)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.adam_steps += 1
