"""Follow a run without taking part: keep its chain and its payloads, and serve both.

A bootstrap node does this, so that a joiner finds the run's log even when every volunteer has gone home. The keeper runs
the ordinary machine as a peer that is always leaving: it hears everything, votes on nothing and asks for no membership. It
lets the machine adopt a manifest only once it holds the payloads, so the head in its heartbeats says what it can serve.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from functools import partial

from sparseloco.bootstrap.errors import StateError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.node.branches import fetch_branch
from sparseloco.node.chain import Chain
from sparseloco.node.durable import OutOfDisk, once_there_is_space
from sparseloco.node.event_queue import EventQueue
from sparseloco.node.exchange import Exchange
from sparseloco.node.mail import Mail
from sparseloco.protocol import events as ev
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.machine import Machine
from sparseloco.protocol.manifest import Manifest, Member
from sparseloco.protocol.messages import Commit, Frame, Message, Signed, sign
from sparseloco.protocol.rules import Rules

logger = logging.getLogger(__name__)

# A payload that nobody serves any more must not stop the chain: it is given up after so long.
PAYLOAD_SECONDS = 60.0


class Keeper:
    """Runs beside a bootstrap node's other duties until cancelled."""

    def __init__(
        self, identity: Identity, session: bytes, rules: Rules, transport: Transport, exchange: Exchange, chain: Chain
    ) -> None:
        self.rules = rules
        self.exchange = exchange
        self.chain = chain
        self._identity = identity
        self._queue = EventQueue()
        self._transport = transport
        self._branches: set[asyncio.Task[None]] = set()
        self._commits: asyncio.Queue[tuple[str, Commit]] = asyncio.Queue(maxsize=64)
        self.machine = Machine(
            Member(identity.peer_id, session), rules, self._sign, random.Random(), head=chain.head, state_digest=None,
            recent=chain.recent(),
        )  # fmt: skip
        self.machine.leaving = True
        self.mail = Mail(transport, self._received, self._refused)

    def _sign(self, message: Message) -> Signed:
        return sign(message, self._identity.public_key, self._identity.sign)

    def put(self, event: ev.Event) -> None:
        self._queue.put(event)

    async def run(self) -> None:
        fetching = asyncio.create_task(self._fetch_payloads())
        try:
            event: ev.Event = ev.Tick()
            while True:
                for effect in self.machine.handle(event, time.monotonic()):
                    await self._perform(effect)
                if fetching.done():
                    fetching.result()
                event = await self._queue.next(self.machine.next_wakeup)
        finally:
            tasks = [fetching, *self._branches]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.mail.close()

    async def _perform(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peers, frame):
                self.mail.send(peers, frame)
            case ev.Persist(ev.Committed(commit)):
                await once_there_is_space(partial(self.chain.append, commit), self._say_full, lambda: True)
                logger.info("round %d: %d contributions", commit.manifest.round, len(commit.manifest.contributions))
            case ev.ServeCommits(peer, head_round):
                for commit in self.chain.following(head_round):
                    self.mail.send((peer,), commit)
            case ev.FetchBranch(peer):
                self._branches.add(task := asyncio.get_running_loop().create_task(self._fetch_branch(peer)))
                task.add_done_callback(self._branches.discard)
            case ev.RollBack(fork_round, _, commits):
                await once_there_is_space(partial(self.chain.switch, fork_round, commits), self._say_full, lambda: True)
                logger.info("another branch won from round %d on; it is followed to round %d", fork_round, self.chain.head_round)
            case ev.Note("refused", _, fields):
                logger.debug("refused a message of %s: %s", fields["peer"], fields["rule"])

    def _say_full(self, error: OutOfDisk) -> None:
        logger.error("%s; the chain waits here until there is space", error)

    def _received(self, sender: str, frame: Frame) -> None:
        """Commits wait for their payloads; of the rest only what shows who is alive matters here."""
        if isinstance(frame, Commit):
            if frame.manifest.round > self.chain.head_round and not self._commits.full():
                self._commits.put_nowait((sender, frame))
        elif not isinstance(frame, Signed):
            self._queue.put_received(sender, frame)

    def _refused(self, sender: str, error: RemoteProtocolError) -> None:
        logger.debug("refused a message of %s: %s", sender, error)

    async def _fetch_payloads(self) -> None:
        while True:
            sender, commit = await self._commits.get()
            if commit.manifest.round == self.chain.head_round + 1:
                try:
                    self.chain.check(commit)
                except RemoteProtocolError as error:
                    logger.debug("a commit that does not follow: %s", error)
                    self._queue.put(ev.Received(sender, commit))  # the machine looks whether it is another branch's
                    continue
                await self._hold(commit.manifest)
                self._queue.put(ev.Received(self._identity.peer_id, commit))
                # Wait until it is on the chain, or the next commit would look like one too far ahead. The machine may have
                # changed branches meanwhile: then it never gets there.
                deadline = time.monotonic() + self.rules.detection_seconds
                while self.chain.head_round < commit.manifest.round and time.monotonic() < deadline:
                    await asyncio.sleep(0.01)

    async def _fetch_branch(self, peer: str) -> None:
        """Another branch's commits for the machine to choose, once their payloads are held."""
        try:
            found = await fetch_branch(self._transport, self.chain, peer)
        except (TransportError, RemoteProtocolError) as error:
            logger.debug("the branch of %s: %s", peer, error)
            return
        if found is not None:
            for commit in found.theirs:
                await self._hold(commit.manifest)
            self._queue.put(found)

    async def _hold(self, manifest: Manifest) -> None:
        group = [member.peer for member in manifest.group]
        try:
            async with asyncio.timeout(PAYLOAD_SECONDS):
                blobs = await self.exchange.obtain_all(manifest, lambda: group)
            for blob in blobs:
                await asyncio.to_thread(self.exchange.keep, blob)
        except TimeoutError:
            logger.warning("a payload of round %d is served by nobody; the log kept here has a gap", manifest.round)
        except (OutOfDisk, StateError) as error:
            logger.error("%s; the log kept here has a gap at round %d", error, manifest.round)
