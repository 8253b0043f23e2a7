"""A checkpoint's pieces from several donors at once: each checked on arrival, kept on the disk, never asked for twice.

    STATE_DIR/download/<state digest>/00000017    one file a piece, named by its index

The state digest is certified before the first piece is asked for, and the piece digests follow from it, so no donor is
believed. A donor that dies or stalls is left out, and what it sent of a piece is handed on; one whose piece has another digest
is found out at that piece and left out by name. After a restart the pieces on the disk are checked again and only the others
are fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.node.durable import remove_leftovers, round_name, write_atomic
from sparseloco.node.state import PIECE_BYTES, digest_of_pieces, empty_theta, piece_count, total_bytes, write_piece

if TYPE_CHECKING:
    import torch

    from sparseloco.compression.layout import TensorSpec

logger = logging.getLogger(__name__)

# Pieces asked of one donor at once: the next is on its way while one is hashed and written, and a donor serves many joiners.
PIECES_PER_DONOR = 2
# A donor from which nothing comes for so long is left out.
NO_PROGRESS_SECONDS = 5.0


class Pieces:
    """The pieces of one state that are on the disk. `length_bytes` is the state's; digests are in piece order."""

    def __init__(self, downloads: Path, length_bytes: int, digests: Sequence[bytes]) -> None:
        if len(digests) != piece_count(length_bytes):
            raise ValueError(f"{len(digests)} digests cannot be those of {length_bytes} bytes")
        self.digests = tuple(digests)
        self.length_bytes = length_bytes
        self.folder = downloads / digest_of_pieces(length_bytes, digests).hex()

    def size(self, index: int) -> int:
        """Bytes of a piece: all but the last have the same."""
        return min(PIECE_BYTES, self.length_bytes - index * PIECE_BYTES)

    def open(self) -> None:
        """Make the folder and remove what a crash left half-written; another state's pieces are no use any more."""
        self.folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.folder)
        for other in self.folder.parent.iterdir():
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)

    def kept(self, index: int) -> bytes | None:
        """A piece from the disk, None if it is not here; one that was damaged is removed."""
        path = self._path(index)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if hashlib.sha256(data).digest() == self.digests[index]:
            return data
        logger.warning("%s is damaged; that piece is fetched again", path)
        path.unlink()
        return None

    def keep(self, index: int, data: bytes) -> None:
        """Store a piece durably; OutOfDisk if it does not fit."""
        write_atomic(self._path(index), data)

    def remove(self) -> None:
        """The state is a checkpoint now."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)

    def _path(self, index: int) -> Path:
        return self.folder / round_name(index)


def partial_downloads(downloads: Path) -> frozenset[str]:
    """State digests (hex) of which pieces are on the disk."""
    return frozenset(path.name for path in downloads.iterdir() if any(path.iterdir())) if downloads.is_dir() else frozenset()


class Download:
    """Fetches what is missing of `pieces` and puts everything into one state.

    `found_out(peer)` is told of a donor that sent wrong bytes, `progress(done, total)` of the bytes that are here.
    """

    def __init__(
        self,
        transport: Transport,
        pieces: Pieces,
        specs: Sequence[TensorSpec],
        *,
        found_out: Callable[[str], None],
        progress: Callable[[int, int], None],
    ) -> None:
        self.transport = transport
        self.pieces = pieces
        self.theta = empty_theta(specs)
        if total_bytes(self.theta) != pieces.length_bytes:
            raise ValueError(f"{pieces.length_bytes} bytes are no state of these tensors")
        self.fetched = 0  # pieces that came over the network
        self._found_out = found_out
        self._progress = progress
        self._missing: list[int] = []
        self._in_flight = 0
        self._partial: dict[int, bytes] = {}  # by piece: its beginning, from a donor that is gone
        self._changed = asyncio.Condition()
        self._here_bytes = 0

    async def run(self, donors: Iterable[str]) -> dict[str, torch.Tensor]:
        """The whole state. TransportError if the donors gave out before it was complete; what came is kept for the next try."""
        await asyncio.to_thread(self._take_kept)
        peers = list(dict.fromkeys(donors))
        if self._missing:
            tasks = [asyncio.create_task(self._serve_from(peer, dead)) for peer in peers for dead in [asyncio.Event()]
                     for _ in range(PIECES_PER_DONOR)]  # fmt: skip
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if self._missing:
            raise TransportError("unreachable", f"{len(self._missing)} of {len(self.pieces.digests)} pieces are missing yet")
        return self.theta

    def _take_kept(self) -> None:
        self.pieces.open()
        for index in range(len(self.pieces.digests)):
            data = self.pieces.kept(index)
            if data is None:
                self._missing.append(index)
            else:
                write_piece(self.theta, index, data)
                self._here_bytes += len(data)
        if self._here_bytes:
            self._progress(self._here_bytes, self.pieces.length_bytes)
        self._missing.reverse()  # taken from the end, first piece first

    async def _serve_from(self, peer: str, gone: asyncio.Event) -> None:
        """Fetch one missing piece after the other from a donor, until none is left or the donor is gone."""
        while not gone.is_set():
            index = await self._next()
            if index is None:
                return
            try:
                data = await self._pull(peer, index)
                await asyncio.to_thread(self.pieces.keep, index, data)
            except TransportError as error:
                first = not gone.is_set()  # of the pulls that run at once from one donor
                gone.set()
                if error.reason == "digest":
                    logger.warning("%s sent other bytes than piece %d of the state has; it is not asked again", peer, index)
                    if first:
                        self._found_out(peer)
                else:
                    logger.info("%s gives no more pieces (%s)", peer, error)
                    self._partial[index] = max(error.partial, self._partial.get(index, b""), key=len)
                await self._give_up(index)
                return
            except BaseException:
                await self._give_up(index)
                raise
            write_piece(self.theta, index, data)
            await self._arrived(len(data))

    async def _pull(self, peer: str, index: int) -> bytes:
        """One piece whole. A beginning that another donor sent is not this one's fault: without it, it gets a second chance."""
        digest, size = self.pieces.digests[index], self.pieces.size(index)
        have = self._partial.pop(index, b"")
        try:
            return await self.transport.pull(peer, digest, size, have=have, no_progress_seconds=NO_PROGRESS_SECONDS)
        except TransportError as error:
            if error.reason != "digest" or not have:
                raise
        return await self.transport.pull(peer, digest, size, no_progress_seconds=NO_PROGRESS_SECONDS)

    async def _next(self) -> int | None:
        """A piece that nobody fetches yet; waits while others are on their way, since their donors may fail."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._missing) or not self._in_flight)
            if not self._missing:
                return None
            self._in_flight += 1
            return self._missing.pop()

    async def _give_up(self, index: int) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            async with self._changed:
                self._missing.append(index)
                self._in_flight -= 1
                self._changed.notify_all()

    async def _arrived(self, size: int) -> None:
        async with self._changed:
            self._in_flight -= 1
            self.fetched += 1
            self._here_bytes += size
            self._changed.notify_all()
        self._progress(self._here_bytes, self.pieces.length_bytes)
