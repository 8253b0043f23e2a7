"""Who is alive, who holds what, and what to send to whom: rule 14.

Each new message is forwarded once to ceil(log2 n) + 1 random members not known to hold it; heartbeats list what is held, and
whoever sees a gap fills it. All times are of the local clock.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from sparseloco.protocol.evidence import Evidence
from sparseloco.protocol.manifest import Member
from sparseloco.protocol.messages import Heartbeat, Signed
from sparseloco.protocol.rules import Rules


@dataclass(slots=True)
class PeerView:
    """What is known of one peer from its own heartbeats."""

    session: bytes
    last_heard: float
    head_round: int
    head: bytes
    attempt: int
    leaving: bool


class Liveness:
    """Which peers are alive, by the receiver's clock only."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.peers: dict[str, PeerView] = {}

    def heard(self, peer: str, beat: Heartbeat, now: float) -> None:
        self.peers[peer] = PeerView(beat.session, now, beat.head_round, beat.head, beat.attempt, beat.leaving)

    def last_word(self, peer: str, now: float) -> tuple[bytes, float] | None:
        """The session in which a peer was last heard, and how many seconds ago; None if it never was."""
        view = self.peers.get(peer)
        return (view.session, now - view.last_heard) if view is not None else None

    def alive(self, member: Member, since: float, grace_seconds: float, now: float) -> bool:
        """Alive: heard within the detection time, in this session; or not heard yet and waited for no longer than the grace."""
        view = self.peers.get(member.peer)
        if view is None:
            return now <= since + grace_seconds
        if view.session != member.session:
            return False
        return now <= max(view.last_heard, since) + self.rules.detection_seconds

    def admits_stranger(self, members: Iterable[str], now: float) -> bool:
        """Room for one more peer from outside the group? The table of those is bounded; the silent make room first."""
        kept = set(members)
        strangers = [peer for peer in self.peers if peer not in kept]
        if len(strangers) < self.rules.max_observers:
            return True
        silent = [peer for peer in strangers if self.peers[peer].last_heard + self.rules.detection_seconds < now]
        for peer in silent:
            del self.peers[peer]
        return bool(silent)

    def forget_silent(self, keep: Iterable[str], now: float) -> None:
        """Drop non-members that have been silent for long, so that the table does not fill with stale ids."""
        kept = set(keep)
        limit = now - 10 * self.rules.detection_seconds
        for peer in [p for p, view in self.peers.items() if p not in kept and view.last_heard < limit]:
            del self.peers[peer]


class Delivery:
    """Forwarding and repair for the messages of one round."""

    def __init__(self, rules: Rules, rng: random.Random) -> None:
        self.rules = rules
        self.rng = rng
        self._holders: dict[bytes, set[str]] = {}
        self._since: dict[bytes, float] = {}
        self._repaired: dict[str, float] = {}

    def reset(self) -> None:
        self._holders.clear()
        self._since.clear()
        self._repaired.clear()

    def noted(self, held_id: bytes, holders: Iterable[str], now: float) -> None:
        """A message was first held here at `now`; `holders` are known to have it."""
        self._holders.setdefault(held_id, set()).update(holders)
        self._since.setdefault(held_id, now)

    def forward_targets(self, held_id: bytes, members: Iterable[str], me: str) -> tuple[str, ...]:
        """ceil(log2 n) + 1 random members not known to hold it; they count as holding it from now on."""
        holders = self._holders.setdefault(held_id, set())
        everyone = list(members)
        candidates = [peer for peer in everyone if peer != me and peer not in holders]
        fanout = math.ceil(math.log2(max(len(everyone), 2))) + 1
        chosen = candidates if len(candidates) <= fanout else self.rng.sample(candidates, fanout)
        holders.update(chosen)
        return tuple(chosen)

    def missing(self, evidence: Evidence, peer: str, held: frozenset[bytes], now: float) -> list[Signed]:
        """What `peer` lacks of the round, oldest first, leaving out what is young enough to be on its way."""
        # However often a peer heartbeats, it is answered at most twice per heartbeat time.
        if now < self._repaired.get(peer, -math.inf) + self.rules.heartbeat_seconds / 2:
            return []
        self._repaired[peer] = now
        settled = now - self.rules.heartbeat_seconds
        gaps = [
            signed
            for held_id, signed in evidence.messages.items()
            if held_id not in held and self._since.get(held_id, now) <= settled and signed.message.header.sender != peer
        ]
        return gaps[: self.rules.repair_messages]
