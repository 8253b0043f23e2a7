"""When a manifest counts as decided: a quorum of precommits of the group before it, or the signatures of all founders."""

from __future__ import annotations

from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.evidence import check_votes
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest, genesis_manifest
from sparseloco.protocol.messages import PRECOMMIT, Commit, Form
from sparseloco.protocol.rules import Rules


def verify_commit(commit: Commit, parent: Manifest) -> None:
    """`commit` follows `parent` and a quorum of parent's group precommitted it in one attempt. Raises RemoteProtocolError.

    Signatures are the caller's to verify (`Signed.verify`); this looks at who signed what.
    """
    manifest = commit.manifest
    if (manifest.run, manifest.round, manifest.parent) != (parent.run, parent.round + 1, parent.digest):
        raise RemoteProtocolError("parent", f"manifest {manifest.round} does not follow manifest {parent.round} of this chain")
    check_votes(commit.certificate, PRECOMMIT, manifest.digest, parent)


def founding_commit(rules: Rules) -> Commit:
    """The genesis of a run whose file lists its founders: known to all, so it needs no signature."""
    members = rules.founding_members()
    if not members:
        raise RemoteProtocolError("genesis", "this run's file lists no founders; its first group forms by signatures")
    return Commit(genesis_manifest(rules.run, rules.genesis_state, members, rules.membership.budget_cap_ms), ())


def verify_genesis(commit: Commit, rules: Rules) -> None:
    """`commit` is this run's genesis: the founders of the run file, or a first group that every member signed (rule 18)."""
    manifest = commit.manifest
    expected = genesis_manifest(rules.run, rules.genesis_state, manifest.group, rules.membership.budget_cap_ms)
    if manifest.round != GENESIS_ROUND or manifest != expected:
        raise RemoteProtocolError("genesis", "the genesis manifest does not follow from the run file")
    if rules.founders:
        if manifest.group != rules.founding_members():
            raise RemoteProtocolError("genesis", "the first group is not the run file's founders")
        if commit.certificate:
            raise RemoteProtocolError("genesis", "the founders of the run file need no certificate")
        return
    if len(manifest.group) < rules.membership.min_peers:
        raise RemoteProtocolError("genesis", f"a first group of {len(manifest.group)}, min_peers is {rules.membership.min_peers}")
    signers = set()
    incarnations = set()
    for signed in commit.certificate:
        form = signed.message
        place = (form.header.run, form.header.round, form.header.parent)
        expected_place = (rules.run, GENESIS_ROUND, rules.placeholder_parent())
        if not isinstance(form, Form) or form.members != manifest.group or place != expected_place:
            raise RemoteProtocolError("genesis", "a genesis certificate holds something else than Forms of its group")
        signers.add(form.header.member)
        incarnations.add(form.incarnation)
    if signers != set(manifest.group) or len(incarnations) != 1 or len(commit.certificate) != len(signers):
        raise RemoteProtocolError("genesis", "not every member of the first group signed the same incarnation")
