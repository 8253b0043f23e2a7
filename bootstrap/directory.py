"""Who is in a run, found through the DHT.

Each peer publishes one signed record under a key of its own and a small signed entry in one of the run's index slots
(records.py has the rules). A lookup reads the slots, then each peer's own record. The one rule: lifetimes follow from
the refresh period, at least twice it, so that a late refresh does not make a living peer disappear.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from sparseloco.bootstrap.records import (
    INDEX_SLOTS,
    LONGEST_LIFETIME_SECONDS,
    PEER,
    PeerRecord,
    RecordError,
    index_key,
    key_id,
    open_record,
    peer_record,
    record_key,
    sealed,
)

if TYPE_CHECKING:
    from sparseloco.bootstrap.transport import Transport

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 60.0
LIFETIME_REFRESHES = 3  # two refreshes may be lost
LOOKUPS_AT_ONCE = 16
PEERS_LOOKED_UP = 1024  # a flooded index costs a lookup no more than this

__all__ = ["Directory", "PeerRecord", "RecordError"]


class Directory:
    """Publish this node's record and find those of others. The caller drives the refreshing."""

    def __init__(
        self, transport: Transport, *, refresh_seconds: float = REFRESH_SECONDS, clock: Callable[[], float] = time.time
    ) -> None:
        lifetime = LIFETIME_REFRESHES * refresh_seconds
        if not 0 < lifetime <= LONGEST_LIFETIME_SECONDS:
            longest = LONGEST_LIFETIME_SECONDS / LIFETIME_REFRESHES
            raise ValueError(f"refresh_seconds = {refresh_seconds} must be above 0 and at most {longest:g}")
        self.refresh_seconds, self.lifetime_seconds = refresh_seconds, lifetime
        self._transport, self._clock = transport, clock

    async def publish(self, record: PeerRecord) -> bool:
        """Store the record, and this peer's entry in the run's index, for `lifetime_seconds`; False if nobody took it.

        Call it again every `refresh_seconds`, and whenever the record changes. RecordError for a record of another
        peer or one too long.
        """
        if record.peer_id != self._transport.peer_id:
            raise RecordError("a node publishes its own record only")
        stored = [
            self._transport.network.store(
                signed.key, record.peer_id, signed.seal(self._transport.identity), signed.expires
            )
            for signed in sealed(record, self._clock() + self.lifetime_seconds)
        ]
        return all(await asyncio.gather(*stored))

    async def publish_forever(self, current: Callable[[], PeerRecord]) -> None:
        """Publish `current()` every refresh period until cancelled; a failure is logged once, and tried again."""
        failing = False
        while True:
            ok = await self.publish(current())
            if failing and ok:
                logger.info("this node's record is in the DHT again")
            elif not failing and not ok:
                logger.warning("no peer took this node's DHT record; trying again")
            failing = not ok
            await asyncio.sleep(self.refresh_seconds if ok else self.refresh_seconds / 4)

    async def peers(self, run_id: str) -> list[PeerRecord]:
        """The living records of a run (hex id), this node's own among them, sorted by peer id."""
        slots = await asyncio.gather(
            *(self._transport.network.find(index_key(run_id, slot)) for slot in range(INDEX_SLOTS))
        )
        owners = sorted({owner for slot in slots for owner in slot})
        return await self.records(run_id, owners[:PEERS_LOOKED_UP])

    async def records(self, run_id: str, peer_ids: Iterable[str]) -> list[PeerRecord]:
        """The living records of some peers of a run; peers without one are left out. Addresses are remembered."""
        gate = asyncio.Semaphore(LOOKUPS_AT_ONCE)

        async def one(peer_id: str) -> PeerRecord | None:
            async with gate:
                return await self._find(run_id, peer_id)

        found = [record for record in await asyncio.gather(*(one(p) for p in peer_ids)) if record is not None]
        for record in found:
            self._transport.remember(record.peer_id, record.addresses)
        return found

    async def _find(self, run_id: str, peer_id: str) -> PeerRecord | None:
        key = record_key(PEER, run_id, peer_id)
        found = (await self._transport.network.find(key)).get(peer_id)
        if found is None:
            return None
        value, expires = found
        with suppress(RecordError):
            record = peer_record(open_record(key_id(key), peer_id, value, expires))
            return replace(record, expires=expires) if expires > self._clock() else None
        return None
