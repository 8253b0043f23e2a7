"""What a node answers to named requests: who it is, the run file, the chain, and what its newest checkpoint consists of.

Bodies are JSON or protocol bytes, small by construction; a malformed question is refused. Whoever asks trusts nothing of the
answers but what digests and signatures prove.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from sparseloco import __version__
from sparseloco.bootstrap.errors import StateError
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.node.store import ChainStore
from sparseloco.protocol.encoding import pack, unpack
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.manifest import MAX_COUNT, MAX_ROUND
from sparseloco.protocol.messages import PROTOCOL_VERSION

HELLO, RUN_FILE, COMMITS, STATE = "hello", "run-file", "commits", "state"
# Commits in one answer; the answer also stays under half of the smallest message limit.
COMMITS_PER_ANSWER = 64
ANSWER_BYTES = 500_000


@dataclass(frozen=True)
class Hello:
    """What a node says of itself. `head_round` -2: knows no genesis. The last two speak of the asking peer id: the session in
    which this node last heard it ("" if never) and how many seconds ago."""

    run_id: str
    run_name: str
    role: str
    session: str
    head_round: int
    head: str
    corpus: str
    version: str
    protocol: int
    your_session: str = ""
    your_silence_seconds: float = -1.0

    @classmethod
    def parse(cls, body: bytes) -> Hello:
        """TransportError("refused") for anything that is no Hello."""
        try:
            value = json.loads(body)
            hello = cls(**value)
        except (ValueError, TypeError, RecursionError) as error:
            raise TransportError("refused", "an answer that is no hello") from error
        texts = (hello.run_id, hello.run_name, hello.role, hello.session, hello.head, hello.corpus, hello.version)
        # Some of it is shown to people: nothing in it may move a terminal's cursor.
        if not all(isinstance(text, str) and len(text) <= 200 and text.isprintable() for text in (*texts, hello.your_session)):
            raise TransportError("refused", "a hello with odd text")
        whole = all(type(number) is int and -2 <= number <= MAX_ROUND for number in (hello.head_round, hello.protocol))
        if not whole or type(hello.your_silence_seconds) not in (int, float) or not abs(hello.your_silence_seconds) < 2**53:
            raise TransportError("refused", "a hello with odd numbers")
        return hello


@dataclass(frozen=True)
class StateOffer:
    """A checkpoint that a node serves piece by piece: the state after `round`, its length and piece digests (hex)."""

    round: int
    length_bytes: int
    pieces: tuple[str, ...]

    @classmethod
    def parse(cls, body: bytes) -> StateOffer:
        """TransportError("refused") for anything that is no offer."""
        try:
            value = json.loads(body)
            offer = cls(value["round"], value["length_bytes"], tuple(value["pieces"]))
            if not all(type(number) is int and -1 <= number <= MAX_COUNT for number in (offer.round, offer.length_bytes)):
                raise ValueError("a round and a length are whole numbers")
            if any(len(bytes.fromhex(piece)) != 32 for piece in offer.pieces):
                raise ValueError("a piece digest has 32 bytes")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TransportError("refused", "an answer that is no state offer") from error
        return offer


def plain(value: Any) -> bytes:
    return json.dumps(asdict(value), separators=(",", ":")).encode()


class Services:
    """Registers the request handlers on a transport; what they say comes from the callables given."""

    def __init__(
        self,
        transport: Transport,
        *,
        hello: Callable[[str], Hello],
        run_toml: str,
        chain: ChainStore | None,
        offer: Callable[[], StateOffer | None],
    ) -> None:
        self._hello = hello
        self._run_toml = run_toml.encode()
        self._chain = chain
        self._offer = offer
        transport.on_request(HELLO, self._answer_hello)
        transport.on_request(RUN_FILE, self._answer_run_file)
        transport.on_request(COMMITS, self._answer_commits)
        transport.on_request(STATE, self._answer_state)

    async def _answer_hello(self, sender: str, body: bytes) -> bytes:
        return plain(self._hello(sender))

    async def _answer_run_file(self, sender: str, body: bytes) -> bytes:
        return self._run_toml

    async def _answer_commits(self, sender: str, body: bytes) -> bytes:
        """`body` is the first round wanted (JSON); the answer is a msgpack list of chain files from there on."""
        try:
            first = json.loads(body)
            if type(first) is not int or not -1 <= first <= MAX_ROUND:
                raise ValueError("not a round")
        except (ValueError, RecursionError) as error:
            raise TransportError("refused", "a round number was expected") from error
        answer: list[bytes] = []
        size = 0
        for round_number in range(first, first + COMMITS_PER_ANSWER):
            data = self._read(round_number)
            if data is None or size + len(data) > ANSWER_BYTES:
                break
            answer.append(data)
            size += len(data)
        return pack(answer)

    def _read(self, round_number: int) -> bytes | None:
        if self._chain is None:
            return None
        try:
            return self._chain.read(round_number)
        except StateError:
            return None

    async def _answer_state(self, sender: str, body: bytes) -> bytes:
        offer = self._offer()
        if offer is None:
            raise TransportError("not-found", "no checkpoint to offer")
        return plain(offer)


def parse_commits(body: bytes) -> list[bytes]:
    """The chain files in an answer to COMMITS; TransportError("refused") for anything else."""
    try:
        value = unpack(body, what="commits answer")
    except RemoteProtocolError as error:
        raise TransportError("refused", str(error)) from error
    if not isinstance(value, list) or not all(isinstance(item, bytes) for item in value):
        raise TransportError("refused", "an answer that is no list of commits")
    return value


def make_hello(
    run_id: bytes,
    run_name: str,
    role: str,
    session: bytes,
    head_round: int,
    head: bytes,
    corpus: bytes,
    *,
    heard: tuple[bytes, float] | None = None,
) -> Hello:
    """A Hello; `heard` is the session in which the asking peer was last heard, and how many seconds ago."""
    theirs, silence = (heard[0].hex(), heard[1]) if heard is not None else ("", -1.0)
    texts = (run_id.hex(), run_name, role, session.hex())
    return Hello(*texts, head_round, head.hex(), corpus.hex(), __version__, PROTOCOL_VERSION, theirs, silence)
