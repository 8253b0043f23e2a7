"""What goes into the machine (events), what comes out (effects), and what must survive a crash (records).

Effects are performed in the order given. `Persist` is durable (fsynced) before the next effect is begun: that is how "durable
before sending" (rule 13) reads in code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sparseloco.protocol.encoding import DIGEST_BYTES, check_bytes, check_integer, fields, pack, unpack
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.manifest import MAX_MILLISECONDS, Manifest
from sparseloco.protocol.messages import (
    Announce,
    Check,
    Close,
    Commit,
    Form,
    Frame,
    Heartbeat,
    Proposal,
    Signed,
    Vote,
)

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; also the way to start a machine."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message whose signatures were verified, from the authenticated peer `link` (its author or a forwarder)."""

    link: str
    frame: Signed | Heartbeat | Commit


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """Discovery found a peer of this run; the machine starts to heartbeat it."""

    peer: str


@dataclass(frozen=True, slots=True)
class Trained:
    """Inner steps are done and the contribution is durable. An empty `payload` withholds it (the residual keeps all)."""

    round: int
    payload: bytes
    payload_bytes: int
    steps: int
    tokens: int
    duration_ms: int


@dataclass(frozen=True, slots=True)
class Settled:
    """A payload asked for by `Fetch` was checked and stored durably (`rule` empty) or refused under `rule`."""

    announcement: bytes
    rule: str


@dataclass(frozen=True, slots=True)
class StateDigest:
    """The digest of the state after `round`, known once its manifest has been applied."""

    round: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class LeaveRequested:
    """The node wants to leave cleanly."""


@dataclass(frozen=True, slots=True)
class BranchFetched:
    """What `FetchBranch` found: the last common manifest's commit (None: not even the genesis is common), this node's commits
    after it and the peer's, oldest first, signatures verified."""

    peer: str
    fork: Commit | None
    mine: tuple[Commit, ...]
    theirs: tuple[Commit, ...]


Event = Tick | Received | PeerSeen | Trained | Settled | StateDigest | LeaveRequested | BranchFetched

# --- effects --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Persist:
    record: Record


@dataclass(frozen=True, slots=True)
class Send:
    """Send `frame` to each of `peers`; delivery is not guaranteed, the machine repeats what matters."""

    peers: tuple[str, ...]
    frame: Frame


@dataclass(frozen=True, slots=True)
class Train:
    """Begin the inner steps of `round` as member `index` of `size`; `budget_ms` from now until the round closes."""

    round: int
    index: int
    size: int
    budget_ms: int


@dataclass(frozen=True, slots=True)
class Reveal:
    """A Close was accepted: one's own payload may be served and pushed to `peers` from now on."""

    announcement: Signed
    peers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Obtain and check this announcement's payload, then report `Settled`."""

    announcement: Signed


@dataclass(frozen=True, slots=True)
class Adopt:
    """The round is decided: apply the manifest. `announced`: this node announced in it; `committed`: it was counted.
    `attempt` is the one this node was in."""

    commit: Commit
    committed: bool
    announced: bool
    attempt: int


@dataclass(frozen=True, slots=True)
class ServeCommits:
    """`peer` is at `head_round`; send it the commits that follow, which the machine no longer holds in memory."""

    peer: str
    head_round: int


@dataclass(frozen=True, slots=True)
class FetchBranch:
    """`peer` is on another branch of the run: fetch its commits from the last common one on, then report `BranchFetched`."""

    peer: str


@dataclass(frozen=True, slots=True)
class RollBack:
    """This node's branch lost (rule 19): give its own contributions in `lost` back, put `commits` in their place durably, take
    the state after the fork point and apply them. The vote log stays as it is."""

    fork_round: int
    lost: tuple[Commit, ...]
    commits: tuple[Commit, ...]


@dataclass(frozen=True, slots=True)
class StopAndAsk:
    """This node's branch lost, and it is longer than may be rolled back without asking."""

    depth_rounds: int
    mine: Commit
    theirs: Commit


@dataclass(frozen=True, slots=True)
class Proof:
    """Rule 15: two statements of one peer that no honest peer makes together; keep them."""

    peer: str
    first: Signed
    second: Signed


@dataclass(frozen=True, slots=True)
class Note:
    """Something to log and to write to events.jsonl."""

    event: str
    round: int
    fields: Mapping[str, Any] = field(default_factory=dict)


Effect = Persist | Send | Train | Reveal | Fetch | Adopt | ServeCommits | FetchBranch | RollBack | StopAndAsk | Proof | Note

# --- records --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Announced:
    """This node announced: after a restart it announces exactly this again."""

    announcement: Signed
    duration_ms: int


@dataclass(frozen=True, slots=True)
class DoorClosed:
    """The first Close of the round was accepted; only these announcements (by digest) may ever be valid here."""

    parent: bytes
    eligible: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Voted:
    """A vote was cast. A precommit for a manifest also carries the proposal and prevotes that lock this node on it."""

    vote: Signed
    proposal: Signed | None = None
    prepared: tuple[Signed, ...] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """A Close, Check or Proposal was made: after a restart it is said again word for word, never contradicted."""

    message: Signed


@dataclass(frozen=True, slots=True)
class Formed:
    """This node signed a first group or a regroup."""

    form: Signed


@dataclass(frozen=True, slots=True)
class Committed:
    """A manifest and its certificate; the head of this node's chain from now on."""

    commit: Commit


# Records of undecided rounds on branches that were left; far above what a node says in one round.
KEPT_RECORDS = 4096
Record = Announced | DoorClosed | Said | Voted | Formed | Committed


def parent_of(record: Record) -> bytes:
    """The digest of the manifest in whose round a record binds its node."""
    match record:
        case Announced(signed) | Voted(signed) | Said(signed) | Formed(signed):
            return signed.message.header.parent
        case DoorClosed(parent):
            return parent
        case Committed(commit):
            return commit.manifest.parent


def still_binding(records: Iterable[Record], commit: Commit) -> Sequence[Record]:
    """What is kept of the vote log when `commit` is durable: what was said in rounds that a change of branches left undecided.

    This node could come back to them. The round just decided binds nobody any more, nor does forming once there is a genesis.
    """
    return [r for r in records if parent_of(r) != commit.manifest.parent and not isinstance(r, Formed)][-KEPT_RECORDS:]


def encode_record(record: Record) -> bytes:
    """Canonical bytes of a record for the vote log. `Committed` goes to the chain instead and is refused here."""
    match record:
        case Announced(announcement, duration_ms):
            return pack([1, announcement.parts, duration_ms])
        case DoorClosed(parent, eligible):
            return pack([2, parent, list(eligible)])
        case Voted(vote, proposal, prepared):
            return pack([3, vote.parts, [proposal.parts] if proposal else [], [s.parts for s in prepared]])
        case Formed(form):
            return pack([4, form.parts])
        case Said(message):
            return pack([5, message.parts])
        case Committed():
            raise ValueError("a Committed record belongs in the chain, not in the vote log")


def decode_record(data: bytes) -> Record:
    """The record whose bytes are `data`; raises RemoteProtocolError when a file holds something else."""
    value = unpack(data, what="record")
    kind = value[0] if isinstance(value, list) and value else None
    if kind == 1:
        _, parts, duration_ms = fields(value, 3, what="record")
        check_integer(duration_ms, 0, MAX_MILLISECONDS, "duration")
        return Announced(Signed.from_parts(parts, (Announce.KIND,)), duration_ms)
    if kind == 2:
        _, parent, eligible = fields(value, 3, what="record")
        check_bytes(parent, DIGEST_BYTES, "parent")
        for digest in _array(eligible):
            check_bytes(digest, DIGEST_BYTES, "eligible announcement")
        return DoorClosed(parent, tuple(eligible))
    if kind == 3:
        _, vote, proposal, prepared = fields(value, 4, what="record")
        proposals = [Signed.from_parts(parts, (Proposal.KIND,)) for parts in _array(proposal)]
        if len(proposals) > 1:
            raise RemoteProtocolError("record", "a vote record holds at most one proposal")
        votes = tuple(Signed.from_parts(parts, (Vote.KIND,)) for parts in _array(prepared))
        return Voted(Signed.from_parts(vote, (Vote.KIND,)), proposals[0] if proposals else None, votes)
    if kind == 4:
        _, form = fields(value, 2, what="record")
        return Formed(Signed.from_parts(form, (Form.KIND,)))
    if kind == 5:
        _, message = fields(value, 2, what="record")
        return Said(Signed.from_parts(message, (Close.KIND, Check.KIND, Proposal.KIND)))
    raise RemoteProtocolError("record", f"unknown record kind {kind!r}")


def _array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RemoteProtocolError("fields", "expected an array")
    return value


def encode_commit(manifest: Manifest, certificate: tuple[Signed, ...]) -> bytes:
    """A chain file's bytes."""
    return pack([manifest.body, [s.parts for s in certificate]])


def decode_commit(data: bytes) -> Commit:
    return Commit.parse(fields(unpack(data, what="commit"), 2, what="commit"))
