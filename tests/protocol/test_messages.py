"""Bytes on the wire and in the vote log: golden, canonical, bounded; every refusal by the name of its rule."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from sparseloco.protocol.encoding import pack, sha256
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.events import (
    Announced,
    Committed,
    DoorClosed,
    Formed,
    Record,
    Said,
    Voted,
    decode_commit,
    decode_record,
    encode_commit,
    encode_record,
)
from sparseloco.protocol.manifest import Member
from sparseloco.protocol.messages import (
    MAX_HELD_IDS,
    NIL,
    PREVOTE,
    Announce,
    Check,
    Close,
    Commit,
    Form,
    Header,
    Heartbeat,
    Proposal,
    Signed,
    Vote,
    decode,
    encode,
    signed_bytes,
)

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())
LIMIT = 1_000_000


def every_record(frames: dict[str, Any]) -> dict[str, Record]:
    return {
        "record-announced": Announced(frames["announce"], 3000),
        "record-door-closed": DoorClosed(sha256(b"parent"), (sha256(b"a"), sha256(b"b"))),
        "record-voted": Voted(frames["prevote"]),
        "record-locked": Voted(frames["prevote"], frames["proposal"], (frames["prevote"],)),
        "record-formed": Formed(frames["form"]),
        "record-said": Said(frames["check"]),
    }


def refused(rule: str, call: Callable[[], object]) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        call()
    assert caught.value.rule == rule


# --- golden bytes and round trips -------------------------------------------------------------------------------------


def test_every_frame_has_its_golden_bytes_and_comes_back_equal(frames: dict[str, Any]) -> None:
    for name, frame in frames.items():
        assert encode(frame).hex() == GOLDEN[name], name
        assert decode(bytes.fromhex(GOLDEN[name]), LIMIT) == frame, name


def test_every_record_has_its_golden_bytes_and_comes_back_equal(frames: dict[str, Any]) -> None:
    for name, record in every_record(frames).items():
        assert encode_record(record).hex() == GOLDEN[name], name
        assert decode_record(bytes.fromhex(GOLDEN[name])) == record, name


def test_golden_file_holds_nothing_else(frames: dict[str, Any]) -> None:
    assert set(GOLDEN) == set(frames) | set(every_record(frames))


def test_commit_goes_to_the_chain_and_not_into_the_vote_log(frames: dict[str, Any]) -> None:
    commit = frames["commit"]
    assert decode_commit(encode_commit(commit.manifest, commit.certificate)) == commit
    with pytest.raises(ValueError, match="chain"):
        encode_record(Committed(commit))


# --- refusals of the decoder ------------------------------------------------------------------------------------------


def test_decoder_refuses_an_oversized_message_before_parsing_it() -> None:
    refused("message-bytes", lambda: decode(b"\xc1" * 101, 100))


@pytest.mark.parametrize(
    ("rule", "data"),
    [
        ("encoding", b""),
        ("encoding", b"\xc1"),
        ("encoding", pack([1, 20, []]) + b"\x00"),
        ("encoding", b"\x93\xd1\x00\x01\x00\x90"),  # 1 as a 16-bit integer
        ("encoding", b"\xdc\x00\x03\x01\x00\x90"),  # an array of 3 with a 16-bit length
        ("encoding", msgpack.packb({"a": 1})),
        ("encoding", msgpack.packb(msgpack.ExtType(1, b"x"))),
        ("encoding", b"\x91" * 2000 + b"\x90"),  # nested beyond what msgpack follows
        ("encoding", b"\x93\x01\x00\xa2\xff\xff"),  # text that is not UTF-8
        ("fields", pack([1, 0])),
        ("fields", pack(7)),
        ("version", pack([2, 0, []])),
        ("version", msgpack.packb([True, 0, []])),
        ("kind", pack([1, 99, []])),
        ("kind", msgpack.packb([1, False, []])),
        ("fields", pack([1, 0, [b"", b""]])),
        ("fields", pack([1, 0, ["text", b"", b""]])),
        ("fields", pack([1, 21, [7, []]])),
    ],
)
def test_decoder_refuses_what_is_not_a_canonical_frame(rule: str, data: bytes) -> None:
    refused(rule, lambda: decode(data, LIMIT))


def body_with(frame: Signed, change: Callable[[list[Any]], None]) -> bytes:
    """The frame's bytes with its body changed as a liar would."""
    value = msgpack.unpackb(frame.body, raw=False, use_list=True)
    change(value)
    return pack([1, 0, [pack(value), frame.public_key, frame.signature]])


@pytest.mark.parametrize(
    ("rule", "name", "path", "value"),
    [
        ("version", "vote", (0,), 2),
        ("kind", "vote", (1,), 20),
        ("fields", "vote", (2,), []),
        ("field-length", "vote", (2, 0), bytes(31)),
        ("field-range", "vote", (2, 1), -2),
        ("field-length", "vote", (2, 2), b""),
        ("peer-id", "vote", (2, 3), "../alice"),
        ("peer-id", "vote", (2, 3), "a" * 105),
        ("field-length", "vote", (2, 4), bytes(15)),
        ("field-range", "vote", (3, 0), 3),
        ("field-range", "vote", (3, 1), 2**20 + 1),
        ("field-length", "vote", (3, 2), bytes(8)),
        ("abstention", "announce", (3, 1), b""),
        ("field-range", "announce", (3, 3), -1),
        ("fields", "announce", (3,), [1, 2]),
        ("field-length", "check", (3, 1), b""),
        ("order", "check", (3, 2), [bytes(32), bytes(32)]),
        ("order", "check", (3, 3), [["bob", bytes(16)], ["alice", bytes(16)]]),
        ("order", "check", (3, 4), [["bob", bytes(16)], ["bob", bytes(16)]]),
        ("fields", "check", (3, 4), [["bob"]]),
        ("fields", "check", (3, 2), 7),
        ("field-range", "check", (3, 5), 2**41),
        ("order", "form", (3, 1), [["bob", bytes(16)], ["alice", bytes(16)]]),
        ("form", "form", (3, 1), [["bob", bytes(16)]]),
        ("field-range", "form", (3, 0), 2**41),
        ("fields", "close", (3, 1), [[b"", b""]]),
    ],
)
def test_decoder_refuses_a_body_that_breaks_a_rule(
    frames: dict[str, Any], rule: str, name: str, path: tuple[int, ...], value: Any
) -> None:
    def change(body: list[Any]) -> None:
        for step in path[:-1]:
            body = body[step]
        body[path[-1]] = value

    frame = frames["prevote" if name == "vote" else name]
    refused(rule, lambda: decode(body_with(frame, change), LIMIT))


def test_decoder_refuses_keys_signatures_and_held_ids_beyond_their_lengths(frames: dict[str, Any]) -> None:
    vote = frames["prevote"]
    refused("field-length", lambda: decode(pack([1, 0, [vote.body, bytes(601), b""]]), LIMIT))
    refused("field-length", lambda: decode(pack([1, 0, [vote.body, b"", bytes(513)]]), LIMIT))
    beat = frames["heartbeat"].values()
    refused("field-length", lambda: decode(pack([1, 20, [*beat[:6], bytes(7)]]), LIMIT))
    refused("field-length", lambda: decode(pack([1, 20, [*beat[:6], bytes(8 * MAX_HELD_IDS + 8)]]), LIMIT))
    refused("order", lambda: decode(pack([1, 20, [*beat[:6], bytes(16)]]), LIMIT))
    refused("field-range", lambda: decode(pack([1, 20, [*beat[:5], 2, b""]]), LIMIT))


# --- refusals of the constructors -------------------------------------------------------------------------------------


def test_message_refuses_inner_messages_of_another_kind_round_or_order(frames: dict[str, Any]) -> None:
    close, proposal = frames["close"].message, frames["proposal"].message
    first, second = close.announcements
    header = close.header
    refused("inner-kind", lambda: Close(header, 0, (frames["prevote"],), ()))
    refused("inner-kind", lambda: Close(header, 0, (), (first,)))
    refused("inner-kind", lambda: Proposal(header, 0, first, (), ()))
    refused("order", lambda: Close(header, 0, (second, first), ()))
    refused("order", lambda: Close(header, 0, (first, first), ()))
    later = dataclasses.replace(header, round=1)
    other_parent = dataclasses.replace(header, parent=bytes(32))
    other_run = dataclasses.replace(header, run=bytes(32))
    for elsewhere in (later, other_parent, other_run):
        refused("inner-round", lambda elsewhere=elsewhere: Close(elsewhere, 0, (first,), ()))
        refused("inner-round", lambda elsewhere=elsewhere: Proposal(elsewhere, 0, proposal.close, (), ()))


def test_decoder_refuses_a_proposal_inside_a_proposal_without_parsing_it(frames: dict[str, Any]) -> None:
    """Nested a hundred deep it would be hashed and parsed a hundred times over."""
    proposal = frames["proposal"]
    header = proposal.message.header.values()
    inner = proposal.parts
    for _ in range(100):
        inner = [pack([1, Proposal.KIND, header, [0, inner, [], []]]), b"", b""]
    refused("inner-kind", lambda: decode(pack([1, 0, inner]), LIMIT))
    refused("inner-kind", lambda: decode(pack([1, 21, [frames["commit"].manifest.body, [proposal.parts]]]), LIMIT))


def test_certificate_refuses_anything_but_votes_and_forms(frames: dict[str, Any]) -> None:
    refused("certificate", lambda: Commit(frames["commit"].manifest, (frames["check"],)))


def test_constructor_refuses_what_the_decoder_refuses(frames: dict[str, Any]) -> None:
    header = frames["prevote"].message.header
    refused("field-range", lambda: Vote(header, 0, 0, NIL))
    refused("field-range", lambda: Vote(header, PREVOTE, True, NIL))
    refused("abstention", lambda: Announce(header, bytes(32), b"", 5, 0, 0))
    refused("field-length", lambda: Check(header, 0, bytes(32), (b"short",), (), (), 0))
    refused("form", lambda: Form(header, 0, (Member("zoe", bytes(16)),), bytes(32)))
    refused("peer-id", lambda: Header(bytes(32), 0, bytes(32), "", bytes(16)))
    refused("field-length", lambda: Heartbeat(bytes(32), bytes(16), 0, bytes(32), 0, False, frozenset({b"x"})))
    many = frozenset(number.to_bytes(8, "big") for number in range(MAX_HELD_IDS + 1))
    refused("field-length", lambda: Heartbeat(bytes(32), bytes(16), 0, bytes(32), 0, False, many))


# --- signatures -------------------------------------------------------------------------------------------------------


def fake_verifier(peer: str, public_key: bytes, message: bytes, signature: bytes) -> bool:
    return public_key == b"key of " + peer.encode() and signature == sha256(b"signature" + peer.encode() + message)


def test_every_signed_frame_verifies_and_covers_a_domain_tag(frames: dict[str, Any]) -> None:
    for frame in frames.values():
        if isinstance(frame, Signed):
            frame.verify(fake_verifier)
            assert signed_bytes(frame.body) != frame.body


def test_verification_reaches_the_signatures_inside(frames: dict[str, Any]) -> None:
    forged = dataclasses.replace(frames["announce"], signature=bytes(32))
    refused("signature", lambda: forged.verify(fake_verifier))
    close = frames["close"]
    quoting = dataclasses.replace(close, message=dataclasses.replace(close.message, announcements=(forged,)))
    refused("signature", lambda: quoting.verify(fake_verifier))
    proposal = frames["proposal"]
    twice = dataclasses.replace(proposal, message=dataclasses.replace(proposal.message, close=quoting))
    refused("signature", lambda: twice.verify(fake_verifier))
    assert all(vote in frames["commit"].inner for vote in frames["commit"].certificate)


def test_digest_names_the_body_and_not_the_signature(frames: dict[str, Any]) -> None:
    vote = frames["prevote"]
    assert dataclasses.replace(vote, signature=b"other").digest == vote.digest


# --- anything at all --------------------------------------------------------------------------------------------------


def test_decoder_raises_only_remote_errors_on_random_and_mutated_bytes(frames: dict[str, Any]) -> None:
    seed = 20_240_607
    rng = random.Random(seed)
    originals = [encode(frame) for frame in frames.values()]
    for case in range(12_000):
        if case % 3 == 0:
            data = bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
        else:
            mutated = bytearray(rng.choice(originals))
            for _ in range(rng.randrange(1, 4)):
                mutated[rng.randrange(len(mutated))] = rng.randrange(256)
            data = bytes(mutated[: rng.randrange(len(mutated)) + 1] if case % 3 == 1 and case % 2 else mutated)
        try:
            frame = decode(data, LIMIT)
        except RemoteProtocolError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}: {data.hex()}") from error
        assert encode(frame) == data, f"seed {seed}, case {case}: {data.hex()} is not canonical"


def test_record_decoder_raises_only_remote_errors_on_mutated_bytes(frames: dict[str, Any]) -> None:
    seed = 7
    rng = random.Random(seed)
    originals = [encode_record(record) for record in every_record(frames).values()]
    for case in range(4000):
        mutated = bytearray(rng.choice(originals))
        mutated[rng.randrange(min(len(mutated), 60))] = rng.randrange(256)
        try:
            decode_record(bytes(mutated))
        except RemoteProtocolError:
            continue
        except Exception as error:
            raise AssertionError(f"seed {seed}, case {case}: {mutated.hex()}") from error
