"""Checkpoints of the agreed state, and the node's own state of a round: folders that appear whole or not at all.

    checkpoints/00000010/  theta.safetensors, checkpoint.json   the state after round 10, and what proves it
    own/00000012/          a.safetensors, optimizer.safetensors, own.json   fsynced before announcing round 12

The one rule: the JSON is written last and holds the digests of the rest, and a folder gets its name when all of it is
on the disk. So a checkpoint that loads is the one that was saved. The newest good one is used; a damaged one is
reported and skipped, and the previous one is kept for that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparseloco.bootstrap.errors import StateError
from sparseloco.compression.layout import TensorSpec
from sparseloco.node.durable import (
    fsync_file,
    publish_directory,
    remove_directory,
    remove_leftovers,
    round_name,
    rounds_in,
    write_atomic,
)
from sparseloco.node.state import PIECE_BYTES, digest_of_pieces, piece_digests, total_bytes
from sparseloco.node.tensor_file import read_tensors, write_tensors

THETA_FILE, CHECKPOINT_FILE = "theta.safetensors", "checkpoint.json"
A_FILE, OPTIMIZER_FILE, OWN_FILE = "a.safetensors", "optimizer.safetensors", "own.json"


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint says of itself: the state after `round_number` (-1: genesis) and its digests."""

    round_number: int
    state_digest: bytes
    piece_digests: tuple[bytes, ...]
    manifest_digest: bytes


@dataclass(frozen=True)
class Checkpoint(CheckpointInfo):
    """A checkpoint whose weights were checked against its digests when it was loaded."""

    theta: dict[str, torch.Tensor]


class CheckpointStore:
    """The folder `checkpoints/`, which keeps the newest `keep`."""

    def __init__(self, directory: Path, keep: int, *, tidy: bool = True) -> None:
        """`tidy`: remove what crashes left half-written; an audit looks without touching."""
        if keep < 2:
            raise ValueError("keep at least 2 checkpoints: the previous one is the remedy for a damaged one")
        self.directory = directory
        self.keep = keep
        if tidy:
            remove_leftovers(directory)

    def rounds(self) -> list[int]:
        """Rounds that have a checkpoint, ascending; whether each is good shows when it is loaded."""
        return rounds_in(self.directory)

    def save(self, round_number: int, theta: Mapping[str, torch.Tensor], manifest_digest: bytes) -> bytes:
        """Publish the state after a round, drop what is beyond `keep`, and return the state digest."""
        pieces = piece_digests(theta)
        digest = digest_of_pieces(total_bytes(theta), pieces)
        record = {
            "round": round_number,
            "state_digest": digest.hex(),
            "piece_digests": [piece.hex() for piece in pieces],
            "manifest_digest": manifest_digest.hex(),
        }
        with publish_directory(self.directory / round_name(round_number)) as folder:
            _write_tensors(folder / THETA_FILE, theta)
            write_atomic(folder / CHECKPOINT_FILE, _json(record))
        for old in self.rounds()[: -self.keep]:
            remove_directory(self.directory / round_name(old))
        return digest

    def remove_after(self, round_number: int) -> None:
        """Remove the checkpoints of later rounds: those of a branch that lost."""
        _remove_after(self.directory, round_number)

    def info(self, round_number: int) -> CheckpointInfo:
        """What a checkpoint says of itself, without reading its weights; StateError if it is missing or damaged."""
        path = self.directory / round_name(round_number) / CHECKPOINT_FILE
        record = _read_json(path)
        try:
            state, manifest = bytes.fromhex(record["state_digest"]), bytes.fromhex(record["manifest_digest"])
            pieces = tuple(bytes.fromhex(piece) for piece in record["piece_digests"])
        except (KeyError, TypeError, ValueError):
            raise StateError(f"{path}: is not a checkpoint's record; it is damaged") from None
        if record.get("round") != round_number:
            raise StateError(f"{path}: is not the record of round {round_number}; it is damaged")
        return CheckpointInfo(round_number, state, pieces, manifest)

    def load(self, round_number: int, specs: Sequence[TensorSpec]) -> Checkpoint:
        """One checkpoint, checked; StateError says what is wrong with it."""
        info = self.info(round_number)
        path = self.directory / round_name(round_number) / THETA_FILE
        theta = read_tensors(path, {spec.name: spec.shape for spec in specs})
        pieces = piece_digests(theta)
        digest = digest_of_pieces(total_bytes(theta), pieces)
        if (digest, tuple(pieces)) != (info.state_digest, info.piece_digests):
            raise StateError(f"{path}: the weights do not match the digest saved with them; the checkpoint is damaged")
        return Checkpoint(round_number, digest, info.piece_digests, info.manifest_digest, theta)

    def read_piece(self, round_number: int, index: int, offset: int = 0, count: int = PIECE_BYTES) -> bytes:
        """One 4 MiB piece of the canonical bytes, or `count` bytes of it from `offset` on, straight from the file.

        Unchecked: the receiver checks it.

        safetensors stores tensors of one type in the order of their names, so its data are the canonical bytes.
        """
        path = self.directory / round_name(round_number) / THETA_FILE
        try:
            with path.open("rb") as file:
                header_bytes = int.from_bytes(file.read(8), "little")
                file.seek(8 + header_bytes + index * PIECE_BYTES + offset)
                piece = file.read(min(count, PIECE_BYTES - offset))
        except OSError as error:
            raise StateError(f"{path}: cannot be read ({error.strerror})") from error
        if index < 0 or not piece:
            raise IndexError(f"{path}: there is no piece {index}")
        return piece

    def load_newest(self, specs: Sequence[TensorSpec]) -> tuple[Checkpoint | None, list[StateError]]:
        """The newest good checkpoint (None: there is none) and what was wrong with those newer than it."""
        damaged: list[StateError] = []
        for round_number in reversed(self.rounds()):
            try:
                return self.load(round_number, specs), damaged
            except StateError as error:
                damaged.append(error)
        return None, damaged


@dataclass(frozen=True)
class OwnState:
    """What a node had ready when it announced a round: the buffer a_t, AdamW's state, and the driver's record."""

    round_number: int
    a: dict[str, torch.Tensor]
    optimizer: dict[str, torch.Tensor]
    record: dict[str, Any]


class OwnStore:
    """The folder `own/`, which keeps the newest `keep` rounds."""

    def __init__(self, directory: Path, keep: int, *, tidy: bool = True) -> None:
        if keep < 1:
            raise ValueError("keep at least the newest round")
        self.directory = directory
        self.keep = keep
        if tidy:
            remove_leftovers(directory)

    def rounds(self) -> list[int]:
        return rounds_in(self.directory)

    def remove_after(self, round_number: int) -> None:
        """Remove the states of later rounds."""
        _remove_after(self.directory, round_number)

    def save(
        self,
        round_number: int,
        a: Mapping[str, torch.Tensor],
        optimizer: Mapping[str, torch.Tensor],
        record: Mapping[str, Any],
    ) -> None:
        """Publish a round's state durably; only then may the round be announced. `record` is JSON-able."""
        with publish_directory(self.directory / round_name(round_number)) as folder:
            checksums = {A_FILE: _write_tensors(folder / A_FILE, a)}
            checksums[OPTIMIZER_FILE] = _write_tensors(folder / OPTIMIZER_FILE, optimizer)
            own = {"round": round_number, "record": dict(record), "sha256": checksums}
            write_atomic(folder / OWN_FILE, _json(own))
        for old in self.rounds()[: -self.keep]:
            remove_directory(self.directory / round_name(old))

    def load(self, round_number: int) -> OwnState:
        """A round's state, checked; StateError if it is missing or damaged."""
        folder = self.directory / round_name(round_number)
        own = _read_json(folder / OWN_FILE)
        tensors = {}
        for name in (A_FILE, OPTIMIZER_FILE):
            if not isinstance(own.get("sha256"), dict) or own["sha256"].get(name) != _file_digest(folder / name):
                raise StateError(f"{folder / name}: does not match its checksum in {OWN_FILE}; it is damaged")
            tensors[name] = read_tensors(folder / name)
        if own.get("round") != round_number or not isinstance(own.get("record"), dict):
            raise StateError(f"{folder / OWN_FILE}: is not the record of round {round_number}; it is damaged")
        return OwnState(round_number, tensors[A_FILE], tensors[OPTIMIZER_FILE], own["record"])


def _remove_after(directory: Path, round_number: int) -> None:
    for later in reversed(rounds_in(directory)):
        if later > round_number:
            remove_directory(directory / round_name(later))


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write and fsync a tensor file; returns its SHA-256 in hex."""
    write_tensors(path, tensors)
    fsync_file(path)
    return _file_digest(path)


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise StateError(f"{path}: cannot be read ({error.strerror})") from error


def _json(record: Mapping[str, Any]) -> bytes:
    """A record with the digest of its own canonical form, so that a flipped byte in it shows."""
    return json.dumps({**record, "checksum": _checksum(record)}, indent=1, sort_keys=True).encode() + b"\n"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise StateError(f"{path}: cannot be read ({error})") from error
    if not isinstance(record, dict) or record.pop("checksum", None) != _checksum(record):
        raise StateError(f"{path}: does not match its own checksum; it is damaged")
    return record


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
