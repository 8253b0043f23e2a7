"""Which faults of a `swarm` are due: planned ones at their rounds, random ones as often as `--mtbf` says.

Both are pure functions of the plan (or of the seed), of the clock and of how far the nodes are; `swarm.py` carries them out.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparseloco.node.options import SwarmOptions
from sparseloco.protocol.manifest import quorum

KILL, LATE, RESTART, PAUSE, CORRUPT, ABSENCE = "kill", "late", "restart", "pause", "corrupt", "absence"
# Of random faults: how often each kind comes, and for how long (seconds). A pause is a laptop's lid closed for a moment, an
# absence a machine that goes and comes back in the middle of the run.
RANDOM_KINDS = {RESTART: 5, PAUSE: 3, CORRUPT: 1, ABSENCE: 1}
RANDOM_SECONDS = {PAUSE: (2.0, 12.0), ABSENCE: (8.0, 20.0)}
# Nodes that random faults never touch: by their memory the swarm tells whether a node that just runs keeps within bounds.
SPARED = 2


@dataclass(frozen=True)
class Fault:
    """A fault: its node, the round it is for, its kind, and for a pause or an absence its length."""

    round: int
    node: int
    kind: str
    seconds: float = 0.0


def planned(options: SwarmOptions) -> tuple[Fault, ...]:
    """The faults that the flags name, in the order in which they are looked at."""
    by_kind = {KILL: options.kill, LATE: options.late, RESTART: options.restart, CORRUPT: options.corrupt}
    at_rounds = [Fault(at.round, at.node, kind) for kind, faults in by_kind.items() for at in faults]
    return (*at_rounds, *(Fault(at.round, at.node, PAUSE, at.seconds) for at in options.pause))


def due(plan: Sequence[Fault], done: Sequence[Fault], rounds: Mapping[int, int | None], present: frozenset[int]) -> list[Fault]:
    """The planned faults to carry out now, one for a node at a time.

    `rounds` is the highest round each node has been in, `present` the nodes that run and that no earlier fault keeps away. A
    late start is due when every present node has got to its round, and at least one is; any other fault when its node has.
    """
    now: dict[int, Fault] = {}
    for fault in plan:
        if fault in done or fault.node in now:
            continue
        if fault.kind == LATE:
            ready = bool(present) and all(_reached(rounds, node, fault.round) for node in present)
        else:
            ready = fault.node in present and _reached(rounds, fault.node, fault.round)
        if ready:
            now[fault.node] = fault
    return list(now.values())


def _reached(rounds: Mapping[int, int | None], node: int, target: int) -> bool:
    at = rounds.get(node)
    return at is not None and at >= target


class RandomFaults:
    """Faults at exponential intervals of `mtbf_seconds` on average, over the whole swarm; the seed decides all of them."""

    def __init__(self, seed: int, nodes: int, mtbf_seconds: float, now: float) -> None:
        self._rng = random.Random(seed)
        self._nodes = nodes
        self._mean = mtbf_seconds
        self._next = now + self._rng.expovariate(1 / mtbf_seconds)

    def due(self, now: float, away: frozenset[int], rounds: Mapping[int, int | None]) -> Fault | None:
        """The fault to carry out now, if any. `away`: nodes that are down, paused or not back in the group yet.

        So many may be away at once that the rest is a quorum of all nodes; until one is back, a fault that is due waits.
        """
        if now < self._next or len(away) >= self._nodes - quorum(self._nodes):
            return None
        present = [node for node in range(SPARED, self._nodes) if node not in away and rounds.get(node) is not None]
        if not present:
            return None
        self._next = max(self._next, now - self._mean) + self._rng.expovariate(1 / self._mean)
        node = self._rng.choice(present)
        kind = self._rng.choices(list(RANDOM_KINDS), list(RANDOM_KINDS.values()))[0]
        seconds = round(self._rng.uniform(*RANDOM_SECONDS[kind]), 1) if kind in RANDOM_SECONDS else 0.0
        return Fault(rounds[node] or 0, node, kind, seconds)
