"""Files that rot or vanish between two starts: what can be fetched is fetched, and what cannot be known is not pretended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from loopback import LoopNode, check_twin


def flip(path: Path, position: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern))


def own_payload(node: LoopNode) -> Path:
    """The payload of the newest own round that was committed."""
    mine = [c.payload for m in node.swarm.manifests(node) for c in m.contributions if c.peer == node.peer]
    return node.path / "blobs" / mine[-1].hex()


KEEPS_ITS_SESSION: dict[str, Callable[[LoopNode], None]] = {
    "own payload flipped": lambda node: flip(own_payload(node)),
    "own payload gone": lambda node: own_payload(node).unlink(),
    "checkpoint flipped": lambda node: flip(newest(node.path, "checkpoints/0*/theta.safetensors")),
    "checkpoint record flipped": lambda node: flip(newest(node.path, "checkpoints/0*/checkpoint.json")),
    "newest commit flipped": lambda node: flip(newest(node.path, "chain/0*.bin")),
    "a commit in the middle flipped": lambda node: flip(node.path / "chain" / "00000001.bin"),
    "torn event": lambda node: (node.path / "events.jsonl").open("a").write('{"time": 1') and None,
}


BY_DEFAULT = ("own payload flipped", "newest commit flipped")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what in BY_DEFAULT else pytest.mark.full) for what in KEEPS_ITS_SESSION]
)
def test_what_others_hold_is_fetched_again_and_nothing_is_lost(what, swarm, tell, tmp_path):
    async def story():
        run = swarm(founders=3, run__min_peers=2, round__checkpoint_every=2, round__min_budget_seconds=2.0)
        nodes = await run.start(0, 1, 2)
        await run.until_round(3)
        await nodes[0].kill()
        session = nodes[0].store.read_session()
        KEEPS_ITS_SESSION[what](nodes[0])
        again = await LoopNode(run, nodes[0].identity, nodes[0].path).start()
        assert again.driver.me.session == session
        target = max(node.head for node in run.living) + 2
        await run.until(lambda: any(again.peer in e["contributors"] for e in again.events("committed") if e["round"] >= target),
                        "a contribution afterwards")  # fmt: skip
        await run.until_round(target)
        await run.stop()
        run.check([again, *nodes[1:]])
        assert check_twin(run, again, tmp_path / "twin") >= 4

    tell(story())


@pytest.mark.parametrize("what", ["flipped", pytest.param("gone", marks=pytest.mark.full)])
def test_a_node_that_lost_its_votes_comes_back_as_a_new_member(what, swarm, tell):
    """Rule 13: it must not vote in its old name, in which it may have voted already."""

    async def story():
        run = swarm(founders=4, run__min_peers=2)
        nodes = await run.start(0, 1, 2, 3)
        await run.until_round(1)
        await run.until(lambda: (nodes[0].path / "votes.log").stat().st_size > 100, "votes in the log")
        await nodes[0].kill()
        session = nodes[0].store.read_session()
        log = nodes[0].path / "votes.log"
        if what == "gone":
            log.unlink()
        else:
            data = log.read_bytes() or b"\x01" * 64
            log.write_bytes(bytes([data[0] ^ 1]) + data[1:] + b"\x07" * 32)
        again = await LoopNode(run, nodes[0].identity, nodes[0].path).start()
        assert again.driver.me.session != session
        await run.until(lambda: any(again.driver.me == m for m in nodes[1].driver.chain.head.manifest.group), "a member anew")
        await run.until_round(nodes[1].head + 1)
        await run.stop()
        run.check([again, *nodes[1:]])

    tell(story())


def test_a_node_whose_newest_commit_rotted_while_nobody_can_give_it_votes_under_a_new_session(swarm, tell):
    """It voted in the round after that commit; without it, it would vote in the commit's own round a second time."""

    async def story():
        run = swarm(founders=1, run__min_peers=1)
        (node,) = await run.start(0)
        await run.until_round(2)
        await node.kill()
        session = node.store.read_session()
        flip(newest(node.path, "chain/0*.bin"))
        again = LoopNode(run, node.identity, node.path)
        await again.prepare()
        assert again.driver.me.session != session
        again.end()

    tell(story())
