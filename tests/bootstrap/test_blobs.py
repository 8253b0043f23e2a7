"""One blob over one stream: a pair of sockets stands for libp2p, and one end lies, drips or dies."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from sparseloco.bootstrap.blobs import (
    ACK,
    HEADER,
    STATUS,
    BlobLimits,
    BlobServer,
    Code,
    Header,
    Kind,
    Stream,
    pull_blob,
    push_blob,
)
from sparseloco.bootstrap.errors import TransportError
from sparseloco.bootstrap.rate import Counters, RateLimiter

DATA = os.urandom(300_000)
DIGEST = hashlib.sha256(DATA).digest()
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


class Store(dict[bytes, bytes]):
    def size(self, digest: bytes) -> int | None:
        return len(self[digest]) if digest in self else None

    def read(self, digest: bytes, offset: int, n: int) -> bytes:
        return self[digest][offset : offset + n]


@asynccontextmanager
async def client_of(handler: Handler, no_progress_seconds: float = 5.0) -> AsyncIterator[Stream]:
    """The client's stream to a server that runs `handler`."""
    ours, theirs = socket.socketpair()
    server = await asyncio.open_unix_connection(sock=theirs)
    task = asyncio.create_task(handler(*server))
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        yield Stream(reader, writer, no_progress_seconds, Counters())
    finally:
        writer.close()
        await asyncio.wait({task}, timeout=10)
        assert task.done(), "the server did not let go of the stream"
        server[1].close()


def server_with(**settings: Any) -> tuple[BlobServer, dict[bytes, bytes]]:
    server = BlobServer(BlobLimits(**settings), RateLimiter(0), Counters())
    server.source = Store({DIGEST: DATA})
    delivered: dict[bytes, bytes] = {}
    server.accept = lambda sender, digest, length: length <= len(DATA)
    server.deliver = lambda sender, digest, data: delivered.__setitem__(digest, data)
    return server, delivered


def serving(server: BlobServer) -> Handler:
    return lambda reader, writer: server.handle("peer", reader, writer)


async def push(stream: Stream, digest: bytes = DIGEST, data: bytes = DATA) -> None:
    await push_blob(stream, digest, data, RateLimiter(0))


async def reason_of(coroutine: Any) -> str:
    with pytest.raises(TransportError) as caught:
        await coroutine
    return caught.value.reason


def test_a_push_arrives_whole_and_a_pull_comes_back(run: Callable[..., Any]) -> None:
    async def story() -> None:
        server, delivered = server_with()
        async with client_of(serving(server)) as stream:
            await push(stream)
        assert delivered == {DIGEST: DATA}
        for start in (0, 1, 65_536, len(DATA)):
            into = bytearray(DATA[:start])
            async with client_of(serving(server)) as stream:
                await pull_blob(stream, DIGEST, len(DATA), into)
            assert into == DATA
        assert not server.streams, "a stream is still counted"
        assert server.counters.payload_bytes_received == len(DATA)

    run(story())


def test_empty_blobs_are_blobs(run: Callable[..., Any]) -> None:
    async def story() -> None:
        server, delivered = server_with()
        empty = hashlib.sha256(b"").digest()
        async with client_of(serving(server)) as stream:
            await push(stream, empty, b"")
        assert delivered == {empty: b""}

    run(story())


def test_what_is_too_large_or_unwanted_is_refused_before_it_is_read(run: Callable[..., Any]) -> None:
    async def story() -> None:
        server, delivered = server_with(blob_bytes=400_000)
        async with client_of(serving(server)) as stream:
            assert await reason_of(push(stream, DIGEST, bytes(400_001))) == "too-large"
        async with client_of(serving(server)) as stream:
            assert await reason_of(push(stream, DIGEST, bytes(350_000))) == "refused"
        assert server.counters.bytes_received == 2 * HEADER.size, "more than the headers was read"
        assert not delivered

    run(story())


def test_wrong_bytes_are_not_delivered(run: Callable[..., Any]) -> None:
    async def story() -> None:
        server, delivered = server_with()
        async with client_of(serving(server)) as stream:
            assert await reason_of(push(stream, DIGEST, DATA[:-1] + b"?")) == "digest"
        assert not delivered

    run(story())


def test_pulls_of_unknown_blobs_and_other_lengths_are_answered(run: Callable[..., Any]) -> None:
    async def story() -> None:
        server, _ = server_with()
        async with client_of(serving(server)) as stream:
            assert await reason_of(pull_blob(stream, bytes(32), 5, bytearray())) == "not-found"
        async with client_of(serving(server)) as stream:
            assert await reason_of(pull_blob(stream, DIGEST, 5, bytearray())) == "refused"

    run(story())


def test_a_server_that_dies_in_the_middle_is_a_short_read(run: Callable[..., Any]) -> None:
    async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER.size)
        writer.write(STATUS.pack(b"SLCB", Code.OK, DIGEST, len(DATA)) + DATA[:100_000])
        await writer.drain()
        writer.close()

    async def story() -> None:
        into = bytearray()
        async with client_of(dies) as stream:
            assert await reason_of(pull_blob(stream, DIGEST, len(DATA), into)) == "short"
        assert into == DATA[: len(into)] and 65_536 <= len(into) < len(DATA), "what came is kept for a resume"

    run(story())


def test_a_peer_who_drips_bytes_is_timed_out(run: Callable[..., Any]) -> None:
    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER.size)
        writer.write(STATUS.pack(b"SLCB", Code.OK, DIGEST, len(DATA)))
        while not reader.at_eof():
            writer.write(b"x")
            try:
                await asyncio.wait_for(reader.read(1), 0.02)
            except TimeoutError:
                continue
            except ConnectionError:
                break

    async def story() -> None:
        async with client_of(drips, no_progress_seconds=0.3) as stream:
            assert await reason_of(pull_blob(stream, DIGEST, len(DATA), bytearray())) == "timeout"

        server, delivered = server_with(no_progress_seconds=0.3)
        async with client_of(serving(server)) as stream:  # and a client who drips is cut off too
            await stream.write(Header(Kind.PUSH, DIGEST, len(DATA)).encode())
            await stream.read_status()
            await stream.write(b"x")
            assert await reason_of(stream.read_status()) == "short"
        assert not delivered and not server.streams

    run(story())


def test_a_server_that_says_nothing_is_timed_out(run: Callable[..., Any]) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def story() -> None:
        async with client_of(silent, no_progress_seconds=0.2) as stream:
            assert await reason_of(push(stream)) == "timeout"

    run(story())


def test_streams_above_the_cap_are_told_busy(run: Callable[..., Any]) -> None:
    async def story() -> None:
        server, _ = server_with(streams_per_peer=1)
        async with client_of(serving(server)) as first:
            await first.write(Header(Kind.PUSH, DIGEST, len(DATA)).encode())
            await first.read_status()
            async with client_of(serving(server)) as second:
                assert await reason_of(pull_blob(second, DIGEST, len(DATA), bytearray())) == "busy"
            await first.send_body(lambda at, n: DATA[at : at + n], 0, len(DATA), RateLimiter(0))
            await first.read_status()
        async with client_of(serving(server)) as third:
            await pull_blob(third, DIGEST, len(DATA), bytearray())

    run(story())


def test_one_peers_refused_streams_keep_nobody_else_from_being_served(run: Callable[..., Any]) -> None:
    async def story() -> None:
        server, _ = server_with(streams_per_peer=2, streams=4)
        async with AsyncExitStack() as held:
            for _ in range(20):  # a flood: none of them ever sends a header
                await held.enter_async_context(client_of(serving(server)))
            while server.streams["peer"] + server.refusing["peer"] < 4:
                await asyncio.sleep(0)
            async with client_of(lambda reader, writer: server.handle("another", reader, writer)) as honest:
                await pull_blob(honest, DIGEST, len(DATA), bytearray())
            assert server.streams["peer"] <= 2 and server.refusing["peer"] <= 2

    run(story())


@pytest.mark.parametrize(
    "raw",
    [b"GET / HTTP/1.1\r\n".ljust(HEADER.size, b" "), bytes(HEADER.size), b"SLCB\x01\x09".ljust(HEADER.size, b"\0"),
     HEADER.pack(b"SLCB", 1, 2, DIGEST, 5, 6), HEADER.pack(b"SLCB", 2, 1, DIGEST, 5, 0),
     HEADER.pack(b"SLCB", 1, 1, DIGEST, 2**63, 0)],
)  # fmt: skip
def test_bytes_that_are_no_header_are_refused(run: Callable[..., Any], raw: bytes) -> None:
    async def story() -> None:
        server, _ = server_with()
        async with client_of(serving(server)) as stream:
            await stream.write(raw)
            assert await reason_of(stream.read_status()) == "refused"

    run(story())


def test_acks_for_bytes_never_sent_are_refused(run: Callable[..., Any]) -> None:
    async def lies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(HEADER.size)
        writer.write(STATUS.pack(b"SLCB", Code.OK, DIGEST, len(DATA)) + ACK.pack(10**12))
        await reader.read()

    async def story() -> None:
        async with client_of(lies) as stream:
            assert await reason_of(push(stream)) == "refused"

    run(story())


def test_the_upload_limit_holds_over_all_streams(run: Callable[..., Any]) -> None:
    async def story() -> None:
        now = 0.0

        async def sleep(seconds: float) -> None:
            nonlocal now
            now += seconds

        limiter = RateLimiter(100_000, clock=lambda: now, sleep=sleep)
        await asyncio.gather(*(limiter.take(50_000) for _ in range(20)))
        assert 9.5 <= now <= 10.0

    run(story())


def test_golden_frames() -> None:
    """The bytes on the wire are a promise."""
    assert Header(Kind.PULL, bytes(range(32)), 258, 1).encode().hex() == (
        "534c434201020000" + bytes(range(32)).hex() + "0000000000000102" + "0000000000000001"
    )
    assert STATUS.pack(b"SLCB", Code.BUSY, bytes(32), 3).hex() == "534c434204000000" + "00" * 32 + "0000000000000003"
