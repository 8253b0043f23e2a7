"""Follow the events.jsonl of one node and keep what the verdict and the table need.

The one rule: only what the node wrote counts. A line that is not whole yet stays in the file; a line that a crash tore
is skipped.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sparseloco.protocol.manifest import GENESIS_ROUND

# Events that show a round is under way; a round number in any of them means the node got that far.
_IN_ROUND = ("round_started", "trained", "announced", "closed", "checked", "prevoted", "precommitted", "committed")
_PROGRESS = ("joined", "round_started", "trained", "committed", "caught_up", "attempt", "regrouped", "rolled_back", "left")


@dataclass
class NodeRecord:
    """What one node's events say so far. Rounds are 0-based; times are unix seconds of the one machine they share."""

    peer_id: str
    state: str = "starting"
    round: int | None = None  # the highest round this node has been in
    digests: dict[int, str] = field(default_factory=dict)  # state digest after each committed round
    caught_up: dict[int, str] = field(default_factory=dict)  # state digests reached by download and replay
    train_loss: dict[int, float] = field(default_factory=dict)
    eval_loss: dict[int, float] = field(default_factory=dict)
    started_at: dict[int, float] = field(default_factory=dict)
    closed_at: dict[int, float] = field(default_factory=dict)
    checked_at: dict[int, float] = field(default_factory=dict)
    committed_at: dict[int, float] = field(default_factory=dict)
    contributors: dict[int, tuple[str, ...]] = field(default_factory=dict)
    payloads: dict[int, int] = field(default_factory=dict)  # bytes of this node's own payload, by round
    steps: int = 0
    tokens: int = 0
    returned: int = 0
    returned_rounds: set[int] = field(default_factory=set)
    kept_rounds: set[int] = field(default_factory=set)  # undecided ones whose own state a restart found on the disk
    rollbacks: int = 0
    member_at: float = 0.0  # when it last began a round as a member of the group
    member_round: int = GENESIS_ROUND  # and which
    refusals: list[tuple[int, str, str]] = field(default_factory=list)  # round, peer id, rule
    peers_up: set[str] = field(default_factory=set)
    left: dict[str, Any] | None = None
    progress_at: float = 0.0  # of the last event that moved the run forward
    last_event: str = "nothing yet"

    @property
    def last_committed(self) -> int:
        """The highest round on this node's chain by its own account; -1 before round 0."""
        return max([*self.digests, *self.caught_up], default=GENESIS_ROUND)

    @property
    def final_digest(self) -> str | None:
        """The state digest the node reported last for the head of its chain."""
        head = self.last_committed
        return self.digests.get(head, self.caught_up.get(head))

    def take(self, event: dict[str, Any]) -> None:
        """Apply one event; KeyError, TypeError or ValueError if it lacks what the contract promises."""
        name, at, number = str(event["event"]), float(event["time"]), _round(event)
        if name in _IN_ROUND and number is not None:
            self.round = max(number, -1 if self.round is None else self.round)
        if name in _PROGRESS:
            self.progress_at = max(self.progress_at, at)
        self.last_event = name if number is None else f"{name} of round {number}"
        handler = getattr(self, f"_on_{name}", None)
        if handler is not None:
            handler(event, at, GENESIS_ROUND if number is None else number)

    def _on_rolled_back(self, event: dict[str, Any], at: float, number: int) -> None:
        """Its branch lost: what it reported of the rounds after the fork is no part of the run."""
        last = int(event["to_round"])
        self.state = "rolled back"
        self.rollbacks += 1
        for by_round in (self.digests, self.caught_up, self.eval_loss, self.committed_at, self.contributors):
            for late in [number for number in by_round if number > last]:
                del by_round[late]

    def _on_joined(self, event: dict[str, Any], at: float, number: int) -> None:
        self.state, self.left = "joined", None

    def _on_round_started(self, event: dict[str, Any], at: float, number: int) -> None:
        self.state = "training"
        self.started_at.setdefault(number, at)
        if event.get("member"):
            self.member_at, self.member_round = at, number

    def _on_trained(self, event: dict[str, Any], at: float, number: int) -> None:
        self.state = "exchanging"
        self.steps += int(event["steps"])
        self.tokens += int(event["tokens"])
        loss = event.get("loss")
        if isinstance(loss, int | float) and math.isfinite(loss):
            self.train_loss[number] = float(loss)

    def _on_announced(self, event: dict[str, Any], at: float, number: int) -> None:
        if int(event["bytes"]):
            self.payloads[number] = int(event["bytes"])
            self.returned_rounds.discard(number)  # of a branch that lost: this is the round's contribution on another
            self.kept_rounds.discard(number)

    def _on_closed(self, event: dict[str, Any], at: float, number: int) -> None:
        self.closed_at.setdefault(number, at)

    def _on_checked(self, event: dict[str, Any], at: float, number: int) -> None:
        self.state = "voting"
        self.checked_at.setdefault(number, at)

    def _on_committed(self, event: dict[str, Any], at: float, number: int) -> None:
        self.state = "committed"
        self.digests[number] = str(event["state_digest"])
        self.committed_at.setdefault(number, at)
        self.contributors[number] = tuple(str(peer) for peer in event["contributors"])

    def _on_caught_up(self, event: dict[str, Any], at: float, number: int) -> None:
        self.state = "caught up"
        self.caught_up[number] = str(event["state_digest"])

    def _on_evaluated(self, event: dict[str, Any], at: float, number: int) -> None:
        self.eval_loss[number] = float(event["loss"])

    def _on_returned(self, event: dict[str, Any], at: float, number: int) -> None:
        self.returned += 1
        self.returned_rounds.add(number)

    def _on_refused(self, event: dict[str, Any], at: float, number: int) -> None:
        self.refusals.append((number, str(event["peer"]), str(event["rule"])))

    def _on_withheld(self, event: dict[str, Any], at: float, number: int) -> None:
        self.state = "withheld"

    def _on_peer_up(self, event: dict[str, Any], at: float, number: int) -> None:
        self.peers_up.add(str(event["peer"]))

    def _on_peer_down(self, event: dict[str, Any], at: float, number: int) -> None:
        self.peers_up.discard(str(event["peer"]))

    def _on_left(self, event: dict[str, Any], at: float, number: int) -> None:
        self.state, self.left = "left", event
        self.peers_up.clear()


def differing_rounds(records: Sequence[NodeRecord]) -> dict[int, list[int]]:
    """Rounds after which nodes reported different states: by round, the nodes (by number) that are not with the most."""
    by_round: dict[int, list[tuple[str, int]]] = {}
    for node, record in enumerate(records):
        for digests in (record.digests, record.caught_up):
            for number, digest in digests.items():
                by_round.setdefault(number, []).append((digest, node))
    found = {}
    for number, entries in sorted(by_round.items()):
        common = Counter(digest for digest, _ in entries).most_common(1)[0][0]
        others = sorted({node for digest, node in entries if digest != common})
        if others:
            found[number] = others
    return found


class EventTail:
    """Reads the lines that were added to an events.jsonl since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.skipped_lines = 0
        self._offset = 0

    def read_into(self, record: NodeRecord) -> bool:
        """Apply all new whole lines; whether there were any."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return False
        whole = added[: added.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                record.take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self.skipped_lines += 1
        return bool(whole)


def _round(event: dict[str, Any]) -> int | None:
    number = event.get("round")
    return number if isinstance(number, int) else None
