"""Loopback nodes for the tests of this folder: keys made once, little text, short waits, and an end to every story."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import loopback
import pytest


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Keys made once, in the order of their peer ids: so a node's index is its place in a group of founders."""
    from sparseloco.bootstrap.identity import Identity

    folder = tmp_path_factory.mktemp("identities")
    made = [Identity.load_or_create(folder / f"{index}.key") for index in range(6)]
    return sorted(made, key=lambda identity: identity.peer_id)


@pytest.fixture
def swarm(tmp_path: Path, identities: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`swarm(founders=4, round__vote_seconds=1.0, ...)`: a loopback run whose nodes are gone when the test ends."""
    import torch

    from sparseloco.node import exchange, worker

    torch.set_num_threads(1)
    monkeypatch.setattr(worker, "corpus_of_run", loopback.small_corpus)
    monkeypatch.setattr(exchange, "PUSH_WAIT_SECONDS", 0.3)
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # a crash is a copy of the files here, not a power cut
    made: list[Any] = []

    def make(**options: Any) -> Any:
        folder = tmp_path / f"run{len(made)}"
        folder.mkdir()
        made.append(loopback.Swarm(folder, identities, **options))
        return made[-1]

    yield make
    for one in made:
        one.__exit__()


@pytest.fixture
def tell() -> Callable[..., Any]:
    """Run a story with an end: a hanging test is a failing test."""

    def run_bounded(story: Coroutine[Any, Any, Any], seconds: float = 120.0) -> Any:
        return asyncio.run(asyncio.wait_for(story, seconds))

    return run_bounded
