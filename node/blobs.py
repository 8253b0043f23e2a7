"""Blobs on disk: payloads and other big things, named by their SHA-256, under a byte budget.

The one rule: a name is its content's digest, so what is read back whole is checked, and damage makes a blob absent,
never wrong. Beyond the budget the oldest unpinned blobs go; what a round in progress or the log still needs is pinned
by the caller. Fits the transport's blob source (`size`, `read`). Safe to use from several threads.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from sparseloco.node.durable import OutOfDisk, fsync_directory, write_atomic

logger = logging.getLogger(__name__)
_NAME = re.compile("[0-9a-f]{64}")


class BlobStore:
    """The folder `blobs/`: one file a blob, its name 64 hex digits."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        self.directory = directory
        self.budget_bytes = budget_bytes
        self._lock = threading.RLock()
        self._writing = threading.Lock()  # one writer at a time, taken before the other
        self._pinned: set[bytes] = set()
        self._sizes: dict[bytes, int] = {}  # oldest first
        found = []
        for path in directory.iterdir():
            if _NAME.fullmatch(path.name):
                status = path.stat()
                found.append((status.st_mtime_ns, bytes.fromhex(path.name), status.st_size))
        for _, digest, size in sorted(found):
            self._sizes[digest] = size

    def put(self, data: bytes) -> bytes:
        """Store durably and return the digest; evicts the oldest unpinned blobs. OutOfDisk if pinned ones fill it."""
        digest = hashlib.sha256(data).digest()
        with self._writing:
            with self._lock:
                if digest in self._sizes:
                    return digest
                self._make_room(len(data))
            write_atomic(self._path(digest), data)  # readers go on meanwhile: a disk may take a second to be sure
            with self._lock:
                self._sizes[digest] = len(data)
        return digest

    def get(self, digest: bytes) -> bytes | None:
        """The whole blob, checked; None if it is not here. A damaged one is removed and counts as absent."""
        with self._lock:
            if digest not in self._sizes:
                return None
            data = self._path(digest).read_bytes()
            if hashlib.sha256(data).digest() == digest:
                return data
            logger.warning("%s is damaged and was removed; it can be fetched again", self._path(digest))
            self.remove(digest)
            return None

    def size(self, digest: bytes) -> int | None:
        """Length in bytes, or None if it is not here."""
        return self._sizes.get(digest)

    def read(self, digest: bytes, offset: int, count: int) -> bytes:
        """A stretch of a blob, unchecked: the receiver checks the whole. KeyError if it is not here."""
        with self._lock:
            if digest not in self._sizes:
                raise KeyError(digest.hex())
            with self._path(digest).open("rb") as file:
                file.seek(offset)
                return file.read(count)

    def pin(self, digests: Iterable[bytes]) -> None:
        """Keep these whatever the budget; pinning what is not here yet is allowed."""
        with self._lock:
            self._pinned.update(digests)

    def unpin(self, digests: Iterable[bytes]) -> None:
        with self._lock:
            self._pinned.difference_update(digests)

    def remove(self, digest: bytes) -> None:
        """Drop a blob if it is here, pinned or not."""
        with self._lock:
            if self._sizes.pop(digest, None) is not None:
                self._path(digest).unlink(missing_ok=True)
                fsync_directory(self.directory)

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def _path(self, digest: bytes) -> Path:
        if len(digest) != 32:
            raise ValueError(f"a digest has 32 bytes, not {len(digest)}")
        return self.directory / digest.hex()

    def _make_room(self, size: int) -> None:
        excess = self.used_bytes + size - self.budget_bytes
        if excess <= 0:
            return
        evictable = [digest for digest in self._sizes if digest not in self._pinned]
        needed_bytes = self.used_bytes - sum(self._sizes[digest] for digest in evictable)
        if needed_bytes + size > self.budget_bytes:
            raise OutOfDisk(
                f"{self.directory}: a blob of {size} bytes does not fit: the budget is {self.budget_bytes} bytes and "
                f"{needed_bytes} of them are still needed; raise [limits] stored_blob_bytes"
            )
        for digest in evictable:
            if excess <= 0:
                break
            excess -= self._sizes.pop(digest)
            self._path(digest).unlink(missing_ok=True)
