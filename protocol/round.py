"""One round's decisions: announce, close, check, propose, prevote, precommit, next attempt.

Every step reads as its rule: what must hold, then what is said. The statements themselves and their counting are in
`evidence.py`. Times are local; nothing here compares two machines' clocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparseloco.protocol.errors import LocalProtocolError
from sparseloco.protocol.events import Announced, DoorClosed, Fetch, Formed, Persist, Record, Reveal, Said, Train, Trained, Voted
from sparseloco.protocol.evidence import Evidence, Prepared
from sparseloco.protocol.manifest import Manifest, Member
from sparseloco.protocol.messages import (
    NIL,
    PHASE_NAMES,
    PRECOMMIT,
    PREVOTE,
    Announce,
    Check,
    Close,
    Commit,
    Proposal,
    Signed,
    Vote,
)
from sparseloco.protocol.regroup import Regroup
from sparseloco.protocol.states import Gathering, State, Voting, step

if TYPE_CHECKING:
    from sparseloco.protocol.machine import Machine


class Round:
    """The round after the machine's head, from its start to the commit that ends it."""

    def __init__(self, machine: Machine, evidence: Evidence) -> None:
        self.machine = machine
        self.evidence = evidence
        self.rules = evidence.rules
        self.number = evidence.round
        self.me = machine.me
        self.is_member = evidence.members.get(machine.me.peer) == machine.me
        self.budget_seconds = evidence.parent.budget_ms / 1000
        self.started = self.entered = machine.now
        self.attempt = 0
        self.trained: Trained | None = None
        self.own_announcement: Signed | None = None
        self.lock: Prepared | None = None
        self.closed_at: float | None = None
        self.eligible: frozenset[bytes] = frozenset()
        self._accepted: dict[int, Signed] = {}
        self._settled: dict[bytes, str] = {}
        self._asked: set[bytes] = set()
        self._announce_done = self._train_asked = self._revealed = False
        self._own_check: Check | None = None
        self._check_revision = 0
        self._checked_known = (0, 0)  # how many Closes and payloads the last look at one's own Check knew of
        self._cast: dict[tuple[int, int], bytes] = {}
        self._cast_at: dict[tuple[int, int], float] = {}
        self._met_quorum = False
        self.gathering: State = Gathering.TRAINING
        self.voting: State = Voting.AWAITING
        self.regroup = Regroup(self, evidence)

    # --- beginning, restarting ------------------------------------------------------------------------------------

    def begin(self) -> None:
        group = [member.peer for member in self.evidence.parent.group]
        self.machine.note("round_started", group=group, budget_seconds=self.budget_seconds, member=self.is_member)

    def restore(self, record: Record) -> None:
        """Take back what an earlier process of this session had said in this round (rule 13); no moves, these are its states."""
        parent = self.evidence.parent.digest
        match record:
            case Announced(announcement, duration_ms) if announcement.message.header.parent == parent:
                message = announcement.message
                assert isinstance(message, Announce)
                self.own_announcement = announcement
                self.trained = Trained(
                    self.number, message.payload, message.payload_bytes, message.steps, message.tokens, duration_ms
                )
                self._settled[announcement.digest] = ""
                self._announce_done = True
                self.gathering = Gathering.ANNOUNCED
                self.evidence.add(announcement)
            case DoorClosed(closed_parent, eligible) if closed_parent == parent:
                self.closed_at = self.machine.now
                self.eligible = frozenset(eligible)
                self.gathering = Gathering.CLOSED
            case Said(said) if said.message.header.parent == parent:
                if isinstance(said.message, Close | Proposal):
                    self._restore_attempt(said.message.attempt)
                self.evidence.add(said)
                if isinstance(said.message, Check):
                    self._own_check, self._check_revision = said.message, said.message.revision + 1
                    self.gathering = Gathering.CHECKED
            case Formed(form) if form.message.header.parent == parent:
                self.regroup.restore(form)
                self.gathering = Gathering.BOUND
            case Voted(vote, proposal, prepared) if vote.message.header.parent == parent:
                self._restore_vote(vote, proposal, prepared)

    def _restore_vote(self, vote: Signed, proposal: Signed | None, prepared: tuple[Signed, ...]) -> None:
        message = vote.message
        assert isinstance(message, Vote)
        self._restore_attempt(message.attempt)
        self.voting = Voting.PREVOTED if message.phase == PREVOTE else Voting.PRECOMMITTED
        self.evidence.add(vote)
        key = (message.phase, message.attempt)
        self._cast[key], self._cast_at[key] = message.digest, self.machine.now
        if message.phase == PRECOMMIT and message.digest != NIL:
            if proposal is None:
                raise LocalProtocolError("a precommit was recorded without the proposal it locks on")
            self.evidence.add(proposal)
            manifest = self.evidence.by_digest[message.digest][0]
            for signed in prepared:
                self.evidence.add(signed)
            self.lock = Prepared(message.attempt, manifest, proposal, prepared)

    def _restore_attempt(self, attempt: int) -> None:
        if attempt > self.attempt:
            self.voting = Voting.AWAITING
            self.attempt = self.evidence.attempt = attempt

    def settle(self, announcement: bytes, rule: str) -> None:
        self._settled.setdefault(announcement, rule)

    def _gather(self, state: Gathering) -> None:
        self.gathering = step(self.gathering, state)

    # --- what holds now -------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Below min_peers nothing is contributed; the group only waits for joiners."""
        return len(self.evidence.parent.group) < self.rules.membership.min_peers

    @property
    def _pending_membership(self) -> bool:
        group = self.evidence.parent.group
        gone = any(not self.machine.alive(m) or self.machine.leaving_member(m) for m in group if m != self.me)
        return gone or bool(self._ready_joiners()) or bool(self.evidence.leaves)

    @property
    def _stalled(self) -> bool:
        """No time-out counts while fewer than a quorum are heard, or while there is nothing to decide."""
        return self.machine.heard_members() < self.evidence.quorum or (self.idle and not self._pending_membership)

    @property
    def _budget_over(self) -> bool:
        return self.machine.now >= self.started + self.budget_seconds

    def _covers_the_living(self, covered: frozenset[str]) -> bool:
        return all(
            m.peer in covered or not self.machine.alive(m) or self.machine.leaving_member(m) or self._shut_out(m.peer)
            for m in self.evidence.parent.group
        )

    def _shut_out(self, peer: str) -> bool:
        """The door is shut and this peer had not announced: no Close has a reason to wait for it any more."""
        announced = self.evidence.announcements.get(peer)
        return not self.door_open() and (announced is None or announced.digest not in self.eligible)

    def _strands_the_rest(self, leavers: int) -> bool:
        """So many leave that those who stay are no quorum: the round ends now, while the leavers still vote."""
        staying = len(self.evidence.members) - leavers
        return leavers > 0 and 0 < staying < self.evidence.quorum

    def _acceptable(self, close: Close) -> bool:
        """Rule 4: a Close before the budget is over must cover every member seen alive here. One's own was found to, once."""
        if close.header.member == self.me or self.idle or self._strands_the_rest(len(close.leaves)):
            return True
        return self._budget_over or self._covers_the_living(close.covered)

    def _timed_out(self, since: float, seconds: float) -> bool:
        return self.machine.now >= since + seconds and not self._stalled

    # --- one pass over the rules ----------------------------------------------------------------------------------

    def advance(self) -> Commit | None:
        """Do whatever the rules now call for; the commit that ends the round, once there is one."""
        commit = self.regroup.advance()
        if self.regroup.bound and self.gathering is not Gathering.BOUND:
            self._gather(Gathering.BOUND)
        if commit is not None or self.regroup.bound:
            return commit or self._decision()
        self._wait_for_founders()
        self._ask_for_training()
        self._announce()
        self._close()
        self._accept_closes()
        self._check()
        self._propose()
        return self._vote()

    def _wait_for_founders(self) -> None:
        """Round 0 starts when a quorum has been heard: founders start their programs at different times."""
        if not self._met_quorum:
            self._met_quorum = self.number > 0 or self.machine.heard_members() >= self.evidence.quorum
            self.started = self.entered = self.machine.now if self.number == 0 else self.started

    def _ask_for_training(self) -> None:
        if self._train_asked or not self._met_quorum or self.idle or self.own_announcement or self.machine.leaving:
            return
        self._train_asked = True
        peers = [member.peer for member in self.evidence.parent.group]
        elapsed_ms = int((self.machine.now - self.started) * 1000)
        budget_ms = max(0, self.evidence.parent.budget_ms - elapsed_ms)
        self.machine.emit(Train(self.number, peers.index(self.me.peer), len(peers), budget_ms))

    def door_open(self) -> bool:
        """Commit, then reveal: after the first accepted Close nothing new is announced or taken as announced."""
        return self.closed_at is None

    def _announce(self) -> None:
        base = self.machine.state_digest
        trained = self.trained
        if trained is None or self._announce_done or base is None:
            return
        self._announce_done = True
        if not self.door_open():
            self.machine.note("late", steps=trained.steps)
            return
        message = Announce(
            self.machine.header(), base, trained.payload, trained.payload_bytes, trained.steps, trained.tokens
        )
        signed = self.machine.sign(message)
        self.own_announcement = signed
        self._gather(Gathering.ANNOUNCED)
        self._settled[signed.digest] = ""
        self.machine.persist(Announced(signed, trained.duration_ms))
        self.machine.broadcast(signed)
        self.machine.note("announced", payload=trained.payload.hex(), bytes=trained.payload_bytes)

    def _leads(self) -> bool:
        return self.evidence.leader(self.attempt) == self.me.peer

    def _close(self) -> None:
        if not self._leads() or self._accepted or self.attempt in self.evidence.closes or not self._met_quorum:
            return
        announcements = self.evidence.announcements
        if not self.door_open():  # restarted after the Close was accepted and lost: nothing new may slip in
            announcements = {peer: signed for peer, signed in announcements.items() if signed.digest in self.eligible}
        leaves = self.evidence.leaves
        if self.idle:
            ready = self._pending_membership
        else:
            hurried = self._budget_over or self._strands_the_rest(len(leaves))
            ready = hurried or self._covers_the_living(frozenset((*announcements, *leaves)))
        if ready:
            ordered = tuple(announcements[peer] for peer in sorted(announcements))
            gone = tuple(leaves[peer] for peer in sorted(leaves))
            self.machine.say(Close(self.machine.header(), self.attempt, ordered, gone))

    def _accept_closes(self) -> None:
        for attempt, signed in self.evidence.closes.items():
            close = signed.message
            assert isinstance(close, Close)
            if attempt not in self._accepted and self._acceptable(close):
                self._accepted[attempt] = signed
                self._shut_door(close)
                self._reveal(close)
                self._fetch(close)

    def _shut_door(self, close: Close) -> None:
        if self.closed_at is not None:
            return
        self.closed_at = self.machine.now
        self._gather(Gathering.CLOSED)
        self.eligible = frozenset(signed.digest for signed in self.evidence.announcements.values())
        self.machine.persist(DoorClosed(self.evidence.parent.digest, tuple(sorted(self.eligible))))
        contributors = [s.message.header.sender for s in close.announcements]
        self.machine.note("closed", attempt=close.attempt, contributors=contributors)

    def _reveal(self, close: Close) -> None:
        own = self.own_announcement
        if own is None or self._revealed or own.digest not in {signed.digest for signed in close.announcements}:
            return
        self._revealed = True
        assert isinstance(own.message, Announce)
        if not own.message.abstains:
            self.machine.emit(Reveal(own, self.machine.others()))

    def _fetch(self, close: Close) -> None:
        for signed in close.announcements:
            if signed.digest in self._asked or signed.digest not in self.eligible or signed.digest in self._settled:
                continue
            assert isinstance(signed.message, Announce)
            if not signed.message.abstains:
                self._asked.add(signed.digest)
                self.machine.emit(Fetch(signed))

    def _wanted(self) -> dict[bytes, Announce]:
        """Announcements of accepted Closes that may be valid here, by digest."""
        wanted = {}
        for accepted in self._accepted.values():
            assert isinstance(accepted.message, Close)
            for signed in accepted.message.announcements:
                message = signed.message
                assert isinstance(message, Announce)
                if signed.digest in self.eligible and not message.abstains:
                    wanted[signed.digest] = message
        return wanted

    def _check(self) -> None:
        """Rule 6: once all closed payloads are settled or the exchange time is over; again when more became valid."""
        base = self.machine.state_digest
        if self.closed_at is None or base is None or not self._accepted:
            return
        known = (len(self._accepted), len(self._settled))
        if self._own_check is not None and known == self._checked_known:
            return
        self._checked_known = known
        wanted = self._wanted()
        complete = all(digest in self._settled for digest in wanted)
        if self._own_check is None and not complete and self.machine.now < self.closed_at + self.rules.exchange_seconds:
            return
        listed = set(self._own_check.valid) if self._own_check is not None and self._own_check.base == base else set()
        banned = self.machine.banned
        good = {d: a for d, a in wanted.items() if self._settled.get(d) == "" and a.header.sender not in banned}
        found = {d for d, a in good.items() if a.base == base}
        if self._own_check is not None and found <= listed:
            return
        valid = tuple(sorted(found | listed))
        if self._check_revision > self.rules.check_resends:
            return
        group = self.evidence.parent.group
        dead = tuple(m for m in group if m != self.me and self._is_gone(m))
        check = Check(
            self.machine.header(), self._check_revision, base, valid, dead, self._ready_joiners(), self._duration_ms()
        )
        self._check_revision += 1
        self._own_check = check
        self._gather(Gathering.CHECKED)
        self.machine.say(check)
        self.machine.note("checked", valid=len(valid), dead=len(dead), ready=len(check.ready))

    def _is_gone(self, member: Member) -> bool:
        """What this member's Check calls dead: silent, leaving, or found out (rule 15)."""
        machine = self.machine
        return not machine.alive(member) or machine.leaving_member(member) or member.peer in machine.banned

    def _ready_joiners(self) -> tuple[Member, ...]:
        limit = self.machine.now - self.rules.detection_seconds
        peers = self.machine.liveness.peers
        members = [signed.message.header.member for signed in self.evidence.joins.values()]
        views = [(m, peers.get(m.peer)) for m in members if m.peer not in self.machine.banned]
        ready = [m for m, v in views if v and v.session == m.session and v.last_heard >= limit and not v.leaving]
        return tuple(sorted(ready))

    def _duration_ms(self) -> int:
        if self.trained is not None:
            return self.trained.duration_ms
        return 0 if self.idle else int((self.machine.now - self.started) * 1000)

    # --- proposing and voting -------------------------------------------------------------------------------------

    def prepared_manifest(self) -> Prepared | None:
        """Rule 9: what a leader must propose again, with the certificate that frees others from their locks."""
        return self.evidence.latest_prepared() or self.lock

    def _propose(self) -> None:
        if not self._leads() or self.attempt in self.evidence.proposals or (PREVOTE, self.attempt) in self._cast:
            return
        prepared = self.prepared_manifest()
        if prepared is not None and prepared.attempt < self.attempt:
            old = prepared.proposal.message
            assert isinstance(old, Proposal)
            self.machine.say(Proposal(self.machine.header(), self.attempt, old.close, old.checks, prepared.votes))
            return
        usable = [attempt for attempt in self._accepted if attempt <= self.attempt]
        base = self.machine.state_digest
        if not usable or base is None or self.closed_at is None:
            return
        checks = self.evidence.checks
        same_base = [checks[peer] for peer in sorted(checks) if checks[peer].message.base == base]  # type: ignore[union-attr]
        if len(same_base) < self.evidence.quorum:
            return
        everybody = all(m.peer in checks or not self.machine.alive(m) for m in self.evidence.parent.group)
        patience = max(self.closed_at + self.rules.exchange_seconds, self.entered) + self.rules.vote_seconds / 2
        if everybody or self.machine.now >= patience:
            close = self._accepted[min(usable)]
            self.machine.say(Proposal(self.machine.header(), self.attempt, close, tuple(same_base), ()))

    def _vote(self) -> Commit | None:
        while True:
            target = self.machine.jump_attempt()
            if target is not None:
                self._enter(target, "others are there")
            commit = self._decision()
            if commit is not None:
                return commit
            if not (self._prevote() or self._precommit() or self._next_attempt()):
                return None
            self._close()
            self._accept_closes()
            self._check()
            self._propose()

    def _decision(self) -> Commit | None:
        """Rule 10: a quorum of precommits for one manifest in any one attempt."""
        for phase, attempt in self.evidence.votes:
            if phase == PRECOMMIT:
                digest = self.evidence.decided(PRECOMMIT, attempt)
                if digest and digest in self.evidence.by_digest:
                    return Commit(self.evidence.by_digest[digest][0], self.evidence.supporters(PRECOMMIT, attempt, digest))
        return None

    def propose_deadline(self) -> float:
        """When this attempt's proposal is given up: after the budget, or the exchange, and one voting time."""
        begun = self.started + self.budget_seconds if self.closed_at is None else self.closed_at + self.rules.exchange_seconds
        return max(begun, self.entered) + self.rules.vote_timeout_seconds(self.attempt)

    def _prevote(self) -> bool:
        if (PREVOTE, self.attempt) in self._cast or not self._met_quorum:
            return False
        proposal = self.evidence.proposals.get(self.attempt)
        choice = None if proposal is None else self._choice(proposal.message, self.evidence.manifests[self.attempt])
        if choice is None:
            leader = self.evidence.members[self.evidence.leader(self.attempt)]
            gone = not self.machine.alive(leader) and not self._stalled
            if not (gone or self._timed_out(self.propose_deadline(), 0.0)):
                return False
            choice = NIL
        self._cast_vote(PREVOTE, choice, None, ())
        return True

    def _choice(self, proposal: object, manifest: Manifest) -> bytes | None:
        """What to prevote for a proposal; None to wait until its Close is acceptable here."""
        assert isinstance(proposal, Proposal)
        if self.bound_by_lock(proposal, manifest):
            return NIL
        close = proposal.close.message
        assert isinstance(close, Close)
        if not proposal.prepared and close.attempt not in self._accepted and not self._acceptable(close):
            return None
        return manifest.digest

    def bound_by_lock(self, proposal: Proposal, manifest: Manifest) -> bool:
        """Rule 8: locked on another manifest, and no prepare certificate from an attempt at or after the lock."""
        if self.lock is None or self.lock.manifest.digest == manifest.digest:
            return False
        if not proposal.prepared:
            return True
        vote = proposal.prepared[0].message
        assert isinstance(vote, Vote)
        return vote.attempt < self.lock.attempt

    def _precommit(self) -> bool:
        key = (PRECOMMIT, self.attempt)
        if key in self._cast or (PREVOTE, self.attempt) not in self._cast:
            return False
        digest = self.evidence.decided(PREVOTE, self.attempt)
        if digest and digest in self.evidence.by_digest:
            manifest, proposal = self.evidence.by_digest[digest]
            votes = self.evidence.supporters(PREVOTE, self.attempt, digest)
            self.lock = Prepared(self.attempt, manifest, proposal, votes)
            self._cast_vote(PRECOMMIT, digest, proposal, votes)
            return True
        waited = self._timed_out(self._cast_at[(PREVOTE, self.attempt)], self.rules.vote_timeout_seconds(self.attempt))
        if digest == NIL or waited:
            self._cast_vote(PRECOMMIT, NIL, None, ())
            return True
        return False

    def _cast_vote(self, phase: int, digest: bytes, proposal: Signed | None, prepared: tuple[Signed, ...]) -> None:
        key = (phase, self.attempt)
        signed = self.machine.sign(Vote(self.machine.header(), phase, self.attempt, digest))
        self._cast[key], self._cast_at[key] = digest, self.machine.now
        self.voting = step(self.voting, Voting.PREVOTED if phase == PREVOTE else Voting.PRECOMMITTED)
        self.machine.emit(Persist(Voted(signed, proposal, prepared)))
        self.machine.broadcast(signed)
        name = "prevoted" if phase == PREVOTE else "precommitted"
        self.machine.note(name, attempt=self.attempt, digest=digest.hex() or None, phase=PHASE_NAMES[phase])

    def _next_attempt(self) -> bool:
        key = (PRECOMMIT, self.attempt)
        if key not in self._cast:
            return False
        if self.evidence.decided(PRECOMMIT, self.attempt) == NIL:
            self._enter(self.attempt + 1, "a quorum decided for none")
            return True
        if self._timed_out(self._cast_at[key], self.rules.vote_timeout_seconds(self.attempt)):
            self._enter(self.attempt + 1, "no quorum in time")
            return True
        return False

    def _enter(self, attempt: int, why: str) -> None:
        self.voting = step(self.voting, Voting.AWAITING)
        self.attempt = self.evidence.attempt = attempt
        self.entered = self.machine.now
        self.evidence.forget_nil_votes_before(attempt - 1)
        self.machine.note("attempt", attempt=attempt, why=why)

    def deadlines(self) -> Iterator[float]:
        """Every local time at which `advance` may have something new to do."""
        yield self.started + self.budget_seconds
        yield self.propose_deadline()
        if self.closed_at is not None:
            exchanged = self.closed_at + self.rules.exchange_seconds
            yield exchanged
            yield max(exchanged, self.entered) + self.rules.vote_seconds / 2
        for phase in (PREVOTE, PRECOMMIT):
            cast_at = self._cast_at.get((phase, self.attempt))
            if cast_at is not None:
                yield cast_at + self.rules.vote_timeout_seconds(self.attempt)
