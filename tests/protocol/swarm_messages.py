"""One small group, and one of every message it may send."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from sparseloco.protocol.encoding import sha256
from sparseloco.protocol.events import Effect, Note, Persist, Record, Send, Tick
from sparseloco.protocol.machine import Machine
from sparseloco.protocol.manifest import Manifest, Member, MembershipRules, genesis_manifest
from sparseloco.protocol.messages import (
    PRECOMMIT,
    PREVOTE,
    Announce,
    Check,
    Close,
    Commit,
    Form,
    Header,
    Heartbeat,
    Join,
    Leave,
    Message,
    Proposal,
    Signed,
    Vote,
    encode_body,
    sign,
)
from sparseloco.protocol.rules import FOUNDER_SESSION, Rules

RUN = sha256(b"run")
STATE = sha256(b"genesis state")
LIMITS = MembershipRules(
    min_peers=2, group_size=8, joiners_per_round=2, budget_cap_ms=10_000, budget_floor_ms=1_000, straggler_factor=3.0
)


def make_rules(*peers: str, **changes: Any) -> Rules:
    settings: dict[str, Any] = {
        "heartbeat_seconds": 1.0,
        "detection_seconds": 5.0,
        "formation_seconds": 8.0,
        "exchange_seconds": 6.0,
        "vote_seconds": 2.0,
        "founders": tuple(peers),
        "membership": LIMITS,
    }
    return Rules(run=RUN, genesis_state=STATE, **(settings | changes))


def member(peer: str, session: bytes = FOUNDER_SESSION) -> Member:
    return Member(peer, session)


def genesis(*peers: str, rules: Rules | None = None) -> Manifest:
    cap = (rules or make_rules()).membership.budget_cap_ms
    return genesis_manifest(RUN, STATE, [member(peer) for peer in peers], cap)


def unsigned(message: Message) -> Signed:
    """Signed in form only: the rules never look at signatures, their driver does."""
    return Signed(message, b"", b"", encode_body(message))


class Fellow:
    """What another member of `parent`'s group may say about the round after it."""

    def __init__(self, parent: Manifest, peer: str, session: bytes = FOUNDER_SESSION) -> None:
        self.parent, self.peer, self.session = parent, peer, session
        self.header = Header(parent.run, parent.round + 1, parent.digest, peer, session)

    def announces(self, text: str = "") -> Signed:
        payload = sha256(f"payload {self.peer}{text}".encode())
        return unsigned(Announce(self.header, STATE, payload, 1000, 15, 4000))

    def closes(self, *announcements: Signed, attempt: int = 0, leaves: tuple[Signed, ...] = ()) -> Signed:
        return unsigned(Close(self.header, attempt, by_sender(announcements), by_sender(leaves)))

    def checks(self, *valid: Signed, revision: int = 0, dead: Any = (), ready: Any = (), base: bytes = STATE) -> Signed:
        digests = tuple(sorted(signed.digest for signed in valid))
        return unsigned(Check(self.header, revision, base, digests, tuple(dead), tuple(ready), 3000))

    def proposes(self, close: Signed, *checks: Signed, attempt: int = 0, prepared: Any = ()) -> Signed:
        return unsigned(Proposal(self.header, attempt, close, by_sender(checks), by_sender(prepared)))

    def prevotes(self, digest: bytes, attempt: int = 0) -> Signed:
        return unsigned(Vote(self.header, PREVOTE, attempt, digest))

    def precommits(self, digest: bytes, attempt: int = 0) -> Signed:
        return unsigned(Vote(self.header, PRECOMMIT, attempt, digest))

    def joins(self) -> Signed:
        return unsigned(Join(self.header))

    def leaves(self) -> Signed:
        return unsigned(Leave(self.header))

    def beats(self, attempt: int = 0, *, held: Any = (), leaving: bool = False, behind: int = 0) -> Heartbeat:
        return Heartbeat(RUN, self.session, self.parent.round - behind, self.parent.digest, attempt, leaving, frozenset(held))


def by_sender(messages: Any) -> tuple[Signed, ...]:
    return tuple(sorted(messages, key=lambda signed: signed.message.header.sender))


def make_machine(me: Member, rules: Rules, head: Commit | None, records: list[Record] | None = None, **changes: Any) -> Machine:
    settings: dict[str, Any] = {"head": head, "state_digest": STATE if head else None, "records": records or []}
    return Machine(me, rules, unsigned, random.Random(0), **(settings | changes))


def said(effects: list[Effect]) -> list[Message]:
    """The distinct signed messages among the effects, in the order of their first sending."""
    messages = [effect.frame.message for effect in effects if isinstance(effect, Send) and isinstance(effect.frame, Signed)]
    return list(dict.fromkeys(messages))


def saved(effects: list[Effect]) -> list[Record]:
    return [effect.record for effect in effects if isinstance(effect, Persist)]


def refusals(effects: list[Effect]) -> list[str]:
    return [effect.fields["rule"] for effect in effects if isinstance(effect, Note) and effect.event == "refused"]


def notes(effects: list[Effect]) -> list[str]:
    return [effect.event for effect in effects if isinstance(effect, Note)]


def every_frame() -> dict[str, Any]:
    """One of every message on the wire, with made-up keys and signatures; what their golden bytes are made from."""
    parent = genesis("alice", "bob", "carol")

    def signed(message: Message) -> Signed:
        name = message.header.sender.encode()
        return sign(message, b"key of " + name, lambda data: sha256(b"signature" + name + data))

    def again(unsigned_message: Signed) -> Signed:
        return signed(unsigned_message.message)

    alice, bob, carol = (Fellow(parent, peer) for peer in ("alice", "bob", "carol"))
    announcements = (again(alice.announces()), again(bob.announces()))
    leave = again(carol.leaves())
    close = again(alice.closes(*announcements, leaves=(leave,)))
    checks = tuple(again(f.checks(*announcements, dead=[member("carol")], ready=[member("dave")])) for f in (alice, bob))
    manifest = replace(parent, round=0, parent=parent.digest, base=STATE, group=(member("alice"), member("bob")))
    prevotes = tuple(again(f.prevotes(manifest.digest)) for f in (alice, bob))
    precommits = tuple(again(f.precommits(manifest.digest)) for f in (alice, bob))
    rules = make_rules()
    header = Header(RUN, -1, rules.placeholder_parent(), "alice", bytes(16))
    return {
        "announce": announcements[0],
        "abstention": signed(Announce(alice.header, STATE, b"", 0, 0, 0)),
        "leave": leave,
        "join": signed(Join(Header(RUN, 0, parent.digest, "dave", bytes(range(16))))),
        "close": close,
        "check": checks[0],
        "prevote": prevotes[0],
        "precommit-nil": again(bob.precommits(b"", 3)),
        "proposal": again(alice.proposes(close, *checks)),
        "re-proposal": again(bob.proposes(close, *checks, attempt=1, prepared=prevotes)),
        "form": signed(Form(header, 7, (member("alice"), member("bob")), parent.digest)),
        "heartbeat": Heartbeat(RUN, bytes(range(16)), 4, sha256(b"head"), 2, True, frozenset({b"heldid01", b"heldid02"})),
        "commit": Commit(manifest, precommits),
        "genesis-commit": Commit(parent, ()),
    }


def tick_until(machine: Machine, now: float, end: float, step: float = 0.5) -> list[Effect]:
    effects: list[Effect] = []
    while now <= end:
        effects += machine.handle(Tick(), now)
        now += step
    return effects
