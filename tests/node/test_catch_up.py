"""Late joiners: the exact state from donors that die or lie, and a place in the group afterwards."""

from __future__ import annotations

import json
from typing import Any

import pytest
from loopback import LoopNode, check_twin

from sparseloco.bootstrap.errors import NetworkError, TransportError
from sparseloco.node.services import parse_commits
from sparseloco.protocol.encoding import pack
from sparseloco.protocol.events import decode_commit, encode_commit
from sparseloco.protocol.messages import Commit


def test_a_late_joiner_gets_the_exact_state_is_named_and_contributes_from_then_on(swarm, tell, tmp_path):
    async def story():
        run = swarm(founders=3, run__min_peers=2, round__checkpoint_every=2)
        founders = await run.start(0, 1, 2)
        await run.until_round(3)
        joiner = await run.new(3).start()
        caught = joiner.events("caught_up")[0]
        await run.until(lambda: joiner.events("joined"), "joining")
        joined = joiner.events("joined")[0]
        assert joiner.peer in joined["group"] and joined["round"] >= caught["round"]
        await run.until_round(joined["round"] + 2)
        await run.stop()
        assert founders[0].states()[caught["round"]] == caught["state_digest"]
        contributors = {e["round"]: e["contributors"] for e in joiner.events("committed")}
        assert joiner.peer in contributors[joined["round"] + 1], "it contributes to the round after the one that named it"
        run.check([*founders, joiner])
        pulled = sum(size for kind, _, to, size in run.network.log if kind == "pull" and to == joiner.peer)
        assert pulled >= 4 * run.layout.parameters
        assert check_twin(run, joiner, tmp_path / "twin") >= 1

    tell(story())


def flip_pieces(kind: str, to: str, data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:] if kind == "blob" else data


def cut_blobs(kind: str, to: str, data: bytes) -> bytes:
    return data[: len(data) // 2] if kind == "blob" else data


def no_blobs(kind: str, to: str, data: bytes) -> bytes | None:
    return None if kind == "blob" else data


def change_piece_list(kind: str, to: str, data: bytes) -> bytes:
    if kind != "answer:state":
        return data
    offer = json.loads(data)
    return json.dumps({**offer, "pieces": ["ab" * 32 for _ in offer["pieces"]]}).encode()


def wrong_size(kind: str, to: str, data: bytes) -> bytes:
    return json.dumps({**json.loads(data), "length_bytes": 4}).encode() if kind == "answer:state" else data


def odd_offer(kind: str, to: str, data: bytes) -> bytes:
    return b'{"round": 1e999, "length_bytes": 1, "pieces": []}' if kind == "answer:state" else data


def forge_chain(kind: str, to: str, data: bytes) -> bytes:
    """The last commit's certificate is one vote short of a quorum; everything else is as the group signed it."""
    if kind != "answer:commits":
        return data
    files = parse_commits(data)
    if files:
        last = decode_commit(files[-1])
        files[-1] = encode_commit(last.manifest, last.certificate[:1])
    return pack(files)


def another_group(kind: str, to: str, data: bytes) -> bytes:
    """A chain whose votes are for other manifests than those shown: certificates shifted by one round."""
    if kind != "answer:commits":
        return data
    commits = [decode_commit(file) for file in parse_commits(data)]
    shifted = [Commit(a.manifest, b.certificate) for a, b in zip(commits, [*commits[1:], *commits[:1]], strict=True)]
    return pack([encode_commit(commit.manifest, commit.certificate) for commit in shifted])


def bad_genesis(kind: str, to: str, data: bytes) -> bytes:
    return b"\xc1" if kind == "answer:commits" else data


LIES = (
    flip_pieces, cut_blobs, no_blobs, change_piece_list, wrong_size, odd_offer, forge_chain, another_group, bad_genesis,
)  # fmt: skip


def test_donors_that_lie_are_passed_over_and_the_state_is_the_groups(swarm, tell):
    """Each time a fresh joiner, and the donor that it asks first lies in another way."""

    async def story():
        run = swarm(founders=3, run__min_peers=2, round__checkpoint_every=2)
        founders = await run.start(0, 1, 2)
        await run.until_round(4)
        for place, lie in enumerate(LIES):
            first = await first_donor(run)
            run.network.lies = {first: lie}
            joiner = LoopNode(run, run.identities[4], run.folder / f"joiner{place}")
            await joiner.prepare()
            number, theta = joiner.worker.state_round, joiner.worker.theta
            await run.until_round(number)
            digest = joiner.worker.digest(theta).hex()
            assert number >= 4 and founders[0].states()[number] == digest, lie.__name__
            joiner.end()
        run.network.lies = {}
        await run.stop()
        run.check(founders)

    async def first_donor(run: Any) -> str:
        """The same order as find_donors': furthest ahead, then by peer id; asked just before."""
        return max(run.living, key=lambda node: (node.head, [-ord(c) for c in node.peer])).peer

    tell(story())


@pytest.mark.full
def test_with_every_checkpoint_spoilt_the_genesis_of_the_bootstrap_and_the_log_lead_to_the_same_state(swarm, tell):
    async def story():
        run = swarm(founders=3, run__min_peers=2, round__checkpoint_every=2)
        founders = await run.start(0, 1, 2)
        await run.until_round(3)
        run.network.lies = {node.peer: change_piece_list for node in founders}
        joiner = await run.new(3).start()
        first = joiner.store.checkpoints.rounds()
        assert first[0] == -1, "it began at the genesis state"
        run.network.lies = {}
        await run.until_round(joiner.head + 1)
        await run.stop()
        run.check([*founders, joiner])

    tell(story())


def test_without_any_honest_donor_a_joiner_says_whom_it_asked_and_why_it_failed(swarm, tell):
    async def story():
        run = swarm(founders=2, run__min_peers=2, round__checkpoint_every=2)
        nodes = await run.start(0, 1)
        await run.until_round(1)
        run.network.lies = dict.fromkeys(run.network.transports, change_piece_list)
        with pytest.raises(NetworkError) as caught:
            await run.new(3).start()
        for node in nodes:
            assert node.peer in str(caught.value)
        assert caught.value.exit_code == 4
        run.network.lies = {}
        await run.stop()

    tell(story())


def test_a_restart_replays_its_own_log_without_asking_for_payloads(swarm, tell):
    """Checkpoint and log are on its disk: nothing but what it missed is fetched."""

    async def story():
        run = swarm(founders=2, run__min_peers=1, round__checkpoint_every=3)
        nodes = await run.start(0, 1)
        await run.until_round(4)
        await nodes[1].kill()
        before = nodes[1].states()
        run.network.log.clear()
        again = LoopNode(run, run.identities[1], nodes[1].path)
        await again.start()
        held = {path.name for path in (again.path / "blobs").iterdir()}
        committed = {c.payload.hex() for m in run.manifests(again) if m.round <= max(before) for c in m.contributions}
        assert committed <= held
        await run.until_round(max(before) + 2)
        await run.stop()
        run.check([nodes[0], again])
        reached = again.events("caught_up")
        assert not reached or reached[-1]["round"] >= max(before)

    tell(story())


def test_a_payload_that_was_missed_is_stored_when_the_round_is_applied(swarm, tell):
    """A node that gets a committed payload late keeps it: its own restart and joiners need the whole log."""

    async def story():
        run = swarm(founders=4, run__min_peers=3, round__exchange_seconds=1.0, round__min_budget_seconds=2.0)
        nodes = await run.start(0, 1, 2, 3)
        await run.until_round(0)
        deaf = nodes[0]
        pull, accept = deaf.transport.pull, deaf.transport.accept
        cut = {"until": deaf.head + 1}

        async def no_pull(*arguments: Any, **options: Any) -> bytes:
            if deaf.head <= cut["until"]:
                raise TransportError("timeout", "nothing came")
            return await pull(*arguments, **options)

        deaf.transport.pull = no_pull
        deaf.transport.accept = lambda *arguments: deaf.head > cut["until"] and accept(*arguments)
        await run.until_round(cut["until"] + 2)
        await run.stop()
        run.check(nodes)
        held = {path.name for path in (deaf.path / "blobs").iterdir()}
        for manifest in run.manifests(deaf):
            if manifest.round <= deaf.worker.state_round:
                assert {c.payload.hex() for c in manifest.contributions} <= held, f"round {manifest.round} is not whole"

    tell(story())
