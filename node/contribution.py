"""A contribution's blob: a header that says whose it is and for which round, then the codec's payload.

The header is inside what the digest names, so nobody can show another's payload as his own, or an old one again. Its length
follows from the peer id, so a blob's size is known exactly before a byte of it is asked for.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = b"SLCPAY1\0"
_FIXED = struct.Struct("<8s32sq32sH")  # magic, run id, round, base state digest, length of the peer id


class ContributionError(Exception):
    """A blob that is no valid contribution; `rule` is the short name that Checks and `refused` events use."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


@dataclass(frozen=True)
class ContributionHeader:
    """What a blob claims: run id and base state digest (32 bytes each), round, peer id."""

    run: bytes
    round: int
    base: bytes
    peer: str

    def encode(self) -> bytes:
        peer = self.peer.encode("ascii")
        return _FIXED.pack(MAGIC, self.run, self.round, self.base, len(peer)) + peer


def contribution_bytes(peer: str, payload_bytes: int) -> int:
    """Exact size of the blob of a peer whose payload has so many bytes."""
    return _FIXED.size + len(peer) + payload_bytes


def pack_contribution(header: ContributionHeader, payload: bytes) -> bytes:
    return header.encode() + payload


def open_contribution(blob: bytes, expected: ContributionHeader, payload_bytes: int) -> bytes:
    """The payload inside, if the blob is exactly `expected`'s; ContributionError names the first rule broken."""
    size = contribution_bytes(expected.peer, payload_bytes)
    if len(blob) != size:
        raise ContributionError("payload-bytes", f"{len(blob)} bytes, this run's are {size}")
    magic, run, round_number, base, _ = _FIXED.unpack_from(blob)
    if magic != MAGIC:
        raise ContributionError("payload-header", "not a contribution of this version")
    if run != expected.run:
        raise ContributionError("payload-run", "made for another run")
    if round_number != expected.round:
        raise ContributionError("payload-round", f"made for round {round_number}, this is round {expected.round}")
    if base != expected.base:
        raise ContributionError("payload-base", "made on another base state")
    header = expected.encode()
    if blob[: len(header)] != header:
        raise ContributionError("payload-peer", "made by another peer than the one that announced it")
    return blob[len(header) :]
