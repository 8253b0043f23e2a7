"""How far a node has come: what the live view shows and the last event reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparseloco.node.inner_loop import RoundResult
from sparseloco.protocol.manifest import GENESIS_ROUND

# Losses kept for the sparkline.
LOSSES_KEPT = 200


@dataclass
class Progress:
    """Counts since this process started, and the present phase in words."""

    round: int = GENESIS_ROUND
    phase: str = "starting"
    group: tuple[str, ...] = ()
    alive: set[str] = field(default_factory=set)
    loss: float | None = None
    eval_loss: float | None = None
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    committed_rounds: int = 0
    contributions_committed: int = 0
    contributions_returned: int = 0

    def trained(self, result: RoundResult) -> None:
        """Count one round's inner steps."""
        self.loss = result.loss_mean
        self.losses.append(result.loss_mean)
        del self.losses[:-LOSSES_KEPT]
        self.steps += result.steps
        self.tokens += result.tokens
        self.tokens_per_second = result.tokens / max(result.seconds, 1e-9)
