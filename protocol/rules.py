"""Every number a round depends on, from the run file; the machine has no constants of its own beside these."""

from __future__ import annotations

from dataclasses import dataclass

from sparseloco.protocol.encoding import sha256
from sparseloco.protocol.manifest import Member, MembershipRules

# A founder's first session. Founders are listed by peer id before any session exists, so their first one is agreed to be this;
# a founder that comes back with an empty state directory after round 0 takes a random one and joins (rule 13).
FOUNDER_SESSION = bytes(16)


@dataclass(frozen=True, slots=True)
class Rules:
    """A run's settings as the machine sees them. Seconds are of the local monotonic clock.

    heartbeat_seconds: between two heartbeats to the same peer.
    detection_seconds: silence after which a member counts as dead.
    formation_seconds: how long a founder that was never heard is waited for at genesis.
    exchange_seconds: from the accepted Close to the latest first Check.
    vote_seconds: one voting step of attempt 0; doubles with each attempt up to `max_backoff` times.
    settle_seconds: how long the set of candidates must stay unchanged before a first group is formed.
    check_resends: revisions of one member's Check per round.
    attempt_window: votes of attempts further ahead than this are not kept.
    future_messages: messages for the round after this one kept per sender.
    repair_messages: missing messages sent in answer to one heartbeat.
    max_observers: non-members (joiners, watchers) heartbeat and served.
    max_rollback_rounds: a lost branch longer than this is not left without being asked (rule 19).
    """

    run: bytes
    genesis_state: bytes
    membership: MembershipRules
    heartbeat_seconds: float = 0.5
    detection_seconds: float = 5.0
    formation_seconds: float = 30.0
    exchange_seconds: float = 20.0
    vote_seconds: float = 3.0
    settle_seconds: float = 3.0
    check_resends: int = 8
    max_backoff: int = 16
    attempt_window: int = 64
    future_messages: int = 16
    repair_messages: int = 64
    max_observers: int = 64
    max_rollback_rounds: int = 16
    founders: tuple[str, ...] = ()
    admitted: frozenset[str] | None = None  # peer ids that may join; None: everybody

    def admits(self, peer: str) -> bool:
        return self.admitted is None or peer in self.admitted

    def vote_timeout_seconds(self, attempt: int) -> float:
        return self.vote_seconds * float(min(1 << min(attempt, 30), self.max_backoff))

    def founding_members(self) -> tuple[Member, ...]:
        return tuple(Member(peer, FOUNDER_SESSION) for peer in sorted(self.founders))

    def placeholder_parent(self) -> bytes:
        """The parent digest of messages sent before any manifest exists: Forms."""
        return sha256(b"forming" + self.run)
