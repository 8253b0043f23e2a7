"""Payloads on their way: reveal, push, pull, check, store.

One's own payload is served to nobody before a Close was accepted (commit, then reveal). What arrives is taken only if it was
asked for, has the announced length and digest, and passes every rule of header and codec; the first broken rule is the
verdict. Whoever misses a payload pulls it from its origin first and then from anyone who says it holds it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from sparseloco.bootstrap.errors import StateError
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.compression.layout import PayloadLayout
from sparseloco.compression.validation import PayloadError, validate
from sparseloco.node.blobs import BlobStore
from sparseloco.node.checkpoints import CheckpointStore
from sparseloco.node.contribution import ContributionError, ContributionHeader, contribution_bytes, open_contribution
from sparseloco.node.state import PIECE_BYTES
from sparseloco.node.store import StateDir
from sparseloco.protocol.manifest import Manifest
from sparseloco.protocol.messages import Announce, Signed

logger = logging.getLogger(__name__)

# An origin pushes as soon as it accepts the Close; a pull that starts at once would move every payload twice.
PUSH_WAIT_SECONDS = 1.0
RETRY_SECONDS = 0.25
NO_PROGRESS_SECONDS = 5.0
# Pushes at once: a slow uplink serves a few peers well rather than all badly.
PUSHES_AT_ONCE = 4
# Pushes that came before their Close was accepted here; whoever made one has the payload ready, so it is pulled at once.
EARLY_PUSHES = 256


@dataclass
class _Wanted:
    """A payload being waited for."""

    length: int
    arrived: asyncio.Future[bytes] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class GatedBlobs:
    """What this node serves: its blobs but for its own unrevealed payload, and the pieces of its checkpoints."""

    def __init__(self, blobs: BlobStore, checkpoints: CheckpointStore) -> None:
        self.blobs = blobs
        self.checkpoints = checkpoints
        self.hidden: set[bytes] = set()
        self._pieces: dict[bytes, tuple[int, int, int]] = {}  # digest -> round, index, size

    def size(self, digest: bytes) -> int | None:
        if digest in self.hidden:
            return None
        piece = self._pieces.get(digest)
        return piece[2] if piece is not None else self.blobs.size(digest)

    def read(self, digest: bytes, offset: int, n: int) -> bytes:
        piece = self._pieces.get(digest)
        if piece is None:
            return self.blobs.read(digest, offset, n)
        try:
            return self.checkpoints.read_piece(piece[0], piece[1], offset, n)
        except StateError as error:
            raise OSError(str(error)) from error

    def offer_checkpoints(self, length_bytes: int) -> None:
        """Serve the pieces of every checkpoint that is on the disk now; a state has `length_bytes`."""
        self._pieces = {}
        for round_number in self.checkpoints.rounds():
            try:
                pieces = self.checkpoints.info(round_number).piece_digests
            except StateError as error:  # damaged, or just now replaced by a newer one
                logger.debug("not served: %s", error)
                continue
            for index, digest in enumerate(pieces):
                size = min(PIECE_BYTES, length_bytes - index * PIECE_BYTES)
                self._pieces.setdefault(digest, (round_number, index, size))


class Exchange:
    """One node's payload traffic. All methods run in the event loop; checking runs on a thread."""

    def __init__(self, transport: Transport, store: StateDir, layout: PayloadLayout, rng: random.Random) -> None:
        self.transport = transport
        self.layout = layout
        self.served = GatedBlobs(store.blobs, store.checkpoints)
        self._blobs = store.blobs
        self._rng = rng
        self._wanted: dict[bytes, _Wanted] = {}
        self._early: dict[bytes, None] = {}
        self._pushing = asyncio.Semaphore(PUSHES_AT_ONCE)
        transport.serve_blobs(self.served)
        transport.accept_pushes(self._accept, self._deliver)

    def _accept(self, sender: str, digest: bytes, length: int) -> bool:
        wanted = self._wanted.get(digest)
        if wanted is None:
            self._early[digest] = None
            if len(self._early) > EARLY_PUSHES:
                del self._early[next(iter(self._early))]
        return wanted is not None and not wanted.arrived.done() and wanted.length == length

    def _deliver(self, sender: str, digest: bytes, data: bytes) -> None:
        wanted = self._wanted.get(digest)
        if wanted is not None and not wanted.arrived.done():
            wanted.arrived.set_result(data)

    def hide(self, digest: bytes) -> None:
        self.served.hidden.add(digest)

    async def reveal(self, announcement: Signed, peers: Iterable[str]) -> None:
        """Serve this node's payload from now on and push it to `peers`; a peer that does not take it will pull."""
        message = announcement.message
        assert isinstance(message, Announce)
        self.served.hidden.discard(message.payload)
        blob = await asyncio.to_thread(self._blobs.get, message.payload)
        if blob is not None:
            order = list(peers)
            self._rng.shuffle(order)
            await asyncio.gather(*(self._push(peer, message.payload, blob) for peer in order))

    async def _push(self, peer: str, digest: bytes, blob: bytes) -> None:
        async with self._pushing:
            try:
                await self.transport.push(peer, digest, blob, NO_PROGRESS_SECONDS)
            except TransportError as error:
                logger.debug("pushing %s to %s: %s", digest.hex()[:12], peer, error)

    async def settle(self, announcement: Signed, holders: Callable[[], Iterable[str]]) -> str:
        """Obtain, check and durably store an announced payload; the rule it breaks, "" if none. Runs until it has one.

        `holders` are peers that may have it by now, asked anew for every try; the announcing peer comes first.
        """
        message = announcement.message
        assert isinstance(message, Announce)
        header = message.header
        if message.payload_bytes != contribution_bytes(header.sender, self.layout.total_bytes):
            return "payload-bytes"
        blob = await self.obtain(message.payload, message.payload_bytes, header.sender, holders, PUSH_WAIT_SECONDS)
        expected = ContributionHeader(header.run, header.round, message.base, header.sender)
        rule = await asyncio.to_thread(broken_rule, blob, expected, self.layout)
        if not rule:
            await asyncio.to_thread(self.keep, blob)
        return rule

    def keep(self, blob: bytes) -> None:
        """Store a blob durably, and hold it against eviction until it is unpinned."""
        self._blobs.pin([self._blobs.put(blob)])

    async def obtain(
        self, digest: bytes, length: int, origin: str, holders: Callable[[], Iterable[str]], push_wait_seconds: float = 0.0
    ) -> bytes:
        """A blob by digest: from disk, by a push, or pulled from its origin and other holders until one gives it."""
        known = await asyncio.to_thread(self._blobs.get, digest)
        if known is not None:
            return known
        wanted = self._wanted.setdefault(digest, _Wanted(length))
        try:
            if push_wait_seconds and digest not in self._early:
                await asyncio.wait([wanted.arrived], timeout=push_wait_seconds)
            partial = b""
            while not wanted.arrived.done():
                others = [peer for peer in holders() if peer not in (origin, self.transport.peer_id)]
                self._rng.shuffle(others)
                for peer in (origin, *others):
                    if wanted.arrived.done():
                        break
                    partial = await self._pull(peer, digest, length, partial, wanted)
                if not wanted.arrived.done():
                    await asyncio.wait([wanted.arrived], timeout=RETRY_SECONDS)
            return wanted.arrived.result()
        finally:
            self._wanted.pop(digest, None)
            self._early.pop(digest, None)

    async def obtain_all(self, manifest: Manifest, holders: Callable[[], Iterable[str]]) -> list[bytes]:
        """The blobs of a decided round's contributions, in manifest order."""
        size = self.layout.total_bytes
        jobs = [self.obtain(c.payload, contribution_bytes(c.peer, size), c.peer, holders) for c in manifest.contributions]
        return list(await asyncio.gather(*jobs))

    async def _pull(self, peer: str, digest: bytes, length: int, partial: bytes, wanted: _Wanted) -> bytes:
        """One try at one peer; what arrived of it is kept for the next."""
        if peer == self.transport.peer_id:
            return partial
        try:
            data = await self.transport.pull(peer, digest, length, have=partial, no_progress_seconds=NO_PROGRESS_SECONDS)
        except TransportError as error:
            logger.debug("pulling %s from %s: %s", digest.hex()[:12], peer, error)
            return b"" if error.reason == "digest" else error.partial or partial
        if not wanted.arrived.done():
            wanted.arrived.set_result(data)
        return b""


def broken_rule(blob: bytes, expected: ContributionHeader, layout: PayloadLayout) -> str:
    """The first rule that a contribution blob breaks, "" if it is valid."""
    try:
        validate(open_contribution(blob, expected, layout.total_bytes), layout)
    except (ContributionError, PayloadError) as error:
        return error.rule
    return ""
