"""The libp2p network and the DHT of one node, inside the caller's asyncio loop.

Importing this module imports hivemind, and with it torch (1.6 s, 280 MB resident): callers import it late. hivemind's
own classes are wrapped and not subclassed, except for the DHT's record check, which is made to be. The one rule: every
wait here ends. A dead daemon, a peer that is away and a lookup that finds nothing are all answers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.wrappers_pb2 import BytesValue  # type: ignore[import-untyped]
from hivemind.dht import DHTNode
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P, P2PContext, P2PDaemonError, P2PHandlerError, PeerID
from hivemind.utils.multiaddr import Multiaddr

from sparseloco.bootstrap.addresses import AddressError, PeerAddress, parse_peer_address
from sparseloco.bootstrap.daemon import Daemon, NetworkSettings, reason_of
from sparseloco.bootstrap.errors import NetworkError, TransportError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.records import msgpack_bytes, msgpack_text

logger = logging.getLogger(__name__)

StreamHandler = Callable[[str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CallHandler = Callable[[str, bytes], Awaitable[bytes]]  # (authenticated sender, body) -> answer; must not raise
# (key, sub-key, value, expiry) of a DHT record -> the rule it breaks, or None. Runs on every record stored or found.
RecordRule = Callable[[bytes, str, bytes, float], str | None]

ATTACH_SECONDS = 10.0
DIAL_SECONDS = 10.0
DHT_SECONDS = 15.0  # one store or lookup; hivemind waits 3 s for each peer that does not answer
BOOK_PEERS = 4096
UNKNOWN = "no address known"
BOOK_ADDRESSES = 8  # per peer, the newest: a laptop has a few networks, an attacker any number


class Network:
    """A running daemon with its DHT node. `daemon` is its child process."""

    def __init__(self, identity: Identity, daemon: Daemon, p2p: P2P, dht: DHTNode, dht_options: dict[str, Any]) -> None:
        self.peer_id = identity.peer_id
        self.daemon, self._p2p, self._dht, self._dht_options = daemon, p2p, dht, dht_options
        self._book: OrderedDict[str, list[str]] = OrderedDict()
        self._down: set[str] = set()
        self._mending = asyncio.Lock()
        self._closed = False

    @classmethod
    async def start(cls, identity: Identity, settings: NetworkSettings, rule: RecordRule) -> Network:
        """Start the daemon and the DHT node; NetworkError with the daemon's own words and a remedy."""
        daemon = await Daemon.start(settings, identity.path)
        options = {"client_mode": settings.client_mode, "record_validator": _SignedRecords(rule)}
        p2p: P2P | None = None
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                p2p = await P2P.replicate(Multiaddr(f"/unix{daemon.control}"))
                if p2p.peer_id.to_base58() != identity.peer_id:
                    raise NetworkError(f"the daemon calls itself {p2p.peer_id} and not {identity.peer_id}")
                dht = await _new_dht(daemon, options)
        except (TimeoutError, OSError, P2PDaemonError, asyncio.IncompleteReadError) as error:
            await _shut(p2p, daemon)
            raise NetworkError(
                f"the libp2p daemon started and does not answer ({error or 'timeout'}); it said: {daemon.last_words}"
            ) from None
        except BaseException:
            await _shut(p2p, daemon)
            raise
        return cls(identity, daemon, p2p, dht, options)

    @property
    def alive(self) -> bool:
        """False once the daemon or the connection to it is gone; nothing works then, and nothing brings it back."""
        return not self._closed and self.daemon.alive and _is_attached(self._p2p)

    async def addresses(self) -> list[str]:
        """Where others may reach this node: multiaddrs that end in its peer id. Empty if it listens nowhere."""
        try:
            async with asyncio.timeout(ATTACH_SECONDS):
                return [str(address) for address in await self._p2p.get_visible_maddrs(latest=True)]
        except ValueError:  # hivemind's way to say that there are none
            return []
        except (TimeoutError, OSError, P2PDaemonError, asyncio.IncompleteReadError) as error:
            raise NetworkError(f"the libp2p daemon does not answer: {error or 'timeout'}") from None

    async def connected(self) -> set[str]:
        """Peer ids with an open connection; empty if the daemon is dead."""
        with suppress(TimeoutError, OSError, P2PDaemonError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ATTACH_SECONDS):
                return {info.peer_id.to_base58() for info in await self._p2p.list_peers()}
        return set()

    def remember(self, peer_id: str, addresses: Iterable[str]) -> None:
        """Note where a peer may be found; the newest addresses first. Texts that are no address of it are dropped."""
        kept = self._book.pop(peer_id, [])
        for text in addresses:
            with suppress(AddressError):
                if parse_peer_address(text).peer_id == peer_id:
                    kept = [text, *(other for other in kept if other != text)]
        if kept and peer_id != self.peer_id:
            self._book[peer_id] = kept[:BOOK_ADDRESSES]
            while len(self._book) > BOOK_PEERS:
                self._book.popitem(last=False)

    def known_addresses(self) -> dict[str, list[str]]:
        """The address book, for a cache on disk."""
        return {peer_id: list(addresses) for peer_id, addresses in self._book.items()}

    async def connect(self, address: str, timeout_seconds: float = DIAL_SECONDS) -> str:
        """Dial a peer and make it known to the DHT; its peer id, or NetworkError saying why not."""
        parsed = parse_peer_address(address)
        why = await self._dial(parsed.peer_id, [parsed.text], timeout_seconds)
        if why is not None:
            raise NetworkError(f"{address}: {why}")
        self.remember(parsed.peer_id, [parsed.text])
        return parsed.peer_id

    async def connect_any(self, addresses: Sequence[str], timeout_seconds: float = DIAL_SECONDS) -> list[str]:
        """Dial all at once; the peer ids that answered. NetworkError naming each and why, if none did."""
        parsed: list[PeerAddress] = [parse_peer_address(text) for text in addresses]
        results = await asyncio.gather(
            *(self.connect(address.text, timeout_seconds) for address in parsed), return_exceptions=True
        )
        alive: list[str] = []
        failures: list[str] = []
        for result in results:
            if isinstance(result, NetworkError):
                failures.append(str(result))
            elif isinstance(result, BaseException):
                raise result
            else:
                alive.append(result)
        if addresses and not alive:
            listed = "\n  ".join(failures)
            raise NetworkError(
                f"none of the {len(failures)} given peers answered:\n  {listed}\n"
                "Check the addresses and this machine's connection; the identity is not the cause"
            )
        if failures:
            logger.info("%d of %d given peers did not answer: %s", len(failures), len(results), "; ".join(failures))
        if alive:
            await asyncio.sleep(0)  # hivemind enters a pinged peer into its table in a task of its own
            with suppress(TimeoutError):
                async with asyncio.timeout(DHT_SECONDS):
                    await self._dht.find_nearest_nodes([self._dht.node_id])
        return alive

    async def redial(self, peer_id: str, timeout_seconds: float = DIAL_SECONDS) -> str | None:
        """Dial a remembered peer again; None if it is connected now, else why not."""
        addresses = self._book.get(peer_id)
        if not addresses:
            return UNKNOWN
        return await self._dial(peer_id, addresses, timeout_seconds)

    async def rejoin(self, at_most: int = 8) -> int:
        """Dial so many remembered peers that are not connected, the newest first; how many answered.

        The watchdog's remedy after an outage: nothing else brings a node back that has no peer left.
        """
        connected = await self.connected()
        away = [peer_id for peer_id in reversed(self._book) if peer_id not in connected][:at_most]
        return sum(why is None for why in await asyncio.gather(*(self.redial(peer_id) for peer_id in away)))

    async def _dial(self, peer_id: str, addresses: list[str], timeout_seconds: float) -> str | None:
        if not self.alive:
            return "the libp2p daemon is not running"
        try:
            peer = PeerID.from_base58(peer_id)
            places = [Multiaddr(text.rsplit("/p2p/", 1)[0]) for text in addresses]
        except ValueError as error:
            return f"hivemind does not take this address: {error}"
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._p2p._client.connect(peer, places)
        except TimeoutError:
            return f"no answer in {timeout_seconds:g} s"
        except (OSError, P2PDaemonError, asyncio.IncompleteReadError) as error:
            return reason_of(str(error))
        with suppress(TimeoutError):
            async with asyncio.timeout(DIAL_SECONDS):
                await self._dht.protocol.call_ping(peer)  # a peer without DHT is connected all the same
        return None

    # --- calls and streams ---------------------------------------------------------------------------------------

    async def answer_calls(self, protocol: str, handler: CallHandler) -> None:
        """Let `handler` answer the small calls of one protocol."""

        async def serve(request: BytesValue, context: P2PContext) -> BytesValue:
            return BytesValue(value=await handler(context.remote_id.to_base58(), request.value))

        await self._p2p.add_protobuf_handler(protocol, serve, BytesValue)

    async def answer_streams(self, protocol: str, handler: StreamHandler) -> None:
        """Let `handler` serve the raw streams of one protocol."""

        async def serve(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await handler(info.peer_id.to_base58(), reader, writer)

        await self._p2p.add_binary_stream_handler(protocol, serve)

    async def call(self, peer_id: str, protocol: str, body: bytes) -> bytes:
        """One small call, without a time-out of its own: see calls.py for why. TransportError("unreachable")."""
        try:
            peer = PeerID.from_base58(peer_id)
            answer = await self._p2p.call_protobuf_handler(peer, protocol, BytesValue(value=body), BytesValue)
        except (P2PDaemonError, P2PHandlerError, OSError) as error:
            raise TransportError("unreachable", reason_of(str(error))) from None
        except (DecodeError, ValueError) as error:
            raise TransportError("refused", f"not an answer: {error}") from None
        return bytes(answer.value)

    async def open_stream(
        self, peer_id: str, protocol: str, deadline: float
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A raw stream before `deadline` (monotonic seconds), or TransportError."""
        if not self.alive:
            raise TransportError("unreachable", "the libp2p daemon is not running")
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                peer = PeerID.from_base58(peer_id)
                _, reader, writer = await self._p2p.call_binary_stream_handler(peer, protocol)
        except TimeoutError:
            raise TransportError("timeout", "no stream could be opened in time") from None
        except (P2PDaemonError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise TransportError("unreachable", reason_of(str(error))) from None
        return reader, writer

    async def reach(self, peer_id: str, deadline: float, attempt: Callable[[], Awaitable[Any]]) -> Any:
        """Try; if the peer is unreachable, dial its known addresses and try once more, all before the deadline."""
        try:
            result = await attempt()
        except TransportError as error:
            left = deadline - time.monotonic()
            if error.reason != "unreachable" or left <= 0 or not self.alive:
                self._note_down(peer_id, error)
                raise
            why = await self.redial(peer_id, left)
            if why is not None:
                self._note_down(peer_id, error)
                raise TransportError("unreachable", error.detail if why == UNKNOWN else why) from None
            result = await attempt()
        if peer_id in self._down:
            self._down.discard(peer_id)
            logger.info("peer %s answers again", peer_id)
        return result

    def _note_down(self, peer_id: str, error: TransportError) -> None:
        """One line when a peer goes, none while it stays away."""
        if peer_id not in self._down and error.reason in ("unreachable", "timeout"):
            self._down.add(peer_id)
            logger.info("peer %s is not reached: %s", peer_id, error.detail)

    # --- the DHT -------------------------------------------------------------------------------------------------

    async def store(self, key: bytes, subkey: str, value: bytes, expires: float) -> bool:
        """Put one signed record into the DHT; False if nobody took it. `expires` is unix time."""
        await self._mend_dht()
        with suppress(TimeoutError):
            async with asyncio.timeout(DHT_SECONDS):
                return bool(await self._dht.store(key, value, expires, subkey=subkey))
        return False

    async def find(self, key: bytes) -> dict[str, tuple[bytes, float]]:
        """{sub-key: (value, expiry)} of the newest records under a key; all have passed the rule."""
        await self._mend_dht()
        with suppress(TimeoutError):
            async with asyncio.timeout(DHT_SECONDS):
                found = await self._dht.get(key, latest=True)
                if found is not None and isinstance(found.value, dict):
                    return {sub: (item.value, item.expiration_time) for sub, item in found.value.items()}
        return {}

    async def _mend_dht(self) -> None:
        """Make a new DHT node if the old one has lost its connection to the daemon.

        hivemind's reader of answers dies of an answer that meets a cancelled call, and the DHT cancels its calls at a
        time-out. So the DHT has a connection of its own, which can be replaced without loss.
        """
        async with self._mending:
            old = self._dht
            if not self.alive or _is_attached(old.p2p):
                return
            logger.info("the DHT node lost its connection to the libp2p daemon and is made anew")
            old.is_alive = False
            await old.p2p.shutdown()
            with suppress(TimeoutError, OSError, P2PDaemonError, asyncio.IncompleteReadError):
                async with asyncio.timeout(ATTACH_SECONDS):
                    self._dht = await _new_dht(self.daemon, self._dht_options)
                    peers = [PeerID.from_base58(peer_id) for peer_id in await self.connected()]
                    await asyncio.gather(*(self._dht.protocol.call_ping(peer) for peer in peers))
                    await asyncio.sleep(0)  # hivemind enters a pinged peer into its table in a task of its own

    async def close(self) -> None:
        """Leave the network and end the daemon; a second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self.daemon.alive:
            with suppress(TimeoutError, OSError, P2PDaemonError):
                async with asyncio.timeout(2.0):
                    await self._dht.shutdown()
        if self._dht.cache_refresh_task is not None:
            self._dht.cache_refresh_task.cancel()
        await self._dht.p2p.shutdown()
        await _shut(self._p2p, self.daemon)


async def _new_dht(daemon: Daemon, options: dict[str, Any]) -> DHTNode:
    return await DHTNode.create(p2p=await P2P.replicate(Multiaddr(f"/unix{daemon.control}")), **options)


def _is_attached(p2p: P2P) -> bool:
    """Whether answers to calls are still read; hivemind itself does not notice when they are not."""
    return not p2p._client.control._read_task.done()


async def _shut(p2p: P2P | None, daemon: Daemon) -> None:
    if p2p is not None:
        await p2p.shutdown()
    await daemon.close()


class _SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Refuses every record that `rule` does not accept: in this DHT nothing is stored that is not signed."""

    def __init__(self, rule: RecordRule) -> None:
        self._rule = rule

    def validate(self, record: DHTRecord) -> bool:
        subkey, value = msgpack_text(record.subkey), msgpack_bytes(record.value)
        if subkey is None or value is None:
            logger.debug("refused a DHT record: it is not of the signed form")
            return False
        broken = self._rule(record.key, subkey, value, record.expiration_time)
        if broken:
            logger.debug("refused a DHT record of %s: %s", subkey, broken)
        return broken is None
