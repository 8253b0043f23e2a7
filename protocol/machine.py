"""The round, as one peer lives it: `handle(event, now) -> effects`, nothing else.

Two phases with locks over a manifest that is a pure function of signed evidence (the rules are numbered as in docs/protocol.md;
the agreement core is Tendermint's, Buchman, Kwon and Milosevic 2018, arXiv 1807.04938, with the block replaced by evidence).
The one law: a vote is durable before it is sent, and nothing sent earlier is ever contradicted.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sparseloco.protocol.certificates import is_regroup, verify_commit
from sparseloco.protocol.delivery import Delivery, Liveness
from sparseloco.protocol.errors import LocalProtocolError, RemoteProtocolError
from sparseloco.protocol.events import (
    Adopt,
    Announced,
    BranchFetched,
    Committed,
    DoorClosed,
    Effect,
    Event,
    FetchBranch,
    Formed,
    LeaveRequested,
    Note,
    PeerSeen,
    Persist,
    Proof,
    Received,
    Record,
    RollBack,
    Said,
    Send,
    ServeCommits,
    Settled,
    StateDigest,
    StopAndAsk,
    Tick,
    Trained,
    Voted,
    parent_of,
)
from sparseloco.protocol.evidence import Evidence
from sparseloco.protocol.forks import Branch, theirs_wins, verify_branch
from sparseloco.protocol.forming import Forming
from sparseloco.protocol.manifest import GENESIS_ROUND, Member, tolerated_liars
from sparseloco.protocol.messages import (
    MAX_HELD_IDS,
    NO_HEAD_ROUND,
    Announce,
    Commit,
    Form,
    Frame,
    Header,
    Heartbeat,
    Join,
    Leave,
    Message,
    Signed,
)
from sparseloco.protocol.round import Round
from sparseloco.protocol.rules import Rules

# Commits kept in memory to answer peers that are a few rounds behind; older ones are served from the chain on disk.
RECENT_COMMITS = 32
# Peers whose branch was asked for lately; far above a group, and a bound on what strangers can make one remember.
BRANCHES_ASKED = 256
# Commits sent in answer to one heartbeat of a peer that is behind.
COMMITS_PER_ANSWER = 4
# A peer that discovery reported and that never answers is heartbeat for this many detection times, until it is reported again.
CANDIDATE_DETECTIONS = 20
# Bodies of one sender kept for the round after this one; repairs bring the rest.
FUTURE_BYTES = 1 << 20
# Different refusals noted per round; the same peer breaking the same rule again is not news.
NOTED_REFUSALS = 256


class Machine:
    """One peer's side of every round from `head` on.

    `sign` puts this node's signature under a message; `rng` chooses whom to forward to and nothing else; `records` are what an
    earlier process of the same session persisted, in order. `state_digest` is the digest of the state after `head`, if known;
    `recent` are the commits up to and with `head` that are still to be told from another branch's; `banned` are peers that
    were found out earlier (rule 15).
    """

    # The rules of one round; a test replaces it to switch one of them off.
    round_factory: type[Round] = Round

    def __init__(
        self,
        me: Member,
        rules: Rules,
        sign: Callable[[Message], Signed],
        rng: random.Random,
        *,
        head: Commit | None,
        state_digest: bytes | None = None,
        records: Sequence[Record] = (),
        recent: Sequence[Commit] = (),
        banned: Iterable[str] = (),
    ) -> None:
        self.me = me
        self.rules = rules
        self.rng = rng
        self.head: Commit | None = None
        self.round: Round | None = None
        self.liveness = Liveness(rules)
        self.delivery = Delivery(rules, rng)
        self.forming = Forming(me, rules)
        self.leaving = False
        self.next_wakeup = 0.0
        self._sign = sign
        self._now: float | None = None
        self._effects: list[Effect] = []
        self._restored = list(records)
        self._restore_head = head
        self._state_digest = state_digest
        self._recent: deque[Commit] = deque(recent, maxlen=max(RECENT_COMMITS, rules.max_rollback_rounds + 2))
        self.banned = set(banned)
        self._said: list[Record] = []  # everything persisted or restored since the head was adopted
        self._left: dict[bytes, tuple[Record, ...]] = {}  # by parent: what was said in rounds that a rollback left undecided
        self._branch_asked: dict[str, float] = {}  # by peer: when its branch was last asked for
        self._future: dict[str, list[Signed]] = {}
        self._candidates: dict[str, float] = {}  # by peer: until when it is heartbeat without an answer
        self._refused: set[tuple[str, str, str]] = set()
        self._member_since: dict[Member, float] = {}
        self._seen_alive: dict[str, bool] = {}
        self._next_heartbeat = 0.0
        self._answered: dict[str, tuple[int, float]] = {}

    # --- the one entry point --------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event at local time `now` (seconds); the effects are to be performed in order."""
        if self._now is None:
            self._now = now
            self._start()
        if now < self._now:
            raise LocalProtocolError(f"time went backwards: {now} after {self._now}")
        self._now = now
        news = True
        match event:
            case Received(link, frame):
                news = self._take(link, frame)
            case PeerSeen(peer):
                self._see_candidate(peer)
            case Trained():
                if self.round is not None and event.round == self.round.number:
                    self.round.trained = event
            case Settled(announcement, rule):
                if self.round is not None:
                    self.round.settle(announcement, rule)
            case StateDigest(number, digest):
                if self.head is not None and number == self.head.manifest.round:
                    self._state_digest = digest
            case BranchFetched():
                self._choose_branch(event)
            case LeaveRequested():
                self._leave()
            case Tick():
                pass
        if now >= self._next_heartbeat:
            self._heartbeat()
        if news or now >= self.next_wakeup:
            self._advance()
        effects, self._effects = self._effects, []
        return effects

    @property
    def now(self) -> float:
        assert self._now is not None
        return self._now

    @property
    def state_digest(self) -> bytes | None:
        """The digest of the state after the head, None while it is being computed."""
        return self._state_digest

    @property
    def is_member(self) -> bool:
        return self.round is not None and self.round.is_member

    @property
    def may_go(self) -> bool:
        """Nobody counts on this node: it is in no group, and has no request to join out that a manifest may still grant."""
        return self.round is None or not (self.is_member or self.me.peer in self.round.evidence.joins)

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def note(self, event: str, **fields: Any) -> None:
        number = self.round.number if self.round is not None else GENESIS_ROUND
        self.emit(Note(event, number, fields))

    def persist(self, record: Record) -> None:
        self._said.append(record)
        self.emit(Persist(record))

    # --- starting and restarting ----------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._restore_head is not None:
            self.head = self._restore_head
            if not self._recent:
                self._recent.append(self.head)
            self._begin_round()
        for record in self._restored:
            match record:
                case Formed(form) if form.message.header.round == GENESIS_ROUND:
                    self.forming.restore(form)
                case Announced() | DoorClosed() | Said() | Voted() | Formed():
                    self._restore(record)
                case Committed():
                    raise LocalProtocolError("the chain's head is passed as `head`, not as a record")
        self._restored.clear()
        if self.round is not None:
            for signed in self.round.evidence.messages.values():
                self.delivery.noted(signed.held_id, (), self.now)

    def _restore(self, record: Record) -> None:
        parent = parent_of(record)
        if self.round is not None and parent == self._head_digest:
            self._said.append(record)
            self.round.restore(record)
        elif self.round is not None:
            self._left[parent] = (*self._left.get(parent, ()), record)

    def _begin_round(self) -> None:
        assert self.head is not None
        manifest = self.head.manifest
        self.delivery.reset()
        self._member_since = {m: self._member_since.get(m, self.now) for m in manifest.group}
        self._refused.clear()
        self.round = self.round_factory(self, Evidence(manifest, self.rules))
        self.round.begin()
        self._said = list(self._left.pop(manifest.digest, ()))
        for record in self._said:  # this node was here before it changed branches: what it said then binds it
            self.round.restore(record)
        buffered, self._future = self._future, {}
        for messages in buffered.values():
            for signed in messages:
                self._take(signed.message.header.sender, signed)

    # --- liveness and heartbeats ----------------------------------------------------------------------------------

    def alive(self, member: Member) -> bool:
        if member.peer == self.me.peer:
            return member == self.me
        assert self.head is not None
        at_genesis = self.head.manifest.round == GENESIS_ROUND
        grace = self.rules.formation_seconds if at_genesis else self.rules.detection_seconds
        return self.liveness.alive(member, self._member_since.get(member, self.now), grace, self.now)

    def leaving_member(self, member: Member) -> bool:
        view = self.liveness.peers.get(member.peer)
        return view is not None and view.session == member.session and view.leaving

    def heard_members(self) -> int:
        """Members really heard within the detection time, oneself included: no grace."""
        assert self.head is not None
        limit = self.now - self.rules.detection_seconds
        peers = self.liveness.peers
        return sum(
            member.peer == self.me.peer
            or ((view := peers.get(member.peer)) is not None and view.session == member.session and view.last_heard >= limit)
            for member in self.head.manifest.group
        )

    def others(self) -> tuple[str, ...]:
        """Members of the current group but oneself."""
        if self.head is None:
            return ()
        return tuple(member.peer for member in self.head.manifest.group if member.peer != self.me.peer)

    def _audience(self) -> list[str]:
        """Whom to heartbeat: the group, those who heartbeat us from outside it, and peers discovery found."""
        group = dict.fromkeys(self.others())
        outside = [p for p in self.liveness.peers if p not in group and p != self.me.peer][: self.rules.max_observers]
        candidates = [p for p in sorted(self._candidates) if p not in group and p not in outside]
        return [*group, *outside, *candidates[: self.rules.max_observers]]

    def _heartbeat(self) -> None:
        self._next_heartbeat = self.now + self.rules.heartbeat_seconds
        self.liveness.forget_silent(self.others(), self.now)
        peers = self.liveness.peers
        self._candidates = {p: until for p, until in self._candidates.items() if p not in peers and until > self.now}
        audience = self._audience()
        if audience:
            self.emit(Send(tuple(audience), self.own_heartbeat()))
        self._note_liveness()

    def own_heartbeat(self) -> Heartbeat:
        manifest = self.head.manifest if self.head else None
        messages = self.round.evidence.messages if self.round else self.forming.messages
        # More than fit are never needed; what is left out is at worst sent once more.
        held = frozenset(messages if len(messages) <= MAX_HELD_IDS else itertools.islice(messages, MAX_HELD_IDS))
        return Heartbeat(
            self.rules.run,
            self.me.session,
            manifest.round if manifest else NO_HEAD_ROUND,
            manifest.digest if manifest else self.rules.run,
            self.round.attempt if self.round else 0,
            self.leaving,
            held,
        )

    def _note_liveness(self) -> None:
        """One note per change of a member's state, none while it lasts."""
        if self.head is None:
            return
        now_alive = {m.peer: self.alive(m) for m in self.head.manifest.group if m != self.me}
        for peer, alive in now_alive.items():
            heard = peer in self.liveness.peers
            if self._seen_alive.get(peer) != alive and (heard or not alive):
                self._seen_alive[peer] = alive
                self.note("peer_up" if alive else "peer_down", peer=peer)
        for peer in set(self._seen_alive) - set(now_alive):
            del self._seen_alive[peer]

    def _see_candidate(self, peer: str) -> None:
        room = peer in self._candidates or len(self._candidates) < self.rules.max_observers
        if peer != self.me.peer and peer not in self.liveness.peers and room:
            self._candidates[peer] = self.now + CANDIDATE_DETECTIONS * self.rules.detection_seconds

    # --- receiving ------------------------------------------------------------------------------------------------

    def _take(self, link: str, frame: Frame) -> bool:
        """Receive, and turn a refusal into a note that names the peer and the rule; False if it told nothing new."""
        try:
            return self._receive(link, frame)
        except RemoteProtocolError as error:
            author = frame.message.header.sender if isinstance(frame, Signed) else link
            refusal = (author, link, error.rule)
            if refusal in self._refused or len(self._refused) >= NOTED_REFUSALS:
                return False
            self._refused.add(refusal)
            if error.rule == "equivocation" and self.round is not None:
                self._keep_proofs()
            self.note("refused", peer=author, link=link, rule=error.rule, detail=error.detail)
            return False

    def _receive(self, link: str, frame: Frame) -> bool:
        match frame:
            case Heartbeat():
                return self._receive_heartbeat(link, frame)
            case Commit():
                return self._receive_commit(link, frame)
            case Signed():
                return self._receive_signed(link, frame)

    def _receive_heartbeat(self, link: str, beat: Heartbeat) -> bool:
        if beat.run != self.rules.run:
            raise RemoteProtocolError("other-run", f"a heartbeat of another run from {link}")
        if link == self.me.peer:
            return False
        known = self.liveness.peers.get(link)
        member = self.head.manifest.member(link) if self.head else None
        if known is None and member is None and not self.liveness.admits_stranger(self.others(), self.now):
            raise RemoteProtocolError("observers", f"more than {self.rules.max_observers} peers from outside the group heartbeat")
        self.liveness.heard(link, beat, self.now)
        mine = self.head.manifest.round if self.head else NO_HEAD_ROUND
        here = self._digest_at(beat.head_round)
        if here is not None and here != beat.head:
            self._ask_for_branch(link)
            if beat.head_round < mine:  # what does not follow its head shows it that there is another branch
                self._answer_with_commits(link, beat.head_round)
        elif beat.head_round < mine:
            self._answer_with_commits(link, beat.head_round)
        elif self.head is not None and self.round is not None and beat.head == self.head.manifest.digest:
            if member is not None and member.session == beat.session:
                for signed in self.delivery.missing(self.round.evidence, link, beat.held, self.now):
                    self.emit(Send((link,), signed))
        elif self.head is None and beat.head_round == mine:
            self.forming.heard(link, beat, self)
        ahead = self.round is not None and beat.attempt > self.round.attempt
        return known is None or ahead or (known.session, known.leaving) != (beat.session, beat.leaving)

    def _answer_with_commits(self, peer: str, head_round: int) -> None:
        """Commits after `head_round`, at most one answer per peer, round and heartbeat time."""
        last = self._answered.get(peer)
        if last is not None and last[0] == head_round and self.now < last[1] + self.rules.heartbeat_seconds:
            return
        self._answered[peer] = (head_round, self.now)
        if len(self._answered) > 4 * self.rules.max_observers:
            del self._answered[next(iter(self._answered))]
        wanted = [commit for commit in self._recent if commit.manifest.round > head_round]
        if wanted and wanted[0].manifest.round == max(head_round + 1, GENESIS_ROUND):
            for commit in wanted[:COMMITS_PER_ANSWER]:
                self.emit(Send((peer,), commit))
        else:
            self.emit(ServeCommits(peer, head_round))

    def _receive_commit(self, link: str, commit: Commit) -> bool:
        manifest = commit.manifest
        if manifest.run != self.rules.run:
            raise RemoteProtocolError("other-run", "a commit of another run")
        if self.head is None:
            if manifest.round == GENESIS_ROUND:
                self.forming.check_commit(commit)
                self._adopt(commit)
            return True
        here = self._digest_at(manifest.round)
        next_one = manifest.round == self.head.manifest.round + 1
        if (here is not None and here != manifest.digest) or (next_one and manifest.parent != self.head.manifest.digest):
            self._ask_for_branch(link)
            return False
        if not next_one:
            return False  # of the past, or too far ahead: heartbeats bring what lies between
        verify_commit(commit, self.head.manifest, self.rules)
        if not self._may_follow(commit):
            return False
        self._adopt(commit)
        return True

    def _may_follow(self, commit: Commit) -> bool:
        """A regroup binds its signers, and takes along whoever is left behind; not a group that still has its quorum."""
        if not is_regroup(commit) or not self.is_member:
            return True
        signers = {signed.message.header.member for signed in commit.certificate}
        return self.me in signers or self._heard_on({self._head_digest}) < self._head_quorum

    @property
    def _head_digest(self) -> bytes:
        assert self.head is not None
        return self.head.manifest.digest

    @property
    def _head_quorum(self) -> int:
        assert self.head is not None
        return self.head.manifest.quorum

    # --- branches (rule 19) ---------------------------------------------------------------------------------------

    def _digest_at(self, round_number: int) -> bytes | None:
        """The digest of this node's own manifest of a round, if it is a recent one."""
        if not self._recent:
            return None
        index = round_number - self._recent[0].manifest.round
        return self._recent[index].manifest.digest if 0 <= index < len(self._recent) else None

    def _ask_for_branch(self, peer: str) -> None:
        """At most once per peer and detection time."""
        if self.now < self._branch_asked.get(peer, -self.rules.detection_seconds) + self.rules.detection_seconds:
            return
        self._branch_asked.pop(peer, None)
        if len(self._branch_asked) >= BRANCHES_ASKED:
            del self._branch_asked[next(iter(self._branch_asked))]
        self._branch_asked[peer] = self.now
        self.emit(FetchBranch(peer))

    def _heard_on(self, digests: set[bytes], head: Commit | None = None, *, beyond: bool = False) -> int:
        """Members of a head's group (one's own by default) heard lately with one of these heads, oneself included.

        `beyond`: or with a later head that is none of this node's own.
        """
        commit = head if head is not None else self.head
        assert commit is not None
        limit = self.now - self.rules.detection_seconds
        count = 0
        for member in commit.manifest.group:
            view = self.liveness.peers.get(member.peer)
            if member == self.me:
                count += self.head is not None and self._head_digest in digests
            elif view is not None and view.session == member.session and view.last_heard >= limit:
                later = beyond and view.head_round > commit.manifest.round and self._digest_at(view.head_round) != view.head
                count += view.head in digests or later
        return count

    def _choose_branch(self, fetched: BranchFetched) -> None:
        """Stay or change sides; a peer's branch that does not hold together is refused under its name."""
        tip = fetched.mine[-1] if fetched.mine else fetched.fork
        if self.head is None or tip is None or tip.manifest.digest != self._head_digest or not fetched.theirs:
            return  # this node went on meanwhile; the next heartbeat asks again
        fork = fetched.fork.manifest if fetched.fork is not None else None
        try:
            verify_branch(fork, fetched.theirs, self.rules)
        except RemoteProtocolError as error:
            self.note("refused", peer=fetched.peer, link=fetched.peer, rule=error.rule, detail=error.detail)
            return
        own = {commit.manifest.digest for commit in fetched.mine} | {self._head_digest}
        if self.round is not None and self.now < self.round.started + self.rules.detection_seconds:
            own.add(self.head.manifest.parent)  # whoever was there a moment ago has not had the time to say where it is now
        mine = Branch(fetched.mine, self._heard_on(own) >= self._head_quorum)
        head = fetched.theirs[-1]
        digests = {commit.manifest.digest for commit in fetched.theirs}
        theirs = Branch(fetched.theirs, self._heard_on(digests, head, beyond=True) >= head.manifest.quorum)
        if not theirs_wins(fork, mine, theirs):
            return
        if len(fetched.mine) > self.rules.max_rollback_rounds:
            self.emit(StopAndAsk(len(fetched.mine), self.head, head))
            return
        self._change_branch(fork.round if fork is not None else GENESIS_ROUND - 1, fetched.mine, fetched.theirs)

    def _change_branch(self, fork_round: int, mine: tuple[Commit, ...], theirs: tuple[Commit, ...]) -> None:
        assert self.head is not None
        self._left[self._head_digest] = tuple(self._said)
        # Noted first: who reads the events after a crash in between must not take the lost rounds for rounds of the run.
        self.note("rolled_back", to_round=fork_round, lost=len(mine), head_round=theirs[-1].manifest.round)
        self.emit(RollBack(fork_round, mine, theirs))
        while self._recent and self._recent[-1].manifest.round > fork_round:
            self._recent.pop()
        self._recent.extend(theirs)
        self.head = theirs[-1]
        self._state_digest = self.rules.genesis_state if self.head.manifest.round == GENESIS_ROUND else None
        self._begin_round()

    def _keep_proofs(self) -> None:
        """Rule 15: whoever said two things on one matter is found out; the proof is kept and his contributions count no more."""
        assert self.round is not None
        for peer, (first, second) in self.round.evidence.offences.items():
            if peer not in self.banned:
                self.banned.add(peer)
                self.emit(Proof(peer, first, second))
                self.note("evidence", peer=peer, rule="equivocation", first=first.digest.hex(), second=second.digest.hex())

    def _receive_signed(self, link: str, signed: Signed) -> bool:
        if isinstance(signed.message, Form) and signed.message.header.round == GENESIS_ROUND:
            if self.head is None:
                self.forming.receive(signed, self)
            return self.head is None
        if self.round is not None and signed.held_id in self.round.evidence.messages:
            return False
        header = signed.message.header
        if header.run != self.rules.run:
            raise RemoteProtocolError("other-run", f"a message of another run from {header.sender}")
        if self.round is None or header.round > self.round.number:
            self._buffer(signed)
            return False
        if header.round < self.round.number:
            if header.sender == link and header.member != self.me:
                self._answer_with_commits(link, header.round - 1)
            return False
        if header.parent != self._head_digest:
            if header.sender == link:
                self._ask_for_branch(link)
            return False
        if not self.round.evidence.add(signed):
            return False
        self.accepted(signed, link)
        return True

    def _buffer(self, signed: Signed) -> None:
        """Keep a few messages of the very next round: its first ones may overtake the commit that begins it."""
        header = signed.message.header
        if self.round is None or header.round != self.round.number + 1:
            return
        if header.sender not in self.round.evidence.members and header.sender not in self.round.evidence.joins:
            return
        messages = self._future.setdefault(header.sender, [])
        total_bytes = len(signed.body) + sum(len(kept.body) for kept in messages)
        if len(messages) < self.rules.future_messages and total_bytes <= FUTURE_BYTES:
            messages.append(signed)

    def accepted(self, signed: Signed, link: str) -> None:
        """A message is new and valid: remember who has it and pass it on."""
        assert self.head is not None
        self.delivery.noted(signed.held_id, (link, signed.message.header.sender), self.now)
        targets = self.delivery.forward_targets(signed.held_id, self.others(), self.me.peer)
        if targets:
            self.emit(Send(targets, signed))

    def say(self, message: Message) -> Signed:
        """Sign a message of this round, take it into the evidence, and send it to the whole group."""
        assert self.round is not None
        signed = self._sign(message)
        if not isinstance(message, Join | Leave):  # those are the same words each time
            self.persist(Said(signed))
        self.broadcast(signed)
        return signed

    def sign(self, message: Message) -> Signed:
        return self._sign(message)

    def broadcast(self, signed: Signed) -> None:
        assert self.round is not None
        try:
            self.round.evidence.add(signed)
        except RemoteProtocolError as error:
            # Others quote this session with words it does not remember: its vote log is not whole (rule 13).
            raise LocalProtocolError(f"this session has spoken before and forgot it; take a new session ({error})") from error
        others = self.others()
        self.delivery.noted(signed.held_id, others, self.now)
        if others:
            self.emit(Send(others, signed))

    def header(self) -> Header:
        assert self.head is not None and self.round is not None
        return Header(self.rules.run, self.round.number, self.head.manifest.digest, self.me.peer, self.me.session)

    # --- deciding -------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        if self.round is None:
            commit = self.forming.advance(self)
            if commit is not None:
                self._adopt(commit)
        while self.round is not None:
            commit = self.round.advance() if self.is_member else None
            if commit is None:
                break
            self._adopt(commit)
        if self.round is not None and not self.is_member:
            self._ask_to_join()
        self._set_wakeup()

    def _ask_to_join(self) -> None:
        assert self.round is not None
        if self._state_digest is None or self.leaving or self.me.peer in self.round.evidence.joins:
            return
        self.say(Join(self.header()))

    def _leave(self) -> None:
        self.leaving = True
        if self.round is not None and self.is_member and self.me.peer not in self.round.evidence.leaves:
            self.say(Leave(self.header()))
        self._next_heartbeat = self.now

    def _adopt(self, commit: Commit) -> None:
        """The manifest is decided: make it durable, tell the others, begin the next round (rules 10 and 12)."""
        manifest = commit.manifest
        announced = self.round is not None and self.round.own_announcement is not None
        attempt = self.round.attempt if self.round is not None else 0
        own = self.round.own_announcement.message if self.round and self.round.own_announcement else None
        committed = isinstance(own, Announce) and any(
            (contribution.peer, contribution.payload) == (self.me.peer, own.payload) for contribution in manifest.contributions
        )
        self.persist(Committed(commit))
        self.head = commit
        self._recent.append(commit)
        self._state_digest = self.rules.genesis_state if manifest.round == GENESIS_ROUND else None
        self._tell_commit(commit)
        self.emit(Adopt(commit, committed, announced, attempt))
        contributors = [contribution.peer for contribution in manifest.contributions]
        if is_regroup(commit):
            group = [member.peer for member in manifest.group]
            self.emit(Note("regrouped", manifest.round, {"group": group, "contributors": contributors}))
        if manifest.round != GENESIS_ROUND:
            self.emit(Note("decided", manifest.round, {"attempt": attempt, "contributors": contributors}))
        self._begin_round()
        if self.leaving and self.is_member:
            self._leave()

    def _tell_commit(self, commit: Commit) -> None:
        """To everybody who is not known to be there already; heartbeats repair what is lost."""
        peers = [p for p in self._audience() if (v := self.liveness.peers.get(p)) is None or v.head_round < commit.manifest.round]
        if peers:
            self.emit(Send(tuple(peers), commit))

    def jump_attempt(self) -> int | None:
        """The attempt that f + 1 members are in or beyond, if it is later than ours (rule 11)."""
        assert self.round is not None and self.head is not None
        if self.round.attempt >= self.round.evidence.highest_attempt and all(
            view.attempt <= self.round.attempt for view in self.liveness.peers.values()
        ):
            return None
        ahead = self.round.evidence.peers_beyond(self.round.attempt)
        for member in self.head.manifest.group:
            view = self.liveness.peers.get(member.peer)
            if view is None or view.session != member.session:
                continue
            if view.head == self._head_digest and view.attempt > self.round.attempt:
                ahead[member.peer] = max(ahead.get(member.peer, 0), view.attempt)
        ahead.pop(self.me.peer, None)
        needed = tolerated_liars(len(self.head.manifest.group)) + 1
        attempts = sorted(ahead.values(), reverse=True)
        return attempts[needed - 1] if len(attempts) >= needed else None

    def _set_wakeup(self) -> None:
        deadlines: Iterable[float] = self.round.deadlines() if self.round is not None and self.is_member else ()
        upcoming = [deadline for deadline in deadlines if deadline > self.now]
        self.next_wakeup = min([self._next_heartbeat, *upcoming])
