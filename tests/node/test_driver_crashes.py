"""Power cut at an instant: the files as they were then, another process, and nothing lost, contradicted or counted twice."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback import LoopNode, Swarm, check_twin

from sparseloco.node.durable import BESIDE
from sparseloco.protocol import events as ev
from sparseloco.protocol.messages import PREVOTE, Announce, Check, Close, Proposal, Signed, Vote, decode

Records = Callable[[Any], bool]

RECORDS: dict[str, Records] = {
    "announced": lambda record: isinstance(record, ev.Announced),
    "door closed": lambda record: isinstance(record, ev.DoorClosed),
    "close": lambda record: isinstance(record, ev.Said) and isinstance(record.message.message, Close),
    "check": lambda record: isinstance(record, ev.Said) and isinstance(record.message.message, Check),
    "proposal": lambda record: isinstance(record, ev.Said) and isinstance(record.message.message, Proposal),
    "prevote": lambda record: isinstance(record, ev.Voted) and record.vote.message.phase == PREVOTE,
    "precommit": lambda record: isinstance(record, ev.Voted) and record.vote.message.phase != PREVOTE,
    "committed": lambda record: isinstance(record, ev.Committed),
}
BEFORE = [f"before {name}" for name in RECORDS]
AFTER = [f"after {name}" for name in RECORDS]
SENT: dict[str, type] = {
    "announcement sent": Announce, "close sent": Close, "check sent": Check, "proposal sent": Proposal, "vote sent": Vote,
}  # fmt: skip
# What is written, by the name it gets. Of each: a file torn in half before its fsync, and the instants around its rename.
FILES = {
    "blob": r"blobs/[0-9a-f]{64}",
    "buffer": r"own/\d{8}/a\.safetensors",
    "optimizer": r"own/\d{8}/optimizer\.safetensors",
    "own record": r"own/\d{8}/own\.json",
    "own folder": r"own/\d{8}",
    "weights": r"checkpoints/\d{8}/theta\.safetensors",
    "checkpoint record": r"checkpoints/\d{8}/checkpoint\.json",
    "checkpoint folder": r"checkpoints/\d{8}",
    "chain": r"chain/\d{8}\.bin",
    "votes": r"votes\.log",
}
TORN = [f"torn {name}" for name in FILES if not name.endswith("folder")]
MOVED = ["blob", "own record", "own folder", "checkpoint record", "checkpoint folder", "chain", "votes"]
UNNAMED = [f"{name} unnamed" for name in MOVED]
NAMED = [f"{name} named" for name in MOVED]
OTHERS = [*SENT, "own state saved", "chain written", "before apply", "after apply"]


class Crasher:
    """Cuts the power of the first node that comes to the armed point; every later one passes."""

    def __init__(self) -> None:
        self.point = ""
        self.hit: LoopNode | None = None
        self._choosing = threading.Lock()

    def arrange(self, node: LoopNode) -> None:
        persist, save = node.driver._persist, node.store.own.save
        write, apply, send = node.store.chain.write, node.worker.apply, node.transport.before_send

        def persisting(record: Any) -> None:
            name = next((name for name, fits in RECORDS.items() if fits(record)), "")
            self.at(node, f"before {name}")
            persist(record)
            self.at(node, f"after {name}")

        def saving(*arguments: Any) -> None:
            save(*arguments)
            self.at(node, "own state saved")

        def writing(*arguments: Any) -> None:
            write(*arguments)
            self.at(node, "chain written")

        def applying(*arguments: Any) -> Any:
            self.at(node, "before apply")
            result = apply(*arguments)
            self.at(node, "after apply")
            return result

        def sending(peer: str, data: bytes) -> None:
            send(peer, data)
            if self.point in SENT:
                frame = decode(data, 10**6)
                mine = isinstance(frame, Signed) and frame.message.header.sender == node.peer
                if mine and isinstance(frame.message, SENT[self.point]):  # type: ignore[union-attr]
                    self.at(node, self.point)

        node.driver._persist = persisting  # type: ignore[method-assign]
        node.store.own.save = saving  # type: ignore[method-assign]
        node.store.chain.write = writing  # type: ignore[method-assign]
        node.worker.apply = applying
        node.transport.before_send = sending

    def wants(self, node: LoopNode, point: str) -> bool:
        """Choose the node if it is the first one at the armed point."""
        with self._choosing:
            if self.hit is None and point == self.point and node.head >= 1:
                self.hit = node
            return node is self.hit

    def at(self, node: LoopNode, point: str) -> None:
        if self.wants(node, point):
            node.cut_power()  # the first time; from then on it is dead and nothing of it goes on


def file_kind(run: Swarm, path: Path) -> tuple[LoopNode, str] | None:
    """Whose file this is, and which of FILES it is or is about to become."""
    owner = next((node for node in run.living if node.path in path.parents), None)
    if owner is None:
        return None
    name = str(path.relative_to(owner.path)).replace(BESIDE, "")
    return next(((owner, kind) for kind, form in FILES.items() if re.fullmatch(form, name)), None)


def watch_files(monkeypatch: pytest.MonkeyPatch, crasher: Crasher, run: Swarm) -> None:
    """Crash points at every fsync of a file and around every rename, wherever in the code they are."""

    def syncing(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        found = file_kind(run, path) if path.is_file() else None
        if found is not None and crasher.wants(found[0], f"torn {found[1]}"):
            size = path.stat().st_size
            os.truncate(path, size - 3 if found[1] == "votes" else size // 2)  # of the votes, only the last one was not synced
            crasher.at(found[0], f"torn {found[1]}")

    def around(name: str) -> None:
        move = getattr(Path, name)

        def moving(path: Path, target: Path) -> Path:
            found = file_kind(run, Path(target)) if BESIDE in path.name else None
            if found is None:
                return move(path, target)  # type: ignore[no-any-return]
            crasher.at(found[0], f"{found[1]} unnamed")
            result: Path = move(path, target)
            crasher.at(found[0], f"{found[1]} named")
            return result

        monkeypatch.setattr(Path, name, moving)

    monkeypatch.setattr("os.fsync", syncing)
    around("rename")
    around("replace")


# One point of each kind; the full run has them all.
SOME = ["before check", "after announced", "vote sent", "before apply", "torn votes", "checkpoint folder unnamed", "chain named"]
ALL = {"before": BEFORE, "after": AFTER, "others": OTHERS, "torn": TORN, "unnamed": UNNAMED, "named": NAMED}


def test_there_are_enough_crash_points() -> None:
    points = [point for group in ALL.values() for point in group]
    assert len(points) == len(set(points)) >= 40 and set(SOME) <= set(points)


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(SOME, id="some"),
        *(pytest.param(points, id=name, marks=pytest.mark.full) for name, points in ALL.items()),
    ],
)
def test_a_node_whose_power_is_cut_goes_on_from_its_files(points, swarm, tell, tmp_path, monkeypatch):
    async def story():
        run = swarm(founders=3, run__min_peers=2, round__checkpoint_every=2)
        crasher = Crasher()
        watch_files(monkeypatch, crasher, run)
        await run.start(0, 1, 2, arrange=crasher.arrange)
        again: list[LoopNode] = []
        for point in points:
            crasher.hit, crasher.point = None, point
            await run.until(lambda: crasher.hit is not None and crasher.hit.snapshot is not None, point)
            again.append(await crasher.hit.restart(crasher.arrange))
            await run.until_round(max(node.head for node in run.living) + 1)
        crasher.point = ""
        target = max(node.head for node in run.living) + 1
        await run.until(lambda: all(n.worker.state_round >= target for n in run.living), "a quiet end")
        await run.stop()
        nodes = [node for node in again if node.snapshot is None]
        assert run.check(nodes) > len(points)
        for place, node in enumerate(nodes):
            assert check_twin(run, node, tmp_path / f"twin{place}") >= 3
            sessions = {event["session"] for event in node.events("joined")}
            assert len(sessions) == 1, "it came back under another session"

    tell(story(), 170)
