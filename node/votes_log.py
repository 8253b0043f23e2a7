"""The votes log: what a node promised in a round, appended and fsynced before it is said to anyone.

A record is a header (length and CRC-32 of the length) and a body (CRC-32, then the bytes). Opening the log tells two
kinds of damage apart. A crash while appending leaves a torn *last* record: cut short, or with its last disk page still
zero; it was never said to anyone, and is dropped. Anything else that does not check is a flipped byte in what was said:
a StateError, since a node that forgets a vote and votes again can split the run. The node then needs a new session.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparseloco.bootstrap.errors import StateError
from sparseloco.node.durable import disk_errors, fsync_directory, is_full, write_atomic

_HEADER = struct.Struct("<II")  # body length, CRC-32 of those four bytes
_CHECKSUM = struct.Struct("<I")
RECORD_BYTES = 16 * 2**20  # far above any vote with its certificate
PAGE_BYTES = 4096


@dataclass(frozen=True)
class _Scan:
    records: list[bytes]
    good_bytes: int  # the length up to the end of the last whole record


class VotesLog:
    """An open log; `append` returns when the record is on the disk.

    OutOfDisk leaves the log as it was: nothing was promised. Any other OSError from `append` must end the process.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the log; StateError if a record that is not the torn last one is damaged."""
        self.path = path
        if not path.exists():
            write_atomic(path, b"")
        data = path.read_bytes()
        scan = _scan(data, path)
        self.records: tuple[bytes, ...] = tuple(scan.records)
        self.dropped_bytes = len(data) - scan.good_bytes
        self._lock = threading.Lock()
        self._file = path.open("rb+", buffering=0)
        if self.dropped_bytes:
            self._file.truncate(scan.good_bytes)
            os.fsync(self._file.fileno())
        self._file.seek(scan.good_bytes)

    def append(self, record: bytes) -> None:
        """Add a record durably."""
        data = memoryview(_framed(record))
        with self._lock, disk_errors(self.path):
            start = self._file.tell()
            try:
                while data:  # an unbuffered write may be short
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError as error:
                self._take_back(start, error)
                raise
            self.records += (record,)

    def _take_back(self, start: int, error: OSError) -> None:
        """After a full disk the log ends where it did; else it is closed, since nobody knows how much was written."""
        try:
            if is_full(error):
                self._file.truncate(start)
                self._file.seek(start)
                os.fsync(self._file.fileno())
                return
        except OSError:
            self._file.close()
            raise
        self._file.close()

    def replace(self, records: Sequence[bytes]) -> None:
        """Keep only these records, atomically: after a commit, older rounds' votes bind nobody any more."""
        with self._lock:
            write_atomic(self.path, b"".join(map(_framed, records)))
            self._file.close()
            self._file = self.path.open("rb+", buffering=0)
            self._file.seek(0, os.SEEK_END)
            self.records = tuple(records)

    def close(self) -> None:
        self._file.close()


def read_votes(path: Path) -> list[bytes]:
    """The records of a log, without opening it for writing; StateError if one that is not the torn last is damaged."""
    return _scan(path.read_bytes(), path).records


def start_votes_log_anew(path: Path) -> None:
    """Put a damaged log aside as NAME.damaged; the caller then takes a new session, as whoever lost its votes must."""
    path.replace(path.with_name(path.name + ".damaged"))
    fsync_directory(path.parent)


def _framed(record: bytes) -> bytes:
    if not 0 < len(record) <= RECORD_BYTES:
        raise ValueError(f"a votes log record has 1 to {RECORD_BYTES} bytes, not {len(record)}")
    length = len(record).to_bytes(4, "little")
    return length + _CHECKSUM.pack(zlib.crc32(length)) + _CHECKSUM.pack(zlib.crc32(record)) + record


def _scan(data: bytes, path: Path) -> _Scan:
    records: list[bytes] = []
    offset = 0
    while offset < len(data):
        header_end = offset + _HEADER.size
        if header_end > len(data):
            break  # torn inside the header
        length, length_checksum = _HEADER.unpack_from(data, offset)
        if zlib.crc32(data[offset : offset + 4]) != length_checksum:
            if not any(data[offset:]):
                break  # the file grew, its data never came
            raise _damaged(path, len(records), offset)
        body_start = header_end + _CHECKSUM.size
        end = body_start + length
        if end > len(data):
            break  # torn inside the body
        body = data[body_start:end]
        if zlib.crc32(body) != _CHECKSUM.unpack_from(data, header_end)[0]:
            last_page = max((end - 1) // PAGE_BYTES * PAGE_BYTES, header_end)
            if end == len(data) and not any(data[last_page:end]):
                break  # the last page never came
            raise _damaged(path, len(records), offset)
        records.append(body)
        offset = end
    return _Scan(records, offset)


def _damaged(path: Path, index: int, offset: int) -> StateError:
    return StateError(
        f"{path}: record {index} at byte {offset} does not match its checksum, so what this node voted is not known; "
        "it must not vote as before: it can go on as a new member (a new session), or with a fresh --state-dir"
    )
