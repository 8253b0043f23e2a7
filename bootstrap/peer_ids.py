"""libp2p's names for keys, computed here so that no check of a signature has to import hivemind.

A peer id is the base58 text of a multihash: for RSA keys, the SHA-256 of the public key's protobuf
(https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md). Only RSA-2048 keys sign here.
"""

from __future__ import annotations

import hashlib

BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
KEY_KINDS = {0: "RSA", 1: "Ed25519", 2: "Secp256k1", 3: "ECDSA"}
RSA = 0
_SHA256_MULTIHASH = b"\x12\x20"
_LONGEST_BASE58 = 128  # ids are 46 or 52 characters; decoding is quadratic


def base58_encode(data: bytes) -> str:
    """Bitcoin's base58: leading zero bytes become leading ones."""
    number = int.from_bytes(data, "big")
    digits = []
    while number:
        number, rest = divmod(number, 58)
        digits.append(BASE58[rest])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return BASE58[0] * zeros + "".join(reversed(digits))


def base58_decode(text: str) -> bytes:
    """The bytes of a base58 text; ValueError for other characters or an absurd length."""
    if len(text) > _LONGEST_BASE58:
        raise ValueError(f"{len(text)} characters are too many for base58 here")
    number = 0
    for char in text:
        digit = BASE58.find(char)
        if digit < 0:
            raise ValueError(f"{char!r} is not a base58 character")
        number = number * 58 + digit
    zeros = len(text) - len(text.lstrip(BASE58[0]))
    return b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8, "big")


def peer_id_of(public_key: bytes) -> str:
    """The peer id of a public key's protobuf bytes (RSA: always by hash)."""
    return base58_encode(_SHA256_MULTIHASH + hashlib.sha256(public_key).digest())


def is_peer_id(text: str) -> bool:
    """Whether `text` is a well-formed id: a SHA-256 multihash, or an inlined key of 36 bytes (Ed25519)."""
    try:
        raw = base58_decode(text)
    except ValueError:
        return False
    return (raw[:2] == _SHA256_MULTIHASH and len(raw) == 34) or (raw[:2] == b"\x00\x24" and len(raw) == 38)


def encode_key(kind: int, data: bytes) -> bytes:
    """libp2p's key protobuf: field 1 the kind (varint), field 2 the key's own bytes."""
    return bytes((0x08, kind, 0x12)) + _varint(len(data)) + data


def decode_key(raw: bytes) -> tuple[int, bytes]:
    """(kind, key bytes) of a libp2p key protobuf in its one canonical form; ValueError otherwise."""
    if len(raw) < 4 or raw[0] != 0x08 or raw[1] > 0x7F or raw[2] != 0x12:
        raise ValueError("not a libp2p key")
    length, position = 0, 3
    for shift in (0, 7, 14):
        if position >= len(raw):
            raise ValueError("a libp2p key that ends early")
        byte = raw[position]
        position += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    if len(raw) != position + length or encode_key(raw[1], raw[position:]) != raw:
        raise ValueError("a libp2p key of the wrong length")
    return raw[1], raw[position:]


def _varint(number: int) -> bytes:
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
