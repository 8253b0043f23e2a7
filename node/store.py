"""The state directory: everything a node keeps on disk, held by one process at a time.

    identity.key  lock  run.toml  node.json  session  events.jsonl  votes.log
    chain/00000012.bin   blobs/<digest>   checkpoints/00000010/   own/00000012/
    returned/00000011/   evidence/<peer id>.proof

The one rule: whatever a restart or another process reads was written beside, fsynced and renamed (`durable`); only
the votes log and events.jsonl are appended to. The store knows nothing of what chain files or votes mean.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sparseloco.bootstrap.errors import StateError
from sparseloco.node.blobs import BlobStore
from sparseloco.node.checkpoints import CheckpointStore, OwnStore
from sparseloco.node.durable import (
    disk_errors,
    fsync_directory,
    is_full,
    remove_leftovers,
    round_name,
    rounds_in,
    write_atomic,
)
from sparseloco.node.votes_log import VotesLog, start_votes_log_anew

BLOB_BUDGET_BYTES = 2 * 10**9  # the default of [limits] stored_blob_bytes
KEEP_CHECKPOINTS = 3  # the newest, the previous one if it is damaged, and one a joiner may be half-way through
KEEP_OWN = 4  # the announced round, the one before it, and two more for rounds lost to a short fork
CHAIN_SUFFIX = ".bin"
IDENTITY_FILE, RUN_FILE, VOTES_FILE, EVENTS_FILE = "identity.key", "run.toml", "votes.log", "events.jsonl"
SESSION_BYTES = 16


class StateDirInUse(StateError):
    """Another process holds the state directory; `path` is the directory and `pid` that process, if it said so."""

    def __init__(self, path: Path, pid: int | None) -> None:
        holder = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{path}: this state directory is in use by {holder}; use another with --state-dir")
        self.path = path
        self.pid = pid


class ChainStore:
    """The folder `chain/`: one opaque file a round."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        remove_leftovers(directory)

    def rounds(self) -> list[int]:
        return rounds_in(self.directory, CHAIN_SUFFIX)

    def write(self, round_number: int, data: bytes) -> None:
        """Store durably; replaces what was there (another branch's)."""
        write_atomic(self._path(round_number), data)

    def read(self, round_number: int) -> bytes:
        """StateError if it is not here; whether the bytes are good is the caller's to check."""
        try:
            return self._path(round_number).read_bytes()
        except OSError as error:
            raise StateError(f"{self._path(round_number)}: cannot be read ({error.strerror})") from error

    def truncate_after(self, round_number: int) -> None:
        """Remove the rounds after this one, newest first, so that a crash leaves a chain without gaps."""
        for later in reversed(self.rounds()):
            if later > round_number:
                self._path(later).unlink()
                fsync_directory(self.directory)

    def _path(self, round_number: int) -> Path:
        return self.directory / (round_name(round_number) + CHAIN_SUFFIX)


class EventLog:
    """`events.jsonl`: one JSON object a line, for people and checks; not fsynced, nothing depends on it.

    Lines that a full disk does not take wait in memory, so many bytes of them, and are written when there is space again.
    """

    WAITING_BYTES = 2**20

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._clock = clock
        with contextlib.suppress(FileNotFoundError), path.open("rb+") as file:
            if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) and file.read(1) != b"\n":
                file.write(b"\n")  # a crash tore the last line; do not glue the next one to it
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._lock = threading.Lock()

    def write(self, event: str, round_number: int, **fields: Any) -> None:
        """Add one line; `fields` are the event's own, JSON-able (docs/architecture.md lists them)."""
        line = {"time": self._clock(), "event": event, "round": round_number, **fields}
        with self._lock:
            if len(self._waiting) < self.WAITING_BYTES:
                self._waiting += json.dumps(line, separators=(",", ":")).encode() + b"\n"
            self._flush()

    def _flush(self) -> None:
        try:
            while self._waiting:
                self._waiting = self._waiting[self._file.write(self._waiting) :]
        except OSError as error:
            if not is_full(error):
                raise

    def close(self) -> None:
        with self._lock:
            self._flush()
            self._file.close()


class StateDir:
    """An open, locked state directory; close it, or leave the `with`, to let the next process in."""

    def __init__(self, path: Path, lock: int, blob_budget_bytes: int, keep_checkpoints: int) -> None:
        self.path = path
        self._lock = lock
        self.chain = ChainStore(_folder(path / "chain"))
        self.blobs = _blobs(path / "blobs", blob_budget_bytes)
        self.checkpoints = CheckpointStore(_folder(path / "checkpoints"), keep_checkpoints)
        self.own = OwnStore(_folder(path / "own"), KEEP_OWN)
        self.returned = OwnStore(_folder(path / "returned"), 1)  # the error feedback after a lost branch was left
        self.events = EventLog(path / EVENTS_FILE)
        self._votes: VotesLog | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        blob_budget_bytes: int = BLOB_BUDGET_BYTES,
        keep_checkpoints: int = KEEP_CHECKPOINTS,
    ) -> StateDir:
        """Create or open a state directory and lock it; StateDirInUse if another process has it."""
        try:
            with disk_errors(path):
                path.mkdir(parents=True, exist_ok=True)
                lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except (NotADirectoryError, FileExistsError, PermissionError) as error:
            raise StateError(f"{path}: cannot be a state directory ({error.strerror}); give another --state-dir") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode("ascii", errors="replace").strip()
            os.close(lock)
            raise StateDirInUse(path, int(holder) if holder.isdecimal() else None) from None
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            remove_leftovers(path)
            return cls(path, lock, blob_budget_bytes, keep_checkpoints)
        except BaseException:
            os.close(lock)
            raise

    def open_votes(self) -> VotesLog:
        """The votes log; StateError if it is damaged, and then only `abandon_votes` and a new session go on."""
        if self._votes is None:
            self._votes = VotesLog(self.path / VOTES_FILE)
        return self._votes

    def abandon_votes(self) -> None:
        """Put a damaged votes log aside and forget the session: this node is a new member from now on."""
        (self.path / "session").unlink(missing_ok=True)
        start_votes_log_anew(self.path / VOTES_FILE)

    def read_session(self) -> bytes | None:
        """The 16 bytes of the session, or None if there is none (or it is damaged, which comes to the same)."""
        try:
            return parse_session((self.path / "session").read_text("ascii"))
        except (FileNotFoundError, ValueError, StateError):
            return None

    def write_session(self, session: bytes) -> None:
        if len(session) != SESSION_BYTES:
            raise ValueError(f"a session has {SESSION_BYTES} bytes, not {len(session)}")
        write_atomic(self.path / "session", f"{session.hex()} {_session_checksum(session)}".encode())

    def write_node_info(self, info: Mapping[str, Any]) -> None:
        """`node.json`, for other processes: pid, peer id, session, role, run id, addresses."""
        write_atomic(self.path / "node.json", json.dumps(dict(info), indent=1).encode() + b"\n")

    def write_run_file(self, toml: str) -> None:
        write_atomic(self.path / RUN_FILE, toml.encode())

    def close(self) -> None:
        if self._votes is not None:
            self._votes.close()
        self.events.close()
        os.close(self._lock)  # which releases the lock

    def __enter__(self) -> StateDir:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def parse_session(text: str) -> bytes:
    """The session in its file's text, 32 hex digits and a checksum; StateError if it is damaged."""
    word, _, checksum = text.partition(" ")
    try:
        session = bytes.fromhex(word)
    except ValueError:
        session = b""
    if len(session) != SESSION_BYTES or word != session.hex() or checksum != _session_checksum(session):
        raise StateError("the session does not match its checksum; it is damaged")
    return session


def _session_checksum(session: bytes) -> str:
    return hashlib.sha256(session).hexdigest()[:16]


def _folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def _blobs(path: Path, budget_bytes: int) -> BlobStore:
    remove_leftovers(_folder(path))
    return BlobStore(path, budget_bytes)
