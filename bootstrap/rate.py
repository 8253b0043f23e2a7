"""Counting and limiting bytes: totals for the log, and a token bucket for bulk uploads.

Only bulk data is limited: heartbeats and votes are small, and a saturated link must not delay them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass


@dataclass
class Counters:
    """Bytes since the start. Totals hold framing and messages as seen above libp2p; payload is blob bodies only."""

    bytes_sent: int = 0
    bytes_received: int = 0
    payload_bytes_sent: int = 0
    payload_bytes_received: int = 0
    messages_sent: int = 0
    messages_received: int = 0


class RateLimiter:
    """A token bucket shared by all uploads of a node; 0 bytes per second means no limit. First come, first served."""

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self.bytes_per_second = bytes_per_second
        self._clock, self._sleep = clock, sleep
        self._free_at = clock()  # when all that was granted will have been paid for
        self._order = asyncio.Lock()

    async def take(self, count: int) -> None:
        """Return when `count` bytes may be written."""
        if self.bytes_per_second <= 0:
            return
        async with self._order:
            # a quarter of a second may be sent at once after a pause: enough to keep a link full
            self._free_at = max(self._free_at, self._clock() - 0.25)
            self._free_at += count / self.bytes_per_second
            wait = self._free_at - self._clock()
            if wait > 0:
                await self._sleep(wait)
