"""What peers say to each other in a round, and the bytes of it.

Signed messages travel as `Signed`: body, public key, signature; the digest that names one covers the body only. Every class
validates itself at construction, so the sender and the receiver meet the same rules, and a decoder can only produce what a
constructor accepts. Heartbeats and Commits are not signed: the first are authenticated by the connection, the second prove
themselves by the votes inside.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, ClassVar

from sparseloco.protocol.encoding import (
    ARRAY_ITEMS,
    DIGEST_BYTES,
    SESSION_BYTES,
    check_bytes,
    check_integer,
    check_peer_id,
    check_sorted_unique,
    fields,
    pack,
    sha256,
    unpack,
)
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.manifest import GENESIS_ROUND, MAX_COUNT, MAX_MILLISECONDS, MAX_ROUND, Manifest, Member

PROTOCOL_VERSION = 1
MAX_ATTEMPT = 2**20
MAX_INCARNATION = 2**40
# Ids in a heartbeat are the first bytes of a message's digest: enough to tell a round's messages apart, small to send.
HELD_ID_BYTES = 8
MAX_HELD_IDS = ARRAY_ITEMS
PREVOTE = 1
PRECOMMIT = 2
PHASE_NAMES = {PREVOTE: "prevote", PRECOMMIT: "precommit"}
NIL = b""
# A peer that has seen no genesis yet heartbeats this round.
NO_HEAD_ROUND = GENESIS_ROUND - 1
# Incarnation, members and manifest digest of a Form.
FormKey = tuple[int, tuple[Member, ...], bytes]
# Public keys and signatures of the supported kinds (RSA-2048 to RSA-4096, Ed25519) stay below these.
MAX_KEY_BYTES = 600
MAX_SIGNATURE_BYTES = 512


@dataclass(frozen=True, slots=True)
class Header:
    """Which run, round and parent manifest a message speaks of, and who speaks (peer id and session)."""

    run: bytes
    round: int
    parent: bytes
    sender: str
    session: bytes

    def __post_init__(self) -> None:
        check_bytes(self.run, DIGEST_BYTES, "run id")
        check_integer(self.round, GENESIS_ROUND, MAX_ROUND, "round")
        check_bytes(self.parent, DIGEST_BYTES, "parent digest")
        check_peer_id(self.sender, "sender")
        check_bytes(self.session, SESSION_BYTES, "session")

    @property
    def member(self) -> Member:
        return Member(self.sender, self.session)

    def values(self) -> list[Any]:
        return [self.run, self.round, self.parent, self.sender, self.session]


@dataclass(frozen=True, slots=True)
class Announce:
    """My contribution to the round: which payload, on which base state. An empty payload digest abstains."""

    KIND: ClassVar[int] = 1
    header: Header
    base: bytes
    payload: bytes
    payload_bytes: int
    steps: int
    tokens: int

    def __post_init__(self) -> None:
        check_bytes(self.base, DIGEST_BYTES, "base digest")
        check_bytes(self.payload, (0, DIGEST_BYTES), "payload digest")
        check_integer(self.payload_bytes, 0, MAX_COUNT, "payload bytes")
        check_integer(self.steps, 0, MAX_COUNT, "steps")
        check_integer(self.tokens, 0, MAX_COUNT, "tokens")
        if bool(self.payload) != bool(self.payload_bytes):
            raise RemoteProtocolError("abstention", "an abstention has neither payload digest nor bytes")

    @property
    def abstains(self) -> bool:
        return not self.payload

    def values(self) -> list[Any]:
        return [self.base, self.payload, self.payload_bytes, self.steps, self.tokens]

    @classmethod
    def parse(cls, header: Header, values: list[Any]) -> Announce:
        return cls(header, *fields(values, 5, what="Announce"))


@dataclass(frozen=True, slots=True)
class Leave:
    """I go; drop me from the next group. Bound to one round, so that it cannot be replayed against a later return."""

    KIND: ClassVar[int] = 2
    header: Header

    def values(self) -> list[Any]:
        return []

    @classmethod
    def parse(cls, header: Header, values: list[Any]) -> Leave:
        fields(values, 0, what="Leave")
        return cls(header)


@dataclass(frozen=True, slots=True)
class Join:
    """I hold the verified state at the parent manifest and ask to be in the next group."""

    KIND: ClassVar[int] = 3
    header: Header

    def values(self) -> list[Any]:
        return []

    @classmethod
    def parse(cls, header: Header, values: list[Any]) -> Join:
        fields(values, 0, what="Join")
        return cls(header)


@dataclass(frozen=True, slots=True)
class Close:
    """An attempt's leader ends the announcing: these announcements, ascending by peer, and these signed leavers."""

    KIND: ClassVar[int] = 4
    header: Header
    attempt: int
    announcements: tuple[Signed, ...]
    leaves: tuple[Signed, ...]

    def __post_init__(self) -> None:
        check_integer(self.attempt, 0, MAX_ATTEMPT, "attempt")
        _check_inner(self.announcements, Announce, self.header, "announcements")
        _check_inner(self.leaves, Leave, self.header, "leaves")

    def values(self) -> list[Any]:
        return [self.attempt, [s.parts for s in self.announcements], [s.parts for s in self.leaves]]

    @classmethod
    def parse(cls, header: Header, values: list[Any]) -> Close:
        attempt, announcements, leaves = fields(values, 3, what="Close")
        return cls(header, attempt, _signed_items(announcements, Announce), _signed_items(leaves, Leave))

    @property
    def covered(self) -> frozenset[str]:
        return frozenset(s.message.header.sender for s in (*self.announcements, *self.leaves))


@dataclass(frozen=True, slots=True)
class Check:
    """What I found: valid announcements (by digest), members dead, joiners ready, and my own finish duration.

    `revision` orders one member's Checks of a round; a later one lists at least as much.
    """

    KIND: ClassVar[int] = 5
    header: Header
    revision: int
    base: bytes
    valid: tuple[bytes, ...]
    dead: tuple[Member, ...]
    ready: tuple[Member, ...]
    duration_ms: int

    def __post_init__(self) -> None:
        check_integer(self.revision, 0, MAX_ATTEMPT, "revision")
        check_bytes(self.base, DIGEST_BYTES, "base digest")
        for digest in self.valid:
            check_bytes(digest, DIGEST_BYTES, "announcement digest")
        check_sorted_unique(self.valid, "valid announcements")
        check_sorted_unique(self.dead, "dead members")
        check_sorted_unique(self.ready, "ready joiners")
        check_integer(self.duration_ms, 0, MAX_MILLISECONDS, "duration")

    def values(self) -> list[Any]:
        return [
            self.revision,
            self.base,
            list(self.valid),
            [[m.peer, m.session] for m in self.dead],
            [[m.peer, m.session] for m in self.ready],
            self.duration_ms,
        ]

    @classmethod
    def parse(cls, header: Header, values: list[Any]) -> Check:
        revision, base, valid, dead, ready, duration_ms = fields(values, 6, what="Check")
        return cls(header, revision, base, tuple(_array(valid)), _members(dead), _members(ready), duration_ms)


@dataclass(frozen=True, slots=True)
class Vote:
    """Prevote or precommit of one attempt for a manifest digest, or for none (nil, the empty byte string)."""

    KIND: ClassVar[int] = 6
    header: Header
    phase: int
    attempt: int
    digest: bytes

    def __post_init__(self) -> None:
        check_integer(self.phase, PREVOTE, PRECOMMIT, "phase")
        check_integer(self.attempt, 0, MAX_ATTEMPT, "attempt")
        check_bytes(self.digest, (0, DIGEST_BYTES), "voted digest")

    def values(self) -> list[Any]:
        return [self.phase, self.attempt, self.digest]

    @classmethod
    def parse(cls, header: Header, values: list[Any]) -> Vote:
        return cls(header, *fields(values, 3, what="Vote"))


@dataclass(frozen=True, slots=True)
class Proposal:
    """An attempt's evidence for a manifest: one Close, Checks of distinct members, ascending by peer.

    The manifest itself is not sent: it follows from the evidence. `prepared` holds a quorum of prevotes of an earlier attempt
    for that same manifest, if the leader knows one.
    """

    KIND: ClassVar[int] = 7
    header: Header
    attempt: int
    close: Signed
    checks: tuple[Signed, ...]
    prepared: tuple[Signed, ...]

    def __post_init__(self) -> None:
        check_integer(self.attempt, 0, MAX_ATTEMPT, "attempt")
        _check_inner((self.close,), Close, self.header, "close")
        _check_inner(self.checks, Check, self.header, "checks")
        _check_inner(self.prepared, Vote, self.header, "prepared")

    def values(self) -> list[Any]:
        return [self.attempt, self.close.parts, [s.parts for s in self.checks], [s.parts for s in self.prepared]]

    @classmethod
    def parse(cls, header: Header, values: list[Any]) -> Proposal:
        attempt, close, checks, prepared = fields(values, 4, what="Proposal")
        inner_close = Signed.from_parts(close, (Close.KIND,))
        return cls(header, attempt, inner_close, _signed_items(checks, Check), _signed_items(prepared, Vote))


@dataclass(frozen=True, slots=True)
class Form:
    """A signature under a manifest that no quorum voted on: a first group's (rule 18) or that of a regroup (rule 17).

    Certified when every one of `members` signed the same incarnation for the manifest of this digest.
    """

    KIND: ClassVar[int] = 8
    header: Header
    incarnation: int
    members: tuple[Member, ...]
    manifest: bytes

    def __post_init__(self) -> None:
        check_integer(self.incarnation, 0, MAX_INCARNATION, "incarnation")
        check_sorted_unique(self.members, "members")
        check_bytes(self.manifest, DIGEST_BYTES, "manifest digest")
        if self.header.member not in self.members:
            raise RemoteProtocolError("form", "a peer signs only a list that holds itself")

    @property
    def key(self) -> FormKey:
        """What the signers of one certificate have in common."""
        return self.incarnation, self.members, self.manifest

    def values(self) -> list[Any]:
        return [self.incarnation, [[m.peer, m.session] for m in self.members], self.manifest]

    @classmethod
    def parse(cls, header: Header, values: list[Any]) -> Form:
        incarnation, members, manifest = fields(values, 3, what="Form")
        return cls(header, incarnation, _members(members), manifest)


Message = Announce | Leave | Join | Close | Check | Vote | Proposal | Form
SIGNED_KINDS: dict[int, type[Any]] = {c.KIND: c for c in (Announce, Leave, Join, Close, Check, Vote, Proposal, Form)}


@dataclass(frozen=True, slots=True)
class Signed:
    """A message with its sender's signature. Construction does not verify it: see `verify`."""

    message: Message
    public_key: bytes
    signature: bytes
    body: bytes = field(repr=False)
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.public_key) is not bytes or len(self.public_key) > MAX_KEY_BYTES:
            raise RemoteProtocolError("field-length", f"a public key has at most {MAX_KEY_BYTES} bytes")
        if type(self.signature) is not bytes or len(self.signature) > MAX_SIGNATURE_BYTES:
            raise RemoteProtocolError("field-length", f"a signature has at most {MAX_SIGNATURE_BYTES} bytes")
        object.__setattr__(self, "digest", sha256(b"message" + self.body))

    @property
    def parts(self) -> list[bytes]:
        return [self.body, self.public_key, self.signature]

    @property
    def held_id(self) -> bytes:
        return self.digest[:HELD_ID_BYTES]

    @property
    def inner(self) -> tuple[Signed, ...]:
        """The signed messages inside this one, one level down."""
        message = self.message
        if isinstance(message, Close):
            return (*message.announcements, *message.leaves)
        if isinstance(message, Proposal):
            return (message.close, *message.checks, *message.prepared)
        return ()

    @classmethod
    def from_parts(cls, parts: Any, kinds: Container[int] | None = None) -> Signed:
        """From body, public key and signature; `kinds`: those a message around it may hold, looked at before anything is parsed."""
        body, public_key, signature = fields(parts, 3, what="signed message")
        if type(body) is not bytes:
            raise RemoteProtocolError("fields", "a message body is a byte string")
        return cls(decode_body(body, kinds), public_key, signature, body)

    def verify(self, check: Callable[[str, bytes, bytes, bytes], bool]) -> None:
        """Check this signature and those inside; `check(peer_id, public_key, message, signature)`. Raises RemoteProtocolError."""
        self.verify_own(check)
        for signed in self.inner:
            signed.verify(check)

    def verify_own(self, check: Callable[[str, bytes, bytes, bytes], bool]) -> None:
        """Check this signature only."""
        sender = self.message.header.sender
        if not check(sender, self.public_key, signed_bytes(self.body), self.signature):
            raise RemoteProtocolError("signature", f"the signature under a message of {sender} does not verify")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """I am alive: my session, my head, my attempt in the round after it, and which of its messages I hold (8-byte ids)."""

    KIND: ClassVar[int] = 20
    run: bytes
    session: bytes
    head_round: int
    head: bytes
    attempt: int
    leaving: bool
    held: frozenset[bytes]

    def __post_init__(self) -> None:
        check_bytes(self.run, DIGEST_BYTES, "run id")
        check_bytes(self.session, SESSION_BYTES, "session")
        check_integer(self.head_round, NO_HEAD_ROUND, MAX_ROUND, "head round")
        check_bytes(self.head, DIGEST_BYTES, "head digest")
        check_integer(self.attempt, 0, MAX_ATTEMPT, "attempt")
        if len(self.held) > MAX_HELD_IDS:
            raise RemoteProtocolError("field-length", f"a heartbeat lists at most {MAX_HELD_IDS} held ids")
        for item in self.held:
            check_bytes(item, HELD_ID_BYTES, "held id")

    def values(self) -> list[Any]:
        held = b"".join(sorted(self.held))
        return [self.run, self.session, self.head_round, self.head, self.attempt, int(self.leaving), held]

    @classmethod
    def parse(cls, values: list[Any]) -> Heartbeat:
        run, session, head_round, head, attempt, leaving, held = fields(values, 7, what="Heartbeat")
        check_integer(leaving, 0, 1, "leaving")
        if type(held) is not bytes or len(held) % HELD_ID_BYTES or len(held) > MAX_HELD_IDS * HELD_ID_BYTES:
            raise RemoteProtocolError("field-length", f"held ids are up to {MAX_HELD_IDS} times {HELD_ID_BYTES} bytes")
        ids = [held[i : i + HELD_ID_BYTES] for i in range(0, len(held), HELD_ID_BYTES)]
        check_sorted_unique(ids, "held ids")
        return cls(run, session, head_round, head, attempt, bool(leaving), frozenset(ids))


@dataclass(frozen=True, slots=True)
class Commit:
    """A manifest with its certificate: a quorum of precommits of one attempt, or the Forms of everybody on one list."""

    KIND: ClassVar[int] = 21
    manifest: Manifest
    certificate: tuple[Signed, ...]

    def __post_init__(self) -> None:
        for signed in self.certificate:
            if not isinstance(signed.message, Vote | Form):
                raise RemoteProtocolError("certificate", "a certificate holds votes or Forms only")

    @property
    def inner(self) -> tuple[Signed, ...]:
        return self.certificate

    def values(self) -> list[Any]:
        return [self.manifest.body, [s.parts for s in self.certificate]]

    @classmethod
    def parse(cls, values: list[Any]) -> Commit:
        body, certificate = fields(values, 2, what="Commit")
        if type(body) is not bytes:
            raise RemoteProtocolError("fields", "a manifest body is a byte string")
        return cls(Manifest.decode(body), _signed_items(certificate, Vote, Form))


Frame = Signed | Heartbeat | Commit
SIGNED_FRAME = 0


def signed_bytes(body: bytes) -> bytes:
    """What a signature covers: a domain tag and the body, so that no signature can be taken for another purpose's."""
    return b"sparseloco-message-1" + body


def encode_body(message: Message) -> bytes:
    return pack([PROTOCOL_VERSION, message.KIND, message.header.values(), message.values()])


def decode_body(body: bytes, kinds: Container[int] | None = None) -> Message:
    """The message whose canonical bytes are `body`; raises RemoteProtocolError.

    Without the limit on `kinds` a message could nest Proposals in Proposals, each level hashed and parsed again.
    """
    version, kind, header, values = fields(unpack(body, what="message body"), 4, what="message body")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise RemoteProtocolError("version", f"protocol version {version!r}, this node speaks {PROTOCOL_VERSION}")
    if type(kind) is not int or kind not in SIGNED_KINDS:
        raise RemoteProtocolError("kind", f"unknown message kind {kind!r}")
    if kinds is not None and kind not in kinds:
        raise RemoteProtocolError("inner-kind", f"a {SIGNED_KINDS[kind].__name__} has no place inside this message")
    message: Message = SIGNED_KINDS[kind].parse(Header(*fields(header, 5, what="header")), values)
    return message


def sign(message: Message, public_key: bytes, signer: Callable[[bytes], bytes]) -> Signed:
    """`message` under this node's key; `signer` returns the signature of the bytes it is given."""
    body = encode_body(message)
    return Signed(message, public_key, signer(signed_bytes(body)), body)


def encode(frame: Frame) -> bytes:
    """The bytes of one message on the wire."""
    if isinstance(frame, Signed):
        return pack([PROTOCOL_VERSION, SIGNED_FRAME, frame.parts])
    return pack([PROTOCOL_VERSION, frame.KIND, frame.values()])


def decode(data: bytes, max_bytes: int) -> Frame:
    """One message from the wire; nothing is parsed beyond `max_bytes`. Raises RemoteProtocolError, verifies no signature."""
    if len(data) > max_bytes:
        raise RemoteProtocolError("message-bytes", f"{len(data)} bytes, the run allows {max_bytes}")
    version, kind, values = fields(unpack(data, what="frame"), 3, what="frame")
    if type(version) is not int or version != PROTOCOL_VERSION:
        raise RemoteProtocolError("version", f"protocol version {version!r}, this node speaks {PROTOCOL_VERSION}")
    if type(kind) is not int:
        raise RemoteProtocolError("kind", f"unknown frame kind {kind!r}")
    if kind == SIGNED_FRAME:
        return Signed.from_parts(values)
    if kind == Heartbeat.KIND:
        return Heartbeat.parse(values)
    if kind == Commit.KIND:
        return Commit.parse(values)
    raise RemoteProtocolError("kind", f"unknown frame kind {kind!r}")


def _array(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise RemoteProtocolError("fields", "expected an array")
    return value


def _members(value: Any) -> tuple[Member, ...]:
    return tuple(Member(*fields(item, 2, what="member")) for item in _array(value))


def _signed_items(value: Any, *kinds: type[Any]) -> tuple[Signed, ...]:
    allowed = [kind.KIND for kind in kinds]
    return tuple(Signed.from_parts(item, allowed) for item in _array(value))


def _check_inner(inner: tuple[Signed, ...], kind: type[Any], header: Header, what: str) -> None:
    """Inner messages are of one kind, of the same run, round and parent, from distinct peers in ascending order."""
    for signed in inner:
        theirs = signed.message.header
        if type(signed.message) is not kind:
            raise RemoteProtocolError("inner-kind", f"{what} holds a {type(signed.message).__name__}")
        if (theirs.run, theirs.round, theirs.parent) != (header.run, header.round, header.parent):
            raise RemoteProtocolError("inner-round", f"{what} holds a message of another run, round or parent")
    check_sorted_unique([signed.message.header.sender for signed in inner], what)
