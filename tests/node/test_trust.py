"""Whom a joiner believes (rule 20): the peers it was given first, and a head it was told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.node.catch_up import Donor
from sparseloco.node.trust import disagreement, require_trusted_head, trusted_first

DIGESTS = {0: b"\0" * 32, 1: b"\1" * 32, 2: b"\2" * 32}
CHAIN: Any = SimpleNamespace(head=object(), head_round=2, digest_of=DIGESTS.get)


def donor(peer: str, head_round: int, head: bytes) -> Donor:
    return Donor(peer, SimpleNamespace(head_round=head_round, head=head.hex()))  # type: ignore[arg-type]


def test_chain_is_asked_of_the_trusted_first_and_then_of_who_is_furthest() -> None:
    donors = [donor("far", 9, b""), donor("near", 3, b""), donor("bootstrap", 1, b"")]
    assert [d.peer for d in trusted_first(donors, {"bootstrap"})] == ["bootstrap", "far", "near"]


def test_trusted_peers_that_disagree_are_named_with_both_heads() -> None:
    other = b"\7" * 32
    donors = [donor("one", 2, DIGESTS[2]), donor("two", 1, other)]
    problem = disagreement(CHAIN, donors, {"one", "two"})
    assert isinstance(problem, NetworkError) and problem.exit_code == 4
    assert other.hex() in str(problem) and DIGESTS[1].hex() in str(problem) and "two" in str(problem)


def test_behind_ahead_and_untrusted_peers_are_no_disagreement() -> None:
    donors = [donor("behind", 1, DIGESTS[1]), donor("ahead", 5, b"\7" * 32), donor("stranger", 1, b"\7" * 32)]
    assert disagreement(CHAIN, donors, {"behind", "ahead"}) is None


def test_trusted_head_must_be_on_the_chain() -> None:
    require_trusted_head(CHAIN, None)
    require_trusted_head(CHAIN, (1, DIGESTS[1]))
    with pytest.raises(StateError, match=DIGESTS[1].hex()):
        require_trusted_head(CHAIN, (1, b"\7" * 32))
    with pytest.raises(NetworkError, match="ends at round 2"):
        require_trusted_head(CHAIN, (3, b"\7" * 32))
