"""Real nodes on loopback for the tests of this folder: free ports, bounded in time, none left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from sparseloco.bootstrap.identity import Identity


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Identity]:
    """Four keys, made once: 0.1 s each."""
    folder = tmp_path_factory.mktemp("identities")
    return [Identity.load_or_create(folder / f"{index}.key") for index in range(4)]


@pytest.fixture
def run() -> Callable[..., Any]:
    """Run a coroutine with an end: a hanging test is a failing test."""

    def run_bounded(coroutine: Coroutine[Any, Any, Any], seconds: float = 60.0) -> Any:
        return asyncio.run(asyncio.wait_for(coroutine, seconds))

    return run_bounded


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    """Wait for a condition, with a deadline that names it."""

    async def wait_until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not condition():
            assert loop.time() < end, f"never happened: {what}"
            await asyncio.sleep(0.02)

    return wait_until


@pytest.fixture
def nodes(identities: list[Identity]) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """`async with nodes(n) as transports:` n connected transports; afterwards no daemon of theirs is alive."""
    from sparseloco.bootstrap.transport import Transport

    @asynccontextmanager
    async def started(count: int, **settings: Any) -> AsyncIterator[list[Transport]]:
        transports: list[Transport] = []
        try:
            for identity in identities[:count]:
                peers = transports[0].addresses() if transports else []
                transports.append(await Transport.start(identity, peers=peers, **settings))
            for one in transports:
                for other in transports:
                    one.remember(other.peer_id, other.addresses())
            yield transports
        finally:
            for transport in transports:
                await transport.close()
            for transport in transports:
                assert not Path(f"/proc/{transport.network.daemon.pid}").exists(), "a daemon was left behind"

    return started


@pytest.fixture
def dead_address(identities: list[Identity]) -> str:
    """A well-formed address at which nobody listens (port 1 needs rights that no test has)."""
    return f"/ip4/127.0.0.1/tcp/1/p2p/{identities[3].peer_id}"
