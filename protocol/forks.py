"""Which of two branches of a run everybody ends up on: rule 19.

Two branches exist only where a group regrouped (rule 17) on two sides of a partition, or a first group formed twice. The
choice is a pure function of both branches and of who is heard on which, and counts what cannot be inflated by one side alone:
members of the fork point's group, never newcomers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparseloco.protocol.certificates import is_regroup, verify_commit, verify_genesis
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.manifest import Manifest, Member, quorum
from sparseloco.protocol.messages import Commit, Form
from sparseloco.protocol.rules import Rules


@dataclass(frozen=True, slots=True)
class Branch:
    """The commits after a fork point, oldest first; `live`: a quorum of its head's group is heard at that head."""

    commits: tuple[Commit, ...]
    live: bool


def verify_branch(fork: Manifest | None, commits: Sequence[Commit], rules: Rules) -> None:
    """`commits` follow each other from `fork` on (None: from before the genesis). Raises RemoteProtocolError."""
    if not commits:
        raise RemoteProtocolError("branch", "a branch without a commit")
    parent = fork
    for commit in commits:
        if parent is None:
            verify_genesis(commit, rules)
        else:
            verify_commit(commit, parent, rules)
        parent = commit.manifest


def theirs_wins(fork: Manifest | None, mine: Branch, theirs: Branch) -> bool:
    """Whether a peer on `mine` changes to `theirs`.

    A live branch is left only for a live one. Of two live ones (or two that are not) the one wins that more members of the fork
    point's group signed, then the one with more contributions by them, then the one whose first manifest has the lower
    digest. Those counts only grow along a branch and the last never changes, so two peers never change places.
    """
    if mine.live != theirs.live:
        return theirs.live
    if not mine.commits:  # at the fork point itself: nothing is lost by following
        return not mine.live
    return _rank(fork, theirs.commits) > _rank(fork, mine.commits)


def _rank(fork: Manifest | None, commits: Sequence[Commit]) -> tuple[int, int, bytes]:
    first = commits[0]
    members = set(fork.group) if fork is not None else set(first.manifest.group)
    peers = {member.peer for member in members}
    given = sum(contribution.peer in peers for commit in commits for contribution in commit.manifest.contributions)
    inverted = bytes(255 - byte for byte in first.manifest.digest)  # the lower digest ranks higher
    return _signers(first, members), given, inverted


def _signers(first: Commit, members: set[Member]) -> int:
    """Members behind a branch's first step. A quorum's votes count as a quorum, since copies of one certificate differ in votes."""
    if is_regroup(first) or not first.certificate or isinstance(first.certificate[0].message, Form):
        return sum(signed.message.header.member in members for signed in first.certificate)
    return quorum(len(members))
