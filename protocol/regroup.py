"""What is left of a group that lost its quorum goes on by itself: rule 17.

The members still there sign one list of themselves and one manifest: the highest that anyone of them saw prepared, if they hold
its payloads, else one without contributions. Whoever signed votes no more in this round, so that of a group no second
certificate can come together behind its back while the signers are more than a quorum's complement.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseloco.protocol.events import Formed, Persist
from sparseloco.protocol.evidence import Evidence, Prepared
from sparseloco.protocol.manifest import Manifest, Member, regroup_manifest
from sparseloco.protocol.messages import Check, Close, Commit, Form, FormKey, Proposal, Signed

if TYPE_CHECKING:
    from sparseloco.protocol.round import Round

# Founders start their programs at different times: before round 0 a missing quorum is waited for so many formation times.
FOUNDERS_PATIENCE = 2.0
# A list that leaves out somebody seen alive here is signed only after so many detection times: its proposer may not reach him.
ASYMMETRY_DETECTIONS = 2.0


class Regroup:
    """One member's part in the regroup after a manifest."""

    def __init__(self, current: Round, evidence: Evidence) -> None:
        self.round = current
        self.machine = current.machine
        self.evidence = evidence
        self.rules = evidence.rules
        self.signed: Form | None = None
        self._signed_at = 0.0
        self._short_since: float | None = None
        self._view: tuple[Member, ...] = ()
        self._changed = 0.0
        self._first_seen: dict[str, float] = {}  # by proposer: when a list of his that leaves somebody out was first seen

    @property
    def bound(self) -> bool:
        """This member signed: it casts no vote any more in this round."""
        return self.signed is not None

    def restore(self, signed: Signed) -> None:
        """A signature of an earlier process of this session."""
        form = signed.message
        assert isinstance(form, Form)
        self.evidence.add(signed)
        if self.signed is None or form.incarnation > self.signed.incarnation:
            self.signed = form
            self.evidence.incarnation = form.incarnation

    def advance(self) -> Commit | None:
        """Sign where the rules say so; the commit once everybody on this member's own newest list signed it."""
        if not self._called_for() or self.machine.leaving:
            return None
        commit = self._complete()
        if commit is not None:
            return commit
        now, view = self.machine.now, self._living()
        if view != self._view:
            self._view, self._changed = view, now
        if len(view) < self.rules.membership.min_peers:
            return None
        if view[0] == self.machine.me:
            self._propose(view)
            return self._complete()
        self._sign_others(view)
        return None

    def _called_for(self) -> bool:
        """Too few are heard for too long, or too many of the group are bound for a quorum ever to vote again."""
        quorum, now = self.evidence.quorum, self.machine.now
        if self.machine.heard_members() >= quorum:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = now
        patience = self.rules.detection_seconds
        if self.round.number == 0:
            patience = max(patience, FOUNDERS_PATIENCE * self.rules.formation_seconds)
        short = self._short_since is not None and now >= self._short_since + patience
        return self.bound or short or len(self.evidence.members) - len(self.evidence.bound) < quorum

    def _living(self) -> tuple[Member, ...]:
        """Members heard at this very head within the detection time, oneself included, ascending."""
        limit = self.machine.now - self.rules.detection_seconds
        peers, head = self.machine.liveness.peers, self.evidence.parent.digest
        living = [self.machine.me]
        for member in self.evidence.parent.group:
            view = peers.get(member.peer)
            if view is None or view.session != member.session or member == self.machine.me:
                continue
            if view.head == head and view.last_heard >= limit and not view.leaving:
                living.append(member)
        return tuple(sorted(living))

    # --- what is signed -------------------------------------------------------------------------------------------

    def _decision(self, members: tuple[Member, ...]) -> Manifest | None:
        """The manifest that this member would sign for a list; None while its own state's digest is not known."""
        prepared = self.evidence.latest_prepared() or self.round.lock
        if prepared is not None and self._held(prepared, members):
            return prepared.manifest
        base = self.machine.state_digest
        return regroup_manifest(self.evidence.parent, base, members, self.rules.membership) if base is not None else None

    def _held(self, prepared: Prepared, members: tuple[Member, ...]) -> bool:
        """Every payload of a prepared manifest is in the Check of somebody on the list, so it can be had."""
        valid: set[bytes] = set()
        for member in members:
            check = self.evidence.checks.get(member.peer)
            if check is not None:
                assert isinstance(check.message, Check)
                valid.update(check.message.valid)
        proposal = prepared.proposal.message
        assert isinstance(proposal, Proposal) and isinstance(proposal.close.message, Close)
        announced = {signed.message.header.sender: signed.digest for signed in proposal.close.message.announcements}
        return all(announced[contribution.peer] in valid for contribution in prepared.manifest.contributions)

    def _propose(self, view: tuple[Member, ...]) -> None:
        """The lowest living member proposes a new list once its view has settled and the old list cannot be completed."""
        now, decision = self.machine.now, self._decision(view)
        if decision is None or now < self._changed + self.rules.settle_seconds:
            return
        mine = self.signed
        own = mine.key if mine is not None else None
        peers = {member.peer for member in view}
        others = [key[0] for key, signers in self.evidence.forms.items() if key != own and not peers.isdisjoint(signers)]
        newest = max(others, default=-1)  # whoever signed that one signs nothing that is not newer
        if mine is not None:
            stands = mine.members == view and mine.manifest == decision.digest and mine.incarnation > newest
            if stands or now < self._signed_at + self.rules.settle_seconds:
                return
            newest = max(newest, mine.incarnation)
        self._sign((newest + 1, view, decision.digest))

    def _sign_others(self, view: tuple[Member, ...]) -> None:
        """Sign the newest list that its lowest member proposed, if it amounts to the same manifest here."""
        mine = self.signed.incarnation if self.signed is not None else -1
        for key in sorted(self.evidence.forms, reverse=True):
            incarnation, members, digest = key
            if incarnation <= mine or self.machine.me not in members or members[0].peer not in self.evidence.forms[key]:
                continue
            decision = self._decision(members)
            if decision is not None and decision.digest == digest and self._may_leave_out(members, view):
                self._sign(key)
                return

    def _may_leave_out(self, members: tuple[Member, ...], view: tuple[Member, ...]) -> bool:
        if set(view) <= set(members):
            return True
        since = self._first_seen.setdefault(members[0].peer, self.machine.now)
        return self.machine.now >= since + ASYMMETRY_DETECTIONS * self.rules.detection_seconds

    def _sign(self, key: FormKey) -> None:
        form = Form(self.machine.header(), *key)
        signed = self.machine.sign(form)
        self.signed, self._signed_at = form, self.machine.now
        self.evidence.incarnation = form.incarnation
        self.machine.emit(Persist(Formed(signed)))
        self.machine.broadcast(signed)
        self.machine.note("regrouping", members=[member.peer for member in form.members], incarnation=form.incarnation)

    def _complete(self) -> Commit | None:
        """Only the proposer completes a list, and only its newest: it decides once. The others take the commit from it."""
        form = self.signed
        if form is None or form.members[0] != self.machine.me:
            return None
        signers = self.evidence.forms.get(form.key, {})
        decision = self._decision(form.members)
        if len(signers) < len(form.members) or decision is None or decision.digest != form.manifest:
            return None
        return Commit(decision, tuple(signers[peer] for peer in sorted(signers)))
