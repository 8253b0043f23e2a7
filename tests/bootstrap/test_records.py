"""What may stand in the DHT, checked without a network."""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import pytest

from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.records import (
    INDEX,
    INDEX_SLOTS,
    LONGEST_LIFETIME_SECONDS,
    OWNERS_PER_SLOT,
    PEER,
    PeerRecord,
    RecordError,
    RecordRules,
    SignedRecord,
    key_id,
    msgpack_bytes,
    msgpack_text,
    open_record,
    peer_record,
    record_key,
    sealed,
)

RUN = "ab" * 32
NOW = 1_700_000_000.0


def record_of(identity: Identity) -> PeerRecord:
    address = f"/ip4/1.2.3.4/tcp/5/p2p/{identity.peer_id}"
    return PeerRecord(identity.peer_id, RUN, (address,), session="cd" * 16, head_round=7, version="0.1.0")


def rules_at(now: float = NOW) -> RecordRules:
    return RecordRules(clock=lambda: now)


def offer(rules: RecordRules, signed: SignedRecord, value: bytes, owner: str | None = None) -> str | None:
    return rules.check(key_id(signed.key), owner or signed.peer_id, value, signed.expires)


def test_a_peers_own_records_are_accepted_and_read_back(identities: list[Identity]) -> None:
    me = identities[0]
    for signed in sealed(record_of(me), NOW + 60):
        value = signed.seal(me)
        assert offer(rules_at(), signed, value) is None
        opened = open_record(key_id(signed.key), me.peer_id, value, signed.expires)
        if opened.kind == PEER:
            assert peer_record(opened) == replace(record_of(me), expires=NOW + 60)


def test_nobody_stores_for_another_peer(identities: list[Identity]) -> None:
    me, other = identities[:2]
    theirs = sealed(record_of(other), NOW + 60)[0]
    forged = theirs.seal(me)  # under their key, with my signature
    assert "not signed by the owner" in str(offer(rules_at(), theirs, forged))
    mine = sealed(record_of(me), NOW + 60)[0]
    assert "key that is not its own" in str(rules_at().check(key_id(theirs.key), me.peer_id, mine.seal(me), NOW + 60))


def test_nothing_unsigned_or_changed_is_accepted(identities: list[Identity]) -> None:
    me = identities[0]
    signed = sealed(record_of(me), NOW + 60)[0]
    value = signed.seal(me)
    for wrong in (b"", b"\0", b"plain text", value[:-1], value + b" ", value.replace(b"7", b"8"), bytes(5000)):
        assert offer(rules_at(), signed, wrong) is not None
    assert rules_at().check(key_id(signed.key), me.peer_id, value, NOW + 61) is not None, "another expiry"
    assert msgpack_bytes(value) is None and msgpack_text(b"\xc0") is None, "not even the outer form"


def test_no_record_stays_longer_than_allowed(identities: list[Identity]) -> None:
    me = identities[0]
    for expires in (NOW + LONGEST_LIFETIME_SECONDS + 60, float("inf"), 1e300):
        signed = sealed(record_of(me), expires)[0]
        assert offer(rules_at(), signed, signed.seal(me)) == "it would stay too long"
    past = sealed(record_of(me), NOW - 60)[0]
    assert offer(rules_at(), past, past.seal(me)) == "expired"
    assert "too long" in str(rules_at().check(bytes(20), me.peer_id, b"", float("nan")))


def test_a_record_is_validated_field_by_field(identities: list[Identity]) -> None:
    me = identities[0]
    good = sealed(record_of(me), NOW + 60)[0]
    for change in ({"head_round": "7"}, {"head_round": True}, {"session": "xyz"}, {"addresses": "abc"}, {"new": 1},
                   {"addresses": ["x"] * 99}, {"addresses": [3]}, {"version": "\x1b[2J"}, {"corpus_digest": None}):  # fmt: skip
        signed = replace(good, body={**good.body, **change})
        assert offer(rules_at(), signed, signed.seal(me)) is not None, change
    with pytest.raises(RecordError):
        PeerRecord("nobody", RUN)
    entry = SignedRecord(INDEX, me.peer_id, RUN, NOW + 60, {"more": 1})
    assert offer(rules_at(), entry, entry.seal(me)) == "an index entry holds nothing"
    with pytest.raises(RecordError, match="fewer addresses"):
        replace(good, body={**good.body, "addresses": ["x" * 900] * 8}).seal(me)


def test_a_body_that_is_no_object_is_refused(identities: list[Identity]) -> None:
    me = identities[0]
    for body in (b"", b"[]", b"3", b"{", json.dumps({"kind": "peer"}).encode(), b"[" * 3000):
        value = struct.pack("!H", len(me.public_key)) + me.public_key + bytes(256) + body
        assert rules_at().check(bytes(20), me.peer_id, value, NOW + 60) is not None


def test_the_number_of_owners_of_a_slot_is_bounded(identities: list[Identity], monkeypatch: pytest.MonkeyPatch) -> None:
    me = identities[0]
    monkeypatch.setattr("sparseloco.bootstrap.records.open_record", lambda *arguments: None)  # keys are slow to make
    now = NOW
    rules = RecordRules(clock=lambda: now)
    for number in range(OWNERS_PER_SLOT):
        assert rules.check(b"slot", f"owner{number}", b"", NOW + 60) is None
    assert rules.check(b"slot", me.peer_id, b"", NOW + 60) == "this slot of the index is full"
    assert rules.check(b"slot", "owner3", b"", NOW + 61) is None, "who is in may refresh"
    now = NOW + 62
    assert rules.check(b"slot", me.peer_id, b"", NOW + 120) is None, "room again after they expired"


def test_index_slots_are_few_and_fixed(identities: list[Identity]) -> None:
    keys = {record_key(INDEX, RUN, identity.peer_id) for identity in identities}
    assert all(int(key.rsplit(b"/", 1)[1]) < INDEX_SLOTS for key in keys)


def test_hiveminds_forms_are_recognised(identities: list[Identity]) -> None:
    from hivemind.dht.routing import DHTID
    from hivemind.utils import MSGPackSerializer

    for size in (0, 10, 255, 256, 4096):
        assert msgpack_bytes(MSGPackSerializer.dumps(bytes(size))) == bytes(size)
    assert msgpack_text(MSGPackSerializer.dumps(identities[0].peer_id)) == identities[0].peer_id
    assert DHTID.generate(source=b"some key").to_bytes() == key_id(b"some key")
