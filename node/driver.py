"""Drives one node: events into the machine, its effects into the world, until the run's end or a leave.

The machine decides (protocol/), the worker computes (worker.py), the exchange moves payloads (exchange.py); this file only
connects them. Effects are performed in the order given, and a record is on the disk before the effect after it begins.
Nothing here blocks the event loop: disk and tensors run on threads.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.bootstrap.identity import Identity, verify_signature
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.node.catch_up import CatchUp, Chain
from sparseloco.node.durable import OutOfDisk
from sparseloco.node.exchange import Exchange
from sparseloco.node.services import Hello, StateOffer, make_hello
from sparseloco.node.store import StateDir
from sparseloco.node.worker import Trained as WorkerTrained
from sparseloco.node.worker import Worker
from sparseloco.protocol import events as ev
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.machine import Machine
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest, Member
from sparseloco.protocol.messages import Announce, Check, Commit, Frame, Heartbeat, Message, Signed, decode, encode, sign
from sparseloco.protocol.rules import Rules

logger = logging.getLogger(__name__)

# Events waiting for the machine; beyond it the network's are dropped, and heartbeats bring again what mattered.
QUEUED_EVENTS = 10_000
# Messages on their way to one peer that does not take them; beyond it new ones are dropped likewise.
SENDS_IN_FLIGHT = 64
SEND_SECONDS = 5.0
# Signed messages whose signature was found good, so that what is quoted again and again is verified once.
VERIFIED_KEPT = 8192
# A leaver votes on until the group dropped it, but a person at the keyboard waits no longer than this.
LEAVE_SECONDS = 3.0
# At the end of the run: how long peers that are behind are still served.
LINGER_SECONDS = 30.0
# The part of a round's budget left for encoding and announcing.
RESERVED_PART = 0.1
STEP_LOG_EVENTS = ("announced", "closed", "checked", "prevoted", "precommitted", "attempt", "refused", "peer_up", "peer_down")


@dataclass
class Progress:
    """What the live view shows and the last event reports."""

    round: int = GENESIS_ROUND
    phase: str = "starting"
    group: tuple[str, ...] = ()
    alive: set[str] = field(default_factory=set)
    loss: float | None = None
    eval_loss: float | None = None
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    tokens_per_second: float = 0.0
    committed_rounds: int = 0
    contributions_committed: int = 0
    contributions_returned: int = 0


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
        self.transport = transport
        self.exchange = exchange
        self.worker = worker
        self.store: StateDir = worker.store
        self.chain = chain
        self.catch_up = catch_up
        self.rounds = rounds
        self.progress = progress
        self.finished = asyncio.Event()
        self._why = ""
        self._queue: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._work: asyncio.Queue[Callable[[], Coroutine[Any, Any, None]]] = asyncio.Queue()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._fetches: dict[bytes, asyncio.Task[None]] = {}
        self._in_flight: dict[str, int] = {}
        self._verified: dict[tuple[bytes, bytes], None] = {}
        self._torch_thread = ThreadPoolExecutor(1, "torch")
        self._side_thread = ThreadPoolExecutor(1, "digest")
        self._digests: dict[int, Future[bytes]] = {}
        self._reports: set[asyncio.Future[Any]] = set()  # of the events still to be written about finished rounds
        self._stop_training = False
        self._was_late = False
        self._joined = False
        self._leaving_since: float | None = None
        self._linger_until = 0.0
        self._machine = self._make_machine()
        transport.on_message(self._on_message)
        transport.on_death(self._daemon_died)

    # --- set-up ---------------------------------------------------------------------------------------------------

    def _make_machine(self) -> Machine:
        head = self.chain.head
        digest = None
        if head is not None:
            digest = self.worker.digest(self.worker.theta)
            done: Future[bytes] = Future()
            done.set_result(digest)
            self._digests[head.manifest.round] = done
        records = [ev.decode_record(data) for data in self.store.open_votes().records]
        for record in records:
            if isinstance(record, ev.Announced) and isinstance(record.announcement.message, Announce):
                self.exchange.hide(record.announcement.message.payload)
        return Machine(
            self.me,
            self.rules,
            self._sign,
            random.Random(),
            head=head,
            state_digest=digest,
            records=records,
        )

    def _sign(self, message: Message) -> Signed:
        return sign(message, self.identity.public_key, self.identity.sign)

    @property
    def head_round(self) -> int:
        return self.chain.head_round

    def hello(self, asker: str) -> Hello:
        """What this node answers to a hello."""
        head = self.chain.head
        hello = make_hello(
            self.rules.run,
            self.worker.run.run.name,
            "node",
            self.me.session,
            self.head_round,
            head.manifest.digest if head else bytes(32),
            self.worker.corpus.digest,
        )
        view = self._machine.liveness.peers.get(asker)
        if view is None:
            return hello
        silence = time.monotonic() - view.last_heard
        return Hello(**{**hello.__dict__, "your_session": view.session.hex(), "your_silence_seconds": silence})

    @property
    def state_bytes(self) -> int:
        return 4 * self.worker.layout.parameters

    def offer(self) -> StateOffer | None:
        """The newest checkpoint that a joiner can check: the chain names its digest in the manifest after it."""
        for number in reversed(self.store.checkpoints.rounds()):
            certified = self.catch_up.certified_digest(number)
            if certified is not None:
                info = self.store.checkpoints.info(number)
                return StateOffer(number, self.state_bytes, tuple(piece.hex() for piece in info.piece_digests))
        return None

    # --- the loop -------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Until the run's end, the asked number of rounds, a clean leave, or an error."""
        self.exchange.served.offer_checkpoints(self.state_bytes)
        if self.head_round == GENESIS_ROUND or self.chain.head is None:
            self._report_later(self._evaluate(GENESIS_ROUND, self.worker.theta))
        workers = [asyncio.create_task(self._do_work())]
        try:
            await self._loop()
        finally:
            self._stop_training = True
            for task in [*workers, *self._tasks, *self._fetches.values()]:
                task.cancel()
            await asyncio.gather(*workers, *self._tasks, *self._fetches.values(), return_exceptions=True)
            self._torch_thread.shutdown(wait=True, cancel_futures=True)
            self._side_thread.shutdown(wait=True, cancel_futures=True)
        return self._why

    async def _loop(self) -> None:
        event: ev.Event = ev.Tick()
        while not self._ended():
            for effect in self._machine.handle(event, time.monotonic()):
                await self._perform(effect)
            if not self._joined and self._machine.is_member:
                self._joined = True
                group = [member.peer for member in self.chain.commits[self.head_round].manifest.group]
                self._event("joined", self.head_round, peer_id=self.me.peer, session=self.me.session.hex(), group=group)
            self._raise_failures()
            event = await self._next_event()

    async def _next_event(self) -> ev.Event:
        if not self._queue.empty():
            return self._queue.get_nowait()
        timeout = self._machine.next_wakeup - time.monotonic()
        try:
            return await asyncio.wait_for(self._queue.get(), max(timeout, 0.001))
        except TimeoutError:
            return ev.Tick()

    def _raise_failures(self) -> None:
        """A background task that failed ends the node: its error is the node's."""
        for task in [t for t in self._tasks if t.done()]:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                raise task.exception() or RuntimeError("a task failed")

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._queue.put_nowait(ev.Tick()) if _failed(done) else self._tasks.discard(done))
        return task

    def _daemon_died(self) -> None:
        error = NetworkError("the libp2p daemon ended by itself; start the node again, it resumes where it was")
        asyncio.get_running_loop().call_soon(lambda: self.spawn(_fail(error)))

    def put(self, event: ev.Event) -> None:
        self._queue.put_nowait(event)

    def leave(self, why: str = "interrupted") -> None:
        """Leave cleanly: say so, vote until dropped or a few seconds are over."""
        if self._leaving_since is None:
            self._leaving_since = time.monotonic()
            self._why = why
            self._stop_training = True
            self.put(ev.LeaveRequested())

    def _ended(self) -> bool:
        now = time.monotonic()
        if self._leaving_since is not None:
            alone = not self._machine.others()
            return alone or not self._machine.is_member or now > self._leaving_since + LEAVE_SECONDS
        if not self._is_over():
            return False
        if not self._run_is_over():
            self.leave(f"{self.rounds} rounds are committed")
            return False
        if not self._why:
            self._why = "the run is over"
            self._linger_until = now + LINGER_SECONDS
        return now > self._linger_until or not self._somebody_is_behind()

    def _run_is_over(self) -> bool:
        return self.worker.state_round + 1 >= self.worker.run.run.rounds

    def _is_over(self) -> bool:
        """All rounds are committed, applied and reported."""
        enough = self.rounds is not None and self.progress.committed_rounds >= self.rounds
        return (self._run_is_over() or enough) and self._work.empty() and not self._reports

    def _somebody_is_behind(self) -> bool:
        """A living member has not reached this head yet and may need this node's votes or blobs."""
        assert self.chain.head is not None
        final = self.worker.run.run.rounds - 1
        target = min(self.head_round, final)
        peers = self._machine.liveness.peers
        now = time.monotonic()
        return any(
            view.head_round < target and not view.leaving and now - view.last_heard < self.rules.detection_seconds
            for view in peers.values()
        )

    async def farewell(self) -> None:
        """A last heartbeat, so that nobody waits for this node."""
        self._machine.leaving = True
        frame = encode(self._machine.own_heartbeat())
        peers = set(self._machine.others()) | set(self._machine.liveness.peers)
        await asyncio.gather(*(self._send(peer, frame) for peer in peers))

    # --- effects --------------------------------------------------------------------------------------------------

    async def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peers, frame):
                data = encode(frame)
                for peer in peers:
                    if self._in_flight.get(peer, 0) < SENDS_IN_FLIGHT:
                        self.spawn(self._send(peer, data))
            case ev.Persist(record):
                await asyncio.to_thread(self._persist, record)
            case ev.Train(number, index, _, budget_ms):
                self._stop_training = False
                deadline = time.monotonic() + budget_ms / 1000 * (1 - RESERVED_PART)
                self._work.put_nowait(lambda: self._train(number, index, deadline))
            case ev.Reveal(announcement, peers):
                self.spawn(self.exchange.reveal(announcement, peers))
            case ev.Fetch(announcement):
                self._fetches[announcement.digest] = asyncio.get_running_loop().create_task(self._fetch(announcement))
            case ev.Adopt(commit, committed, announced):
                self._adopt(commit, committed, announced)
            case ev.ServeCommits(peer, head_round):
                self._serve_commits(peer, head_round)
            case ev.Note(event, number, fields):
                self._note(event, number, fields)

    def _persist(self, record: ev.Record) -> None:
        """On the disk when this returns. An error ends the process: a vote that may be lost must not be sent."""
        votes = self.store.open_votes()
        if isinstance(record, ev.Committed):
            self.chain.append(record.commit)
            votes.replace([])
        else:
            votes.append(ev.encode_record(record))

    async def _send(self, peer: str, data: bytes) -> None:
        self._in_flight[peer] = self._in_flight.get(peer, 0) + 1
        try:
            await self.transport.send(peer, data, SEND_SECONDS)
        except TransportError as error:
            logger.debug("sending to %s: %s", peer, error)
        finally:
            self._in_flight[peer] -= 1
            if not self._in_flight[peer]:
                del self._in_flight[peer]

    def _serve_commits(self, peer: str, head_round: int) -> None:
        for number in range(max(head_round + 1, GENESIS_ROUND), head_round + 5):
            commit = self.chain.commits.get(number)
            if commit is not None:
                self.spawn(self._send(peer, encode(commit)))

    async def _fetch(self, announcement: Signed) -> None:
        rule = await self.exchange.settle(announcement, lambda: self._holders(announcement))
        if rule:
            sender = announcement.message.header.sender
            self._event("refused", announcement.message.header.round, peer=sender, rule=rule)
        self.put(ev.Settled(announcement.digest, rule))

    def _holders(self, announcement: Signed) -> list[str]:
        """Members whose Check lists the payload."""
        current = self._machine.round
        if current is None:
            return []
        holders = []
        for peer, check in current.evidence.checks.items():
            assert isinstance(check.message, Check)
            if announcement.digest in check.message.valid:
                holders.append(peer)
        return holders

    def _note(self, event: str, number: int, fields: Mapping[str, Any]) -> None:
        self.progress.round = max(self.progress.round, number)
        match event:
            case "round_started":
                self.progress.group = tuple(fields["group"])
                self.progress.phase = "training" if fields["member"] else "following"
                base = self._digests.get(number - 1)
                digest = base.result().hex() if base is not None and base.done() else None
                self._event(event, number, **fields, base=digest)
                return
            case "peer_up":
                self.progress.alive.add(fields["peer"])
                logger.info("peer %s is up", fields["peer"])
            case "peer_down":
                self.progress.alive.discard(fields["peer"])
                logger.info("peer %s is down", fields["peer"])
            case "refused":
                logger.warning("refused a message of %s: %s (%s)", fields["peer"], fields["rule"], fields["detail"])
            case "waiting":
                logger.info("%d of at least %d peers are here; waiting", fields["seen"], fields["min_peers"])
            case "late":
                self._was_late = True
            case "announced" | "closed" | "checked" | "prevoted":
                self.progress.phase = {"announced": "announced", "closed": "exchanging", "checked": "checked"}.get(event, "voting")
        if event in STEP_LOG_EVENTS:
            self._event(event, number, **fields)

    def _event(self, event: str, number: int, **fields: Any) -> None:
        self.store.events.write(event, number, **fields)

    # --- work on tensors, in order --------------------------------------------------------------------------------

    async def _do_work(self) -> None:
        while True:
            job = await self._work.get()
            try:
                await job()
            except asyncio.CancelledError:
                raise
            except Exception as error:  # the outermost loop of the tensors' side: its error ends the node
                self.spawn(_fail(error))
                return

    async def _on_torch_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._torch_thread, function, *arguments)

    async def _train(self, number: int, index: int, deadline: float) -> None:
        if self._stop_training or number != self.head_round + 1 or number >= self.worker.run.run.rounds:
            return
        base = self._digests[number - 1]
        try:
            trained: WorkerTrained = await self._on_torch_thread(
                self.worker.train, number, index, deadline, lambda: self._stop_training, lambda: base.result(60.0)
            )
        except OutOfDisk as error:
            logger.error("%s; this round's contribution is withheld", error)
            self._event("withheld", number, why=str(error))
            self.put(ev.Trained(number, b"", 0, 0, 0, 0))
            return
        result = trained.result
        if result.steps:
            self.progress.loss = result.loss_mean
            self.progress.losses.append(result.loss_mean)
            del self.progress.losses[:-200]
            self.progress.steps += result.steps
            self.progress.tokens += result.tokens
            self.progress.tokens_per_second = result.tokens / max(result.seconds, 1e-9)
            fields = {"steps": result.steps, "tokens": result.tokens, "loss": result.loss_mean, "seconds": result.seconds}
            self._event("trained", number, **fields)
        if trained.why:
            logger.warning("round %d: this node's contribution is withheld: %s", number, trained.why)
            self._event("withheld", number, why=trained.why)
        size = len(trained.blob) if trained.blob is not None else 0
        if size:
            self.exchange.hide(trained.digest)
        self.put(ev.Trained(number, trained.digest, size, result.steps, result.tokens, trained.duration_ms))

    def _adopt(self, commit: Commit, committed: bool, announced: bool) -> None:
        self._stop_training = True
        for task in self._fetches.values():
            task.cancel()
        self._fetches.clear()
        attempt = self._machine.round.attempt if self._machine.round is not None else 0
        late, self._was_late = self._was_late, False
        self._work.put_nowait(lambda: self._apply(commit, committed, announced, late, attempt))

    async def _apply(self, commit: Commit, committed: bool, announced: bool, late: bool, attempt: int) -> None:
        manifest = commit.manifest
        if manifest.round == GENESIS_ROUND:
            self._digest_state(GENESIS_ROUND)
            return
        await self._check_base(manifest)
        group = [m.peer for m in manifest.group]
        blobs = await self.catch_up.blobs_of(manifest, lambda: [p for p in group if p != self.me.peer])
        await self._on_torch_thread(self.worker.apply, manifest, blobs)
        for contribution in manifest.contributions:
            self.exchange.served.hidden.discard(contribution.payload)
        self._count(manifest, committed, announced, late)
        theta = self.worker.theta
        digest = self._digest_state(manifest.round)
        self._report_later(self._evaluate(manifest.round, theta))
        self._report_later(self._report(commit, attempt, digest, theta))

    async def _check_base(self, manifest: Manifest) -> None:
        """The group's base state must be the one held here; a machine that computes wrongly must not go on."""
        digest = self._digests.get(manifest.round - 1)
        mine = manifest.base if digest is None else await asyncio.wrap_future(digest)
        if mine != manifest.base:
            raise StateError(
                f"the group's state before round {manifest.round} is {manifest.base.hex()[:16]}, this node's is "
                f"{mine.hex()[:16]}: this machine computed something else; start again with a new --state-dir"
            )

    def _count(self, manifest: Manifest, committed: bool, announced: bool, late: bool) -> None:
        self.progress.committed_rounds += 1
        self.progress.contributions_committed += committed
        if not committed and (announced or late):
            self.progress.contributions_returned += 1
            why = "late" if late else "not committed by the group"
            self._event("returned", manifest.round, why=why)

    def _digest_state(self, number: int) -> Future[bytes]:
        """Hash the state beside the next round's training; its announcement waits for the result."""
        theta = self.worker.theta
        digest = self._side_thread.submit(self.worker.digest, theta)
        self._digests = {number: digest, **{n: f for n, f in self._digests.items() if n >= number - 1}}
        loop = asyncio.get_running_loop()

        def hashed(done: Future[bytes]) -> None:
            if not done.cancelled() and done.exception() is None:
                loop.call_soon_threadsafe(self.put, ev.StateDigest(number, done.result()))

        digest.add_done_callback(hashed)
        return digest

    async def _report(self, commit: Commit, attempt: int, digest: Future[bytes], theta: Mapping[str, Any]) -> None:
        """The `committed` event, once the resulting state has its digest; then a checkpoint if one is due."""
        manifest = commit.manifest
        state = await asyncio.wrap_future(digest)
        contributors = [contribution.peer for contribution in manifest.contributions]
        self._event(
            "committed",
            manifest.round,
            state_digest=state.hex(),
            manifest=manifest.digest.hex(),
            contributors=contributors,
            attempt=attempt,
            group_size=len(manifest.group),
        )
        logger.info("round %d: %d contributions, state %s", manifest.round, len(contributors), state.hex()[:12])
        every = self.worker.run.round.checkpoint_every
        last = manifest.round + 1 >= self.worker.run.run.rounds
        if (manifest.round + 1) % every == 0 and not last:
            await self.checkpoint(manifest.round, theta, manifest.digest)

    async def checkpoint(self, number: int, theta: Mapping[str, Any], manifest_digest: bytes) -> None:
        """Save a state, offer it to joiners, and let go of payloads that only older ones need."""
        try:
            digest = await asyncio.to_thread(self.store.checkpoints.save, number, theta, manifest_digest)
        except OutOfDisk as error:
            logger.error("%s; the checkpoint of round %d is skipped", error, number)
            return
        self._event("checkpoint", number, state_digest=digest.hex())
        self.exchange.served.offer_checkpoints(self.state_bytes)
        kept = self.store.checkpoints.rounds()
        if len(kept) > 1:
            for old in range(kept[-2] - 2 * self.worker.run.round.checkpoint_every, kept[-2] + 1):
                manifest = self.chain.manifest(old)
                if manifest is not None:
                    self.store.blobs.unpin([contribution.payload for contribution in manifest.contributions])

    def _report_later(self, work: Coroutine[Any, Any, None]) -> None:
        """Write an event when its figures are there; the node does not leave before."""
        report = self.spawn(work)
        self._reports.add(report)
        report.add_done_callback(self._reports.discard)

    async def _evaluate(self, number: int, theta: Mapping[str, Any]) -> None:
        loop = asyncio.get_running_loop()
        evaluation = await loop.run_in_executor(self._side_thread, self.worker.evaluate, theta)
        self.progress.eval_loss = evaluation.loss
        self._event("evaluated", number, loss=evaluation.loss, windows=evaluation.windows)

    # --- messages from others -------------------------------------------------------------------------------------

    def _on_message(self, sender: str, data: bytes) -> None:
        """Decode and verify; what fails is refused by name. Runs in the event loop, a few microseconds to milliseconds."""
        if self._queue.qsize() > QUEUED_EVENTS:
            return
        try:
            frame = decode(data, self.transport.limits.message_bytes)
            self._verify(frame)
        except RemoteProtocolError as error:
            self._event("refused", self.head_round + 1, peer=sender, rule=error.rule, detail=error.detail)
            logger.warning("refused a message of %s: %s", sender, error)
            return
        self._queue.put_nowait(ev.Received(sender, frame))

    def _verify(self, frame: Frame) -> None:
        match frame:
            case Heartbeat():
                return
            case Commit():
                for signed in frame.certificate:
                    self._verify_signed(signed)
            case Signed():
                self._verify_signed(frame)

    def _verify_signed(self, signed: Signed) -> None:
        key = (signed.digest, signed.signature)
        if key in self._verified:
            return
        for inner in signed.inner:
            self._verify_signed(inner)
        signed.verify_own(verify_signature)
        self._verified[key] = None
        if len(self._verified) > VERIFIED_KEPT:
            del self._verified[next(iter(self._verified))]


def _failed(task: asyncio.Task[Any]) -> bool:
    return not task.cancelled() and task.exception() is not None


async def _fail(error: Exception) -> None:
    raise error
