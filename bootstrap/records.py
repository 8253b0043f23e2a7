"""What may stand in the DHT: one signed record per peer and run, and a bounded index of who is in a run.

Every record is a sub-key named by its owner's peer id under a key that follows from its own body, signed by the owner
together with that key and its expiry. So nobody can store for another peer, under another key, for longer, or unsigned.
Nothing is unpickled: the value is a fixed frame around JSON, and JSON is checked field by field in the constructor.

    value = length of public key (2 bytes) | public key | signature (256) | JSON body
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sparseloco.bootstrap.addresses import LONGEST_ADDRESS
from sparseloco.bootstrap.identity import LONGEST_PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, verify_signature
from sparseloco.bootstrap.peer_ids import is_peer_id

LONGEST_LIFETIME_SECONDS = 600.0  # a record's owner has 600 s to come back; a dead peer is gone as fast
CLOCK_SLACK_SECONDS = 30.0  # of the storing peers' clocks
LONGEST_VALUE_BYTES = 4096  # 299 of key, 256 of signature, 8 addresses of 200 characters
LONGEST_ADDRESSES = 8
INDEX_SLOTS = 16
# A slot comes back from the DHT as one message, and those stop at 4 MiB. 256 index entries of 0.8 kB are 0.2 MB; 16
# slots hold 4096 peers, the largest group a run file allows.
OWNERS_PER_SLOT = 256
RECORDS_HELD = 65_536  # checked records remembered here; bounds what strangers' runs can make this node hold

PEER, INDEX = "peer", "index"
_DOMAIN = b"sparseloco DHT record 1\0"


class RecordError(ValueError):
    """A record that breaks a rule; the message names the rule."""


@dataclass(frozen=True)
class PeerRecord:
    """What a peer says of itself. `run_id` and `corpus_digest` are hex; `expires` is unix time, set on publishing."""

    peer_id: str
    run_id: str
    addresses: tuple[str, ...] = ()
    session: str = ""
    head_round: int = -1
    corpus_digest: str = ""
    version: str = ""
    role: str = "node"
    expires: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "addresses", tuple(_list_of_text(self.addresses, LONGEST_ADDRESSES, LONGEST_ADDRESS)))
        if not isinstance(self.peer_id, str) or not is_peer_id(self.peer_id):
            raise RecordError("peer_id is no peer id")
        _hex(self.run_id, "run_id", (64,))
        _hex(self.session, "session", (0, 32))
        _hex(self.corpus_digest, "corpus_digest", (0, 64))
        if type(self.head_round) is not int or not -1 <= self.head_round < 2**40:
            raise RecordError("head_round is no round")
        for name in ("version", "role"):
            _list_of_text([getattr(self, name)], 1, 64)
        if not isinstance(self.expires, int | float) or not math.isfinite(self.expires):
            raise RecordError("expires is no time")


@dataclass(frozen=True)
class SignedRecord:
    """A record as it stands in the DHT: `key` is what the DHT hashes, `body` the JSON that was signed."""

    kind: str
    peer_id: str
    run_id: str
    expires: float
    body: dict[str, Any]

    @property
    def key(self) -> bytes:
        return record_key(self.kind, self.run_id, self.peer_id)

    def seal(self, identity: Identity) -> bytes:
        """The signed value; RecordError if it is too long."""
        body = json.dumps(
            {**self.body, "kind": self.kind, "run_id": self.run_id}, sort_keys=True, separators=(",", ":")
        ).encode()
        signature = identity.sign(_signed_bytes(key_id(self.key), identity.peer_id, self.expires, body))
        value = struct.pack("!H", len(identity.public_key)) + identity.public_key + signature + body
        if len(value) > LONGEST_VALUE_BYTES:
            raise RecordError(
                f"a record of {len(value)} bytes; at most {LONGEST_VALUE_BYTES}: announce fewer addresses"
            )
        return value


def record_key(kind: str, run_id: str, peer_id: str) -> bytes:
    """The DHT key of a peer's record, or of its slot of the index."""
    if kind == PEER:
        return f"sparseloco/1/peer/{run_id}/{peer_id}".encode()
    return index_key(run_id, hashlib.sha256(peer_id.encode()).digest()[0] % INDEX_SLOTS)


def index_key(run_id: str, slot: int) -> bytes:
    return f"sparseloco/1/index/{run_id}/{slot}".encode()


def key_id(key: bytes) -> bytes:
    """The 20 bytes that hivemind's DHT makes of a key of bytes."""
    return hashlib.sha1(key, usedforsecurity=False).digest()


def open_record(key: bytes, owner: str, value: bytes, expires: float) -> SignedRecord:
    """Check one record against its key's 20 bytes; RecordError naming the broken rule."""
    if len(value) > LONGEST_VALUE_BYTES:
        raise RecordError("longer than a record may be")
    if len(value) < 2:
        raise RecordError("not signed")
    (key_bytes,) = struct.unpack_from("!H", value)
    body_at = 2 + key_bytes + SIGNATURE_BYTES
    if key_bytes > LONGEST_PUBLIC_KEY_BYTES or len(value) < body_at:
        raise RecordError("not signed")
    public_key, signature, body = value[2 : 2 + key_bytes], value[2 + key_bytes : body_at], value[body_at:]
    try:
        fields = json.loads(body)
        kind, run_id = fields.pop("kind"), fields.pop("run_id")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise RecordError("the body is no JSON of a record") from None
    if kind not in (PEER, INDEX):
        raise RecordError("of unknown kind")
    _hex(run_id, "run_id", (64,))
    if key_id(record_key(kind, run_id, owner)) != key:
        raise RecordError("under a key that is not its own")
    if not verify_signature(owner, public_key, _signed_bytes(key, owner, expires, body), signature):
        raise RecordError("not signed by the owner named in the sub-key")
    record = SignedRecord(kind, owner, run_id, expires, fields)
    if kind == PEER:
        peer_record(record)
    elif fields:
        raise RecordError("an index entry holds nothing")
    return record


def peer_record(record: SignedRecord) -> PeerRecord:
    """The peer's own words of a checked record; RecordError if a field is missing, unknown or wrong."""
    try:
        return PeerRecord(peer_id=record.peer_id, run_id=record.run_id, expires=record.expires, **record.body)
    except TypeError:
        raise RecordError("unknown or wrong fields") from None


def sealed(record: PeerRecord, expires: float) -> tuple[SignedRecord, SignedRecord]:
    """The two records that announce a peer: its own, and its entry in the index."""
    body = asdict(record)
    for name in ("peer_id", "run_id", "expires"):
        del body[name]
    own = SignedRecord(PEER, record.peer_id, record.run_id, expires, body)
    return own, SignedRecord(INDEX, record.peer_id, record.run_id, expires, {})


class RecordRules:
    """The check that runs on every record which another peer stores here or finds for us.

    It remembers what it accepted: a record is checked once, and the number of owners per key and of all records is
    bounded whatever is offered.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._accepted: OrderedDict[bytes, float] = OrderedDict()
        self._owners: dict[bytes, dict[str, float]] = {}
        self._next_sweep = 0.0

    def check(self, key: bytes, owner: str, value: bytes, expires: float) -> str | None:
        """None if the record may stay, else the rule it breaks."""
        now = self._clock()
        if not (math.isfinite(expires) and expires <= now + LONGEST_LIFETIME_SECONDS + CLOCK_SLACK_SECONDS):
            return "it would stay too long"
        mark = hashlib.sha256(struct.pack("!d", expires) + key + owner.encode() + value).digest()
        if mark in self._accepted:
            return None
        if expires <= now - CLOCK_SLACK_SECONDS:
            return "expired"
        self._sweep(now)
        owners = self._owners.get(key, {})
        if owner not in owners and len(owners) >= OWNERS_PER_SLOT:
            return "this slot of the index is full"
        if len(self._accepted) >= RECORDS_HELD:
            return "this node holds as many records as it may"
        try:
            open_record(key, owner, value, expires)
        except RecordError as error:
            return str(error)
        self._accepted[mark] = expires
        self._owners.setdefault(key, {})[owner] = expires
        return None

    def _sweep(self, now: float) -> None:
        """Forget what has expired, at most once in ten seconds: the sweep is linear."""
        if now < self._next_sweep:
            return
        self._next_sweep = now + 10.0
        for mark in [mark for mark, expires in self._accepted.items() if expires <= now]:
            del self._accepted[mark]
        for key in list(self._owners):
            live = {owner: expires for owner, expires in self._owners[key].items() if expires > now}
            if live:
                self._owners[key] = live
            else:
                del self._owners[key]


def _signed_bytes(key: bytes, owner: str, expires: float, body: bytes) -> bytes:
    return _DOMAIN + key + struct.pack("!d", expires) + owner.encode() + b"\0" + body


def _hex(text: object, name: str, lengths: tuple[int, ...]) -> None:
    if not isinstance(text, str) or len(text) not in lengths or set(text) - set("0123456789abcdef"):
        raise RecordError(f"{name} is not {' or '.join(map(str, lengths))} lower-case hex digits")


def _list_of_text(items: object, longest: int, longest_text: int) -> list[str]:
    if not isinstance(items, list | tuple) or len(items) > longest:
        raise RecordError(f"a list of more than {longest}, or no list")
    for item in items:
        if not isinstance(item, str) or len(item) > longest_text or not item.isprintable():
            raise RecordError(f"a text of more than {longest_text} characters, or none that can be printed")
    return list(items)


def msgpack_text(raw: bytes) -> str | None:
    """A msgpack str of 32 to 255 bytes, the form in which hivemind's DHT writes a peer id as sub-key."""
    if len(raw) < 2 or raw[0] != 0xD9 or raw[1] != len(raw) - 2 or not raw[2:].isascii():
        return None
    return raw[2:].decode()


def msgpack_bytes(raw: bytes) -> bytes | None:
    """A msgpack bin below 64 KiB, the form in which hivemind's DHT writes a value of bytes."""
    if len(raw) >= 2 and raw[0] == 0xC4 and raw[1] == len(raw) - 2:
        return raw[2:]
    if len(raw) >= 3 and raw[0] == 0xC5 and int.from_bytes(raw[1:3], "big") == len(raw) - 3:
        return raw[3:]
    return None
