"""The ledger's entries: what a round committed and who is in the next group.

A manifest is a pure function of the previous manifest, one Close and at least a quorum of Checks (rule 7): whoever holds the
same evidence computes the same bytes, so a leader can choose when to propose but not what.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparseloco.protocol.encoding import (
    ARRAY_ITEMS,
    DIGEST_BYTES,
    SESSION_BYTES,
    check_bytes,
    check_integer,
    check_peer_id,
    check_sorted_unique,
    fields,
    pack,
    sha256,
    unpack,
)
from sparseloco.protocol.errors import RemoteProtocolError

GENESIS_ROUND = -1
MAX_ROUND = 2**40
MAX_MILLISECONDS = 2**40
MAX_COUNT = 2**53


def quorum(members: int) -> int:
    """Votes that decide in a group of `members`: a majority up to 3, more than two thirds from 4 on."""
    if members < 1:
        raise ValueError(f"a group has at least one member, not {members}")
    return members // 2 + 1 if members <= 3 else 2 * members // 3 + 1


def tolerated_liars(members: int) -> int:
    """How many lying members agreement survives; small groups survive crashes only."""
    return 0 if members <= 3 else (members - 1) // 3


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """One member of a group: a peer in one session. A peer that lost its vote log comes back in another session."""

    peer: str
    session: bytes

    def __post_init__(self) -> None:
        check_peer_id(self.peer, "member")
        check_bytes(self.session, SESSION_BYTES, "session")


@dataclass(frozen=True, slots=True, order=True)
class Contribution:
    """One committed payload. `steps` and `tokens` are what its peer declared; they are never weights without a cap."""

    peer: str
    payload: bytes
    payload_bytes: int
    steps: int
    tokens: int

    def __post_init__(self) -> None:
        check_peer_id(self.peer, "contributor")
        check_bytes(self.payload, DIGEST_BYTES, "payload digest")
        check_integer(self.payload_bytes, 1, MAX_COUNT, "payload bytes")
        check_integer(self.steps, 0, MAX_COUNT, "steps")
        check_integer(self.tokens, 0, MAX_COUNT, "tokens")


@dataclass(frozen=True, slots=True)
class Manifest:
    """Round `round` of the run's ledger.

    `base` is the digest of the state the round started from; `group` votes on round + 1, which has `budget_ms` for training.
    `digest` covers exactly these fields; certificates are attachments beside it.
    """

    run: bytes
    round: int
    parent: bytes
    base: bytes
    contributions: tuple[Contribution, ...]
    group: tuple[Member, ...]
    budget_ms: int
    body: bytes = field(init=False, compare=False, repr=False)
    digest: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_bytes(self.run, DIGEST_BYTES, "run id")
        check_integer(self.round, GENESIS_ROUND, MAX_ROUND, "round")
        check_bytes(self.parent, DIGEST_BYTES, "parent digest")
        check_bytes(self.base, DIGEST_BYTES, "base digest")
        check_integer(self.budget_ms, 0, MAX_MILLISECONDS, "budget")
        if not 1 <= len(self.group) <= ARRAY_ITEMS:
            raise RemoteProtocolError("group-size", f"a group has 1 to {ARRAY_ITEMS} members, not {len(self.group)}")
        check_sorted_unique([member.peer for member in self.group], "group")
        check_sorted_unique([contribution.peer for contribution in self.contributions], "contributions")
        body = pack(
            [
                self.run,
                self.round,
                self.parent,
                self.base,
                [[c.peer, c.payload, c.payload_bytes, c.steps, c.tokens] for c in self.contributions],
                [[m.peer, m.session] for m in self.group],
                self.budget_ms,
            ]
        )
        object.__setattr__(self, "body", body)
        object.__setattr__(self, "digest", sha256(b"manifest" + body))

    @classmethod
    def decode(cls, body: bytes) -> Manifest:
        """The manifest whose canonical bytes are `body`; raises RemoteProtocolError."""
        run, round_, parent, base, contributions, group, budget_ms = fields(unpack(body, what="manifest"), 7, what="manifest")
        return cls(
            run,
            round_,
            parent,
            base,
            tuple(Contribution(*fields(item, 5, what="contribution")) for item in _items(contributions)),
            tuple(Member(*fields(item, 2, what="member")) for item in _items(group)),
            budget_ms,
        )

    @property
    def quorum(self) -> int:
        return quorum(len(self.group))

    def member(self, peer: str) -> Member | None:
        return next((member for member in self.group if member.peer == peer), None)

    def leader_order(self) -> tuple[str, ...]:
        """Peer ids in the order in which they lead the next round's attempts: by hash(run, this digest, peer id)."""
        seed = self.run + self.digest
        return tuple(sorted((m.peer for m in self.group), key=lambda peer: sha256(seed + peer.encode())))


def _items(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RemoteProtocolError("fields", "expected an array")
    return value


def genesis_manifest(run: bytes, genesis_state: bytes, group: Iterable[Member], budget_ms: int) -> Manifest:
    """Round -1: no contribution, the genesis state, the first group. Its parent is the run id itself (rule 18)."""
    return Manifest(run, GENESIS_ROUND, run, genesis_state, (), tuple(sorted(group)), budget_ms)


@dataclass(frozen=True, slots=True)
class MembershipRules:
    """The part of the run file that a manifest depends on. Durations in milliseconds."""

    min_peers: int
    group_size: int
    joiners_per_round: int
    budget_cap_ms: int
    budget_floor_ms: int
    straggler_factor: float


@dataclass(frozen=True, slots=True)
class CheckFacts:
    """What the manifest takes from one member's Check: its marks, and how long that member needed for its inner steps."""

    valid: frozenset[bytes]
    dead: frozenset[Member]
    ready: frozenset[Member]
    duration_ms: int


@dataclass(frozen=True, slots=True)
class CloseFacts:
    """What the manifest takes from a Close: announced contributions by announcement digest, and signed leavers."""

    announced: tuple[tuple[bytes, Contribution], ...]
    leavers: frozenset[Member]


def regroup_manifest(parent: Manifest, base: bytes, members: Iterable[Member], rules: MembershipRules) -> Manifest:
    """Rule 17: what is left of parent's group goes on from the state after it (`base`), without contributions."""
    group = tuple(sorted(members))
    return Manifest(parent.run, parent.round + 1, parent.digest, base, (), group, rules.budget_cap_ms)


def next_budget_ms(previous_ms: int, durations_ms: Sequence[int], rules: MembershipRules) -> int:
    """clamp(median + k x MAD of finish durations), in integers so that every peer gets the same.

    MAD is floored at an eighth of the median: equal machines have a MAD near zero, and a budget equal to the median would
    cut half of them off at the next hiccup. Without durations the previous budget stays.
    """
    known = sorted(duration for duration in durations_ms if duration > 0)
    if not known:
        return min(max(previous_ms, rules.budget_floor_ms), rules.budget_cap_ms)
    median = known[(len(known) - 1) // 2]
    deviations = sorted(abs(duration - median) for duration in known)
    spread = max(deviations[(len(deviations) - 1) // 2], median // 8)
    budget = median + int(rules.straggler_factor * 1000) * spread // 1000
    return min(max(budget, rules.budget_floor_ms), rules.budget_cap_ms)


def next_manifest(
    previous: Manifest, base: bytes, close: CloseFacts, checks: Sequence[CheckFacts], rules: MembershipRules
) -> Manifest:
    """Rule 7's pure function. `checks` come from distinct members of `previous.group`, all on `base`, at least a quorum."""
    needed = previous.quorum
    if len(checks) < needed:
        raise RemoteProtocolError("checks", f"{len(checks)} checks, a quorum is {needed}")
    valid: Counter[bytes] = Counter()
    dead: Counter[Member] = Counter()
    ready: Counter[Member] = Counter()
    for check in checks:
        valid.update(check.valid)
        dead.update(check.dead)
        ready.update(check.ready)

    staying = [m for m in previous.group if dead[m] < needed and m not in close.leavers] or list(previous.group)
    group = _admit(staying, [m for m, marks in ready.items() if marks >= needed], len(checks), rules)
    contributions: tuple[Contribution, ...] = ()
    if min(len(previous.group), len(group)) >= rules.min_peers:
        contributions = tuple(sorted(c for digest, c in close.announced if valid[digest] >= needed))
    budget_ms = next_budget_ms(previous.budget_ms, [check.duration_ms for check in checks], rules)
    return Manifest(previous.run, previous.round + 1, previous.digest, base, contributions, tuple(group), budget_ms)


def _admit(staying: list[Member], ready: list[Member], checks_present: int, rules: MembershipRules) -> list[Member]:
    """The next group: who stays, plus as many joiners as the limits and a quorum of those present allow.

    A group that grew beyond what the present members can carry would stall until the newcomers prove themselves, so j
    joiners enter only while q(n + j) <= Checks present. One group of one could never grow by that rule (q(2) = 2), so the
    first joiner of a single member enters on that member's own Check.
    """
    group = {member.peer: member for member in staying}
    admitted = 0
    for joiner in sorted(ready):
        if admitted >= rules.joiners_per_round or joiner.peer in group or len(group) >= rules.group_size:
            continue
        lone_start = len(group) == 1 and admitted == 0
        if quorum(len(group) + 1) > checks_present and not lone_start:
            break
        group[joiner.peer] = joiner
        admitted += 1
    return sorted(group.values())
