"""Whom a joiner believes: rule 20. The peers inside its bootstrap addresses, and a head it was told by other means.

A chain proves itself from its first group on; which first group is the run's is what a stranger cannot know. So a joiner that has
no chain of its own takes it from the peers it was given, before anybody else, and stops if those do not tell one story.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.node.catch_up import Donor
from sparseloco.node.chain import Chain


def trusted_first(donors: Iterable[Donor], trusted: Collection[str]) -> list[Donor]:
    """Donors in the order in which the chain is asked of them: the trusted, then the rest, each furthest ahead first."""
    return sorted(donors, key=lambda donor: (donor.peer not in trusted, -donor.hello.head_round, donor.peer))


def disagreement(chain: Chain, donors: Iterable[Donor], trusted: Collection[str]) -> NetworkError | None:
    """An error that names both heads if a trusted peer's head is not on the chain, though the chain is as long."""
    head = chain.head
    if head is None:
        return None
    for donor in donors:
        here = chain.digest_of(donor.hello.head_round)
        if donor.peer in trusted and here is not None and here.hex() != donor.hello.head:
            return NetworkError(
                f"the bootstrap peers disagree: {donor.peer} is at round {donor.hello.head_round}, manifest "
                f"{donor.hello.head}, another one's chain has {here.hex()} there; ask the run's organiser which is right, and "
                "join with --trust-head ROUND:DIGEST"
            )
    return None


def require_trusted_head(chain: Chain, trust_head: tuple[int, bytes] | None) -> None:
    """Error unless the chain holds the manifest that `--trust-head` names."""
    if trust_head is None:
        return
    number, digest = trust_head
    here = chain.digest_of(number)
    if here is None:
        raise NetworkError(
            f"--trust-head {number}:{digest.hex()}: the chain that the peers serve ends at round {chain.head_round}; give a round "
            "that the run has reached, or peers that are further on"
        )
    if here != digest:
        raise StateError(
            f"--trust-head {number}:{digest.hex()}: the chain here has {here.hex()} at that round, another branch or another "
            "run; give peers of the right one, with a new --state-dir"
        )
