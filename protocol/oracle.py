"""Does the simulated swarm keep its word? Checked after every event, from what was said, not from what was adopted.

The agreement oracle is the strong form: over all votes ever made, no two commit certificates with one parent can be put
together. Comparing adopted digests alone would miss forks that nobody happened to see.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparseloco.protocol.certificates import is_regroup
from sparseloco.protocol.events import Adopt
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest, Member
from sparseloco.protocol.messages import NIL, PRECOMMIT, Announce, Check, Close, Commit, Form, Proposal, Signed, Vote

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
        self._adopted: dict[bytes, bytes] = {}  # by parent: what a quorum's votes made its successor
        self._regrouped: dict[bytes, dict[bytes, Commit]] = defaultdict(dict)  # by parent: what regroups made of it
        self._states: dict[bytes, bytes] = {}
        self._announced: dict[tuple[str, bytes], bytes] = {}
        self._seen_payload: dict[tuple[str, bytes], float] = {}
        self._valid_marks: dict[bytes, set[str]] = defaultdict(set)
        self._payload_of: dict[bytes, bytes] = {}
        self._said: set[bytes] = set()
        self._once: dict[tuple[Member, bytes, type[object], tuple[int, ...]], bytes] = {}
        self.first_adopted: dict[bytes, float] = {}  # by manifest: when the first peer adopted it
        self.longest_round_seconds = 0.0
        self.longest_part_of_bound = 0.0
        self.commits = 0
        self.only = ""  # a test may ask for one guarantee alone

    def fail(self, guarantee: str, detail: str) -> None:
        if self.only and guarantee != self.only:
            return
        raise Violation(guarantee, f"seed {self._swarm.seed} at {self._swarm.now:.3f} s: {detail}")

    # --- what is said ---------------------------------------------------------------------------------------------

    def said(self, signed: Signed) -> None:
        """A peer made a statement durable or sent it; from here on it counts, whatever becomes of it."""
        if signed.digest in self._said:
            return
        self._said.add(signed.digest)
        message = signed.message
        if self._swarm.profile.durable and message.header.sender not in self._swarm.liars:
            self._contradicts_nothing(signed)
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

    def _contradicts_nothing(self, signed: Signed) -> None:
        """One digest for each thing a member may say once, restarts included."""
        message = signed.message
        header = message.header
        which: tuple[int, ...] = ()
        match message:
            case Vote(phase=phase, attempt=attempt):
                which = (phase, attempt)
            case Close(attempt=attempt) | Proposal(attempt=attempt):
                which = (attempt,)
            case Check(revision=revision):
                which = (revision,)
            case Form(incarnation=incarnation):
                which = (incarnation,)
        key = (header.member, header.parent, type(message), which)
        if self._once.setdefault(key, signed.digest) != signed.digest:
            self.fail("equivocation", f"{header.sender} said two different things as {type(message).__name__} {which}")

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
        if self._swarm.liars & {fields["peer"], fields["link"]} or peer in self._swarm.liars:
            return
        if rule not in HONEST_REFUSALS and self._swarm.profile.durable:
            self.fail("honest-refusal", f"{peer} refused {fields['peer']}: {rule}: {fields['detail']}")

    # --- what is adopted ------------------------------------------------------------------------------------------

    def adopted(self, peer: str, adopt: Adopt, own_payloads: Mapping[bytes, bytes]) -> None:
        """A peer adopted a manifest: one per parent, only what a quorum checked, and its own contribution accounted for."""
        manifest = adopt.commit.manifest
        self.commits += 1
        self._manifests[manifest.digest] = manifest
        if manifest.digest not in self.first_adopted:
            self.first_adopted[manifest.digest] = self._swarm.now
            self._in_time(manifest)
        self._one_successor(peer, adopt.commit)
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
            holders = self._swarm.holders(contribution.payload)
            if holders < group.quorum:
                self.fail("nothing-lost", f"only {holders} peers hold a payload that round {manifest.round} committed")
        self._accounted(peer, adopt, own_payloads)

    def _one_successor(self, peer: str, commit: Commit) -> None:
        """Votes give a manifest one successor; a regroup may give it another only out of reach of any quorum."""
        manifest = commit.manifest
        parent = self._manifests.get(manifest.parent)
        if is_regroup(commit) or (manifest.round == GENESIS_ROUND and commit.certificate):
            self._regrouped[manifest.parent][manifest.digest] = commit
        elif self._adopted.setdefault(manifest.parent, manifest.digest) != manifest.digest:
            self.fail("agreement", f"{peer} adopted another manifest {manifest.round} than its fellows")
        voted = self._adopted.get(manifest.parent)
        for digest, regroup in self._regrouped[manifest.parent].items():
            signers = len({s.message.header.member for s in regroup.certificate} - self._lying(regroup))
            if parent is not None and voted not in (None, digest) and signers > len(parent.group) - parent.quorum:
                self.fail("agreement", f"round {manifest.round} was voted on behind the back of {signers} that had regrouped")

    def _lying(self, commit: Commit) -> set[Member]:
        return {s.message.header.member for s in commit.certificate if s.message.header.sender in self._swarm.liars}

    def rolled_back(self, peer: str, lost: Sequence[Commit], own_payloads: Mapping[bytes, bytes]) -> None:
        """Only a regroup's fork is rolled back, and every contribution in the lost rounds is still there to be given back."""
        for commit in lost:
            for contribution in commit.manifest.contributions:
                if contribution.peer == peer and own_payloads.get(commit.manifest.parent) is None:
                    self.fail("nothing-lost", f"{peer} no longer holds its contribution to lost round {commit.manifest.round}")

    def _accounted(self, peer: str, adopt: Adopt, own_payloads: Mapping[bytes, bytes]) -> None:
        """Whoever announced learns whether it was committed or returned, and still holds it either way."""
        manifest = adopt.commit.manifest
        own = self._announced.get((peer, manifest.parent))
        if not self._swarm.profile.durable or own is None:
            return
        if not adopt.announced:
            self.fail("nothing-lost", f"{peer} forgot its announcement when round {manifest.round} was decided")
        if own and own_payloads.get(manifest.parent) != own:
            self.fail("nothing-lost", f"{peer} no longer holds what it announced in round {manifest.round}")
        counted = any(c.peer == peer and c.payload == own for c in manifest.contributions)
        if adopt.committed != counted:
            self.fail("nothing-lost", f"{peer} takes committed for {adopt.committed} of its contribution, it is {counted}")

    def bound_seconds(self, parent: Manifest) -> float:
        """G4: budget + exchange + for each attempt up to f + 1 the detection time and three voting times, doubling."""
        rules = self._swarm.rules
        attempts = range(len(parent.group) - parent.quorum + 1)
        steps = sum(rules.detection_seconds + 3 * rules.vote_timeout_seconds(attempt) for attempt in attempts)
        return parent.budget_ms / 1000 + rules.exchange_seconds + steps

    def _in_time(self, manifest: Manifest) -> None:
        begun = self.first_adopted.get(manifest.parent)
        if begun is None or begun < self._swarm.disturbed_until or self._swarm.profile.loss > 0.1:
            return
        parent = self._manifests[manifest.parent]
        if len(parent.group) < self._swarm.rules.membership.min_peers:
            return
        seconds, bound = self._swarm.now - begun, self.bound_seconds(parent)
        self.longest_round_seconds = max(self.longest_round_seconds, seconds)
        self.longest_part_of_bound = max(self.longest_part_of_bound, seconds / bound)
        if seconds > bound:
            self.fail("progress", f"round {manifest.round} took {seconds:.1f} s without a crash, its bound is {bound:.1f} s")

    def state(self, peer: str, manifest: bytes, digest: bytes) -> None:
        if self._states.setdefault(manifest, digest) != digest:
            self.fail("agreement", f"{peer} holds another state after manifest {manifest.hex()[:12]}")

    def known(self, commit: Commit) -> None:
        """A genesis that everybody knows beforehand, or a commit that is durable, though its peer may crash before it adopts it."""
        self._manifests[commit.manifest.digest] = commit.manifest
