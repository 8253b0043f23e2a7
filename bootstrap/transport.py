"""Messages and blobs between authenticated peers.

Small messages and requests are unary calls (calls.py); blobs are raw streams (blobs.py). libp2p secures each connection, so the
sender's peer id that handlers are given is proved. The one rule: whatever the other side does, a call ends, with what
was asked for or with a TransportError that says why; and no peer learns more of an error here than its code.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from weakref import WeakValueDictionary

from sparseloco.bootstrap.blobs import (
    BUSY_PAUSES_SECONDS,
    PULL_ATTEMPTS,
    BlobLimits,
    BlobServer,
    BlobSource,
    Stream,
    digest_of,
    pull_blob,
    push_blob,
)
from sparseloco.bootstrap.calls import CLOCK, Calls
from sparseloco.bootstrap.daemon import NetworkSettings
from sparseloco.bootstrap.errors import TransportError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.network import Network
from sparseloco.bootstrap.rate import Counters, RateLimiter
from sparseloco.bootstrap.records import RecordRules
from sparseloco.bootstrap.run_file import Limits

logger = logging.getLogger(__name__)

BLOB = "sparseloco/1/blob"

__all__ = ["BlobSource", "Counters", "Limits", "Transport", "TransportError"]


class Transport:
    """One node on the network. Build it with `await Transport.start(...)` and end it with `await close()`."""

    def __init__(self, identity: Identity, network: Network, limits: Limits, upload_bytes_per_second: float) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self.network = network
        self.limits = limits
        self.counters = Counters()
        self._own_upload_limit = upload_bytes_per_second
        self._limiter = RateLimiter(upload_bytes_per_second or limits.upload_bytes_per_second)
        self._blobs = BlobServer(_blob_limits(limits), self._limiter, self.counters)
        self._calls = Calls(network, self.counters, limits.message_bytes, limits.requests_in_flight)
        self._slots: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._addresses: list[str] = []

    @classmethod
    async def start(
        cls,
        identity: Identity,
        *,
        listen: Sequence[str] = ("/ip4/127.0.0.1/tcp/0",),
        announce: Sequence[str] = (),
        peers: Sequence[str] = (),
        client_mode: bool = False,
        relay: bool = True,
        auto_relay: bool = False,
        trusted_relays: Sequence[str] = (),
        port_mapping: bool = False,
        reachability: str = "",
        startup_seconds: float = 30.0,
        upload_bytes_per_second: float = 0,
        limits: Limits | None = None,
    ) -> Transport:
        """Start the daemon, answer calls, dial `peers`; NetworkError if the daemon fails or no given peer answers."""
        settings = NetworkSettings(
            tuple(listen), tuple(announce), client_mode, relay, auto_relay, tuple(trusted_relays), port_mapping,
            reachability, startup_seconds,
        )  # fmt: skip
        network = await Network.start(identity, settings, RecordRules().check)
        try:
            transport = cls(identity, network, limits or Limits(), upload_bytes_per_second)
            await transport._calls.start()
            await network.answer_streams(BLOB, transport._blobs.handle)
            await network.connect_any(peers)
            await transport.refresh_addresses()
        except BaseException:
            await network.close()
            raise
        return transport

    def use_limits(self, limits: Limits) -> None:
        """Go by a run's limits from now on: a joiner learns them from a peer, after the start."""
        self.limits = limits
        self._limiter.bytes_per_second = self._own_upload_limit or limits.upload_bytes_per_second
        self._blobs.limits = _blob_limits(limits)
        self._calls.use_limits(limits.message_bytes, limits.requests_in_flight)

    # --- who and where -------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False once the daemon is gone: every call then fails with TransportError("unreachable")."""
        return self.network.alive

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call back once if the daemon ends by itself."""
        self.network.daemon.on_death.append(callback)

    def addresses(self) -> list[str]:
        """This node's multiaddrs, ending in /p2p/<peer id>, as of the last `refresh_addresses`."""
        return list(self._addresses)

    async def refresh_addresses(self) -> list[str]:
        """Ask the daemon again: relays and port mappings come after the start."""
        self._addresses = await self.network.addresses()
        return self.addresses()

    async def connect(self, address: str, timeout_seconds: float = 10.0) -> str:
        """Dial one address; its peer id, or NetworkError saying why not."""
        return await self.network.connect(address, timeout_seconds)

    async def connect_any(self, addresses: Sequence[str]) -> list[str]:
        """Dial several; those that answered, or NetworkError naming each and why."""
        return await self.network.connect_any(addresses)

    async def connected(self) -> set[str]:
        """Peer ids with an open connection."""
        return await self.network.connected()

    def remember(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Where to look for a peer whose connection is gone."""
        self.network.remember(peer_id, addresses)

    async def rejoin(self) -> int:
        """Dial remembered peers again; how many answered. For a node that has no connection left."""
        return await self.network.rejoin()

    async def clock_offset(self, peer_id: str, timeout_seconds: float = 5.0) -> float:
        """Seconds by which the peer's clock is ahead, to half the round trip. The DHT stops working near 3 s."""
        before = time.time()
        answer = await self.request(peer_id, CLOCK, b"", timeout_seconds)
        after = time.time()
        if len(answer) != 8:
            raise TransportError("refused", "an answer that is no time")
        (theirs,) = struct.unpack("!d", answer)
        return float(theirs) - (before + after) / 2

    # --- small messages ------------------------------------------------------------------------------------------

    def on_message(self, handler: Callable[[str, bytes], None]) -> None:
        """`handler(authenticated sender, message)` for each message; it must not block."""
        self._calls.message_handler = handler

    def on_request(self, name: str, handler: Callable[[str, bytes], Awaitable[bytes]]) -> None:
        """`await handler(sender, body)` answers requests of this name; it may raise TransportError to refuse."""
        self._calls.on_request(name, handler)

    async def send(self, peer_id: str, message: bytes, timeout_seconds: float = 5.0) -> None:
        """Deliver one message to the peer's handler, or raise TransportError. One-way: the handler has run, no more."""
        await self._calls.send(peer_id, message, timeout_seconds)

    async def request(self, peer_id: str, name: str, body: bytes, timeout_seconds: float = 10.0) -> bytes:
        """The peer's answer to a named request, or TransportError."""
        return await self._calls.request(peer_id, name, body, timeout_seconds)

    # --- blobs ---------------------------------------------------------------------------------------------------

    def serve_blobs(self, source: BlobSource) -> None:
        """Answer pulls from `source`; its `read` is called for 64 KiB at a time and must not block for long."""
        self._blobs.source = source

    def accept_pushes(
        self, accept: Callable[[str, bytes, int], bool], deliver: Callable[[str, bytes, bytes], None]
    ) -> None:
        """`accept(sender, digest, length)` decides before a byte is read; `deliver(sender, digest, data)` gets what is
        whole and has the right digest."""
        self._blobs.accept, self._blobs.deliver = accept, deliver

    async def push(self, peer_id: str, digest: bytes, data: bytes, no_progress_seconds: float = 10.0) -> None:
        """Send a blob; returns when the peer holds it whole, else TransportError."""

        async def once() -> None:
            async with self._stream(peer_id, no_progress_seconds) as stream:
                await push_blob(stream, digest, data, self._limiter)

        slot = self._slot(peer_id)
        async with slot:
            await _patiently(once)

    async def pull(
        self, peer_id: str, digest: bytes, length: int, *, have: bytes = b"", no_progress_seconds: float = 10.0
    ) -> bytes:
        """Fetch a blob of known length, whole and digest-checked, or TransportError.

        A short read is tried again at the same peer from where it ended. `have` is a beginning received earlier, such
        as the `partial` of another donor's TransportError.
        """
        into = bytearray(have)

        async def once() -> None:
            async with self._stream(peer_id, no_progress_seconds) as stream:
                await pull_blob(stream, digest, length, into)

        slot = self._slot(peer_id)
        async with slot:
            for attempt in range(PULL_ATTEMPTS):
                before = len(into)
                try:
                    await _patiently(once)
                    break
                except TransportError as error:
                    moved = len(into) > before
                    again = error.reason == "short" or (error.reason == "timeout" and moved)
                    if not again or attempt == PULL_ATTEMPTS - 1:
                        raise TransportError(error.reason, error.detail, bytes(into)) from None
                    logger.debug("a pull from %s ended after %d of %d bytes, again", peer_id, len(into), length)
        if await digest_of(into) != digest:
            raise TransportError("digest", f"{length} bytes from {peer_id} are not what was asked for")
        return bytes(into)

    def _slot(self, peer_id: str) -> asyncio.Semaphore:
        """Half of what a peer serves at once, so that one's own streams that are just closing do not count as busy."""
        slot = self._slots.get(peer_id)
        if slot is None:
            slot = self._slots[peer_id] = asyncio.Semaphore(max(1, self.limits.requests_in_flight // 2))
        return slot

    @asynccontextmanager
    async def _stream(self, peer_id: str, no_progress_seconds: float) -> AsyncIterator[Stream]:
        deadline = time.monotonic() + no_progress_seconds
        reader, writer = await self.network.reach(
            peer_id, deadline, lambda: self.network.open_stream(peer_id, BLOB, deadline)
        )
        stream = Stream(reader, writer, no_progress_seconds, self.counters)
        try:
            yield stream
        finally:
            stream.close()

    async def close(self) -> None:
        """Leave the network; no daemon is left. A second call does nothing."""
        await self.network.close()
        await self._calls.close()


def _blob_limits(limits: Limits) -> BlobLimits:
    return BlobLimits(
        streams_per_peer=limits.requests_in_flight,
        streams=8 * limits.requests_in_flight,
        blob_bytes=limits.blob_bytes,
    )


async def _patiently(attempt: Callable[[], Awaitable[None]]) -> None:
    """Try again after short pauses while the other side says that it is busy."""
    for pause in BUSY_PAUSES_SECONDS:
        try:
            await attempt()
            return
        except TransportError as error:
            if error.reason != "busy":
                raise
        await asyncio.sleep(pause)
    await attempt()
