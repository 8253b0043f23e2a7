"""Peers that lie: each lie is refused under its rule's name, by every honest node, and the round goes on without it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from loopback import LoopNode, Swarm

from sparseloco.node.contribution import MAGIC, ContributionHeader, pack_contribution
from sparseloco.protocol.encoding import pack
from sparseloco.protocol.events import decode_commit
from sparseloco.protocol.manifest import Member
from sparseloco.protocol.messages import (
    PRECOMMIT,
    PROTOCOL_VERSION,
    Announce,
    Close,
    Commit,
    Header,
    Vote,
    encode,
    sign,
    signed_bytes,
)

RECORD_LOW, RECORD_UPPER, RECORD_CODES = 48, 16, 16  # bytes of a record's fields at k = 64


def payload_lies(run: Swarm, liar: LoopNode, other: str) -> list[tuple[str, Callable[[bytes, ContributionHeader], bytes]]]:
    """(rule, what becomes of the blob)."""
    start = len(ContributionHeader(bytes(32), 0, bytes(32), liar.peer).encode())

    def patched(blob: bytes, at: int, new: bytes) -> bytes:
        return blob[: start + at] + new + blob[start + at + len(new) :]

    def changed(change: Callable[[ContributionHeader], dict[str, Any]]) -> Callable[[bytes, ContributionHeader], bytes]:
        return lambda blob, mine: pack_contribution(replace(mine, **change(mine)), blob[start:])

    last_upper = RECORD_LOW + RECORD_UPPER - 1
    levels = RECORD_LOW + RECORD_UPPER + RECORD_CODES
    repeated = bytes(RECORD_LOW) + b"\xff" * 8 + bytes(8)  # all 64 indices are 0
    return [
        ("payload-bytes", lambda blob, _: blob[:-1]),
        ("payload-bytes", lambda blob, _: blob + b"\0"),
        ("popcount", lambda blob, _: patched(blob, last_upper, bytes([blob[start + last_upper] ^ 0x80]))),
        ("index-order", lambda blob, _: patched(blob, 0, repeated)),
        ("scale-finite", lambda blob, _: patched(blob, levels, struct.pack("<HH", 0x7FC0, 0x7FC0))),
        ("payload-round", changed(lambda mine: {"round": mine.round - 1})),
        ("payload-run", changed(lambda mine: {"run": b"x" * 32})),
        ("payload-base", changed(lambda mine: {"base": b"x" * 32})),
        ("payload-peer", changed(lambda mine: {"peer": other})),
        ("payload-header", lambda blob, _: b"SLCPAY9\0" + blob[len(MAGIC) :]),
    ]


def test_a_payload_that_breaks_a_rule_is_refused_by_name_and_not_committed(swarm, tell):
    async def story():
        run = swarm(founders=4, run__min_peers=3)
        told: dict[int, str] = {}

        def arrange(node: LoopNode) -> None:
            if node.peer != run.identities[1].peer_id:
                return
            train = node.worker.train
            lies = payload_lies(run, node, run.identities[2].peer_id)

            def lying(number: int, index: int, deadline: float, stop: Any, base: Any) -> Any:
                trained = train(number, index, deadline, stop, base)
                if not 0 < number <= len(lies):
                    return trained
                rule, lie = lies[number - 1]
                header = ContributionHeader(run.run.run_id, number, base(), node.peer)
                blob = lie(trained.blob, header)
                told[number] = rule
                return replace(trained, blob=blob, digest=node.store.blobs.put(blob))

            node.worker.train = lying
            run.network.lies[node.peer] = lambda kind, to, data: data

        nodes = await run.start(0, 1, 2, 3, arrange=arrange)
        await run.until_round(11)
        await run.stop()
        assert len(told) == 10
        honest = [node for node in nodes if node.peer not in run.network.lies]
        run.check(honest)
        liar = nodes[1].peer
        for node in honest:
            committed = {e["round"]: e["contributors"] for e in node.events("committed")}
            assert liar in committed[0] and liar in committed[11], "the liar's good contributions count"
            for number, rule in told.items():
                refusals = {(e["round"], e["rule"]) for e in node.events("refused") if e["peer"] == liar}
                assert (number, rule) in refusals, f"{rule} of round {number} was not refused at {node.path.name}"
                assert liar not in committed[number] and len(committed[number]) == 3
        assert {e["round"] for e in nodes[1].events("returned")} >= set(told)

    tell(story())


def test_a_payload_damaged_on_its_way_is_fetched_from_a_peer_that_holds_it(swarm, tell):
    """Flipped bits in what one peer sends to one other: a matter of links, no refusal, and nothing is missing."""

    async def story():
        run = swarm(founders=3, run__min_peers=3)
        first, second = run.identities[0].peer_id, run.identities[1].peer_id
        flipped: list[str] = []

        def flip(kind: str, to: str, data: bytes) -> bytes:
            if kind == "blob" and to == second and len(data) > 100:
                flipped.append(to)
                return data[:100] + bytes([data[100] ^ 1]) + data[101:]
            return data

        nodes = await run.start(0, 1, 2)
        run.network.lies[first] = flip
        await run.until_round(3)
        await run.stop()
        run.check()
        run.check(nodes)
        assert flipped
        committed = [e for e in nodes[1].events("committed") if e["round"] <= 3]
        assert all(len(event["contributors"]) == 3 for event in committed)
        assert not nodes[1].events("refused")

    tell(story())


def test_bad_messages_are_refused_by_name_and_rounds_go_on(swarm, tell):
    async def story():
        run = swarm(founders=4, run__min_peers=3)
        nodes = await run.start(0, 1, 2, 3)
        await run.until_round(0)
        liar = nodes[3]
        stranger = run.network.transport(run.identities[4], run.run.limits)
        run.network.lies[liar.peer] = run.network.lies[stranger.peer_id] = lambda kind, to, data: data
        victim = nodes[0]

        async def refused(rule: str, sender: Any, make: Callable[[Header], bytes]) -> None:
            """Send it until it is refused: the round may turn between making a message and its arrival."""

            def seen() -> bool:
                return any(e["rule"] == rule and e["peer"] == sender.peer_id for e in victim.events("refused"))

            for _ in range(20):
                manifest = victim.driver.chain.head.manifest
                session = liar.driver.me.session
                header = Header(run.run.run_id, manifest.round + 1, manifest.digest, sender.peer_id, session)
                await sender.send(victim.peer, make(header))
                head = victim.head
                await run.until(lambda head=head: seen() or victim.head > head, f"refusal {rule} or the next round")
                if seen():
                    return
            raise AssertionError(f"{rule} was not refused:\n{run.describe()}")

        def signed(message: Any, who: Any) -> bytes:
            return encode(sign(message, who.public_key, who.sign))

        def vote(header: Header, attempt: int = 9) -> Vote:
            return Vote(header, PRECOMMIT, attempt, b"d" * 32)

        def badly_signed(header: Header) -> bytes:
            good = sign(vote(header), liar.identity.public_key, liar.identity.sign)
            return encode(replace(good, signature=good.signature[:-1] + bytes([good.signature[-1] ^ 1])))

        def as_another(header: Header) -> bytes:
            other = replace(header, sender=nodes[1].peer)
            return signed(vote(other), liar.identity)

        def announce(header: Header) -> Announce:
            return Announce(header, b"b" * 32, b"p" * 32, 1, 1, 1)

        def forged_commit(header: Header) -> bytes:
            manifest = replace(victim.driver.chain.head.manifest, round=header.round, parent=header.parent)
            certificate = sign(Vote(header, PRECOMMIT, 0, manifest.digest), liar.identity.public_key, liar.identity.sign)
            return encode(Commit(manifest, (certificate,)))

        member, me = liar.transport, liar.identity
        await refused("signature", member, badly_signed)
        await refused("signature", stranger, lambda header: as_another(replace(header, sender=stranger.peer_id)))
        await refused("other-run", member, lambda header: signed(vote(replace(header, run=b"o" * 32)), me))
        await refused("not-a-member", stranger, lambda header: signed(vote(header), stranger.identity))
        await refused("encoding", member, lambda header: b"\xc1 garbage")
        await refused("attempt-window", member, lambda header: signed(vote(header, 10**6), me))
        await refused("certificate", member, forged_commit)
        await refused("inner-round", member, lambda header: signed_close_of_other_round(header, me))
        await refused("equivocation", member, lambda header: signed(announce(header), me))

        head = victim.head
        await run.until_round(head + 2, [n for n in nodes if n is not liar])
        await run.stop()
        run.check([node for node in nodes if node is not liar])
        assert all(event["peer"] in (liar.peer, stranger.peer_id, nodes[1].peer) for event in victim.events("refused"))

    def signed_close_of_other_round(header: Header, who: Any) -> bytes:
        """The constructor refuses to make one, so it is made of bytes."""
        other = replace(header, round=header.round + 7)
        inner = sign(Announce(other, b"b" * 32, b"p" * 32, 1, 1, 1), who.public_key, who.sign)
        body = pack([PROTOCOL_VERSION, Close.KIND, header.values(), [0, [inner.parts], []]])
        parts = [body, who.public_key, who.sign(signed_bytes(body))]
        return pack([PROTOCOL_VERSION, 0, parts])

    tell(story())


def test_a_certificate_with_swapped_keys_is_refused_though_its_votes_were_seen_before(swarm, tell):
    """A vote verified once must not vouch for the same vote under another key: joiners would refuse the chain for it."""

    async def story():
        run = swarm(founders=3, run__min_peers=3)
        nodes = await run.start(0, 1, 2)
        await run.until_round(1)
        files = [decode_commit(path.read_bytes()) for path in (nodes[0].path / "chain").glob("0*1.bin")]
        tampered = Commit(
            files[0].manifest,
            tuple(replace(vote, public_key=vote.public_key[:-1] + b"\0") for vote in files[0].certificate),
        )
        run.network.lies[nodes[2].peer] = lambda kind, to, data: data
        await nodes[2].transport.send(nodes[0].peer, encode(tampered))
        await run.until(lambda: any(e["rule"] == "signature" for e in nodes[0].events("refused")), "the refusal")
        await run.stop()
        run.check(nodes)

    tell(story())


def test_a_flood_of_bad_messages_is_written_down_once_a_round(swarm, tell):
    async def story():
        run = swarm(founders=2, run__min_peers=2)
        nodes = await run.start(0, 1)
        await run.until_round(0)
        stranger = run.network.transport(run.identities[4], run.run.limits)
        for number in range(300):
            await stranger.send(nodes[0].peer, b"\xc1" + bytes([number % 256]))
        rounds = nodes[0].head + 2
        await run.stop()
        assert 1 <= len(nodes[0].events("refused")) <= rounds
        assert Member(nodes[0].peer, bytes(16)) in run.manifests(nodes[0])[0].group

    tell(story())
