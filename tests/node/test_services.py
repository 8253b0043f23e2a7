"""What nodes answer to strangers, what a joiner makes of the answers, and what it tells a person whom nobody serves."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from loopback import SCRATCH, LoopbackNetwork, settings, toml_of

from sparseloco.bootstrap.errors import NetworkError, TransportError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.catch_up import find_donors
from sparseloco.node.finding import find_run
from sparseloco.node.services import (
    COMMITS,
    COMMITS_PER_ANSWER,
    HELLO,
    RUN_FILE,
    STATE,
    Hello,
    Services,
    StateOffer,
    make_hello,
    parse_commits,
    plain,
)
from sparseloco.node.store import ChainStore
from sparseloco.protocol.encoding import pack

GOOD = make_hello(b"r" * 32, "tiny", "node", b"s" * 16, 4, b"h" * 32, b"c" * 32)
OFFER = StateOffer(3, 4096, ("ab" * 32,))


def test_hellos_and_offers_come_back_as_they_were():
    assert Hello.parse(plain(GOOD)) == GOOD
    heard = make_hello(b"r" * 32, "tiny", "node", b"s" * 16, 4, b"h" * 32, b"c" * 32, heard=(b"t" * 16, 1.5))
    assert Hello.parse(plain(heard)) == heard and heard.your_session == (b"t" * 16).hex()
    assert StateOffer.parse(plain(OFFER)) == OFFER


def test_a_hello_is_small():
    assert len(plain(GOOD)) < 1000


@pytest.mark.parametrize(
    "change",
    [
        {"head_round": 1.5}, {"head_round": True}, {"head_round": float("inf")}, {"head_round": "4"}, {"head_round": 2**60},
        {"head_round": -3}, {"protocol": None}, {"run_name": "x" * 201}, {"run_name": "\x1b[2Jgone"}, {"run_name": 5},
        {"your_session": 7}, {"your_silence_seconds": float("nan")}, {"your_silence_seconds": "now"}, {"session": []},
        {"version": "1\n2"}, {"surprise": 1},
    ],
)  # fmt: skip
def test_an_odd_hello_is_refused(change):
    with pytest.raises(TransportError) as caught:
        Hello.parse(json.dumps({**asdict(GOOD), **change}).encode())
    assert caught.value.reason == "refused"


@pytest.mark.parametrize(
    "change",
    [
        {"round": 1e999}, {"round": "3"}, {"round": True}, {"round": -2}, {"length_bytes": 2**60}, {"length_bytes": 1.5},
        {"pieces": "abab"}, {"pieces": 5}, {"pieces": [5]}, {"pieces": ["ab"]}, {"pieces": ["xy" * 32]}, {"pieces": None},
    ],
)  # fmt: skip
def test_an_odd_offer_is_refused(change):
    with pytest.raises(TransportError) as caught:
        StateOffer.parse(json.dumps({**asdict(OFFER), **change}).encode())
    assert caught.value.reason == "refused"


NOISE = [b"", b"{", b"[]", b"null", b"5", b'"a"', b"\xff\xfe", b"[" * 100_000, b'{"round":' * 10_000, b"9" * 5000]


@pytest.mark.parametrize("body", NOISE, ids=range(len(NOISE)))
def test_noise_is_refused_by_every_parser(body):
    for parse in (Hello.parse, StateOffer.parse, parse_commits):
        with pytest.raises(TransportError):
            parse(body)


def test_random_bytes_are_refused_by_every_parser():
    print(f"seed {SCRATCH}")
    rng = random.Random(SCRATCH)
    for _ in range(300):
        body = rng.randbytes(rng.randrange(1, 60))
        good = bytearray(plain(GOOD))
        good[rng.randrange(len(good))] = rng.randrange(256)
        for parse in (Hello.parse, StateOffer.parse, parse_commits):
            for data in (body, bytes(good)):
                try:
                    value = parse(data)
                except TransportError:
                    continue
                # A changed letter may leave a hello, and a few bytes may be a list; noise never becomes more than that.
                assert isinstance(value, Hello if data != body else list)


def test_a_list_of_something_else_is_no_list_of_commits():
    assert parse_commits(pack([b"a", b"b"])) == [b"a", b"b"]
    for value in ([1], [b"a", "b"], b"a", [[b"a"]]):
        with pytest.raises(TransportError):
            parse_commits(pack(value))


class Served:
    """A network with peers that serve runs, and one that asks."""

    def __init__(self, identities: list[Any], folder: Path) -> None:
        self.network = LoopbackNetwork(3)
        self.identities = identities
        self.folder = folder
        self.limits = RunFile.parse(toml_of(settings())).limits
        self.asker = self.network.transport(identities[-1], self.limits)

    def serve(self, index: int, run: RunFile, *, chain: ChainStore | None = None, **changes: Any) -> str:
        transport = self.network.transport(self.identities[index], self.limits)
        hello = make_hello(run.run_id, run.run.name, "node", b"s" * 16, index, b"h" * 32, b"c" * 32)
        changed = replace(hello, **changes)
        Services(
            transport, hello=lambda asker: changed, run_toml=run.to_toml(), chain=chain, offer=lambda: None  # type: ignore[arg-type]
        )
        return transport.addresses()[0]

    def address(self, index: int) -> str:
        return f"/ip4/127.0.0.1/tcp/1/p2p/{self.identities[index].peer_id}"

    async def find(self, *addresses: str, wanted: str | None = None, kept: RunFile | None = None) -> Any:
        return await find_run(self.asker, addresses, wanted, kept)  # type: ignore[arg-type]


@pytest.fixture
def served(identities, tmp_path):
    return Served(identities, tmp_path)


def a_run(name: str = "loop", **changes: Any) -> RunFile:
    return RunFile.parse(toml_of(settings(run__name=name, **changes))).with_genesis(b"g" * 32)


def test_a_joiner_finds_the_one_run_and_checks_its_file(served, tell):
    async def story():
        run = a_run()
        first, second = served.serve(0, run), served.serve(1, run)
        found, donors = await served.find(first, second)
        assert found == run and {donor.peer for donor in donors} == {served.identities[i].peer_id for i in (0, 1)}
        for wanted in ("loop", run.run_id.hex(), run.run_id.hex()[:8]):
            assert (await served.find(first, wanted=wanted))[0] == run
        with pytest.raises(NetworkError):
            await served.find(first, wanted=run.run_id.hex()[:4])

    tell(story())


def test_nobody_who_answers_is_named_with_the_reason(served, tell):
    async def story():
        with pytest.raises(NetworkError) as caught:
            await served.find(served.address(0))
        message = str(caught.value)
        assert caught.value.exit_code == 4
        assert (served.identities[0].peer_id in message and "unreachable" in message) or "no way there" in message

    tell(story())


def test_another_run_than_the_wanted_one_is_named_with_its_peer(served, tell):
    async def story():
        address = served.serve(0, a_run("other"))
        with pytest.raises(NetworkError) as caught:
            await served.find(address, wanted="mine")
        message = str(caught.value)
        assert "'mine'" in message and "other" in message and served.identities[0].peer_id in message
        with pytest.raises(NetworkError):
            await served.find(address, kept=a_run("mine"))

    tell(story())


def test_several_runs_are_listed_to_choose_from(served, tell):
    async def story():
        one, two = a_run("one"), a_run("two")
        addresses = served.serve(0, one), served.serve(1, two)
        with pytest.raises(NetworkError) as caught:
            await served.find(*addresses)
        message = str(caught.value)
        for run in (one, two):
            assert f"--run {run.run_id.hex()[:12]}" in message and run.run.name in message
        assert (await served.find(*addresses, wanted="two"))[0] == two

    tell(story())


def test_another_protocol_version_is_said_so_unless_somebody_speaks_ours(served, tell):
    async def story():
        run = a_run()
        old = served.serve(0, run, protocol=99, version="9.9")
        with pytest.raises(NetworkError) as caught:
            await served.find(old)
        message = str(caught.value)
        assert "99" in message and "9.9" in message and served.identities[0].peer_id in message
        served.serve(1, run)
        _, donors = await served.find(old, served.address(1))
        assert [donor.peer for donor in donors] == [served.identities[1].peer_id]

    tell(story())


def test_a_run_file_with_another_id_than_said_is_not_taken(served, tell):
    async def story():
        run = a_run()
        liar = served.serve(0, a_run("fake"), run_id=run.run_id.hex(), run_name="loop")
        with pytest.raises(NetworkError, match="another id than it says"):
            await served.find(liar)
        honest = served.serve(1, run)
        assert (await served.find(liar, honest))[0] == run

    tell(story())


def test_a_kept_run_needs_nobody_to_answer(served, tell):
    async def story():
        run = a_run()
        assert await served.find(served.address(0), kept=run) == (run, [])

    tell(story())


def test_donors_are_those_of_the_run_furthest_ahead_first(served, tell):
    async def story():
        run = a_run()
        for index in (0, 2, 1):
            served.serve(index, run)
        served.serve(3, a_run("other"))
        peers = [identity.peer_id for identity in served.identities[:5]]
        donors = await find_donors(served.asker, [*peers, *peers], run.run_id)  # type: ignore[arg-type]
        assert [donor.hello.head_round for donor in donors] == [2, 1, 0]

    tell(story())


def test_commits_are_answered_in_order_and_bounded_and_bad_questions_refused(served, tell):
    async def story():
        (served.folder / "chain").mkdir()
        chain = ChainStore(served.folder / "chain")
        for number in range(-1, 100):
            chain.write(number, b"commit %d" % number)
        served.serve(0, a_run(), chain=chain)
        peer = served.identities[0].peer_id

        async def ask(body: bytes) -> list[bytes]:
            return parse_commits(await served.asker.request(peer, COMMITS, body))

        assert await ask(b"98") == [b"commit 98", b"commit 99"]
        assert await ask(b"100") == [] and await ask(b"1000000000000") == []
        first = await ask(b"-1")
        assert len(first) == COMMITS_PER_ANSWER and first[0] == b"commit -1"
        for bad in (b"", b"-2", b"1.5", b"true", b'"1"', b"[1]", b"1e999", b"9" * 400, b"{", b"../../etc/passwd"):
            with pytest.raises(TransportError) as caught:
                await ask(bad)
            assert (caught.value.reason == "refused" and caught.value.__cause__ is None) or isinstance(
                caught.value.__cause__, ValueError | RecursionError
            )
        chain.write(100, bytes(600_000))
        assert await ask(b"100") == [], "what does not fit a message is not sent"
        for name in (HELLO, RUN_FILE):
            assert await served.asker.request(peer, name, b"anything at all")
        with pytest.raises(TransportError) as caught:
            await served.asker.request(peer, STATE, b"{}")
        assert caught.value.reason == "not-found"

    tell(story())
