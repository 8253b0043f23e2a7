"""A checkpoint's pieces from several donors: who dies, who lies, and what a joiner that is killed has to fetch again (nothing)."""

from __future__ import annotations

import asyncio
import errno
import hashlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import LoopbackNetwork

from sparseloco.bootstrap.transport import TransportError
from sparseloco.compression.layout import TensorSpec
from sparseloco.node import download, durable
from sparseloco.node.download import Download, Pieces, partial_downloads
from sparseloco.node.durable import OutOfDisk
from sparseloco.node.state import PIECE_BYTES, piece_digests, read_piece, state_digest, total_bytes

# Nine pieces, the last one short.
SPECS = (TensorSpec("a.large", (4096, 2048)), TensorSpec("b.small", (77,)))


class Source:
    """What a donor serves: every piece of one state, by digest."""

    def __init__(self, theta: dict[str, torch.Tensor]) -> None:
        self.pieces = {digest: read_piece(theta, index) for index, digest in enumerate(piece_digests(theta))}

    def size(self, digest: bytes) -> int | None:
        return len(self.pieces[digest]) if digest in self.pieces else None

    def read(self, digest: bytes, offset: int, length: int) -> bytes:
        return self.pieces[digest][offset : offset + length]


class Story:
    """One joiner (identity 0), donors beside it, and a state that they serve."""

    def __init__(self, tmp_path: Path, identities: list[Any], donors: int, seed: int = 3) -> None:
        self.network = LoopbackNetwork(seed)
        generator = torch.Generator().manual_seed(seed)
        self.theta = {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}
        self.digests = piece_digests(self.theta)
        self.downloads = tmp_path / "download"
        self.joiner = self.network.transport(identities[0], None)
        self.donors = [identity.peer_id for identity in identities[1 : 1 + donors]]
        for identity in identities[1 : 1 + donors]:
            self.network.transport(identity, None).serve_blobs(Source(self.theta))
        self.liars: list[str] = []
        self.progress: list[int] = []

    def download(self) -> Download:
        """A download as a process that has just started makes it."""
        pieces = Pieces(self.downloads, total_bytes(self.theta), self.digests)
        return Download(
            self.joiner, pieces, SPECS, found_out=self.liars.append, progress=lambda done, total: self.progress.append(done)
        )

    def pulled(self) -> Counter[str]:
        """Bytes that each donor gave."""
        counted: Counter[str] = Counter()
        for _, donor, _, size in self.network.log:
            counted[donor] += size
        return counted

    def whole(self, theta: dict[str, torch.Tensor]) -> bool:
        return state_digest(theta) == state_digest(self.theta)


@pytest.fixture
def story(tmp_path: Path, identities: list[Any]) -> Callable[[int], Story]:
    return lambda donors: Story(tmp_path, identities, donors)


def flip(kind: str, to: str, data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def dies_after(pieces: int) -> Callable[[str, str, bytes], bytes | None]:
    """Serves so many pieces, half of the next, and is heard no more."""
    served = 0

    def lie(kind: str, to: str, data: bytes) -> bytes | None:
        nonlocal served
        served += 1
        if served <= pieces:
            return data
        return data[: len(data) // 2] if served == pieces + 1 else None

    return lie


def test_pieces_come_from_all_donors_at_once(story: Callable[[int], Story]) -> None:
    told = story(3)
    assert told.whole(asyncio.run(told.download().run(told.donors)))
    assert set(told.pulled()) == set(told.donors), "nobody carries a joiner alone"
    assert sum(told.pulled().values()) == total_bytes(told.theta) == told.progress[-1]
    assert told.progress == sorted(told.progress)


def test_one_donor_is_asked_for_two_pieces_at_a_time(story: Callable[[int], Story], monkeypatch: pytest.MonkeyPatch) -> None:
    told, busy, most = story(1), 0, 0
    pull = told.joiner.pull

    async def counted(*args: Any, **named: Any) -> bytes:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        try:
            return await pull(*args, **named)
        finally:
            busy -= 1

    monkeypatch.setattr(told.joiner, "pull", counted)
    assert told.whole(asyncio.run(told.download().run(told.donors)))
    assert most == download.PIECES_PER_DONOR


def test_a_dead_donor_a_liar_and_a_killed_joiner_cost_no_byte_twice(story: Callable[[int], Story]) -> None:
    told = story(3)
    dying, lying, honest = told.donors
    told.network.lies = {dying: dies_after(1), lying: flip}

    async def killed_halfway() -> None:
        first = told.download()
        task = asyncio.create_task(first.run(told.donors))
        async with asyncio.timeout(30.0):
            while first.fetched < 4:
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(killed_halfway())
    assert told.liars == [lying], "found out at its first piece, and asked for no other"
    kept = {path.name: path.read_bytes() for path in (told.downloads / state_digest(told.theta).hex()).iterdir()}
    assert len(kept) >= 4
    before = len(told.network.log)
    again = told.download()
    assert told.whole(asyncio.run(again.run([honest])))
    assert again.fetched == len(told.digests) - len(kept), "what was on the disk is not fetched again"
    later = sum(size for *_, size in told.network.log[before:])
    assert later == total_bytes(told.theta) - sum(map(len, kept.values()))


def test_what_a_dying_donor_sent_of_a_piece_is_handed_to_the_next(story: Callable[[int], Story]) -> None:
    told = story(2)
    dying, honest = told.donors
    told.network.lies = {dying: dies_after(0)}
    assert told.whole(asyncio.run(told.download().run(told.donors)))
    assert told.pulled()[honest] == total_bytes(told.theta) - PIECE_BYTES // 2
    assert not told.liars


def test_a_false_beginning_is_not_the_fault_of_whoever_sends_the_rest(story: Callable[[int], Story]) -> None:
    told = story(2)
    lying, _honest = told.donors
    halve = dies_after(0)

    def false_half(kind: str, to: str, data: bytes) -> bytes | None:
        half = halve(kind, to, data)
        return half and flip(kind, to, half)

    told.network.lies = {lying: false_half}
    assert told.whole(asyncio.run(told.download().run(told.donors)))
    assert not told.liars, "the honest donor is not blamed for the beginning that another one sent"


def test_when_all_donors_are_gone_what_came_is_kept_for_the_next_try(story: Callable[[int], Story]) -> None:
    told = story(2)
    told.network.lies = {donor: dies_after(2) for donor in told.donors}
    with pytest.raises(TransportError, match="5 of 9 pieces are missing yet"):
        asyncio.run(told.download().run(told.donors))
    assert partial_downloads(told.downloads) == {state_digest(told.theta).hex()}
    told.network.lies = {}
    again = told.download()
    assert told.whole(asyncio.run(again.run(told.donors)))
    assert again.fetched == 5


@pytest.mark.parametrize("damage", ["flipped", "torn", "half-written"])
def test_a_damaged_piece_is_fetched_again_and_no_other(story: Callable[[int], Story], damage: str) -> None:
    told = story(1)
    asyncio.run(told.download().run(told.donors))
    folder = told.downloads / state_digest(told.theta).hex()
    victim = sorted(folder.iterdir())[3]
    whole = victim.read_bytes()
    if damage == "flipped":
        victim.write_bytes(flip("", "", whole))
    elif damage == "torn":
        victim.write_bytes(whole[:1000])
    else:
        victim.unlink()
        (folder / f"{victim.name}.tmp").write_bytes(whole[:1000])
    again = told.download()
    assert told.whole(asyncio.run(again.run(told.donors)))
    assert again.fetched == 1
    assert hashlib.sha256(victim.read_bytes()).digest() == told.digests[3]


def test_pieces_of_another_state_make_room(story: Callable[[int], Story]) -> None:
    told = story(1)
    other = told.downloads / ("ab" * 32)
    other.mkdir(parents=True)
    (other / "00000000").write_bytes(b"of a state that is old by now")
    asyncio.run(told.download().run(told.donors))
    assert not other.exists()


def test_a_full_disk_ends_the_download_and_what_fitted_is_not_lost(
    story: Callable[[int], Story], monkeypatch: pytest.MonkeyPatch
) -> None:
    told, room = story(2), 3
    write = durable.write_atomic

    def little_room(path: Path, data: bytes) -> None:
        nonlocal room
        if room == 0:
            raise OutOfDisk(errno.ENOSPC, "no space left", str(path))
        room -= 1
        write(path, data)

    monkeypatch.setattr(download, "write_atomic", little_room)
    with pytest.raises(OutOfDisk):
        asyncio.run(told.download().run(told.donors))
    monkeypatch.undo()
    again = told.download()
    assert told.whole(asyncio.run(again.run(told.donors)))
    assert again.fetched == len(told.digests) - 3
