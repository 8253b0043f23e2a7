"""What waits to be handed to a round machine, one event at a time, and the machine's own time to wake."""

from __future__ import annotations

import asyncio
import time

from sparseloco.protocol import events as ev
from sparseloco.protocol.messages import Frame

# Peers' messages that may wait; beyond it they are dropped, and heartbeats bring again what mattered.
RECEIVED_WAITING = 10_000


class EventQueue:
    """Events of one machine, in order. What this node itself reports is never dropped."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[ev.Event] = asyncio.Queue()

    def put(self, event: ev.Event) -> None:
        self._events.put_nowait(event)

    def put_received(self, sender: str, frame: Frame) -> None:
        """A peer's message, unless too many wait."""
        if self._events.qsize() < RECEIVED_WAITING:
            self._events.put_nowait(ev.Received(sender, frame))

    async def next(self, wakeup: float) -> ev.Event:
        """The next event, or a Tick at `wakeup` (monotonic seconds)."""
        if not self._events.empty():
            return self._events.get_nowait()
        try:
            async with asyncio.timeout(max(wakeup - time.monotonic(), 0.001)):  # wait_for of 3.11 can swallow a cancellation
                return await self._events.get()
        except TimeoutError:
            return ev.Tick()
