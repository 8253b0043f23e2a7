"""Protocol messages in and out: decoded, bounded and verified on the way in, bounded per peer on the way out.

Whatever arrives is a verified message or a refusal with its rule; nothing that a peer sends raises past this file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from sparseloco.bootstrap.identity import verify_signature
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.messages import Commit, Frame, Heartbeat, Signed, decode, encode

logger = logging.getLogger(__name__)

# Messages on their way to one peer that does not take them; beyond it new ones are dropped, and heartbeats bring again
# what mattered.
SENDS_IN_FLIGHT = 64
SEND_SECONDS = 5.0
# Signed messages whose signature was found good, so that what is quoted again and again is verified once.
VERIFIED_KEPT = 8192


class Mail:
    """One node's messages. `deliver(sender, frame)` gets what is good, `refuse(sender, error)` what is not."""

    def __init__(
        self,
        transport: Transport,
        deliver: Callable[[str, Frame], None],
        refuse: Callable[[str, RemoteProtocolError], None],
    ) -> None:
        self._transport = transport
        self._deliver = deliver
        self._refuse = refuse
        self._in_flight: dict[str, int] = {}
        self._sends: set[asyncio.Task[None]] = set()
        self._verified: dict[tuple[bytes, bytes, bytes], None] = {}
        transport.on_message(self._on_message)

    # --- in -------------------------------------------------------------------------------------------------------

    def _on_message(self, sender: str, data: bytes) -> None:
        """Runs in the event loop: microseconds for a heartbeat, .03 ms for each signature not seen before."""
        try:
            frame = decode(data, self._transport.limits.message_bytes)
            self._verify(frame)
        except RemoteProtocolError as error:
            self._refuse(sender, error)
            return
        self._deliver(sender, frame)

    def _verify(self, frame: Frame) -> None:
        match frame:
            case Heartbeat():
                return
            case Commit():
                for signed in frame.certificate:
                    self._verify_signed(signed)
            case Signed():
                self._verify_signed(frame)

    def _verify_signed(self, signed: Signed) -> None:
        key = (signed.digest, signed.public_key, signed.signature)
        if key in self._verified:
            return
        for inner in signed.inner:
            self._verify_signed(inner)
        signed.verify_own(verify_signature)
        self._verified[key] = None
        if len(self._verified) > VERIFIED_KEPT:
            del self._verified[next(iter(self._verified))]

    # --- out ------------------------------------------------------------------------------------------------------

    def send(self, peers: Iterable[str], frame: Frame) -> None:
        """Send to each, without waiting; delivery is not guaranteed."""
        data = encode(frame)
        for peer in peers:
            if self._in_flight.get(peer, 0) < SENDS_IN_FLIGHT:
                task = asyncio.get_running_loop().create_task(self._send(peer, data))
                self._sends.add(task)
                task.add_done_callback(self._sends.discard)

    async def _send(self, peer: str, data: bytes) -> None:
        self._in_flight[peer] = self._in_flight.get(peer, 0) + 1
        try:
            await self._transport.send(peer, data, SEND_SECONDS)
        except TransportError as error:
            logger.debug("sending to %s: %s", peer, error)
        finally:
            self._in_flight[peer] -= 1
            if not self._in_flight[peer]:
                del self._in_flight[peer]

    async def flush(self, seconds: float) -> None:
        """Wait for what is on its way, at most so long."""
        if self._sends:
            await asyncio.wait(set(self._sends), timeout=seconds)

    async def close(self) -> None:
        for task in self._sends:
            task.cancel()
        await asyncio.gather(*self._sends, return_exceptions=True)
