"""Does the simulated swarm keep its word? Checked after every event, from what was said, not from what was adopted.

The agreement oracle is the strong form: over all votes ever made, no two commit certificates with one parent can be put
together. Comparing adopted digests alone would miss forks that nobody happened to see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest, Member
from sparseloco.protocol.messages import NIL, PRECOMMIT, Announce, Check, Commit, Form, Signed, Vote

if TYPE_CHECKING:
    from sparseloco.protocol.simulator import SimulatedSwarm

# Refusals that honest peers cause each other through lateness and restarts; any other refusal among honest peers is a bug.
HONEST_REFUSALS = {"join", "not-a-member"}


class Violation(AssertionError):
    """A guarantee was broken: `guarantee` is its short name."""

    def __init__(self, guarantee: str, detail: str) -> None:
        super().__init__(f"{guarantee}: {detail}")
        self.guarantee = guarantee


class Oracle:
    """Listens to everything a swarm says and does; raises Violation at the first broken guarantee."""

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self._swarm = swarm
        self._precommits: dict[tuple[bytes, int, bytes], set[Member]] = defaultdict(set)
        self._certified: dict[bytes, bytes] = {}
        self._manifests: dict[bytes, Manifest] = {}
        self._adopted: dict[bytes, bytes] = {}
        self._states: dict[tuple[int, bytes], bytes] = {}
        self._head_of: dict[str, bytes] = {}
        self._announced: dict[tuple[str, bytes], bytes] = {}
        self._seen_payload: dict[tuple[str, bytes], float] = {}
        self._valid_marks: dict[bytes, set[str]] = defaultdict(set)
        self._payload_of: dict[bytes, bytes] = {}
        self._said: set[bytes] = set()
        self.commits = 0

    def fail(self, guarantee: str, detail: str) -> None:
        raise Violation(guarantee, f"seed {self._swarm.seed} at {self._swarm.now:.3f} s: {detail}")

    # --- what is said ---------------------------------------------------------------------------------------------

    def said(self, signed: Signed) -> None:
        """A peer made a statement durable or sent it; from here on it counts, whatever becomes of it."""
        if signed.digest in self._said:
            return
        self._said.add(signed.digest)
        message = signed.message
        if isinstance(message, Vote) and message.phase == PRECOMMIT and message.digest != NIL:
            self._precommitted(message)
        elif isinstance(message, Check):
            for digest in message.valid:
                self._valid_marks[digest].add(message.header.sender)
        elif isinstance(message, Announce):
            key = (message.header.sender, message.header.parent)
            if key in self._seen_payload and not message.abstains:
                self.fail("commit-then-reveal", f"{message.header.sender} announced after it had read another's payload")
            self._payload_of[signed.digest] = message.payload
        elif isinstance(message, Form):
            return

    def _precommitted(self, vote: Vote) -> None:
        parent = vote.header.parent
        manifest = self._manifests.get(parent)
        if manifest is None:
            self.fail("agreement", f"{vote.header.sender} precommitted on a parent that nobody adopted")
            return
        voters = self._precommits[(parent, vote.attempt, vote.digest)]
        voters.add(vote.header.member)
        if len(voters) < manifest.quorum:
            return
        other = self._certified.setdefault(parent, vote.digest)
        if other != vote.digest:
            self.fail("agreement", f"two certificates follow one manifest in round {vote.header.round}")

    def announced(self, peer: str, signed: Signed) -> None:
        """A durable announcement: one payload per peer and parent, restarts included."""
        assert isinstance(signed.message, Announce)
        key = (peer, signed.message.header.parent)
        if self._announced.setdefault(key, signed.message.payload) != signed.message.payload and self._swarm.profile.durable:
            self.fail("one-announcement", f"{peer} announced two payloads in one round")

    def payload_seen(self, peer: str, signed: Signed) -> None:
        self._seen_payload.setdefault((peer, signed.message.header.parent), self._swarm.now)

    def refused(self, peer: str, fields: Mapping[str, Any]) -> None:
        rule = fields["rule"]
        if rule not in HONEST_REFUSALS and self._swarm.profile.durable:
            self.fail("honest-refusal", f"{peer} refused {fields['peer']}: {rule}: {fields['detail']}")

    # --- what is adopted ------------------------------------------------------------------------------------------

    def adopted(self, peer: str, commit: Commit, own_payloads: Mapping[int, bytes]) -> None:
        manifest = commit.manifest
        self.commits += 1
        self._manifests[manifest.digest] = manifest
        previous = self._adopted.setdefault(manifest.parent, manifest.digest)
        if previous != manifest.digest:
            self.fail("agreement", f"{peer} adopted another manifest {manifest.round} than its fellows")
        if manifest.round == GENESIS_ROUND:
            return
        group = self._manifests[manifest.parent]
        peers = [contribution.peer for contribution in manifest.contributions]
        if len(set(peers)) != len(peers) or not set(peers) <= {member.peer for member in group.group}:
            self.fail("validity", f"round {manifest.round} counts a peer twice or from outside its group")
        for contribution in manifest.contributions:
            marks = max(
                (len(who) for digest, who in self._valid_marks.items() if self._payload_of.get(digest) == contribution.payload),
                default=0,
            )
            if marks < group.quorum:
                self.fail("validity", f"a payload of {contribution.peer} was committed with {marks} valid marks")
            if contribution.peer == peer and own_payloads.get(manifest.round) != contribution.payload:
                self.fail("nothing-lost", f"{peer} no longer holds its contribution that round {manifest.round} committed")

    def state(self, peer: str, number: int, digest: bytes) -> None:
        key = (number, self._adopted.get(b"", b""))
        if self._states.setdefault(key, digest) != digest:
            self.fail("agreement", f"{peer} holds another state after round {number}")

    def founded(self, commit: Commit) -> None:
        """A genesis that everybody knows beforehand."""
        self._manifests[commit.manifest.digest] = commit.manifest
