"""From a run id and some peers to the group's exact state: chain, checkpoint, log.

Nothing a donor says is believed. Every manifest is checked against a quorum of the group before it; a checkpoint's digest is
the `base` of the next manifest, or the genesis digest of the run file; every piece and payload is checked on arrival; and
the replayed state must have the digest that each next manifest names.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.node.chain import Chain
from sparseloco.node.durable import OutOfDisk
from sparseloco.node.exchange import Exchange
from sparseloco.node.services import COMMITS, HELLO, STATE, Hello, StateOffer, parse_commits
from sparseloco.node.state import PIECE_BYTES, digest_of_pieces, empty_theta, piece_count, total_bytes, write_piece
from sparseloco.node.worker import Worker
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest
from sparseloco.protocol.messages import Commit

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

NO_PROGRESS_SECONDS = 5.0
# Replaying one round of the log waits so long for its payloads before a checkpoint is downloaded instead.
REPLAY_SECONDS = 60.0


@dataclass(frozen=True)
class Donor:
    """A peer that serves the run, with what it said of itself."""

    peer: str
    hello: Hello


async def ask_hello(transport: Transport, peer: str) -> Donor:
    """A peer's hello; TransportError if it gives none."""
    return Donor(peer, Hello.parse(await transport.request(peer, HELLO, b"{}")))


async def find_donors(transport: Transport, peers: Iterable[str], run_id: bytes) -> list[Donor]:
    """The peers of this run that answer, furthest ahead first."""

    async def one(peer: str) -> Donor | None:
        try:
            return await ask_hello(transport, peer)
        except TransportError as error:
            logger.debug("%s gives no hello: %s", peer, error)
            return None

    found = await asyncio.gather(*(one(peer) for peer in dict.fromkeys(peers) if peer != transport.peer_id))
    donors = [donor for donor in found if donor is not None and donor.hello.run_id == run_id.hex()]
    return sorted(donors, key=lambda donor: (-donor.hello.head_round, donor.peer))


class CatchUp:
    """Brings a worker's state and the chain to the furthest head that donors can prove."""

    def __init__(self, transport: Transport, exchange: Exchange, worker: Worker, chain: Chain) -> None:
        self.transport = transport
        self.exchange = exchange
        self.worker = worker
        self.chain = chain

    async def run(self, donors: list[Donor], progress: Callable[[int, int], None]) -> None:
        """Chain, then this node's own checkpoint and the log, or else a donor's checkpoint and the log."""
        await self.fetch_chain(donors)
        await self.restore(donors, progress)

    async def restore(self, donors: list[Donor], progress: Callable[[int, int], None]) -> None:
        """Bring the worker's state to the chain's head as it is."""
        if await asyncio.to_thread(self.load_own):
            try:
                await self.replay(donors)
                return
            except TimeoutError:
                logger.info("nobody serves the log after round %d any more; downloading a state", self.worker.state_round)
        await self.fetch_state(donors, progress)
        try:
            await self.replay(donors)
        except TimeoutError:
            raise NetworkError(
                "no peer serves the payloads after its own checkpoint; start again when more peers are there"
            ) from None

    async def fetch_chain(self, donors: list[Donor]) -> None:
        """Extend the chain to the donors' furthest provable head."""
        for donor in donors:
            try:
                while donor.hello.head_round > self.chain.head_round:
                    first = max(self.chain.head_round + 1, GENESIS_ROUND)
                    body = await self.transport.request(donor.peer, COMMITS, json.dumps(first).encode())
                    files = parse_commits(body)
                    if not files:
                        break
                    for data in files:
                        await asyncio.to_thread(self.chain.extend, data)
            except TransportError as error:
                logger.info("the chain from %s: %s", donor.peer, error)
            except RemoteProtocolError as error:
                logger.warning("%s serves a chain that does not verify (%s); another donor is asked", donor.peer, error)

    def certified_digest(self, round_number: int) -> bytes | None:
        """The state digest after a round, as the run file or the next manifest names it."""
        if round_number == GENESIS_ROUND:
            return self.chain.rules.genesis_state
        following = self.chain.manifest(round_number + 1)
        return following.base if following else None

    def load_own(self) -> bool:
        """Take the newest checkpoint of the state directory that the chain certifies; False if there is none."""
        store = self.worker.store
        for round_number in reversed(store.checkpoints.rounds()):
            try:
                checkpoint = store.checkpoints.load(round_number, self.worker.specs)
            except StateError as error:
                logger.warning("%s; an earlier one is used", error)
                continue
            commit = self.chain.manifest(round_number)
            known = self.certified_digest(round_number)
            fits_chain = round_number == GENESIS_ROUND or (commit and commit.digest == checkpoint.manifest_digest)
            if fits_chain and known in (None, checkpoint.state_digest):
                self.worker.hold(round_number, checkpoint.theta)
                return True
            logger.warning("checkpoint %d is not of this chain; an earlier one is used", round_number)
        return False

    async def fetch_state(self, donors: list[Donor], progress: Callable[[int, int], None]) -> None:
        """Download the newest certified checkpoint, every piece checked; NetworkError if no donor has one."""
        offers: list[tuple[Donor, StateOffer]] = []
        refused: list[str] = []
        for donor in donors:
            try:
                offers.append((donor, StateOffer.parse(await self.transport.request(donor.peer, STATE, b"{}"))))
            except TransportError as error:
                refused.append(f"  {donor.peer}: {error}")
        for donor, offer in sorted(offers, key=lambda found: -found[1].round):
            try:
                theta = await self._fetch_pieces(donor, offer, progress)
            except (TransportError, RemoteProtocolError) as error:
                logger.info("the state that %s offers: %s; another donor is asked", donor.peer, error)
                refused.append(f"  {donor.peer}: {error}")
                continue
            manifest = self.chain.manifest(offer.round)
            digest = manifest.digest if manifest else bytes(32)
            await asyncio.to_thread(self.worker.store.checkpoints.save, offer.round, theta, digest)
            self.worker.hold(offer.round, theta)
            return
        raise NetworkError(
            "no peer gave a state that the chain certifies; start again when more peers are there:\n" + "\n".join(refused)
        )

    async def _fetch_pieces(self, donor: Donor, offer: StateOffer, progress: Callable[[int, int], None]) -> dict[str, torch.Tensor]:
        theta = empty_theta(self.worker.specs)
        length = total_bytes(theta)
        digests = [bytes.fromhex(piece) for piece in offer.pieces]
        certified = self.certified_digest(offer.round)
        if certified is None:  # the group may have gone on since the chain was fetched
            await self.fetch_chain([await ask_hello(self.transport, donor.peer)])
            certified = self.certified_digest(offer.round)
        if certified is None:
            raise RemoteProtocolError("state", f"its checkpoint of round {offer.round} is not certified by the chain")
        if offer.length_bytes != length or len(digests) != piece_count(length):
            raise RemoteProtocolError("state", "its checkpoint has another size than the run's model")
        if digest_of_pieces(length, digests) != certified:
            raise RemoteProtocolError("state", f"its checkpoint of round {offer.round} is not the one that the chain certifies")
        for index, digest in enumerate(digests):
            size = min(PIECE_BYTES, length - index * PIECE_BYTES)
            data = await self.transport.pull(donor.peer, digest, size, no_progress_seconds=NO_PROGRESS_SECONDS)
            write_piece(theta, index, data)
            progress(index * PIECE_BYTES + size, length)
        return theta

    async def replay(self, donors: list[Donor]) -> None:
        """Apply the log from the worker's state to the chain's head; StateError if the states do not agree."""
        while self.worker.state_round < self.chain.head_round:
            commit = self.chain.commits[self.worker.state_round + 1]
            async with asyncio.timeout(REPLAY_SECONDS):
                await self.apply(commit, lambda: [donor.peer for donor in donors])

    async def apply(self, commit: Commit, holders: Callable[[], Iterable[str]]) -> None:
        """One decided round: fetch what is missing of it, take the outer step, compare with the next manifest."""
        manifest = commit.manifest
        certified = self.certified_digest(manifest.round)
        blobs = await self.blobs_of(manifest, holders)
        await asyncio.to_thread(self.worker.apply, manifest, blobs)
        if certified is not None and certified != await asyncio.to_thread(self.worker.digest, self.worker.theta):
            raise StateError(
                f"the state after round {manifest.round} is not the one that the group certified; this machine or its state "
                "directory is faulty: start with a new --state-dir, and test the machine's memory if it happens again"
            )

    async def blobs_of(self, manifest: Manifest, holders: Callable[[], Iterable[str]]) -> list[bytes]:
        """The contributions' blobs in manifest order, fetched where they are missing."""
        started = time.monotonic()
        blobs = await self.exchange.obtain_all(manifest, holders)
        logger.debug("round %d: %d payloads after %.2f s", manifest.round, len(blobs), time.monotonic() - started)
        store = self.worker.store.blobs
        store.pin([contribution.payload for contribution in manifest.contributions])
        try:
            for blob in blobs:
                await asyncio.to_thread(store.put, blob)
        except OutOfDisk as error:
            logger.error("%s; this node cannot replay or serve round %d", error, manifest.round)
        return blobs

    async def fetch_own_payload(self, donors: list[Donor]) -> None:
        """Bring back a damaged or missing payload of one's own that was committed: the error feedback is derived from it."""
        store = self.worker.store
        newest = max((number for number in store.own.rounds() if self.chain.manifest(number) is not None), default=None)
        manifest = self.chain.manifest(newest) if newest is not None else None
        own = [c for c in manifest.contributions if c.peer == self.worker.peer_id] if manifest is not None else []
        if manifest is None or not own or await asyncio.to_thread(store.blobs.get, own[0].payload) is not None:
            return
        logger.warning("this node's own payload of round %d is missing or damaged; asking others for it", manifest.round)
        try:
            async with asyncio.timeout(REPLAY_SECONDS):
                await self.blobs_of(manifest, lambda: [donor.peer for donor in donors])
        except TimeoutError:
            logger.warning("nobody serves this node's own payload of round %d any more", manifest.round)
