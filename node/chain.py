"""The chain of manifests as one node keeps it: on the disk, verified when read, extended only by what its rules allow."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sparseloco.bootstrap.errors import StateError
from sparseloco.bootstrap.identity import verify_signature
from sparseloco.node.store import StateDir
from sparseloco.protocol.certificates import founding_commit, verify_commit, verify_genesis
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.events import decode_commit, encode_commit
from sparseloco.protocol.machine import COMMITS_PER_ANSWER, RECENT_COMMITS
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest
from sparseloco.protocol.messages import Commit
from sparseloco.protocol.rules import Rules

logger = logging.getLogger(__name__)


class Chain:
    """This node's chain of commits: read from disk with its links checked, extended only by what a quorum signed."""

    def __init__(self, store: StateDir, rules: Rules) -> None:
        self.store = store
        self.rules = rules
        self.commits: dict[int, Commit] = {}
        # The furthest round that was ever kept here. A head before it means that the votes since are forgotten.
        self.reached = max(store.chain.rounds(), default=GENESIS_ROUND - 1)
        self._read()

    @property
    def head(self) -> Commit | None:
        return self.commits[max(self.commits)] if self.commits else None

    @property
    def head_round(self) -> int:
        return max(self.commits, default=GENESIS_ROUND - 1)

    def manifest(self, round_number: int) -> Manifest | None:
        commit = self.commits.get(round_number)
        return commit.manifest if commit else None

    def digest_of(self, round_number: int) -> bytes | None:
        """The digest of the manifest of a round, None if this chain has none."""
        commit = self.commits.get(round_number)
        return commit.manifest.digest if commit else None

    def recent(self) -> tuple[Commit, ...]:
        """The last commits, by which another branch is told from this one, oldest first."""
        first = self.head_round - max(RECENT_COMMITS, self.rules.max_rollback_rounds + 2) + 1
        return tuple(self.commits[number] for number in sorted(self.commits) if number >= first)

    def _read(self) -> None:
        for round_number in self.store.chain.rounds():
            try:
                commit = decode_commit(self.store.chain.read(round_number))
                self._verify(commit, signatures=True)  # a certificate that rotted would be refused by every joiner
            except (RemoteProtocolError, StateError) as error:
                logger.warning("chain file of round %d is damaged (%s); it is fetched again", round_number, error)
                break
            self.commits[round_number] = commit
        if not self.commits and self.rules.founders:
            self.append(founding_commit(self.rules))

    def _verify(self, commit: Commit, *, signatures: bool) -> None:
        head = self.head
        if signatures:
            for signed in commit.certificate:
                signed.verify(verify_signature)
        if head is None:
            verify_genesis(commit, self.rules)
        else:
            verify_commit(commit, head.manifest, self.rules)

    def extend(self, data: bytes) -> Commit:
        """Verify a donor's next commit and keep it durably; RemoteProtocolError if it does not follow."""
        commit = decode_commit(data)
        self._verify(commit, signatures=True)
        self.append(commit)
        return commit

    def following(self, head_round: int) -> list[Commit]:
        """The few commits after a round that bring a peer with that head on, oldest first."""
        first = max(head_round + 1, GENESIS_ROUND)
        return [self.commits[number] for number in range(first, first + COMMITS_PER_ANSWER) if number in self.commits]

    def check(self, commit: Commit) -> None:
        """RemoteProtocolError unless a commit whose signatures were verified follows the head."""
        self._verify(commit, signatures=False)

    def append(self, commit: Commit) -> None:
        """Keep a commit that was verified already."""
        number = commit.manifest.round
        self.store.chain.write(number, encode_commit(commit.manifest, commit.certificate))
        self.commits[number] = commit

    def switch(self, fork_round: int, commits: Sequence[Commit]) -> None:
        """Put another branch in the place of what follows `fork_round`; its commits are verified already.

        Its first commit replaces this branch's before anything is removed, so that after a crash in between the head is never
        again the fork point, where this session voted.
        """
        self.store.chain.write(commits[0].manifest.round, encode_commit(commits[0].manifest, commits[0].certificate))
        self.store.chain.truncate_after(commits[0].manifest.round)
        self.commits = {number: commit for number, commit in self.commits.items() if number <= fork_round}
        for commit in commits:
            self.append(commit)
