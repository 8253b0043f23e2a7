"""Writes that survive a crash at any instant: beside, fsync, rename, fsync of the folder.

The one rule: a name in the state directory either is absent or holds what was meant in full. A full disk is a typed
error, `OutOfDisk`, since its remedy is the volunteer's; every other OSError passes on as it is, and the driver ends
the process on it rather than go on with a state it cannot trust.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sparseloco.bootstrap.errors import HardwareError

# What is written beside carries this suffix; left over from a crash, it is removed when the state is opened.
BESIDE = ".partial"
REPLACED = BESIDE + "-replaced"
GENESIS_NAME = "genesis"
# While the disk is full: how often it is tried again.
SPACE_SECONDS = 1.0

T = TypeVar("T")


class OutOfDisk(HardwareError):
    """The disk, or the user's quota on it, is full."""


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk into OutOfDisk that names the path, what is free and the remedy."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise OutOfDisk(
            f"{path}: no space left on the disk ({error.strerror}); free some, lower [limits] stored_blob_bytes, "
            "or put the state elsewhere with --state-dir"
        ) from error


async def once_there_is_space(write: Callable[[], T], say: Callable[[OutOfDisk], None], waiting: Callable[[], bool]) -> T:
    """The result of `write`, run on a thread and safe to repeat; tried again while the disk is full.

    `say` is told of the first failure. OutOfDisk passes on when `waiting()` is no longer true.
    """
    said = False
    while True:
        try:
            return await asyncio.to_thread(write)
        except OutOfDisk as error:
            if not waiting():
                raise
            if not said:
                say(error)
            said = True
        await asyncio.sleep(SPACE_SECONDS)


def fsync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: Path) -> None:
    """Make a file that somebody else wrote durable."""
    with disk_errors(path), path.open("rb+") as file:
        os.fsync(file.fileno())


def write_atomic(path: Path, data: bytes | memoryview, mode: int = 0o644) -> None:
    """Replace a file's content; after a crash it holds the old content or the new, never a part."""
    beside = path.with_name(path.name + BESIDE)
    with disk_errors(path):
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:  # noqa: PTH123
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        fsync_directory(path.parent)


@contextmanager
def publish_directory(path: Path) -> Iterator[Path]:
    """Build a folder beside and give it its name when the block ends well; an older one of that name is replaced.

    Files are written by the block; each must have been fsynced (`write_atomic` does, else `fsync_file`).
    """
    beside = path.with_name(path.name + BESIDE)
    with disk_errors(path):
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        try:
            yield beside
            fsync_directory(beside)
            replaced = path.with_name(path.name + REPLACED)
            if path.exists():  # a folder cannot be renamed over a full one; `remove_leftovers` undoes a half swap
                path.rename(replaced)
            beside.rename(path)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        fsync_directory(path.parent)
        shutil.rmtree(replaced, ignore_errors=True)


def remove_directory(path: Path) -> None:
    """Remove a folder so that a crash in between leaves no half of it under its name."""
    doomed = path.with_name(path.name + BESIDE + "-removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(directory: Path) -> None:
    """Remove what crashes left half-written in a folder, and put back what was about to be replaced."""
    for path in directory.glob(f"*{REPLACED}"):
        published = path.with_name(path.name.removesuffix(REPLACED))
        if not published.exists():
            path.rename(published)
    for path in directory.glob(f"*{BESIDE}*"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def round_name(round_number: int) -> str:
    """The name of a round's file or folder: 8 digits, which sort; the genesis (round -1) has its own."""
    if round_number < -1:
        raise ValueError(f"there is no round {round_number}")
    return GENESIS_NAME if round_number == -1 else f"{round_number:08d}"


def rounds_in(directory: Path, suffix: str = "") -> list[int]:
    """The rounds that have a file or folder here, ascending; other names are ignored."""
    found = []
    for path in directory.iterdir():
        stem = path.name.removesuffix(suffix)
        if suffix and stem == path.name:
            continue
        if stem == GENESIS_NAME:
            found.append(-1)
        elif len(stem) >= 8 and stem.isdecimal():
            found.append(int(stem))
    return sorted(found)
