"""The first group of a run without founders: everybody who is there signs one list of members (rule 18).

The lowest peer id among the live candidates proposes once the view has settled; the others sign if they see the same peers
alive. The group exists when every member of it signed the same incarnation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparseloco.protocol.certificates import verify_genesis
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.events import Formed, Note, Persist, Send
from sparseloco.protocol.evidence import INCARNATION_WINDOW, KEPT_FORMS
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest, Member, genesis_manifest
from sparseloco.protocol.messages import NO_HEAD_ROUND, Commit, Form, FormKey, Header, Heartbeat, Signed
from sparseloco.protocol.rules import Rules

if TYPE_CHECKING:
    from sparseloco.protocol.machine import Machine

class Forming:
    """The state of a peer that knows no genesis manifest yet."""

    def __init__(self, me: Member, rules: Rules) -> None:
        self.me = me
        self.rules = rules
        self.messages: dict[bytes, Signed] = {}
        self._forms: dict[FormKey, dict[str, Signed]] = {}
        self._view: tuple[Member, ...] = ()
        self._changed = 0.0
        self._signed_incarnation = -1
        self._signed_at: float | None = None
        self._signed_members: tuple[Member, ...] = ()
        self._waited_noted = -1

    def restore(self, form: Signed) -> None:
        """A signature of an earlier process: its incarnation is used up."""
        assert isinstance(form.message, Form)
        if form.message.incarnation > self._signed_incarnation:
            self._signed_incarnation, self._signed_members = form.message.incarnation, form.message.members
        self._store(form)

    def heard(self, peer: str, beat: Heartbeat, machine: Machine) -> None:
        """A candidate's heartbeat: send it the Forms it lacks."""
        for held_id, signed in list(self.messages.items()):
            if held_id not in beat.held:
                machine.emit(Send((peer,), signed))

    def receive(self, signed: Signed, machine: Machine) -> None:
        form = signed.message
        assert isinstance(form, Form)
        header = form.header
        if header.run != self.rules.run or header.parent != self.rules.placeholder_parent() or header.round != GENESIS_ROUND:
            raise RemoteProtocolError("other-run", f"a Form of another run from {header.sender}")
        if len(form.members) > self.rules.membership.group_size:
            raise RemoteProtocolError("group-size", f"a first group of {len(form.members)} members")
        if not all(self.rules.admits(member.peer) for member in form.members):
            raise RemoteProtocolError("not-admitted", "a first group with a peer that is not on this run's list")
        if form.incarnation > self._signed_incarnation + INCARNATION_WINDOW:
            raise RemoteProtocolError("incarnation", f"incarnation {form.incarnation} is too far beyond {self._signed_incarnation}")
        # Whoever is heard is bounded, so what is kept is; a list signed here is completed whoever is silent by now.
        view = machine.liveness.peers.get(header.sender)
        heard = view is not None and view.session == header.session
        if form.manifest != self._genesis(form.members).digest:
            raise RemoteProtocolError("genesis", "a first group's list with another manifest than the run file gives it")
        signed_here = self.me.peer in self._forms.get(form.key, {})
        if self.me in form.members and (heard or signed_here):
            self._store(signed)

    def check_commit(self, commit: Commit) -> None:
        verify_genesis(commit, self.rules)

    def advance(self, machine: Machine) -> Commit | None:
        """Propose or sign a first group where the rules say so; the genesis commit once a group is complete."""
        for (incarnation, members, _), forms in self._forms.items():
            # Only the proposer completes a list, and only its newest: it decides once, so two lists of one proposer never both
            # become a first group. The others take the commit from it.
            newest = members[0] == self.me and incarnation == self._signed_incarnation
            if newest and len(forms) == len(members):
                return Commit(self._genesis(members), tuple(forms[peer] for peer in sorted(forms)))
        view = self._live(machine)
        if view != self._view:
            self._view, self._changed = view, machine.now
        if machine.leaving:
            return None
        if len(view) < self.rules.membership.min_peers:
            if self._waited_noted != len(view):
                self._waited_noted = len(view)
                fields = {"seen": len(view), "min_peers": self.rules.membership.min_peers}
                machine.emit(Note("waiting", GENESIS_ROUND, fields))
            return None
        self._sign_others(machine, view)
        settled = machine.now - self._changed >= self.rules.settle_seconds
        rested = self._signed_at is None or machine.now - self._signed_at >= self.rules.settle_seconds
        if settled and rested and view[0] == self.me and self._may_leave_out(view, machine.now):
            self._sign(machine, self._signed_incarnation + 1, view)
            return self.advance(machine) if len(view) == 1 else None
        return None

    def _genesis(self, members: tuple[Member, ...]) -> Manifest:
        return genesis_manifest(self.rules.run, self.rules.genesis_state, members, self.rules.membership.budget_cap_ms)

    def _live(self, machine: Machine) -> tuple[Member, ...]:
        limit = machine.now - self.rules.detection_seconds
        peers = machine.liveness.peers
        live = [
            Member(peer, view.session)
            for peer, view in peers.items()
            if view.head_round == NO_HEAD_ROUND and view.last_heard >= limit and not view.leaving and self.rules.admits(peer)
        ]
        return tuple(sorted([*live, self.me])[: self.rules.membership.group_size])

    def _may_leave_out(self, members: tuple[Member, ...], now: float) -> bool:
        """Whoever signed with this peer before may have completed that list and be restarting: it is waited for a while."""
        if self._signed_at is None:  # the first look after a start counts as the signing
            self._signed_at = now if self._signed_members else None
        waited = self._signed_at is None or now >= self._signed_at + self.rules.formation_seconds
        return waited or set(self._signed_members) <= set(members)

    def _sign_others(self, machine: Machine, view: tuple[Member, ...]) -> None:
        """Sign what the lowest peer of a list proposed, if all of it is alive here and the incarnation is new to us."""
        for (incarnation, members, _), forms in list(self._forms.items()):
            proposed = members[0].peer in forms and self.me.peer not in forms
            newer = incarnation > self._signed_incarnation
            if proposed and newer and set(members) <= set(view) and self._may_leave_out(members, machine.now):
                self._sign(machine, incarnation, members)

    def _sign(self, machine: Machine, incarnation: int, members: tuple[Member, ...]) -> None:
        header = Header(self.rules.run, GENESIS_ROUND, self.rules.placeholder_parent(), self.me.peer, self.me.session)
        signed = machine.sign(Form(header, incarnation, members, self._genesis(members).digest))
        self._signed_incarnation, self._signed_at, self._signed_members = incarnation, machine.now, members
        machine.emit(Persist(Formed(signed)))
        self._store(signed)
        others = tuple(member.peer for member in members if member != self.me)
        if others:
            machine.emit(Send(others, signed))

    def _store(self, signed: Signed) -> None:
        form = signed.message
        assert isinstance(form, Form)
        forms = self._forms.setdefault(form.key, {})
        if form.header.sender not in forms:
            forms[form.header.sender] = signed
            self.messages[signed.held_id] = signed
        theirs = sorted(key for key, signers in self._forms.items() if form.header.sender in signers)
        for old in theirs[:-KEPT_FORMS]:
            dropped = self._forms[old].pop(form.header.sender)
            self.messages.pop(dropped.held_id, None)
            if not self._forms[old]:
                del self._forms[old]
