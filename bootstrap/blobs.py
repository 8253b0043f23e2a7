"""Bulk data over one raw stream: framing, refusal before reading, flow control and digests.

    push:  client header -> server status -> client body / server acks -> server status -> client closes
    pull:  client header -> server status -> server body / client acks -> client closes

A libp2p stream through hivemind can end early without an error, so the one rule is: nothing is whole until its digest
was computed here. The server keeps the stream open until the client has closed it. Acks make progress visible from end
to end: without them a sender on a slow link could not tell megabytes waiting in socket buffers from a dead receiver.
Every read and write has a time-out on progress, at least one chunk in each `no_progress_seconds`, so that a peer who
drips single bytes does not hold a stream. No hivemind here: a stream is a pair of asyncio reader and writer.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from sparseloco.bootstrap.errors import TransportError
from sparseloco.bootstrap.rate import Counters, RateLimiter

logger = logging.getLogger(__name__)

DIGEST_BYTES = 32
MAGIC = b"SLCB"
VERSION = 1
HEADER = struct.Struct("!4sBB2x32sQQ")  # magic, version, kind, digest, length of the whole blob, first byte wanted
STATUS = struct.Struct("!4sB3x32sQ")  # magic, code, digest, length
ACK = struct.Struct("!Q")  # bytes of the body received so far

CHUNK_BYTES = 65_536  # one write, one ack, and what must move in each no-progress time: 6.6 kB/s at 10 seconds
WINDOW_BYTES = 4 * 2**20  # sent and not acknowledged; 80 MB/s at 50 ms round trip
CLOSE_SECONDS = 10.0  # after the last ack the client has only to close
PULL_ATTEMPTS = 4  # short reads come at one in a thousand on busy machines; four in a row mean something else
BUSY_PAUSES_SECONDS = (0.05, 0.2, 0.8)


class Kind(IntEnum):
    PUSH = 1
    PULL = 2


class Code(IntEnum):
    """A server's answer; the names (with dashes) are TransportError's reasons."""

    OK = 0
    TOO_LARGE = 1
    NOT_FOUND = 2
    REFUSED = 3
    BUSY = 4
    DIGEST = 5
    TIMEOUT = 6
    SHORT = 7

    @property
    def reason(self) -> str:
        return self.name.lower().replace("_", "-")


def reason_of_code(code: int) -> str:
    """The TransportError reason of another peer's code; "refused" for a code that this version does not know."""
    try:
        return Code(code).reason
    except ValueError:
        return "refused"


class BlobSource(Protocol):
    """Where served blobs come from: `size` is None for a digest that is not held."""

    def size(self, digest: bytes) -> int | None: ...

    def read(self, digest: bytes, offset: int, n: int) -> bytes: ...


@dataclass(frozen=True)
class Header:
    """What a client asks for; every field is checked against its own rule here, against limits by the server."""

    kind: Kind
    digest: bytes
    length: int
    offset: int = 0

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(self.digest)}")
        if not 0 <= self.offset <= self.length < 2**63:
            raise ValueError(f"offset {self.offset} and length {self.length} do not fit")

    def encode(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, self.kind, self.digest, self.length, self.offset)

    @classmethod
    def decode(cls, raw: bytes) -> Header:
        """ValueError for bytes that are no header of this version."""
        magic, version, kind, digest, length, offset = HEADER.unpack(raw)
        if magic != MAGIC or version != VERSION:
            raise ValueError("not a blob header of this version")
        return cls(Kind(kind), digest, length, offset)


@dataclass(frozen=True)
class BlobLimits:
    """What one peer may hold open here. blob_bytes 0: `accept` alone decides about lengths."""

    streams_per_peer: int = 8
    streams: int = 64
    blob_bytes: int = 0
    no_progress_seconds: float = 10.0


@dataclass
class Stream:
    """One raw stream with its time-out; each call raises TransportError("timeout") or ("short")."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    no_progress_seconds: float
    counters: Counters

    async def read(self, n: int) -> bytes:
        """Exactly n bytes."""
        try:
            async with asyncio.timeout(self.no_progress_seconds):
                data = await self.reader.readexactly(n)
        except TimeoutError:
            raise TransportError("timeout", f"{n} bytes did not arrive in {self.no_progress_seconds:g} s") from None
        except asyncio.IncompleteReadError as error:
            raise TransportError("short", f"the stream ended {n - len(error.partial)} bytes early") from None
        except OSError as error:
            raise TransportError("short", f"the stream broke: {error}") from None
        self.counters.bytes_received += n
        return data

    async def write(self, data: bytes | memoryview) -> None:
        try:
            async with asyncio.timeout(self.no_progress_seconds):
                self.writer.write(data)
                await self.writer.drain()
        except TimeoutError:
            raise TransportError("timeout", f"no room to write for {self.no_progress_seconds:g} s") from None
        except (OSError, RuntimeError) as error:  # uvloop says RuntimeError for a transport that is closing
            raise TransportError("short", f"the stream broke: {error}") from None
        self.counters.bytes_sent += len(data)

    async def read_status(self) -> tuple[bytes, int]:
        """(digest, length) of a good status; a TransportError with the server's reason otherwise."""
        magic, code, digest, length = STATUS.unpack(await self.read(STATUS.size))
        if magic != MAGIC:
            raise TransportError("refused", "the answer is not of this protocol")
        if code != Code.OK:
            reason = reason_of_code(code)
            raise TransportError(reason, "says the other side")
        return digest, length

    async def write_status(self, code: Code, digest: bytes = bytes(DIGEST_BYTES), length: int = 0) -> None:
        await self.write(STATUS.pack(MAGIC, code, digest, length))

    async def send_body(
        self, read: Callable[[int, int], bytes | memoryview], offset: int, length: int, limiter: RateLimiter
    ) -> None:
        """Bytes offset to length from `read(offset, n)`, never more than a window ahead of the acks."""
        sent = acked = offset
        while sent < length:
            chunk = read(sent, min(CHUNK_BYTES, length - sent))
            if not chunk:
                raise TransportError("short", "the source ended early")
            await limiter.take(len(chunk))
            await self.write(chunk)
            sent += len(chunk)
            self.counters.payload_bytes_sent += len(chunk)
            while sent - acked >= WINDOW_BYTES:
                acked = await self._read_ack(acked, sent)
        while acked < length:
            acked = await self._read_ack(acked, length)

    async def _read_ack(self, acked: int, sent: int) -> int:
        (count,) = ACK.unpack(await self.read(ACK.size))
        if not acked < count <= sent:
            raise TransportError("refused", "an ack that does not fit what was sent")
        return int(count)

    async def receive_body(self, into: bytearray, length: int) -> None:
        """Append to `into` until it holds `length` bytes. Memory grows with what arrived, not with what was claimed."""
        while len(into) < length:
            chunk = await self.read(min(CHUNK_BYTES, length - len(into)))
            into += chunk
            self.counters.payload_bytes_received += len(chunk)
            await self.write(ACK.pack(len(into)))

    async def wait_for_close(self) -> None:
        """Until the client has closed; what it still sends is dropped, and a client that stays is cut off."""
        with suppress(TimeoutError, OSError):
            async with asyncio.timeout(CLOSE_SECONDS):
                while await self.reader.read(CHUNK_BYTES):
                    pass

    def close(self) -> None:
        with suppress(OSError, RuntimeError):
            self.writer.close()


async def push_blob(stream: Stream, digest: bytes, data: bytes, limiter: RateLimiter) -> None:
    """The client's side of a push; returns when the other side has said that the digest is right."""
    view = memoryview(data)
    await stream.write(Header(Kind.PUSH, digest, len(data)).encode())
    await stream.read_status()
    await stream.send_body(lambda offset, n: view[offset : offset + n], 0, len(data), limiter)
    got_digest, got_length = await stream.read_status()
    if got_digest != digest or got_length != len(data):
        raise TransportError("digest", "the other side received something else")


async def pull_blob(stream: Stream, digest: bytes, length: int, into: bytearray) -> None:
    """The client's side of a pull: append to `into` from where it ends. The caller checks the digest."""
    await stream.write(Header(Kind.PULL, digest, length, len(into)).encode())
    _, their_length = await stream.read_status()
    if their_length != length:
        raise TransportError("refused", f"the other side has {their_length} bytes under this digest, not {length}")
    await stream.receive_body(into, length)


class BlobServer:
    """The receiving end of both directions; `source`, `accept` and `deliver` are set by the transport's owner."""

    def __init__(self, limits: BlobLimits, limiter: RateLimiter, counters: Counters) -> None:
        self.limits, self.limiter, self.counters = limits, limiter, counters
        self.source: BlobSource | None = None
        self.accept: Callable[[str, bytes, int], bool] | None = None
        self.deliver: Callable[[str, bytes, bytes], None] | None = None
        self.streams: Counter[str] = Counter()  # being served, by peer
        self.refusing: Counter[str] = Counter()  # being told that this node is busy

    async def handle(self, peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one stream of an authenticated peer; never raises TransportError."""
        stream = Stream(reader, writer, self.limits.no_progress_seconds, self.counters)
        full = self.streams[peer] >= self.limits.streams_per_peer or self.streams.total() >= self.limits.streams
        # Refused streams have places of their own: a peer that opens hundreds must not keep others from being served.
        places = self.refusing if full else self.streams
        if full and (self.refusing[peer] >= self.limits.streams_per_peer or self.refusing.total() >= self.limits.streams):
            stream.close()  # even saying "busy" would cost more than a peer may cost
            return
        places[peer] += 1
        try:
            if full:
                await stream.write_status(Code.BUSY)
            else:
                await self._serve(peer, stream)
            await stream.wait_for_close()
        except TransportError as error:
            logger.debug("a stream of %s ended: %s", peer, error)
        except OSError as error:
            logger.warning("a blob for %s could not be read: %s", peer, error)
        finally:
            stream.close()
            places[peer] -= 1
            if not places[peer]:
                del places[peer]

    async def _serve(self, peer: str, stream: Stream) -> None:
        try:
            header = Header.decode(await stream.read(HEADER.size))
        except ValueError as error:
            logger.debug("%s sent a bad header: %s", peer, error)
            await stream.write_status(Code.REFUSED)
            return
        if header.kind == Kind.PULL:
            await self._serve_pull(stream, header)
        else:
            await self._serve_push(peer, stream, header)

    async def _serve_pull(self, stream: Stream, header: Header) -> None:
        source = self.source
        size = source.size(header.digest) if source else None
        if source is None or size is None:
            await stream.write_status(Code.NOT_FOUND)
        elif size != header.length:
            await stream.write_status(Code.REFUSED, header.digest, size)
        else:
            await stream.write_status(Code.OK, header.digest, size)
            await stream.send_body(lambda at, n: source.read(header.digest, at, n), header.offset, size, self.limiter)

    async def _serve_push(self, peer: str, stream: Stream, header: Header) -> None:
        if self.limits.blob_bytes and header.length > self.limits.blob_bytes:
            await stream.write_status(Code.TOO_LARGE)
            return
        if header.offset or not self.accept or not self.accept(peer, header.digest, header.length):
            await stream.write_status(Code.REFUSED)
            return
        await stream.write_status(Code.OK, header.digest, header.length)
        received = bytearray()
        await stream.receive_body(received, header.length)
        data = bytes(received)
        del received
        digest = await digest_of(data)
        if digest != header.digest:
            await stream.write_status(Code.DIGEST, digest, len(data))
            return
        if self.deliver:
            self.deliver(peer, digest, data)
        await stream.write_status(Code.OK, digest, len(data))


async def digest_of(data: bytes | bytearray) -> bytes:
    """SHA-256, on a thread where it would hold the loop for more than a few milliseconds."""
    if len(data) <= 4 * 2**20:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())
