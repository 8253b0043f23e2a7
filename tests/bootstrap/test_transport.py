"""Messages and blobs between real daemons on loopback."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sparseloco.bootstrap.errors import NetworkError, TransportError, UsageError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.run_file import Limits

MEGABYTE = 2**20


def blob(size: int = MEGABYTE) -> tuple[bytes, bytes]:
    data = os.urandom(size)
    return hashlib.sha256(data).digest(), data


class Store(dict[bytes, bytes]):
    def size(self, digest: bytes) -> int | None:
        return len(self[digest]) if digest in self else None

    def read(self, digest: bytes, offset: int, n: int) -> bytes:
        return self[digest][offset : offset + n]


async def error_of(coroutine: Any) -> TransportError:
    with pytest.raises(TransportError) as caught:
        await coroutine
    return caught.value


def test_messages_and_requests(run: Callable[..., Any], nodes: Any) -> None:
    async def story() -> None:
        async with nodes(2) as (one, two):
            inbox: list[tuple[str, bytes]] = []
            assert (await error_of(one.send(two.peer_id, b"early"))).reason == "busy", "nobody listens yet"
            two.on_message(lambda sender, message: inbox.append((sender, message)))
            await one.send(two.peer_id, b"hello")
            largest = bytes(one.limits.message_bytes)
            await one.send(two.peer_id, largest)
            assert inbox == [(one.peer_id, b"hello"), (one.peer_id, largest)]

            async def double(sender: str, body: bytes) -> bytes:
                return body * 2

            async def fail(sender: str, body: bytes) -> bytes:
                raise RuntimeError("secret")

            async def decline(sender: str, body: bytes) -> bytes:
                raise TransportError("not-found", "secret")

            for name, handler in (("double", double), ("fail", fail), ("decline", decline)):
                two.on_request(name, handler)
            assert await one.request(two.peer_id, "double", b"ab") == b"abab"
            assert (await error_of(one.request(two.peer_id, "double", largest))).reason == "too-large"
            assert (await error_of(one.send(two.peer_id, largest + b"!"))).reason == "too-large"
            assert (await error_of(one.request(two.peer_id, "unknown", b""))).reason == "not-found"
            for name, reason in (("fail", "refused"), ("decline", "not-found")):
                error = await error_of(one.request(two.peer_id, name, b""))
                assert error.reason == reason and "secret" not in str(error)
            assert abs(await one.clock_offset(two.peer_id)) < 0.5, "both clocks are this machine's"
            assert two.counters.messages_received == one.counters.messages_sent

    run(story())


def test_the_receiver_checks_sizes_too(run: Callable[..., Any], nodes: Any) -> None:
    async def story() -> None:
        async with nodes(2) as (one, two):
            two.on_message(lambda sender, message: None)
            for reply in (
                await one.network.call(two.peer_id, "sparseloco/1/message", bytes(1_000_001)),
                await one.network.call(two.peer_id, "sparseloco/1/request", b"\x05clock" + bytes(1_000_001)),
            ):
                assert reply == b"\x01", "the code for too-large"
            for malformed in (b"", b"\x00", b"\xffx", b"\x05clo"):
                assert await one.network.call(two.peer_id, "sparseloco/1/request", malformed) == b"\x03"

    run(story())


def test_a_late_answer_costs_one_call_and_not_the_next(run: Callable[..., Any], nodes: Any) -> None:
    async def story() -> None:
        async with nodes(2, limits=Limits(requests_in_flight=2)) as (one, two):
            gate = asyncio.Event()

            async def wait(sender: str, body: bytes) -> bytes:
                await gate.wait()
                return b"late"

            two.on_request("wait", wait)
            for _ in range(2):
                assert (await error_of(one.request(two.peer_id, "wait", b"", 0.1))).reason == "timeout"
            assert (await error_of(one.request(two.peer_id, "wait", b"", 5.0))).reason == "busy"
            gate.set()
            assert await one.request(two.peer_id, "wait", b"", 5.0) == b"late"

    run(story())


def test_four_daemons_exchange_all_to_all(run: Callable[..., Any], nodes: Any) -> None:
    """360 transfers of 1 MB, half pushed and half pulled, each checked by its digest."""

    async def story() -> None:
        async with nodes(4, limits=Limits(requests_in_flight=16)) as swarm:
            delivered: list[tuple[str, str, bytes]] = []
            own = {node.peer_id: blob() for node in swarm}
            for node in swarm:
                node.serve_blobs(Store([own[node.peer_id]]))
                node.accept_pushes(
                    lambda sender, digest, length: length == MEGABYTE,
                    lambda sender, digest, data, node=node: delivered.append((sender, node.peer_id, digest)),
                )

            async def exchange(me: Any, other: Any) -> None:
                for _ in range(15):
                    await me.push(other.peer_id, *own[me.peer_id])
                    digest, data = own[other.peer_id]
                    assert await me.pull(other.peer_id, digest, MEGABYTE) == data

            pairs = [(me, other) for me in swarm for other in swarm if me is not other]
            await asyncio.gather(*(exchange(me, other) for me, other in pairs))
            expected = [(me.peer_id, other.peer_id, own[me.peer_id][0]) for me, other in pairs for _ in range(15)]
            assert sorted(delivered) == sorted(expected)

    run(story(), 80)


def test_refusals_and_lies(run: Callable[..., Any], nodes: Any) -> None:
    async def story() -> None:
        async with nodes(3, limits=Limits(blob_bytes=2 * MEGABYTE)) as (one, two, three):
            digest, data = blob()
            lies = Store()
            lies[digest] = data[:-1] + bytes((data[-1] ^ 1,))
            two.serve_blobs(lies)
            assert (await error_of(one.pull(two.peer_id, digest, MEGABYTE))).reason == "digest"
            assert (await error_of(one.pull(two.peer_id, bytes(32), 1))).reason == "not-found"
            assert (await error_of(one.push(two.peer_id, digest, data))).reason == "refused", "no pushes wanted"
            asked: list[tuple[str, bytes, int]] = []
            two.accept_pushes(lambda *question: bool(asked.append(question)), lambda *delivery: None)
            before = two.counters.bytes_received
            assert (await error_of(one.push(two.peer_id, digest, data))).reason == "refused"
            assert (await error_of(one.push(two.peer_id, digest, bytes(2 * MEGABYTE + 1)))).reason == "too-large"
            assert asked == [(one.peer_id, digest, MEGABYTE)]
            assert two.counters.bytes_received - before < 1000, "only headers were read"
            # the lie is found, and another donor's beginning is of use
            honest = Store([(digest, data)])
            three.serve_blobs(honest)
            received = three.counters.payload_bytes_sent
            assert await one.pull(three.peer_id, digest, MEGABYTE, have=data[:900_000]) == data
            assert three.counters.payload_bytes_sent - received == MEGABYTE - 900_000

    run(story())


def test_a_daemon_killed_in_the_middle_of_a_pull(run: Callable[..., Any], nodes: Any, until: Any) -> None:
    async def story() -> None:
        async with nodes(2) as (one, two):
            digest, data = blob(40 * MEGABYTE)
            deaths: list[str] = []
            two.on_death(lambda: deaths.append(two.peer_id))

            class Deadly(Store):
                def read(self, digest: bytes, offset: int, n: int) -> bytes:
                    if offset > 8 * MEGABYTE and two.alive:
                        os.kill(two.network.daemon.pid, signal.SIGKILL)
                    return super().read(digest, offset, n)

            two.serve_blobs(Deadly([(digest, data)]))
            error = await error_of(one.pull(two.peer_id, digest, len(data), no_progress_seconds=5.0))
            assert error.reason in ("unreachable", "timeout", "short")
            assert 0 < len(error.partial) < len(data) and data.startswith(error.partial)
            await until(lambda: deaths, "its owner is told")
            assert deaths == [two.peer_id] and not two.alive
            assert (await error_of(two.send(one.peer_id, b"x"))).reason == "unreachable"

    run(story())


def test_a_peer_who_comes_back_elsewhere_is_found_again(
    run: Callable[..., Any], nodes: Any, identities: list[Identity], caplog: pytest.LogCaptureFixture
) -> None:
    from sparseloco.bootstrap.transport import Transport

    async def story() -> None:
        async with nodes(1) as (one,):
            two = await Transport.start(identities[1], peers=one.addresses())
            two.on_message(lambda sender, message: None)
            await one.send(two.peer_id, b"x")
            await two.close()
            for _ in range(3):
                assert (await error_of(one.send(two.peer_id, b"x"))).reason in ("unreachable", "timeout")
            two = await Transport.start(identities[1])  # at another port, and it dials nobody
            try:
                two.on_message(lambda sender, message: None)
                assert await one.rejoin() == 0, "only the old address is known"
                one.remember(two.peer_id, two.addresses())
                await one.send(two.peer_id, b"x", 10.0)
                assert await one.connected() == {two.peer_id}
            finally:
                await two.close()

    caplog.set_level("INFO", "sparseloco")
    run(story())
    lines = [record.message for record in caplog.records if "peer " in record.message]
    assert len(lines) == 2 and "is not reached" in lines[0] and "answers again" in lines[1], lines


def test_a_node_that_listens_nowhere_is_a_full_peer_of_those_it_dials(
    run: Callable[..., Any], nodes: Any, identities: list[Identity]
) -> None:
    from sparseloco.bootstrap.transport import Transport

    async def story() -> None:
        async with nodes(1) as (one,):
            two = await Transport.start(identities[1], peers=one.addresses(), listen=(), client_mode=True)
            try:
                assert not any("/tcp/" in address and "p2p-circuit" not in address for address in two.addresses())
                digest, data = blob()
                two.serve_blobs(Store([(digest, data)]))
                assert await one.pull(two.peer_id, digest, MEGABYTE) == data
            finally:
                await two.close()

    run(story())


def test_some_dead_bootstraps_are_fine_and_all_dead_is_named(
    run: Callable[..., Any], nodes: Any, identities: list[Identity], dead_address: str
) -> None:
    from sparseloco.bootstrap.transport import Transport

    async def story() -> None:
        async with nodes(1) as (one,):
            two = await Transport.start(identities[1], peers=[dead_address, *one.addresses()])
            assert one.peer_id in await two.connected()
            await two.close()
            wrong = one.addresses()[0].replace(one.peer_id, identities[2].peer_id)
            with pytest.raises(NetworkError) as caught:
                await Transport.start(identities[1], peers=[dead_address, wrong])
            assert f"{dead_address}: connection refused" in str(caught.value)
            assert f"{wrong}: another peer answers there" in str(caught.value)
            assert caught.value.exit_code == 4
        assert not _daemons_of(os.getpid()), "a failed start left its daemon behind"

    run(story())


def test_a_failed_start_says_the_daemons_own_words_and_a_remedy(
    run: Callable[..., Any], nodes: Any, identities: list[Identity]
) -> None:
    from sparseloco.bootstrap.transport import Transport

    async def story() -> None:
        async with nodes(1) as (one,):
            taken = one.addresses()[0].rsplit("/p2p/", 1)[0]
            with pytest.raises(NetworkError, match=r"address already in use.*choose another --listen"):
                await Transport.start(identities[1], listen=[taken])
            with pytest.raises(NetworkError, match=r"did not start: .*does not have that address"):
                await Transport.start(identities[1], listen=["/ip4/203.0.113.1/tcp/0"])  # not this machine's address
            with pytest.raises(UsageError, match="not an IPv4 address"):
                await Transport.start(identities[1], listen=["/ip4/1.2.3/tcp/0"])
            with pytest.raises(NetworkError, match=r"not ready in 0.001 s.*Raise --startup-timeout"):
                await Transport.start(identities[1], startup_seconds=0.001)
        assert not _daemons_of(os.getpid())

    run(story())


def test_a_killed_parent_leaves_no_daemon_and_ctrl_c_is_not_the_daemons(
    identities: list[Identity], run: Callable[..., Any], until: Any
) -> None:
    code = (
        "import asyncio, sys\n"
        "from sparseloco.bootstrap.identity import Identity\n"
        "from sparseloco.bootstrap.transport import Transport\n"
        "async def main():\n"
        "    node = await Transport.start(Identity.load(sys.argv[1]))\n"
        "    print(node.network.daemon.pid, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(identities[0].path)], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        daemon = int(parent.stdout.readline())
        assert os.getpgid(daemon) != os.getpgid(parent.pid), "a terminal's Ctrl-C goes to the process group"
    finally:
        parent.kill()
        parent.communicate()
    run(until(lambda: not _is_running(daemon), "the daemon ends with its parent", 30.0))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _daemons_of(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if "p2pd" in Path(f"/proc/{child}/comm").read_text()]
