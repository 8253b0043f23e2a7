"""Small messages and named requests: one unary call each, answered with a code and never with an exception's text.

The one rule: a call ends at its deadline, but is never cancelled. hivemind's reader of answers dies of an answer that
meets a cancelled call, and with it all later calls of the node; so a late call is left to end by itself, and the number
of such calls per peer is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from sparseloco.bootstrap.blobs import Code, reason_of_code
from sparseloco.bootstrap.errors import TransportError
from sparseloco.bootstrap.rate import Counters

if TYPE_CHECKING:
    from sparseloco.bootstrap.network import Network

logger = logging.getLogger(__name__)

MESSAGE = "sparseloco/1/message"
REQUEST = "sparseloco/1/request"
CLOCK = "clock"  # a request that every node answers: its unix time

LONGEST_NAME_BYTES = 64
HANDLER_SECONDS = 60.0  # a request handler that takes longer has forgotten the caller
# Calls to one peer that were given up and are not yet over. libp2p ends them when the connection dies, after about 30 s
# without a sign of life; at two heartbeats a second that is 60.
FORGOTTEN_CALLS = 128


class Calls:
    """Both ends of the small calls of one node."""

    def __init__(self, network: Network, counters: Counters, message_bytes: int, requests_in_flight: int) -> None:
        self._network, self._counters = network, counters
        self._message_bytes, self._requests_in_flight = message_bytes, requests_in_flight
        self.message_handler: Callable[[str, bytes], None] | None = None
        self.request_handlers: dict[str, Callable[[str, bytes], Awaitable[bytes]]] = {CLOCK: _tell_time}
        self._serving: Counter[str] = Counter()
        self._pending: dict[asyncio.Task[bytes], str] = {}
        self._pending_of: Counter[str] = Counter()

    async def start(self) -> None:
        """Answer calls from now on."""
        await self._network.answer_calls(MESSAGE, self._serve_message)
        await self._network.answer_calls(REQUEST, self._serve_request)

    def use_limits(self, message_bytes: int, requests_in_flight: int) -> None:
        self._message_bytes, self._requests_in_flight = message_bytes, requests_in_flight

    def on_request(self, name: str, handler: Callable[[str, bytes], Awaitable[bytes]]) -> None:
        if not 0 < len(name.encode()) <= LONGEST_NAME_BYTES:
            raise ValueError(f"a request's name has 1 to {LONGEST_NAME_BYTES} bytes")
        self.request_handlers[name] = handler

    async def send(self, peer_id: str, message: bytes, timeout_seconds: float) -> None:
        self._check_size(message)
        await self._call(peer_id, MESSAGE, message, timeout_seconds)

    async def request(self, peer_id: str, name: str, body: bytes, timeout_seconds: float) -> bytes:
        self._check_size(body)
        encoded = name.encode()
        answer = await self._call(peer_id, REQUEST, bytes((len(encoded),)) + encoded + body, timeout_seconds)
        self._check_size(answer)
        return answer

    async def close(self) -> None:
        """End what is pending; the network is closed already."""
        pending = list(self._pending)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _check_size(self, message: bytes) -> None:
        if len(message) > self._message_bytes:
            raise TransportError("too-large", f"{len(message)} bytes; a message has at most {self._message_bytes}")

    async def _call(self, peer_id: str, protocol: str, body: bytes, timeout_seconds: float) -> bytes:
        """One call, with one redial if the peer is unreachable; the answer's body if its code is good."""
        deadline = time.monotonic() + timeout_seconds
        answer: bytes = await self._network.reach(
            peer_id, deadline, lambda: self._until(deadline, peer_id, protocol, body)
        )
        self._counters.messages_sent += 1
        self._counters.bytes_sent += len(body)
        self._counters.bytes_received += len(answer)
        if not answer:
            raise TransportError("refused", "an answer without a code")
        if answer[0] != Code.OK:
            raise TransportError(reason_of_code(answer[0]), "says the other side")
        return answer[1:]

    async def _until(self, deadline: float, peer_id: str, protocol: str, body: bytes) -> bytes:
        if not self._network.alive:
            raise TransportError("unreachable", "the libp2p daemon is not running")
        if self._pending_of[peer_id] >= FORGOTTEN_CALLS:
            raise TransportError("busy", f"{FORGOTTEN_CALLS} calls to this peer are unanswered")
        task = asyncio.create_task(self._network.call(peer_id, protocol, body))
        self._pending[task] = peer_id
        self._pending_of[peer_id] += 1
        task.add_done_callback(self._forget)
        done, _ = await asyncio.wait({task}, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise TransportError("timeout", "no answer in time")
        return task.result()

    def _forget(self, task: asyncio.Task[bytes]) -> None:
        peer_id = self._pending.pop(task)
        self._pending_of[peer_id] -= 1
        if not self._pending_of[peer_id]:
            del self._pending_of[peer_id]
        if not task.cancelled():
            task.exception()  # looked at, so that asyncio does not report a call that nobody waits for any more

    async def _serve_message(self, sender: str, message: bytes) -> bytes:
        self._count_received(message)
        if len(message) > self._message_bytes:
            return _answer(Code.TOO_LARGE)
        if self.message_handler is None:
            return _answer(Code.BUSY)
        try:
            self.message_handler(sender, message)
        except TransportError as error:
            return _answer(_code_of(error))
        except Exception:  # hivemind would send the caller our exception's text
            logger.exception("the message handler failed on a message of %s", sender)
            return _answer(Code.REFUSED)
        return _answer(Code.OK)

    async def _serve_request(self, sender: str, raw: bytes) -> bytes:
        self._count_received(raw)
        length = raw[0] if raw else 0
        if not 0 < length <= LONGEST_NAME_BYTES or len(raw) < 1 + length:
            return _answer(Code.REFUSED)
        handler = self.request_handlers.get(raw[1 : 1 + length].decode("utf-8", "replace"))
        body = raw[1 + length :]
        if handler is None:
            return _answer(Code.NOT_FOUND)
        if len(body) > self._message_bytes:
            return _answer(Code.TOO_LARGE)
        if self._serving[sender] >= self._requests_in_flight:
            return _answer(Code.BUSY)
        self._serving[sender] += 1
        try:
            return await self._run(handler, sender, body)
        finally:
            self._serving[sender] -= 1
            if not self._serving[sender]:
                del self._serving[sender]

    async def _run(self, handler: Callable[[str, bytes], Awaitable[bytes]], sender: str, body: bytes) -> bytes:
        try:
            async with asyncio.timeout(HANDLER_SECONDS):
                answer = await handler(sender, body)
        except TransportError as error:
            return _answer(_code_of(error))
        except TimeoutError:
            return _answer(Code.TIMEOUT)
        except Exception:  # hivemind would send the caller our exception's text
            logger.exception("a request handler failed on a request of %s", sender)
            return _answer(Code.REFUSED)
        if len(answer) > self._message_bytes:
            logger.error("an answer of %d bytes to %s is above message_bytes", len(answer), sender)
            return _answer(Code.TOO_LARGE)
        self._counters.bytes_sent += len(answer)
        return _answer(Code.OK, answer)

    def _count_received(self, raw: bytes) -> None:
        self._counters.messages_received += 1
        self._counters.bytes_received += len(raw)


async def _tell_time(_sender: str, _body: bytes) -> bytes:
    return struct.pack("!d", time.time())


def _answer(code: Code, body: bytes = b"") -> bytes:
    return bytes((code,)) + body


def _code_of(error: TransportError) -> Code:
    """The code for a reason that a handler raised; reasons that are facts about a link are no answer."""
    name = error.reason.upper().replace("-", "_")
    return Code[name] if name in Code.__members__ else Code.REFUSED
