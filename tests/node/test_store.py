"""The state directory: what survives a crash, what damage is noticed, what is forgotten on purpose."""

import errno
import hashlib
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from sparseloco.bootstrap.errors import StateError
from sparseloco.compression.layout import TensorSpec
from sparseloco.node import blobs, durable
from sparseloco.node.durable import OutOfDisk, publish_directory, write_atomic
from sparseloco.node.state import read_piece, state_digest
from sparseloco.node.store import StateDir, StateDirInUse
from sparseloco.node.votes_log import VotesLog

SPECS = [TensorSpec("a", (3, 5)), TensorSpec("b", (7,))]


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    with StateDir.open(tmp_path / "state") as opened:
        yield opened


def some_theta(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {spec.name: torch.randn(spec.shape, generator=generator) for spec in SPECS}


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


# ---- durable writes ----


def test_a_failed_write_leaves_the_old_content_and_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "file", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable.os, "fsync", full)
    with pytest.raises(OutOfDisk, match=r"no space left.*--state-dir"):
        write_atomic(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_other_disk_errors_pass_on_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(durable.os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output"):
        write_atomic(tmp_path / "file", b"new")


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="crash"), publish_directory(tmp_path / "folder") as folder:
        write_atomic(folder / "part", b"1")
        raise RuntimeError("crash")
    assert list(tmp_path.iterdir()) == []
    for content in (b"1", b"2"):
        with publish_directory(tmp_path / "folder") as folder:
            write_atomic(folder / "part", content)
    assert (tmp_path / "folder" / "part").read_bytes() == b"2"
    assert len(list(tmp_path.iterdir())) == 1


# ---- the directory ----


def test_a_second_process_is_told_who_has_the_directory(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from sparseloco.node.store import StateDir\n"
        "with StateDir.open(Path(sys.argv[1])):\n"
        "    print('open', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "state")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StateDirInUse) as refusal:
            StateDir.open(tmp_path / "state")
        assert refusal.value.pid == holder.pid
        assert refusal.value.exit_code == 5
        holder.kill()  # a dead process holds nothing
    StateDir.open(tmp_path / "state").close()


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StateError, match="--state-dir"):
            StateDir.open(path)


def test_the_session_is_kept_until_the_votes_are_lost(tmp_path: Path) -> None:
    with StateDir.open(tmp_path) as state:
        assert state.read_session() is None
        state.write_session(bytes(range(16)))
        state.open_votes().append(b"prevote")
        state.open_votes().append(b"precommit")
    with StateDir.open(tmp_path) as state:
        assert state.read_session() == bytes(range(16))
        assert state.open_votes().records == (b"prevote", b"precommit")
    flip_byte(tmp_path / "votes.log", 13)
    with StateDir.open(tmp_path) as state:
        with pytest.raises(StateError, match="new session"):
            state.open_votes()
        state.abandon_votes()
        assert state.read_session() is None
        assert state.open_votes().records == ()


def test_events_are_one_json_object_a_line_also_after_a_torn_one(tmp_path: Path) -> None:
    with StateDir.open(tmp_path) as state:
        state.events.write("committed", 3, state_digest="ab")
        line = json.loads((tmp_path / "events.jsonl").read_text())  # buffered by line: visible at once
        assert (line["event"], line["round"], line["state_digest"]) == ("committed", 3, "ab")
        assert line["time"] > 1e9
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1, "ev')
    with StateDir.open(tmp_path) as state:
        state.events.write("left", 4, why="test")
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["event"] == "left"
    assert len(lines) == 3


def test_the_chain_is_read_back_replaced_and_truncated(state: StateDir) -> None:
    for number in range(5):
        state.chain.write(number, b"manifest %d" % number)
    assert state.chain.rounds() == [0, 1, 2, 3, 4]
    state.chain.write(3, b"another branch")
    state.chain.truncate_after(3)
    assert state.chain.rounds() == [0, 1, 2, 3]
    assert state.chain.read(3) == b"another branch"
    with pytest.raises(StateError, match="cannot be read"):
        state.chain.read(4)


# ---- the votes log ----

RECORDS = [b"a", b"prevote" * 3, bytes(150), b"precommit with its certificate" * 6]


def a_log(path: Path) -> bytes:
    path.unlink(missing_ok=True)
    log = VotesLog(path)
    for record in RECORDS:
        log.append(record)
    log.close()
    return path.read_bytes()


def reopened(path: Path) -> tuple[bytes, ...]:
    log = VotesLog(path)
    log.close()
    return log.records


def test_a_log_cut_at_any_byte_keeps_every_whole_record_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "votes.log"
    whole = a_log(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        log = VotesLog(path)
        kept = log.records
        assert list(kept) == RECORDS[: len(kept)]
        assert len(kept) < len(RECORDS)
        log.append(b"next")
        log.close()
        assert reopened(path) == (*kept, b"next")


def test_no_flipped_bit_anywhere_loses_or_changes_a_vote_silently(tmp_path: Path) -> None:
    path = tmp_path / "votes.log"
    whole = a_log(path)
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(StateError, match="checksum"):
            VotesLog(path)
        assert path.read_bytes() == data  # the evidence is left as it was


def test_pages_that_never_came_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "votes.log"
    whole = a_log(path)
    path.write_bytes(whole + bytes(5000))
    assert reopened(path) == tuple(RECORDS)
    path.unlink()
    log = VotesLog(path)
    log.append(b"first")
    log.append(os.urandom(9000))
    log.close()
    data = path.read_bytes()
    path.write_bytes(data[:8192] + bytes(len(data) - 8192))
    assert reopened(path) == (b"first",)


def test_nothing_is_appended_after_a_write_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = VotesLog(tmp_path / "votes.log")
    log.append(b"first")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OutOfDisk):
            log.append(b"second")
    with pytest.raises(ValueError, match="closed"):
        log.append(b"third")
    assert log.records == (b"first",)


def test_old_votes_can_be_dropped(tmp_path: Path) -> None:
    path = tmp_path / "votes.log"
    a_log(path)
    log = VotesLog(path)
    log.replace(log.records[2:])
    log.append(b"next")
    log.close()
    assert reopened(path) == (*RECORDS[2:], b"next")


# ---- blobs ----


def test_blobs_are_named_by_their_digest_and_survive_a_restart(tmp_path: Path) -> None:
    with StateDir.open(tmp_path) as state:
        digest = state.blobs.put(b"payload")
        assert state.blobs.put(b"payload") == digest
    with StateDir.open(tmp_path) as state:
        assert state.blobs.get(digest) == b"payload"
        assert state.blobs.size(digest) == 7
        assert state.blobs.read(digest, 3, 100) == b"load"
        assert state.blobs.get(bytes(32)) is None
        assert state.blobs.size(bytes(32)) is None


def test_a_slow_disk_under_one_blob_does_not_hold_up_readers_of_others(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = state.blobs.put(b"kept")
    in_fsync, go_on = threading.Event(), threading.Event()

    def slow(path: Path, data: bytes) -> None:
        in_fsync.set()
        assert go_on.wait(20)
        write_atomic(path, data)

    monkeypatch.setattr(blobs, "write_atomic", slow)
    with ThreadPoolExecutor(3) as pool:
        writing = pool.submit(state.blobs.put, b"slow")
        try:
            assert in_fsync.wait(20)
            assert pool.submit(state.blobs.read, kept, 0, 4).result(20) == b"kept"
            assert pool.submit(state.blobs.get, kept).result(20) == b"kept"
            assert hashlib.sha256(b"slow").digest() not in state.blobs, "a blob is offered before it is on the disk"
        finally:
            go_on.set()
        assert state.blobs.get(writing.result(20)) == b"slow"


def test_a_damaged_blob_is_absent(tmp_path: Path) -> None:
    with StateDir.open(tmp_path) as state:
        digest = state.blobs.put(b"payload")
        flip_byte(tmp_path / "blobs" / digest.hex(), 2)
        assert state.blobs.get(digest) is None
        assert digest not in state.blobs
        state.blobs.put(b"payload")
        assert state.blobs.get(digest) == b"payload"


def test_the_budget_evicts_the_oldest_that_is_not_pinned(tmp_path: Path) -> None:
    with StateDir.open(tmp_path, blob_budget_bytes=30) as state:
        digests = [state.blobs.put(bytes([number]) * 10) for number in range(3)]
        state.blobs.pin([digests[0]])
        newest = state.blobs.put(b"n" * 10)
        assert [digest in state.blobs for digest in [*digests, newest]] == [True, False, True, True]
        assert state.blobs.used_bytes == 30
        state.blobs.pin([digests[2], newest])
        with pytest.raises(OutOfDisk, match="stored_blob_bytes"):
            state.blobs.put(b"x")
        assert len(state.blobs) == 3
        state.blobs.unpin(digests)
        state.blobs.put(b"x")
        assert digests[0] not in state.blobs
    assert len(list((tmp_path / "blobs").iterdir())) == 3


# ---- checkpoints and own state ----


def test_the_newest_good_checkpoint_is_loaded_and_a_damaged_one_reported(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    with StateDir.open(tmp_path) as state:
        for number in (-1, 4, 9, 14):
            digest = state.checkpoints.save(number, some_theta(number + 1), bytes([number + 1]) * 32)
            assert digest == state_digest(some_theta(number + 1))
        assert state.checkpoints.rounds() == [4, 9, 14]  # the oldest is beyond `keep`
        newest, damaged = state.checkpoints.load_newest(SPECS)
        assert newest is not None
        assert (newest.round_number, newest.manifest_digest, damaged) == (14, bytes([15]) * 32, [])
        assert newest.state_digest == state_digest(some_theta(15))

        path = tmp_path / "checkpoints" / "00000014" / "theta.safetensors"
        good = path.read_bytes()
        header_bytes = 8 + int.from_bytes(good[:8], "little")
        flip_byte(path, random.Random(seed).randrange(header_bytes, len(good)))
        newest, damaged = state.checkpoints.load_newest(SPECS)
        assert newest is not None
        assert newest.round_number == 9
        assert ["damaged" in str(error) for error in damaged] == [True]


def test_a_flip_anywhere_in_a_checkpoint_never_loads_another_state(state: StateDir) -> None:
    state.checkpoints.save(3, some_theta(3), bytes(32))
    folder = state.path / "checkpoints" / "00000003"
    for path in sorted(folder.iterdir()):
        good = path.read_bytes()
        for position in range(len(good)):
            flip_byte(path, position)
            newest, damaged = state.checkpoints.load_newest(SPECS)
            # A flip may fall on a space of the header or of the JSON: then nothing was lost.
            assert newest is None or newest.state_digest == state_digest(some_theta(3))
            assert (newest is None) == (len(damaged) == 1)
            path.write_bytes(good)
    assert state.checkpoints.load_newest(SPECS)[0] is not None


def test_a_half_written_checkpoint_is_swept_away(tmp_path: Path) -> None:
    with StateDir.open(tmp_path) as state:
        state.checkpoints.save(3, some_theta(3), bytes(32))
    (tmp_path / "checkpoints" / "00000008.partial").mkdir()
    (tmp_path / "blobs" / ("00" * 32 + ".partial")).write_bytes(b"half")
    with StateDir.open(tmp_path) as state:
        assert state.checkpoints.rounds() == [3]
        assert len(state.blobs) == 0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["00000003"]


def test_a_checkpoint_of_another_model_is_refused(state: StateDir) -> None:
    state.checkpoints.save(3, some_theta(3), bytes(32))
    newest, damaged = state.checkpoints.load_newest([TensorSpec("a", (5, 3)), SPECS[1]])
    assert newest is None
    assert "another run" in str(damaged[0])


def test_the_own_state_of_a_round_is_read_back_bit_for_bit(state: StateDir) -> None:
    a = some_theta(1)
    optimizer = {"adam_steps": torch.tensor(7), "exp_avg.a": torch.randn(3, 5)}
    for number in range(6):
        state.own.save(number, a, optimizer, {"global_step": 30 * number, "payload_digest": "ab"})
    assert state.own.rounds() == [2, 3, 4, 5]
    own = state.own.load(5)
    assert own.record == {"global_step": 150, "payload_digest": "ab"}
    assert state_digest(own.a) == state_digest(a)
    assert all(torch.equal(own.optimizer[name], tensor) for name, tensor in optimizer.items())


def test_damaged_own_state_is_an_error(state: StateDir) -> None:
    for name in ("a.safetensors", "optimizer.safetensors", "own.json"):
        state.own.save(5, some_theta(1), some_theta(2), {"global_step": 1})
        path = state.path / "own" / "00000005" / name
        flip_byte(path, path.stat().st_size // 2)
        with pytest.raises(StateError):
            state.own.load(5)
        path.unlink()
        with pytest.raises(StateError):
            state.own.load(5)


def killed_at(step: int, action: Callable[[], object]) -> bool:
    """Run `action` in a forked process that dies, as by SIGKILL, before its step-th fsync, rename or removal."""
    child = os.fork()
    if child == 0:
        steps = 0

        def counting(real: Callable[..., object]) -> Callable[..., object]:
            def call(*arguments: object, **options: object) -> object:
                nonlocal steps
                steps += 1
                if steps == step:
                    os._exit(9)
                return real(*arguments, **options)

            return call

        for name in ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir"):
            setattr(os, name, counting(getattr(os, name)))
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("second_round", [1, 2], ids=["the same round again", "the next round"])
def test_a_kill_at_any_instant_of_a_save_leaves_the_old_or_the_new_state(tmp_path: Path, second_round: int) -> None:
    seen = []
    step = 0
    alive = False
    while not alive:
        step += 1
        path = tmp_path / str(step)
        with StateDir.open(path) as state:
            state.checkpoints.save(1, some_theta(1), bytes(32))
            state.own.save(1, some_theta(1), {}, {"payload": "old"})

            def save_both(state: StateDir = state) -> None:
                state.checkpoints.save(second_round, some_theta(2), bytes(32))
                state.own.save(second_round, some_theta(2), {}, {"payload": "new"})

            alive = not killed_at(step, save_both)
        with StateDir.open(path) as state:
            newest, damaged = state.checkpoints.load_newest(SPECS)
            assert newest is not None
            assert damaged == []
            own = state.own.load(state.own.rounds()[-1])
            assert state_digest(own.a) == state_digest(some_theta(1 if own.record["payload"] == "old" else 2))
            seen.append((newest.state_digest == state_digest(some_theta(2)), own.record["payload"] == "new"))
    assert seen == sorted(seen)  # first neither, then the checkpoint, then both
    assert set(seen) == {(False, False), (True, False), (True, True)}
    assert step > 10


def test_a_checkpoint_serves_its_pieces_without_being_loaded(state: StateDir) -> None:
    theta = {"b": torch.randn(1200, 1100), "a": torch.randn(3), "c": torch.randn(9)}
    digest = state.checkpoints.save(7, theta, bytes(32))
    info = state.checkpoints.info(7)
    assert info.state_digest == digest
    assert len(info.piece_digests) == 2
    for index, piece_digest in enumerate(info.piece_digests):
        piece = state.checkpoints.read_piece(7, index)
        assert piece == read_piece(theta, index)
        assert hashlib.sha256(piece).digest() == piece_digest
        for offset, count in ((0, 10), (100, 65536), (len(piece) - 5, 65536)):
            assert state.checkpoints.read_piece(7, index, offset, count) == piece[offset : offset + count]
    with pytest.raises(IndexError):
        state.checkpoints.read_piece(7, 2)


def test_rounds_of_a_lost_branch_are_removed(state: StateDir) -> None:
    for number in (1, 2, 3):
        state.checkpoints.save(number, some_theta(number), bytes(32))
        state.own.save(number, some_theta(number), {}, {})
    state.checkpoints.remove_after(2)
    state.own.remove_after(1)
    assert state.checkpoints.rounds() == [1, 2]
    assert state.own.rounds() == [1]


def test_a_full_disk_is_an_os_error_in_the_tensor_file_too(tmp_path, monkeypatch):
    """safetensors wraps what the system says; a full disk must still be told from a fault of the program."""
    import errno

    from safetensors import SafetensorError
    from safetensors import torch as safetensors_torch

    from sparseloco.node.tensor_file import write_tensors

    def full(*arguments: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors_torch, "save_file", full)
    with pytest.raises(OSError) as caught:
        write_tensors(tmp_path / "x.safetensors", {})
    assert caught.value.errno == errno.ENOSPC
