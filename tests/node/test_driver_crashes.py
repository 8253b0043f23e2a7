"""Power cut at an instant: the files as they were then, another process, and nothing lost, contradicted or counted twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from loopback import LoopNode, Swarm, check_twin

from sparseloco.node import checkpoints
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
OTHERS = ["own state saved", "announcement sent", "vote sent", "chain written", "before apply", "after apply", "in checkpoint"]


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
            if self.point.endswith("sent"):
                frame = decode(data, 10**6)
                kinds = {"announcement sent": Announce, "vote sent": Vote}
                mine = isinstance(frame, Signed) and frame.message.header.sender == node.peer
                if mine and isinstance(frame.message, kinds[self.point]):  # type: ignore[union-attr]
                    self.at(node, self.point)

        node.driver._persist = persisting  # type: ignore[method-assign]
        node.store.own.save = saving  # type: ignore[method-assign]
        node.store.chain.write = writing  # type: ignore[method-assign]
        node.worker.apply = applying
        node.transport.before_send = sending

    def at(self, node: LoopNode, point: str) -> None:
        with self._choosing:
            if self.hit is None and point == self.point and node.head >= 1:
                self.hit = node
            chosen = node is self.hit
        if chosen:
            node.cut_power()  # the first time; from then on it is dead and nothing of it goes on


def watch_checkpoints(monkeypatch: pytest.MonkeyPatch, crasher: Crasher, run: Swarm) -> None:
    write = checkpoints.write_atomic

    def writing(path: Path, data: bytes) -> None:
        owner = next((node for node in run.living if node.path in path.parents), None)
        if owner is not None and path.name == checkpoints.CHECKPOINT_FILE:
            crasher.at(owner, "in checkpoint")
        write(path, data)

    monkeypatch.setattr(checkpoints, "write_atomic", writing)


# One point of each kind; the full run has them all.
SOME = ["before check", "after announced", "own state saved", "vote sent", "chain written", "before apply", "in checkpoint"]


@pytest.mark.parametrize(
    "points",
    [
        pytest.param(SOME, id="some"),
        pytest.param(BEFORE, id="before", marks=pytest.mark.full),
        pytest.param(AFTER, id="after", marks=pytest.mark.full),
        pytest.param(OTHERS, id="others", marks=pytest.mark.full),
    ],
)
def test_a_node_whose_power_is_cut_goes_on_from_its_files(points, swarm, tell, tmp_path, monkeypatch):
    async def story():
        run = swarm(founders=3, run__min_peers=2, round__checkpoint_every=2)
        crasher = Crasher()
        watch_checkpoints(monkeypatch, crasher, run)
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
