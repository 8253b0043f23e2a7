"""The evidence of one round as one member holds it: announcements, Closes, Checks, proposals and votes.

It only ever grows, takes each statement once per peer, refuses what contradicts the parent manifest, and counts. It decides
nothing: see `machine.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.manifest import CheckFacts, CloseFacts, Contribution, Manifest, Member, next_manifest
from sparseloco.protocol.messages import (
    NIL,
    PHASE_NAMES,
    PREVOTE,
    Announce,
    Check,
    Close,
    Form,
    FormKey,
    Join,
    Leave,
    Proposal,
    Signed,
    Vote,
)
from sparseloco.protocol.rules import Rules

K = TypeVar("K")
# Forms kept of one member: its newest. An older list can no longer be completed by anybody who still signs.
KEPT_FORMS = 4
# A Form this far beyond one's own newest is refused: signing it would use up the incarnations. A proposer makes at most one per
# settle time, so a newcomer can still enter a forming that has failed for two days.
INCARNATION_WINDOW = 2**16


@dataclass(frozen=True, slots=True)
class Prepared:
    """A quorum of prevotes of one attempt for one manifest, with the proposal it follows from."""

    attempt: int
    manifest: Manifest
    proposal: Signed
    votes: tuple[Signed, ...]


class Evidence:
    """All statements about the round after `parent`, each checked against the parent's group."""

    def __init__(self, parent: Manifest, rules: Rules) -> None:
        self.parent = parent
        self.round = parent.round + 1
        self.rules = rules
        self.members = {member.peer: member for member in parent.group}
        self.quorum = parent.quorum
        self.leaders = parent.leader_order()
        self.messages: dict[bytes, Signed] = {}  # by held id: what heartbeats list and repairs send
        self.announcements: dict[str, Signed] = {}
        self.leaves: dict[str, Signed] = {}
        self.joins: dict[str, Signed] = {}
        self.closes: dict[int, Signed] = {}
        self.checks: dict[str, Signed] = {}
        self.proposals: dict[int, Signed] = {}
        self.manifests: dict[int, Manifest] = {}  # by attempt: what the attempt's proposal amounts to
        self.by_digest: dict[bytes, tuple[Manifest, Signed]] = {}
        self.votes: dict[tuple[int, int], dict[str, Signed]] = {}
        self.forms: dict[FormKey, dict[str, Signed]] = {}
        self.offences: dict[str, tuple[Signed, Signed]] = {}  # rule 15, by peer: two statements that cannot both be
        self.highest_attempt = 0
        self.incarnation = -1  # of the holder's own newest Form; those too far beyond it are not kept
        self.attempt = 0  # the holder's own; statements too far beyond it are not kept
        self._tally: dict[tuple[int, int], Counter[bytes]] = {}

    def leader(self, attempt: int) -> str:
        return self.leaders[attempt % len(self.leaders)]

    # --- taking statements in ------------------------------------------------------------------------------------

    def add(self, signed: Signed) -> bool:
        """Take a statement in; False if it was known or is superseded. Raises RemoteProtocolError when no honest peer says it."""
        if signed.held_id in self.messages:
            return False
        message = signed.message
        header = message.header
        if header.run != self.parent.run:
            raise RemoteProtocolError("other-run", f"a message of another run from {header.sender}")
        if header.parent != self.parent.digest or header.round != self.round:
            raise RemoteProtocolError("stale-round", f"a message of round {header.round}, this is round {self.round}")
        if isinstance(message, Join):
            return self._add_join(signed)
        if self.members.get(header.sender) != header.member:
            raise RemoteProtocolError("not-a-member", f"{header.sender} is not in round {self.round}'s group with that session")
        added = self._add_member_message(signed)
        if added:
            self.messages[signed.held_id] = signed
        return added

    def _add_join(self, signed: Signed) -> bool:
        sender = signed.message.header.sender
        if self.members.get(sender) == signed.message.header.member:
            raise RemoteProtocolError("join", f"{sender} is a member already")
        if not self.rules.admits(sender):
            raise RemoteProtocolError("not-admitted", f"{sender} is not on this run's list")
        if sender not in self.joins and len(self.joins) >= self.rules.max_observers:
            raise RemoteProtocolError("joiners", f"more than {self.rules.max_observers} peers ask to join")
        if self.joins.setdefault(sender, signed) is not signed:
            raise RemoteProtocolError("join", f"{sender} asked already, in another session")
        self.messages[signed.held_id] = signed
        return True

    def _add_member_message(self, signed: Signed) -> bool:
        message = signed.message
        sender = message.header.sender
        if isinstance(message, Close | Proposal | Vote) and message.attempt > self.attempt + self.rules.attempt_window:
            raise RemoteProtocolError("attempt-window", f"attempt {message.attempt}, this node is in attempt {self.attempt}")
        match message:
            case Announce():
                return self._once(self.announcements, sender, signed, "announcement")
            case Leave():
                return self._once(self.leaves, sender, signed, "leave")
            case Close(attempt=attempt):
                self._check_leader(sender, attempt, "Close")
                self._add_inner(message.announcements)
                self._add_inner(message.leaves)
                return self._once(self.closes, attempt, signed, "Close")
            case Check():
                return self._add_check(sender, signed)
            case Proposal(attempt=attempt):
                self._check_leader(sender, attempt, "Proposal")
                return self._add_proposal(attempt, signed)
            case Form():
                return self._add_form(sender, signed)
            case Vote(phase=phase, attempt=attempt):
                votes = self.votes.setdefault((phase, attempt), {})
                added = self._once(votes, sender, signed, PHASE_NAMES[phase])
                if added:
                    self.highest_attempt = max(self.highest_attempt, attempt)
                    self._tally.setdefault((phase, attempt), Counter())[message.digest] += 1
                return added
        raise RemoteProtocolError("kind", f"a {type(message).__name__} is no message of a round")

    def _once(self, table: dict[K, Signed], key: K, signed: Signed, what: str) -> bool:
        known = table.setdefault(key, signed)
        if known is signed or known.digest == signed.digest:
            return known is signed
        self._contradicts(known, signed)
        raise RemoteProtocolError("equivocation", f"{signed.message.header.sender} made two different {what}s")

    def _contradicts(self, known: Signed, signed: Signed) -> None:
        """Rule 15: keep the first proof against each peer."""
        self.offences.setdefault(signed.message.header.sender, (known, signed))

    def _add_form(self, sender: str, signed: Signed) -> bool:
        form = signed.message
        assert isinstance(form, Form)
        if not set(form.members) <= set(self.parent.group):
            raise RemoteProtocolError("form", f"{sender} lists somebody from outside round {self.round}'s group")
        if len(form.members) < self.rules.membership.min_peers:
            raise RemoteProtocolError("form", f"a list of {len(form.members)}, min_peers is {self.rules.membership.min_peers}")
        if form.incarnation > self.incarnation + INCARNATION_WINDOW:
            raise RemoteProtocolError("incarnation", f"incarnation {form.incarnation} is too far beyond {self.incarnation}")
        theirs = sorted(key for key, signers in self.forms.items() if sender in signers)
        for key in theirs:
            if key[0] == form.incarnation:
                self._once({sender: self.forms[key][sender]}, sender, signed, "Form")
        if len(theirs) >= KEPT_FORMS:
            if form.incarnation < theirs[0][0]:
                return False
            dropped = self.forms[theirs[0]].pop(sender)
            self.messages.pop(dropped.held_id, None)
        self.forms.setdefault(form.key, {})[sender] = signed
        return True

    @property
    def bound(self) -> set[str]:
        """Members that signed a regroup and so vote no more in this round."""
        return {peer for signers in self.forms.values() for peer in signers}

    def _check_leader(self, sender: str, attempt: int, what: str) -> None:
        if sender != self.leader(attempt):
            raise RemoteProtocolError("leader", f"{what} of attempt {attempt} from {sender}, its leader is {self.leader(attempt)}")

    def _add_inner(self, statements: Iterable[Signed]) -> None:
        """Statements inside another count as heard. One that contradicts what was heard first stays out, by its own rule."""
        for signed in statements:
            header = signed.message.header
            if self.members.get(header.sender) != header.member:
                raise RemoteProtocolError("not-a-member", f"{header.sender} is quoted but is not in round {self.round}'s group")
            try:
                self.add(signed)
            except RemoteProtocolError as error:
                if error.rule != "equivocation":
                    raise

    def _add_check(self, sender: str, signed: Signed) -> bool:
        message = signed.message
        assert isinstance(message, Check)
        if message.revision > self.rules.check_resends:
            raise RemoteProtocolError("check-resends", f"revision {message.revision}, the run allows {self.rules.check_resends}")
        known = self.checks.get(sender)
        if known is not None:
            assert isinstance(known.message, Check)
            if known.message.revision == message.revision and known.digest != signed.digest:
                self._contradicts(known, signed)
                raise RemoteProtocolError("equivocation", f"{sender} made two Checks of one revision")
            if known.message.revision >= message.revision:
                return False
            self.messages.pop(known.held_id, None)
        self.checks[sender] = signed
        return True

    def _add_proposal(self, attempt: int, signed: Signed) -> bool:
        message = signed.message
        assert isinstance(message, Proposal)
        if attempt not in self.proposals:
            manifest = self.evaluate(message)
            self._add_inner((message.close, *message.checks, *message.prepared))
            self.manifests[attempt] = manifest
            self.by_digest.setdefault(manifest.digest, (manifest, signed))
        return self._once(self.proposals, attempt, signed, "Proposal")

    # --- what it amounts to --------------------------------------------------------------------------------------

    def evaluate(self, proposal: Proposal) -> Manifest:
        """The manifest that a proposal's evidence amounts to; raises RemoteProtocolError if the evidence is not enough."""
        close = proposal.close.message
        assert isinstance(close, Close)
        self._check_leader(close.header.sender, close.attempt, "Close")
        if close.attempt > proposal.attempt:
            raise RemoteProtocolError("close", "a proposal rests on a Close of a later attempt")
        checks = []
        for signed in (proposal.close, *close.announcements, *close.leaves, *proposal.checks, *proposal.prepared):
            if self.members.get(signed.message.header.sender) != signed.message.header.member:
                raise RemoteProtocolError("not-a-member", f"a proposal quotes {signed.message.header.sender}, not in the group")
            if isinstance(signed.message, Check):
                checks.append(signed.message)
        if len({check.base for check in checks}) != 1:
            raise RemoteProtocolError("base", "a proposal's Checks name different base states")
        manifest = manifest_of(self.parent, close, checks, self.rules)
        if proposal.prepared:
            attempt = check_votes(proposal.prepared, PREVOTE, manifest.digest, self.parent)
            if attempt >= proposal.attempt:
                raise RemoteProtocolError("prepare", "a prepare certificate is from an earlier attempt")
        return manifest

    def decided(self, phase: int, attempt: int) -> bytes | None:
        """The digest (or NIL) that a quorum chose in one step, None while there is none."""
        tally = self._tally.get((phase, attempt))
        if tally is None:
            return None
        return next((digest for digest, count in tally.items() if count >= self.quorum), None)

    def supporters(self, phase: int, attempt: int, digest: bytes) -> tuple[Signed, ...]:
        """The votes for `digest`, ascending by peer: a certificate when they are a quorum."""
        votes = self.votes.get((phase, attempt), {})
        return tuple(votes[peer] for peer in sorted(votes) if votes[peer].message.digest == digest)  # type: ignore[union-attr]

    def latest_prepared(self) -> Prepared | None:
        """The prepare certificate of the highest attempt, if its manifest is known."""
        for phase, attempt in sorted(self._tally, reverse=True):
            if phase != PREVOTE:
                continue
            digest = self.decided(PREVOTE, attempt)
            if digest and digest in self.by_digest:
                manifest, proposal = self.by_digest[digest]
                return Prepared(attempt, manifest, proposal, self.supporters(PREVOTE, attempt, digest))
        return None

    def forget_nil_votes_before(self, attempt: int) -> None:
        """Stop offering what no longer matters to anybody; votes for a manifest may still complete its certificate."""
        for (_, voted), votes in self.votes.items():
            if voted < attempt:
                for signed in votes.values():
                    if signed.message.digest == NIL:  # type: ignore[union-attr]
                        self.messages.pop(signed.held_id, None)

    def peers_beyond(self, attempt: int) -> dict[str, int]:
        """Members whose votes are of a later attempt, with the highest such attempt."""
        beyond: dict[str, int] = {}
        for (_, voted), votes in self.votes.items():
            if voted > attempt:
                for peer in votes:
                    beyond[peer] = max(beyond.get(peer, 0), voted)
        return beyond


def manifest_of(parent: Manifest, close: Close, checks: Sequence[Check], rules: Rules) -> Manifest:
    """Rule 7 from the messages themselves."""
    announced = []
    for signed in close.announcements:
        message = signed.message
        assert isinstance(message, Announce)
        if not message.abstains:
            contribution = Contribution(
                message.header.sender, message.payload, message.payload_bytes, message.steps, message.tokens
            )
            announced.append((signed.digest, contribution))
    leavers = frozenset(signed.message.header.member for signed in close.leaves)
    facts = [
        CheckFacts(frozenset(check.valid), frozenset(check.dead), frozenset(check.ready), check.duration_ms) for check in checks
    ]
    return next_manifest(parent, checks[0].base, CloseFacts(tuple(announced), leavers), facts, rules.membership)


def check_votes(votes: Sequence[Signed], phase: int, digest: bytes, parent: Manifest) -> int:
    """The attempt in which a quorum of `parent`'s group cast these votes for `digest`; raises RemoteProtocolError."""
    attempts = set()
    voters: set[Member] = set()
    for signed in votes:
        vote = signed.message
        if not isinstance(vote, Vote) or vote.phase != phase or vote.digest != digest or digest == NIL:
            raise RemoteProtocolError("certificate", f"a certificate holds something else than a {PHASE_NAMES[phase]} for it")
        header = vote.header
        if (header.run, header.round, header.parent) != (parent.run, parent.round + 1, parent.digest):
            raise RemoteProtocolError("certificate", "a certificate holds a vote of another run, round or parent")
        if header.member not in parent.group:
            raise RemoteProtocolError("certificate", f"{header.sender} is not in the group that decides")
        attempts.add(vote.attempt)
        voters.add(header.member)
    if len(attempts) != 1 or len(voters) < parent.quorum or len(voters) != len(votes):
        detail = f"{len(voters)} distinct voters in {len(attempts)} attempts, a quorum is {parent.quorum}"
        raise RemoteProtocolError("certificate", detail)
    return attempts.pop()
