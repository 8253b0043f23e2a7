"""Canonical bytes: one value, one byte string, so that a digest names a message.

Values are msgpack arrays of integers, byte strings, text and arrays. `unpack` accepts nothing that `pack` would not have
produced, and nothing larger than the lengths it is told.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import Any

import msgpack

from sparseloco.protocol.errors import RemoteProtocolError

DIGEST_BYTES = 32
SESSION_BYTES = 16
# A base58 multihash of an RSA or Ed25519 key has 46 or 52 characters; twice that is generous.
PEER_ID_CHARACTERS = 104
# A run file's group never reaches this; it bounds arrays before the run's own limits are looked at.
ARRAY_ITEMS = 4096


def pack(value: Any) -> bytes:
    """Canonical bytes of nested lists of int, bytes and str."""
    return bytes(msgpack.packb(value, use_bin_type=True))


def unpack(data: bytes, *, what: str) -> Any:
    """The value whose canonical bytes are `data`; raises RemoteProtocolError("encoding") otherwise."""
    try:
        value = msgpack.unpackb(
            data, raw=False, use_list=True, max_array_len=ARRAY_ITEMS, max_map_len=0, max_ext_len=0, max_str_len=4096
        )
        canonical = pack(value)  # refuses what nests too deeply
    except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError("encoding", f"{what} does not parse: {type(error).__name__}") from error
    if canonical != data:
        raise RemoteProtocolError("encoding", f"{what} is not in canonical form")
    return value


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def fields(value: Any, count: int, *, what: str) -> list[Any]:
    """`value` as a list of exactly `count` items."""
    if not isinstance(value, list) or len(value) != count:
        raise RemoteProtocolError("fields", f"{what} must be an array of {count} items")
    return value


def check_bytes(value: Any, length: int | tuple[int, ...], what: str) -> None:
    lengths = (length,) if isinstance(length, int) else length
    if type(value) is not bytes or len(value) not in lengths:
        raise RemoteProtocolError("field-length", f"{what} must be {' or '.join(map(str, lengths))} bytes")


def check_integer(value: Any, low: int, high: int, what: str) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RemoteProtocolError("field-range", f"{what} must be an integer from {low} to {high}")


def check_peer_id(value: Any, what: str) -> None:
    if type(value) is not str or not 1 <= len(value) <= PEER_ID_CHARACTERS or not value.isascii() or not value.isalnum():
        raise RemoteProtocolError("peer-id", f"{what} is not a peer id")


def check_sorted_unique(values: list[Any] | tuple[Any, ...], what: str) -> None:
    if any(left >= right for left, right in itertools.pairwise(values)):
        raise RemoteProtocolError("order", f"{what} must be strictly ascending")
