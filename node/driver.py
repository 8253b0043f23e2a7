"""Drives one node: events into the machine, its effects into the world, until the run's end or a leave.

The machine decides (protocol/), tensors are `work`'s, payloads are the `exchange`'s, messages are `mail`'s; this file only
connects them. Effects are performed in the order given, and a record is on the disk before the effect after it begins.
Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.node.branches import fetch_branch
from sparseloco.node.catch_up import CatchUp
from sparseloco.node.chain import Chain
from sparseloco.node.durable import OutOfDisk, once_there_is_space
from sparseloco.node.event_queue import EventQueue
from sparseloco.node.exchange import Exchange
from sparseloco.node.mail import Mail
from sparseloco.node.progress import Progress
from sparseloco.node.proofs import ProofStore
from sparseloco.node.services import Hello, StateOffer, make_hello
from sparseloco.node.work import Decided, Work
from sparseloco.node.worker import Worker
from sparseloco.protocol import events as ev
from sparseloco.protocol.errors import LocalProtocolError, RemoteProtocolError
from sparseloco.protocol.machine import Machine
from sparseloco.protocol.manifest import Manifest, Member
from sparseloco.protocol.messages import Announce, Check, Frame, Message, Signed, sign
from sparseloco.protocol.rules import Rules

logger = logging.getLogger(__name__)

# Different refusals written down per round: a flood of bad messages must not fill the disk.
NOTED_REFUSALS = 256
# A leaver votes on until the group dropped it, but a person at the keyboard waits no longer than this.
LEAVE_SECONDS = 3.0
FAREWELL_SECONDS = 1.0
# At the end of the run: how long peers that are behind are still served.
LINGER_SECONDS = 30.0
# What of a round's budget is left for encoding, writing and announcing: a part of it, and at least what that took lately.
RESERVED_PART = 0.1
# Notes of the machine that go to events.jsonl as they are; `phase` is what the view shows from then on.
EVENTS_WITH_PHASE = {
    "announced": "waiting for the others",
    "closed": "exchanging",
    "checked": "waiting for the others' checks",
    "prevoted": "voting",
    "precommitted": "voting",
    "attempt": "voting again",
    "refused": "",
    "regrouping": "going on without those who are gone",
    "regrouped": "",
    "rolled_back": "changing to the winning branch",
    "evidence": "",
    "peer_up": "",
    "peer_down": "",
}


class Driver:
    """One node from its first heartbeat to its last; `run()` returns why it ended."""

    def __init__(
        self,
        *,
        identity: Identity,
        session: bytes,
        rules: Rules,
        transport: Transport,
        exchange: Exchange,
        worker: Worker,
        chain: Chain,
        catch_up: CatchUp,
        rounds: int | None,
        progress: Progress,
    ) -> None:
        self.identity = identity
        self.me = Member(identity.peer_id, session)
        self.rules = rules
        self.exchange = exchange
        self.worker = worker
        self.store = worker.store
        self.chain = chain
        self.catch_up = catch_up
        self.rounds = rounds
        self.progress = progress
        self._queue = EventQueue()
        self._failure: BaseException | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fetches: dict[bytes, asyncio.Task[None]] = {}
        self._refusals: set[tuple[str, str]] = set()
        self._why = ""
        self._joined = False
        self._leaving_since: float | None = None
        self._linger_until = 0.0
        self._short_since: float | None = None
        self._short_said = False
        self.work = Work(worker, exchange, catch_up, chain, progress, put=self.put, fail=self.fail)
        self.transport = transport
        self.mail = Mail(transport, self._received, self._refused)
        self.machine = self._make_machine()
        transport.on_death(self._daemon_died)

    def _make_machine(self) -> Machine:
        """A machine at this node's head, with everything that this session said before."""
        records = [ev.decode_record(data) for data in self.store.open_votes().records]
        for record in records:
            if isinstance(record, ev.Announced) and isinstance(record.announcement.message, Announce):
                self.exchange.hide(record.announcement.message.payload)
        head = self.chain.head
        digest = self.work.digest(head.manifest.round).result() if head is not None else None
        return Machine(
            self.me,
            self.rules,
            self._sign,
            random.Random(),
            head=head,
            state_digest=digest,
            records=records,
            recent=self.chain.recent(),
            banned=ProofStore(self.store.path).convicted(),
        )

    def _sign(self, message: Message) -> Signed:
        return sign(message, self.identity.public_key, self.identity.sign)

    # --- what others may ask ---------------------------------------------------------------------------------------

    @property
    def head_round(self) -> int:
        return self.chain.head_round

    def hello(self, asker: str) -> Hello:
        """What this node answers to a hello."""
        head = self.chain.head
        return make_hello(
            self.rules.run,
            self.worker.run.run.name,
            "node",
            self.me.session,
            self.head_round,
            head.manifest.digest if head else bytes(32),
            self.worker.corpus.digest,
            heard=self.machine.liveness.last_word(asker, time.monotonic()),
        )

    def offer(self) -> StateOffer | None:
        """The newest checkpoint that a joiner can check: the chain names its digest in the manifest after it."""
        for number in reversed(self.store.checkpoints.rounds()):
            if self.catch_up.certified_digest(number) is None:
                continue
            try:
                info = self.store.checkpoints.info(number)
            except StateError as error:
                logger.debug("not offered: %s", error)
                continue
            return StateOffer(number, self.work.state_bytes, tuple(piece.hex() for piece in info.piece_digests))
        return None

    # --- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Until the run's end, the asked number of rounds, a clean leave, or an error."""
        self.work.start()
        try:
            await self._loop()
        finally:
            tasks = [*self._tasks, *self._fetches.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.work.close()
        return self._why

    async def _loop(self) -> None:
        event: ev.Event = ev.Tick()
        while not self._ended():
            for effect in self._handle(event):
                await self._perform(effect)
            if not self._joined and self.machine.is_member:
                self._joined = True
                group = [member.peer for member in self.chain.commits[self.head_round].manifest.group]
                self._event("joined", self.head_round, peer_id=self.me.peer, session=self.me.session.hex(), group=group)
            self._watch_quorum()
            event = await self._queue.next(self.machine.next_wakeup)
            if self._failure is not None:
                raise self._failure

    def _watch_quorum(self) -> None:
        """Say once that too few members are heard to decide anything, and once that it is over."""
        head, now = self.machine.head, time.monotonic()
        if head is None or not self.machine.is_member or self.machine.heard_members() >= head.manifest.quorum:
            if self._short_said:
                logger.info("enough members are heard again; rounds go on")
            self._short_since, self._short_said = None, False
            return
        self._short_since = self._short_since or now
        if not self._short_said and now > self._short_since + self.rules.detection_seconds:
            self._short_said = True
            missing = [m.peer for m in head.manifest.group if m != self.me and not self.machine.alive(m)]
            heard, needed = self.machine.heard_members(), head.manifest.quorum
            self.progress.phase = f"waiting: {heard} of {len(head.manifest.group)} members are heard, {needed} must be"
            logger.warning(
                "%d of %d members are heard, %d are needed to go on; waiting for %s to come back",
                heard,
                len(head.manifest.group),
                needed,
                ", ".join(missing) or "the others",
            )

    def _handle(self, event: ev.Event) -> list[ev.Effect]:
        try:
            return self.machine.handle(event, time.monotonic())
        except LocalProtocolError as error:
            raise StateError(
                f"{error}: the vote log is lost, or a copy of this state directory runs elsewhere; stop the copy, or remove "
                f"{self.store.path / 'session'} to come back as a new member"
            ) from error

    def put(self, event: ev.Event) -> None:
        self._queue.put(event)

    def fail(self, error: BaseException) -> None:
        """End the node with this error."""
        self._failure = self._failure or error
        self.put(ev.Tick())

    def _daemon_died(self) -> None:
        self.fail(NetworkError("the libp2p daemon ended by itself; start the node again, it resumes where it was"))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run beside the loop; a failure is the node's."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    # --- the end --------------------------------------------------------------------------------------------------

    def leave(self, why: str = "interrupted") -> None:
        """Leave cleanly: say so, vote until dropped or a few seconds are over."""
        if self._leaving_since is None:
            self._leaving_since = time.monotonic()
            self._why = why
            self.work.stopped = True
            self.put(ev.LeaveRequested())

    def _ended(self) -> bool:
        now = time.monotonic()
        if self._leaving_since is not None:
            alone = not self.machine.others()
            return alone or self.machine.may_go or now > self._leaving_since + LEAVE_SECONDS
        over = self.worker.state_round + 1 >= self.worker.run.run.rounds
        enough = self.rounds is not None and self.progress.committed_rounds >= self.rounds
        if not (over or enough) or not self.work.settled:
            return False
        if not over:
            self.leave(f"{self.rounds} rounds are committed")
            return False
        if not self._why:
            self._why = "the run is over"
            self._linger_until = now + LINGER_SECONDS
        return now > self._linger_until or not self._somebody_is_behind(now)

    def _somebody_is_behind(self, now: float) -> bool:
        """A living peer has not reached the run's last round yet and may need this node's votes or blobs."""
        last = self.worker.run.run.rounds - 1
        peers = self.machine.liveness.peers.values()
        return any(p.head_round < last and now - p.last_heard < self.rules.detection_seconds for p in peers)

    async def farewell(self) -> None:
        """A last heartbeat, so that nobody waits for this node."""
        self.machine.leaving = True
        self.mail.send({*self.machine.others(), *self.machine.liveness.peers}, self.machine.own_heartbeat())
        await self.mail.flush(FAREWELL_SECONDS)
        await self.mail.close()

    # --- effects --------------------------------------------------------------------------------------------------

    async def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peers, frame):
                self.mail.send(peers, frame)
            case ev.Persist(record):
                await self._once_there_is_space("vote", partial(self._persist, record))
            case ev.Train(number, index, _, budget_ms):
                reserved = max(RESERVED_PART * budget_ms / 1000, self.work.after_training_seconds)
                self.work.train(number, index, time.monotonic() + budget_ms / 1000 - reserved)
            case ev.Reveal(announcement, peers):
                self._spawn(self.exchange.reveal(announcement, peers))
            case ev.Fetch(announcement):
                self._fetches[announcement.digest] = self._spawn(self._fetch(announcement))
            case ev.Adopt(commit, committed, announced, attempt):
                self._forget_fetches()
                self._refusals.clear()
                self.work.adopt(Decided(commit, committed, announced, attempt))
            case ev.ServeCommits(peer, head_round):
                for commit in self.chain.following(head_round):
                    self.mail.send((peer,), commit)
            case ev.FetchBranch(peer):
                self._spawn(self._fetch_branch(peer))
            case ev.RollBack():
                await self._change_branch(effect)
            case ev.StopAndAsk(depth, mine, theirs):
                raise StateError(self._question(depth, mine.manifest, theirs.manifest))
            case ev.Proof(peer, first, second):
                await asyncio.to_thread(ProofStore(self.store.path).keep, peer, first, second)
            case ev.Note(event, number, fields):
                self._note(event, number, fields)

    async def _fetch_branch(self, peer: str) -> None:
        try:
            found = await fetch_branch(self.transport, self.chain, peer)
        except TransportError as error:
            logger.debug("the branch of %s: %s", peer, error)
        except RemoteProtocolError as error:
            self._refused(peer, error)
        else:
            if found is not None:
                self.put(found)

    async def _change_branch(self, change: ev.RollBack) -> None:
        """What was given to the branch that lost is durable in the error feedback before the chain changes."""
        lost = [commit.manifest for commit in change.lost]
        instead = [commit.manifest for commit in change.commits]
        logger.warning(
            "another branch of the run won: going back from round %d to round %d and on to %d; no contribution is lost",
            self.head_round,
            change.fork_round,
            instead[-1].round,
        )
        self._forget_fetches()
        if lost:
            await self.work.give_back(lost, instead)
            await self._once_there_is_space("branch", partial(self.worker.save_given_back, instead))
        await self._once_there_is_space("branch", partial(self.chain.switch, change.fork_round, change.commits))
        self.work.follow_branch(change.fork_round)

    def _question(self, depth: int, mine: Manifest, theirs: Manifest) -> str:
        return (
            f"{self.store.path}: the run went on without this node: its own last {depth} rounds (head {mine.round}:"
            f"{mine.digest.hex()}) lost against a branch with head {theirs.round}:{theirs.digest.hex()}, and [limits] "
            f"max_rollback_rounds = {self.rules.max_rollback_rounds} rounds may be given up unasked; nothing was changed. To "
            f"follow the other branch start with a new --state-dir and --trust-head {theirs.round}:{theirs.digest.hex()}"
        )

    async def _once_there_is_space(self, what: str, write: Callable[[], None]) -> None:
        """Write something that must be durable before anything else is said: while the disk is full this node is silent."""

        def say(error: OutOfDisk) -> None:
            logger.error("%s; this node says nothing until there is space", error)
            self.progress.phase = "waiting for space on the disk"
            self._event("disk_full", self.head_round + 1, what=what, why=str(error))

        await once_there_is_space(write, say, lambda: self._leaving_since is None)

    def _persist(self, record: ev.Record) -> None:
        """On the disk when this returns. An error that is not a full disk ends the process: a vote that may be lost is not sent."""
        votes = self.store.open_votes()
        if isinstance(record, ev.Committed):
            self.chain.append(record.commit)
            kept = ev.still_binding([ev.decode_record(data) for data in votes.records], record.commit)
            votes.replace([ev.encode_record(said) for said in kept])
        else:
            votes.append(ev.encode_record(record))

    async def _fetch(self, announcement: Signed) -> None:
        header = announcement.message.header
        try:
            rule = await self.exchange.settle(announcement, lambda: self._holders(announcement))
        except OutOfDisk as error:  # not the sender's fault: the round goes on with a quorum of others that hold it
            logger.error("%s; the contribution of %s to round %d is not kept here", error, header.sender, header.round)
            self._event("disk_full", header.round, what="payload", why=str(error))
            self.put(ev.Settled(announcement.digest, "own-disk-full"))
            return
        if rule:
            logger.warning("refused the contribution of %s to round %d: %s", header.sender, header.round, rule)
            self._event("refused", header.round, peer=header.sender, rule=rule)
        self.put(ev.Settled(announcement.digest, rule))

    def _holders(self, announcement: Signed) -> list[str]:
        """Members whose Check lists the payload."""
        current = self.machine.round
        checks = current.evidence.checks if current is not None else {}
        return [
            peer
            for peer, check in checks.items()
            if isinstance(check.message, Check) and announcement.digest in check.message.valid
        ]

    def _forget_fetches(self) -> None:
        for task in self._fetches.values():
            task.cancel()
        self._fetches.clear()

    def _note(self, event: str, number: int, fields: Mapping[str, Any]) -> None:
        self.progress.round = max(self.progress.round, number)
        match event:
            case "round_started":
                self.progress.group = tuple(fields["group"])
                self.progress.phase = "training" if fields["member"] else "following, not a member yet"
                base = self.work.known_digest(number - 1)
                self._event(event, number, **fields, base=base.hex() if base else None)
            case "peer_up":
                self.progress.alive.add(fields["peer"])
                logger.info("peer %s is up", fields["peer"])
            case "peer_down":
                self.progress.alive.discard(fields["peer"])
                logger.info("peer %s is down", fields["peer"])
            case "regrouped":
                names = ", ".join(fields["group"])
                logger.warning("too few were left for a quorum; %d members go on: %s", len(fields["group"]), names)
            case "evidence":
                logger.warning("peer %s said two things on one matter; the proof is kept, its work counts no more", fields["peer"])
            case "refused":
                logger.warning("refused a message of %s: %s (%s)", fields["peer"], fields["rule"], fields["detail"])
            case "waiting":
                self.progress.phase = f"waiting: {fields['seen']} of at least {fields['min_peers']} peers are here"
                logger.info("%d of at least %d peers are here; waiting", fields["seen"], fields["min_peers"])
        if event in EVENTS_WITH_PHASE:
            self.progress.phase = EVENTS_WITH_PHASE[event] or self.progress.phase
            self._event(event, number, **fields)

    def _event(self, event: str, number: int, **fields: Any) -> None:
        self.store.events.write(event, number, **fields)

    # --- messages from others -------------------------------------------------------------------------------------

    def _received(self, sender: str, frame: Frame) -> None:
        self._queue.put_received(sender, frame)

    def _refused(self, sender: str, error: RemoteProtocolError) -> None:
        if (sender, error.rule) in self._refusals or len(self._refusals) >= NOTED_REFUSALS:
            return
        self._refusals.add((sender, error.rule))
        self._event("refused", self.head_round + 1, peer=sender, rule=error.rule, detail=error.detail)
        logger.warning("refused a message of %s: %s", sender, error)
