"""Payloads on their way: commit then reveal, pushes and pulls, holders when the origin is gone, verdicts by rule."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LoopbackNetwork, settings, toml_of

from sparseloco.bootstrap.errors import TransportError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.compression.codec import encode
from sparseloco.compression.layout import CodecSpec, PayloadLayout, TensorSpec
from sparseloco.node import exchange as exchange_module
from sparseloco.node.contribution import ContributionHeader, contribution_bytes, pack_contribution
from sparseloco.node.exchange import Exchange, broken_rule
from sparseloco.node.store import StateDir
from sparseloco.protocol.messages import Announce, Header, Signed, encode_body, sign
from sparseloco.protocol.messages import encode as encode_frame

LAYOUT = PayloadLayout([TensorSpec("w", (3, 4096)), TensorSpec("b", (10,))], CodecSpec(k=64))
RUN, BASE = b"r" * 32, b"b" * 32


def a_payload(seed: int = 0) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return encode([torch.randn(3, 4096, generator=generator), torch.randn(10, generator=generator)], LAYOUT).payload


class Peer:
    """A transport with an exchange on it, and a folder."""

    def __init__(self, network: LoopbackNetwork, identity: Any, folder: Path) -> None:
        self.identity, self.id = identity, identity.peer_id
        self.transport = network.transport(identity, RunFile.parse(toml_of(settings())).limits)
        self.store = StateDir.open(folder / self.id)
        self.exchange = Exchange(self.transport, self.store, LAYOUT, random.Random(1))  # type: ignore[arg-type]
        self.header = ContributionHeader(RUN, 3, BASE, self.id)

    def announce(self, blob: bytes) -> Signed:
        digest = self.store.blobs.put(blob)
        header = Header(RUN, 3, b"p" * 32, self.id, bytes(16))
        message = Announce(header, BASE, digest, len(blob), 30, 7680)
        return sign(message, self.identity.public_key, self.identity.sign)

    def blob(self, seed: int = 0) -> bytes:
        return pack_contribution(self.header, a_payload(seed))


@pytest.fixture
def peers(identities, tmp_path):
    made: list[Peer] = []

    def make(count: int) -> tuple[LoopbackNetwork, list[Peer]]:
        network = LoopbackNetwork(7, delay_seconds=(0.0, 0.002))
        made.extend(Peer(network, identity, tmp_path) for identity in identities[:count])
        return network, made

    yield make
    for peer in made:
        peer.store.close()


def nobody() -> list[str]:
    return []


async def eventually(condition: Any, what: str) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + 20
    while not condition():
        assert loop.time() < end, f"never happened: {what}"
        await asyncio.sleep(0.005)


def test_what_nobody_asked_for_is_refused_before_a_byte_is_taken(peers, tell):
    async def story():
        _, (origin, other) = peers(2)
        blob = origin.blob()
        with pytest.raises(TransportError) as caught:
            await origin.transport.push(other.id, hashlib.sha256(blob).digest(), blob)
        assert caught.value.reason == "refused"
        assert len(other.store.blobs) == 0

    tell(story())


def test_a_push_that_came_before_the_close_is_made_good_by_a_pull_at_once(peers, tell, monkeypatch):
    """Waiting for a push that was refused would cost its whole waiting time in every round."""
    monkeypatch.setattr(exchange_module, "PUSH_WAIT_SECONDS", 60.0)

    async def story():
        network, (origin, other) = peers(2)
        announcement = origin.announce(origin.blob())
        await origin.exchange.reveal(announcement, [other.id])
        assert [kind for kind, *_ in network.log] == []
        async with asyncio.timeout(5):
            assert await other.exchange.settle(announcement, nobody) == ""
        assert [(kind, sender) for kind, sender, *_ in network.log] == [("pull", origin.id)]

    tell(story())


def test_a_push_that_is_waited_for_saves_the_pull(peers, tell, monkeypatch):
    monkeypatch.setattr(exchange_module, "PUSH_WAIT_SECONDS", 30.0)

    async def story():
        network, (origin, other) = peers(2)
        announcement = origin.announce(origin.blob())
        waiting = asyncio.create_task(other.exchange.settle(announcement, nobody))
        await eventually(lambda: other.exchange._wanted, "the wait")
        await origin.exchange.reveal(announcement, [other.id])
        assert await waiting == ""
        assert [kind for kind, *_ in network.log] == ["push"]
        assert other.store.blobs.get(announcement.message.payload) == origin.blob()

    tell(story())


def test_ones_own_payload_is_served_to_nobody_before_it_is_revealed(peers, tell):
    """Commit, then reveal: after the announcement everybody knows the digest, and nobody gets the bytes."""

    async def story():
        _, (origin, other) = peers(2)
        announcement = origin.announce(origin.blob())
        message = announcement.message
        origin.exchange.hide(message.payload)
        with pytest.raises(TransportError) as caught:
            await other.transport.pull(origin.id, message.payload, message.payload_bytes)
        assert caught.value.reason == "not-found"
        await origin.exchange.reveal(announcement, [])
        assert await other.transport.pull(origin.id, message.payload, message.payload_bytes) == origin.blob()

    tell(story())


def test_when_the_origin_dies_after_one_push_the_others_get_it_from_that_holder(peers, tell, monkeypatch):
    monkeypatch.setattr(exchange_module, "PUSH_WAIT_SECONDS", 0.05)

    async def story():
        network, (origin, holder, third, fourth) = peers(4)
        announcement = origin.announce(origin.blob())
        waiting = asyncio.create_task(holder.exchange.settle(announcement, nobody))
        await eventually(lambda: holder.exchange._wanted, "the wait")
        await origin.exchange.reveal(announcement, [holder.id])
        assert await waiting == ""
        network.drop(origin.id)
        holders: list[str] = []
        others = [asyncio.create_task(p.exchange.settle(announcement, lambda: holders)) for p in (third, fourth)]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in others), "nobody is known to hold it yet"
        holders.append(holder.id)
        assert await asyncio.gather(*others) == ["", ""]
        assert {sender for kind, sender, *_ in network.log if kind == "pull"} == {holder.id}

    tell(story())


def test_a_holder_that_serves_other_bytes_is_passed_over(peers, tell, monkeypatch):
    monkeypatch.setattr(exchange_module, "PUSH_WAIT_SECONDS", 0.0)

    async def story():
        network, (origin, liar, honest, asker) = peers(4)
        announcement = origin.announce(origin.blob())
        for peer in (liar, honest):
            peer.store.blobs.put(origin.blob())
        network.drop(origin.id)
        network.lies[liar.id] = lambda kind, to, data: bytes(len(data)) if kind == "blob" else data
        assert await asker.exchange.settle(announcement, lambda: [liar.id, honest.id]) == ""
        assert asker.store.blobs.get(announcement.message.payload) == origin.blob()

    tell(story())


def test_a_beginning_that_arrived_is_not_fetched_again(peers, tell, monkeypatch):
    monkeypatch.setattr(exchange_module, "PUSH_WAIT_SECONDS", 0.0)

    async def story():
        network, (origin, holder, asker) = peers(3)
        blob = origin.blob()
        announcement = origin.announce(blob)
        holder.store.blobs.put(blob)
        network.lies[origin.id] = lambda kind, to, data: data[:100] if kind == "blob" else data
        assert await asker.exchange.settle(announcement, lambda: [holder.id]) == ""
        sizes = [size for kind, sender, _, size in network.log if kind == "pull"]
        assert sizes == [len(blob) - 100]

    tell(story())


def test_announced_bytes_that_are_not_the_runs_are_refused_unfetched(peers, tell):
    async def story():
        network, (origin, other) = peers(2)
        assert await other.exchange.settle(origin.announce(origin.blob() + b"x"), nobody) == "payload-bytes"
        assert network.log == []

    tell(story())


def test_a_blob_of_another_peer_is_refused_under_the_copiers_name(peers, tell, monkeypatch):
    monkeypatch.setattr(exchange_module, "PUSH_WAIT_SECONDS", 0.0)

    async def story():
        _, (origin, copier, other) = peers(3)
        assert await other.exchange.settle(copier.announce(origin.blob()), nobody) == "payload-peer"
        assert len(other.store.blobs) == 0, "what is refused is not kept"

    tell(story())


def test_the_first_broken_rule_is_the_verdict():
    mine = ContributionHeader(RUN, 3, BASE, "QmPeer")
    good = pack_contribution(mine, a_payload())
    assert broken_rule(good, mine, LAYOUT) == ""
    assert broken_rule(good, ContributionHeader(RUN, 4, BASE, "QmPeer"), LAYOUT) == "payload-round"
    assert broken_rule(good[:-1] + bytes([good[-1] | 0x80]), mine, LAYOUT) == "scale-sign"


def test_a_payload_and_its_signed_announcement_cost_at_most_a_kilobyte_more_than_the_codecs_bytes(identities):
    """The traffic figures that the project states are the codec's; what goes with each payload is bounded by this."""
    identity = identities[0]
    header = Header(RUN, 2**40, b"p" * 32, identity.peer_id, bytes(16))
    size = contribution_bytes(identity.peer_id, LAYOUT.total_bytes)
    announce = Announce(header, BASE, b"d" * 32, 10**9, 10**6, 10**9)
    signed = sign(announce, identity.public_key, identity.sign)
    extra = size - LAYOUT.total_bytes + len(encode_frame(signed))
    print(f"{extra} bytes beside the codec's; the announcement's body is {len(encode_body(announce))}")
    assert extra <= 1024
