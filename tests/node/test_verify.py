"""`verify` on a real node's files: passes on them as they are, and names whichever file has a flipped bit."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from sparseloco.node.cli import run as run_command
from sparseloco.node.verify import audit_of

# What a node's state does not depend on: for people, for finding peers, or about the process that runs now.
NOT_STATE = {"events.jsonl", "node.json", "peers.json", "lock"}


@pytest.fixture
def state_dir(swarm, tell, tmp_path) -> Path:
    """A node's directory after some rounds, checkpoints among them, as a kill leaves it."""

    async def story():
        run = swarm(founders=3, run__min_peers=2, round__min_budget_seconds=2.0, round__checkpoint_every=2)
        nodes = await run.start(0, 1, 2)
        await run.until_round(4)
        await run.until(lambda: len(nodes[0].events("checkpoint")) >= 2, "two checkpoints", 20)
        await run.stop()
        return nodes[0].path

    return tell(story())


def state_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in NOT_STATE and path.stat().st_size)


def flipped(folder: Path, file: Path, at: int, bit: int) -> Path:
    """A copy of the directory with one bit of one file the other way."""
    copy = folder.with_name("flipped")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    target = copy / file.relative_to(folder)
    data = bytearray(target.read_bytes())
    data[at] ^= 1 << bit
    target.write_bytes(data)
    return copy


def matters(file: Path, data: bytes, at: int) -> bool:
    """A comment in the run file and the white space of JSON can change without anything changing."""
    if file.name == "run.toml":
        line = data[data.rfind(b"\n", 0, at) + 1 : at + 1]
        return not line.lstrip().startswith(b"#") and not data[at : at + 1].isspace()
    return file.suffix != ".json" or not data[at : at + 1].isspace()


def look_at_flips(folder: Path, positions: int) -> int:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    seen = 0
    for file in state_files(folder):
        name, data = str(file.relative_to(folder)), file.read_bytes()
        places = [0, len(data) - 1, *(rng.randrange(len(data)) for _ in range(positions))]
        for at in {place for place in places if matters(file, data, place)}:
            bit = rng.randrange(8)
            audit = audit_of(flipped(folder, file, at, bit))
            named = {problem.file for problem in audit.problems}
            assert name in named, f"bit {bit} of byte {at} of {name} of {len(data)}: {audit.problems}"
            seen += 1
    return seen


def test_clean_directory_passes_with_every_state_computed_again(state_dir, capsys) -> None:
    before = {path: path.stat().st_mtime_ns for path in state_dir.rglob("*")}
    assert run_command(["verify", "--state-dir", str(state_dir), "--json"], {}) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["problems"] == [] and found["rounds"] >= 5
    assert found["recomputed_rounds"] >= 4 and found["checked_files"] >= 15
    assert {path: path.stat().st_mtime_ns for path in state_dir.rglob("*")} == before, "an audit changes nothing"


def test_a_flipped_bit_in_any_file_is_found_and_the_file_is_named(state_dir) -> None:
    assert look_at_flips(state_dir, 0) >= 20


@pytest.mark.full
def test_flipped_bits_all_over_every_file_are_found(state_dir) -> None:
    assert look_at_flips(state_dir, 12) >= 200


def test_missing_payload_on_the_way_to_the_head_is_named_with_exit_code_5(state_dir, capsys) -> None:
    chain = sorted((state_dir / "chain").glob("0*.bin"))
    newest = max(int(path.name) for path in (state_dir / "checkpoints").glob("0*"))
    from sparseloco.protocol.events import decode_commit

    after = next(m for path in chain if (m := decode_commit(path.read_bytes()).manifest).round > newest and m.contributions)
    lost = state_dir / "blobs" / after.contributions[0].payload.hex()
    lost.unlink()
    assert run_command(["verify", "--state-dir", str(state_dir)], {}) == 5
    told = capsys.readouterr().out
    assert str(lost) in told and "is missing" in told and "new --state-dir" in told


def test_directory_in_use_and_no_directory_at_all_are_refused(state_dir, tmp_path, capsys) -> None:
    held = os.open(state_dir / "lock", os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert run_command(["verify", "--state-dir", str(state_dir)], {}) == 5
    assert "in use" in capsys.readouterr().err
    os.close(held)
    assert run_command(["verify", "--state-dir", str(tmp_path / "nothing")], {}) == 5
    assert "not a state directory" in capsys.readouterr().err
