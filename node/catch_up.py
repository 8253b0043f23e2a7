"""From a run id and some peers to the group's exact state: chain, checkpoint, log.

Nothing a donor says is believed. Every manifest is checked against a quorum of the group before it; a checkpoint's digest is
the `base` of the next manifest, or the genesis digest of the run file; every piece and payload is checked on arrival; and
the replayed state must have the digest that each next manifest names.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.node.chain import Chain
from sparseloco.node.download import Download, Pieces, partial_downloads
from sparseloco.node.durable import OutOfDisk
from sparseloco.node.exchange import Exchange
from sparseloco.node.services import COMMITS, HELLO, STATE, Hello, StateOffer, parse_commits
from sparseloco.node.state import digest_of_pieces, piece_count
from sparseloco.node.worker import Worker
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest
from sparseloco.protocol.messages import Commit

logger = logging.getLogger(__name__)

# So many checkpoints behind, a node downloads a state rather than replay the log.
FAR_BEHIND_CHECKPOINTS = 2
# Replaying one round of the log waits so long for its payloads before a checkpoint is downloaded instead.
REPLAY_SECONDS = 60.0


def best_offer(offers: Mapping[StateOffer, Sequence[str]], begun: Container[str]) -> tuple[StateOffer, list[str]]:
    """The offer to take and its donors. `begun`: state digests (hex) of which pieces are on the disk."""

    def rank(offer: StateOffer) -> tuple[bool, bool, int]:
        digest = digest_of_pieces(offer.length_bytes, [bytes.fromhex(piece) for piece in offer.pieces])
        return digest.hex() in begun, len(offers[offer]) >= 2, offer.round

    offer = max(offers, key=rank)
    return offer, list(offers[offer])


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
        self._state_bytes = 4 * worker.layout.parameters
        self._liars: set[str] = set()  # donors that sent wrong bytes; not asked again
        self._extending = asyncio.Lock()

    async def run(self, donors: list[Donor], progress: Callable[[int, int], None]) -> None:
        """Chain, then this node's own checkpoint and the log, or else a donor's checkpoint and the log."""
        await self.fetch_chain(donors)
        await self.restore(donors, progress)

    async def restore(self, donors: list[Donor], progress: Callable[[int, int], None]) -> None:
        """Bring the worker's state to the chain's head as it is."""
        if await asyncio.to_thread(self.load_own) and not await self._far_behind(donors):
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

    async def _far_behind(self, donors: list[Donor]) -> bool:
        """The log is so long, and somebody serves a state so much further on, that downloading it is the shorter way."""
        enough = FAR_BEHIND_CHECKPOINTS * self.worker.run.round.checkpoint_every
        if self.chain.head_round - self.worker.state_round <= enough:
            return False
        offers = await self._offers(donors, [])
        return any(offer.round - self.worker.state_round > enough for offer in offers)

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
        """Download a certified checkpoint from everybody who serves it; NetworkError if no donor has one.

        The one of which pieces are here already, else the newest that two donors have, else the newest.
        """
        refused: list[str] = []
        offers = await self._offers(donors, refused)
        while offers:
            offer, peers = best_offer(offers, partial_downloads(self._downloads))
            digests = [bytes.fromhex(piece) for piece in offer.pieces]
            pieces = Pieces(self._downloads, offer.length_bytes, digests)
            found_out = functools.partial(self._found_out, offer.round)
            download = Download(self.transport, pieces, self.worker.specs, found_out=found_out, progress=progress)
            try:
                theta = await download.run(peers)
            except TransportError as error:
                logger.info("the state after round %d: %s", offer.round, error)
                refused.append(f"  round {offer.round} from {', '.join(peers)}: {error}")
                del offers[offer]
                continue
            manifest = self.chain.manifest(offer.round)
            digest = manifest.digest if manifest else bytes(32)
            await asyncio.to_thread(self.worker.store.checkpoints.save, offer.round, theta, digest)
            await asyncio.to_thread(pieces.remove)
            self.worker.hold(offer.round, theta)
            return
        raise NetworkError(
            "no peer gave a state that the chain certifies; start again when more peers are there:\n" + "\n".join(refused)
        )

    @property
    def _downloads(self) -> Path:
        return self.worker.store.path / "download"

    def _found_out(self, round_number: int, peer: str) -> None:
        self._liars.add(peer)
        self.worker.store.events.write("refused", round_number, peer=peer, rule="piece-digest")

    async def _offers(self, donors: list[Donor], refused: list[str]) -> dict[StateOffer, list[str]]:
        """The certified checkpoints that are served, each with its donors; why others do not count goes to `refused`."""

        async def one(donor: Donor) -> StateOffer | None:
            try:
                offer = StateOffer.parse(await self.transport.request(donor.peer, STATE, b"{}"))
                await self._require_certified(donor, offer)
            except (TransportError, RemoteProtocolError) as error:
                logger.info("the state that %s offers: %s", donor.peer, error)
                refused.append(f"  {donor.peer}: {error}")
                return None
            return offer

        asked = [donor for donor in donors if donor.peer not in self._liars]
        offers: dict[StateOffer, list[str]] = {}
        for donor, offer in zip(asked, await asyncio.gather(*(one(donor) for donor in asked)), strict=True):
            if offer is not None:
                offers.setdefault(offer, []).append(donor.peer)
        return offers

    async def _require_certified(self, donor: Donor, offer: StateOffer) -> None:
        """RemoteProtocolError unless the chain names exactly the state that is offered, before a byte of it is asked for."""
        certified = self.certified_digest(offer.round)
        if certified is None:  # the group may have gone on since the chain was fetched
            async with self._extending:
                await self.fetch_chain([await ask_hello(self.transport, donor.peer)])
            certified = self.certified_digest(offer.round)
        if certified is None:
            raise RemoteProtocolError("state", f"its checkpoint of round {offer.round} is not certified by the chain")
        if offer.length_bytes != self._state_bytes or len(offer.pieces) != piece_count(self._state_bytes):
            raise RemoteProtocolError("state", "its checkpoint has another size than the run's model")
        if digest_of_pieces(offer.length_bytes, [bytes.fromhex(piece) for piece in offer.pieces]) != certified:
            raise RemoteProtocolError("state", f"its checkpoint of round {offer.round} is not the one that the chain certifies")

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
