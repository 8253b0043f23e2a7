"""Which faults of a `swarm` are due: a pure function of the plan and of how far the nodes are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparseloco.node.options import FaultAt


@dataclass(frozen=True)
class Fault:
    """A fault that was injected: `kind` is kill or late, `round` the one it was asked for."""

    round: int
    node: int
    kind: str


def due(
    kills: Sequence[FaultAt],
    lates: Sequence[FaultAt],
    done: Sequence[Fault],
    rounds: Mapping[int, int | None],
    running: frozenset[int],
) -> list[Fault]:
    """The faults to inject now.

    `rounds` is the highest round each node has been in, `running` the nodes whose process lives. A kill is due when its
    node has got to the round; a late start when every running node has, and at least one is running.
    """
    wanted = [Fault(kill.round, kill.node, "kill") for kill in kills if _reached(rounds, kill.node, kill.round)]
    for late in lates:
        if running and all(_reached(rounds, node, late.round) for node in running):
            wanted.append(Fault(late.round, late.node, "late"))
    return [
        fault for fault in wanted if fault not in done and (fault.kind == "late" or fault.node in running)
    ]


def _reached(rounds: Mapping[int, int | None], node: int, target: int) -> bool:
    at = rounds.get(node)
    return at is not None and at >= target
