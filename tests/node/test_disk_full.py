"""A state directory on a small disk that really fills up: the node says so, keeps back what it must, and loses nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from loopback import LoopNode, check_twin

from sparseloco.bootstrap.errors import StateError
from sparseloco.node.durable import OutOfDisk
from sparseloco.node.store import EventLog
from sparseloco.node.votes_log import VotesLog, read_votes

DISK_BYTES = 12 * 2**20


class SmallDisk:
    """A mounted tmpfs that a filler file fills to the last byte."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self) -> None:
        with self._filler.open("ab", buffering=0) as file:
            for size in (2**20, 4096):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[Path], SmallDisk]]:
    mounted: list[Path] = []

    def mount(path: Path) -> SmallDisk:
        path.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"no small disk: mount cannot run ({error})")
        if done.returncode:
            pytest.skip(f"no small disk: mounting a tmpfs needs rights that this user does not have ({done.stderr.strip()})")
        mounted.append(path)
        return SmallDisk(path)

    yield mount
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


# What the node is about to do when the last byte goes, and what it must say.
MOMENTS = {
    "checkpoint": ("disk_full", "checkpoint"),
    "own state": ("withheld", None),
    "payload": ("disk_full", "payload"),
    "vote": ("disk_full", "vote"),
    "chain": ("disk_full", "vote"),
}


def fill_before(node: LoopNode, moment: str, fill: Callable[[], None]) -> None:
    """Fill the disk the first time that `node`, which has seen a round, comes to the moment."""
    store = node.store
    owner, name = {
        "checkpoint": (store.checkpoints, "save"),
        "own state": (store.own, "save"),
        "payload": (node.driver.exchange, "keep"),
        "vote": (store.open_votes(), "append"),
        "chain": (store.chain, "write"),
    }[moment]
    inner = getattr(owner, name)

    def filling(*arguments: Any, **options: Any) -> Any:
        if node.head >= 1:
            fill()
        return inner(*arguments, **options)

    setattr(owner, name, filling)


FULL = [pytest.param(moment, marks=pytest.mark.full) for moment in ("checkpoint", "payload", "vote")]


@pytest.mark.parametrize("moment", ["own state", "chain", *FULL])
def test_a_node_on_a_full_disk_goes_on_when_there_is_space(moment, swarm, tell, small_disk, tmp_path):
    async def story():
        run = swarm(founders=3, run__min_peers=2, round__checkpoint_every=2)
        disk = small_disk(run.folder / "node0")
        state = {"full": False}

        def fill() -> None:
            if not state["full"]:
                disk.fill()
                state["full"] = True

        def arrange(node: LoopNode) -> None:
            if node.path == disk.path:
                fill_before(node, moment, fill)

        poor, *rich = await run.start(0, 1, 2, arrange=arrange)
        event, what = MOMENTS[moment]

        def said() -> bool:
            disk_full_lines = poor.driver.store.events._waiting.decode().splitlines()  # the file has no room for them
            told = poor.events(event) + [e for e in map(json.loads, disk_full_lines) if e["event"] == event]
            return any(what in (None, e.get("what")) for e in told)

        await run.until(lambda: state["full"] and said(), f"{event} {what}")
        at = max(node.head for node in rich)
        await run.until(lambda: min(node.head for node in rich) >= at + 2, "the others go on")
        assert poor.task is not None and not poor.task.done(), "the node ended for want of space"
        disk.free()
        target = max(node.head for node in rich) + 1
        await run.until(
            lambda: any(poor.peer in e["contributors"] for e in rich[0].events("committed") if e["round"] >= target),
            "it contributes again",
        )
        await run.until(lambda: poor.worker.state_round >= target, "it applied that round")
        await run.stop()
        run.check()
        for line in (poor.path / "events.jsonl").read_text().splitlines():
            json.loads(line)
        assert check_twin(run, poor, tmp_path / "twin") >= 3

    tell(story())


def test_a_vote_that_did_not_fit_was_not_cast_and_the_next_one_is_whole(small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk")
    log = VotesLog(disk.path / "votes.log")
    log.append(b"first" * 100)
    disk.fill()
    with pytest.raises(OutOfDisk, match="no space left"):
        log.append(b"second" * 2000)
    disk.free()
    log.append(b"third" * 2000)
    assert log.records == (b"first" * 100, b"third" * 2000)
    log.close()
    assert read_votes(disk.path / "votes.log") == [b"first" * 100, b"third" * 2000]


def test_a_vote_after_another_error_is_refused(tmp_path, monkeypatch):
    log = VotesLog(tmp_path / "votes.log")

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", broken)
        with pytest.raises(OSError, match="error"):
            log.append(b"first")
    with pytest.raises((ValueError, OSError, StateError)):
        log.append(b"second")


def test_events_wait_for_space(small_disk, tmp_path):
    disk = small_disk(tmp_path / "disk")
    log = EventLog(disk.path / "events.jsonl")
    log.write("joined", 0)
    disk.fill()
    for number in range(200):
        log.write("trained", number, loss=1.5)
    disk.free()
    log.close()
    lines = [json.loads(line) for line in (disk.path / "events.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [0, *range(200)]
