"""Peers of a run find each other through the DHT, and what is not signed stays out of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from sparseloco.bootstrap.directory import Directory
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.records import LONGEST_LIFETIME_SECONDS, PEER, PeerRecord, RecordError, record_key, sealed

RUN, OTHER_RUN = "ab" * 32, "cd" * 32


def record_of(transport: Any, run_id: str = RUN) -> PeerRecord:
    return PeerRecord(transport.peer_id, run_id, tuple(transport.addresses()), head_round=3, version="0.1.0")


def test_who_publishes_is_found_by_all_and_only_in_his_run(run: Callable[..., Any], nodes: Any) -> None:
    async def story() -> None:
        async with nodes(4) as swarm:
            assert await Directory(swarm[0]).peers(RUN) == []
            for node in swarm[:3]:
                assert await Directory(node).publish(record_of(node))
            assert await Directory(swarm[3]).publish(record_of(swarm[3], OTHER_RUN))
            for node in swarm:
                found = await Directory(node).peers(RUN)
                assert [record.peer_id for record in found] == sorted(peer.peer_id for peer in swarm[:3])
                assert all(record.addresses and record.head_round == 3 for record in found)
            assert [r.peer_id for r in await Directory(swarm[0]).peers(OTHER_RUN)] == [swarm[3].peer_id]

    run(story())


def test_a_later_record_replaces_the_earlier(run: Callable[..., Any], nodes: Any) -> None:
    async def story() -> None:
        async with nodes(2) as (one, two):
            now = time.time()
            directory = Directory(one, clock=lambda: now)
            assert await directory.publish(record_of(one))
            now += 1.0
            moved = PeerRecord(one.peer_id, RUN, head_round=9)
            assert await directory.publish(moved)
            (found,) = await Directory(two).peers(RUN)
            assert (found.head_round, found.addresses) == (9, ())
            assert found.expires == now + directory.lifetime_seconds

    run(story())


def test_forged_unsigned_and_endless_records_are_refused(
    run: Callable[..., Any], nodes: Any, identities: list[Identity]
) -> None:
    async def story() -> None:
        async with nodes(2) as (one, two):
            network = two.network
            assert await Directory(one).publish(record_of(one))
            soon, late = time.time() + 300, time.time() + LONGEST_LIFETIME_SECONDS + 120
            theirs = sealed(record_of(one), soon)[0]
            assert not await network.store(theirs.key, one.peer_id, theirs.seal(two.identity), soon), "forged"
            assert not await network.store(theirs.key, one.peer_id, b"unsigned", soon)
            assert not await network.store(theirs.key, two.peer_id, theirs.seal(two.identity), soon), "wrong key"
            endless = sealed(record_of(two), late)[0]
            assert not await network.store(endless.key, two.peer_id, endless.seal(two.identity), late)
            # a plain value with a later expiry once overwrote the whole key
            plain = network._dht.store(theirs.key, b"plain", soon + 100)
            assert not await asyncio.wait_for(plain, 10)
            for node in (one, two):
                (found,) = await Directory(node).peers(RUN)
                assert found.peer_id == one.peer_id and found.head_round == 3

    run(story())


def test_an_expired_record_is_not_found(run: Callable[..., Any], nodes: Any) -> None:
    async def story() -> None:
        async with nodes(2) as (one, two):
            assert await Directory(one).publish(record_of(one))
            later = time.time() + 10_000
            assert await Directory(two, clock=lambda: later).peers(RUN) == []
            assert len(await Directory(two).records(RUN, [one.peer_id, two.peer_id])) == 1

    run(story())


def test_a_node_publishes_its_own_record_only_and_lives_twice_its_refresh(run: Callable[..., Any], nodes: Any) -> None:
    async def story() -> None:
        async with nodes(2) as (one, two):
            with pytest.raises(RecordError, match="its own record"):
                await Directory(one).publish(record_of(two))
            assert Directory(one).lifetime_seconds >= 2 * Directory(one).refresh_seconds
            with pytest.raises(ValueError, match="refresh_seconds"):
                Directory(one, refresh_seconds=1000)
            task = asyncio.create_task(Directory(one).publish_forever(lambda: record_of(one)))
            while not await Directory(two).records(RUN, [one.peer_id]):
                assert not task.done()
            task.cancel()
            assert record_key(PEER, RUN, one.peer_id) != record_key(PEER, OTHER_RUN, one.peer_id)

    run(story())


def test_a_dht_node_that_lost_its_daemon_connection_is_replaced(run: Callable[..., Any], nodes: Any) -> None:
    async def story() -> None:
        async with nodes(3) as (one, two, three):
            assert await Directory(one).publish(record_of(one))
            three.network._dht.p2p._client.control._read_task.cancel()
            await asyncio.sleep(0)
            assert [record.peer_id for record in await Directory(three).peers(RUN)] == [one.peer_id]
            assert three.alive and await Directory(three).publish(record_of(three))
            assert len(await Directory(two).peers(RUN)) == 2

    run(story())
