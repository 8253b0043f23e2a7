"""When a manifest counts as decided: by a quorum of precommits of the group before it, or by the Forms of a whole list.

Only what has no quorum goes by Forms: the first group (rule 18), and what is left of a group that lost its quorum (rule 17).
"""

from __future__ import annotations

from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.evidence import check_votes
from sparseloco.protocol.manifest import GENESIS_ROUND, Manifest, Member, genesis_manifest
from sparseloco.protocol.messages import PRECOMMIT, Commit, Form
from sparseloco.protocol.rules import Rules


def verify_commit(commit: Commit, parent: Manifest, rules: Rules) -> None:
    """`commit` follows `parent` by the votes of parent's group, or by its regroup. Raises RemoteProtocolError.

    Signatures are the caller's to verify (`Signed.verify`); this looks at who signed what.
    """
    manifest = commit.manifest
    if (manifest.run, manifest.round, manifest.parent) != (parent.run, parent.round + 1, parent.digest):
        raise RemoteProtocolError("parent", f"manifest {manifest.round} does not follow manifest {parent.round} of this chain")
    if is_regroup(commit):
        _verify_regroup(commit, parent, rules)
    else:
        check_votes(commit.certificate, PRECOMMIT, manifest.digest, parent)


def is_regroup(commit: Commit) -> bool:
    """Whether a list of members, and no quorum, stands behind a manifest after the genesis."""
    certificate = commit.certificate
    return commit.manifest.round != GENESIS_ROUND and bool(certificate) and isinstance(certificate[0].message, Form)


def _verify_regroup(commit: Commit, parent: Manifest, rules: Rules) -> None:
    """Rule 17: at least `min_peers` of parent's group all signed it; nobody from outside contributes.

    Whether it is the regroup's own manifest or one that a quorum had prepared is what every signer saw for itself.
    """
    manifest = commit.manifest
    members = _signed_by_all(commit, (parent.run, manifest.round, parent.digest))
    if not set(members) <= set(parent.group):
        raise RemoteProtocolError("certificate", "a regroup holds somebody from outside the group")
    if len(members) < rules.membership.min_peers:
        raise RemoteProtocolError("certificate", f"a regroup of {len(members)}, min_peers is {rules.membership.min_peers}")
    if not {c.peer for c in manifest.contributions} <= {m.peer for m in parent.group}:
        raise RemoteProtocolError("certificate", "a regroup's manifest counts a contribution from outside the group")


def _signed_by_all(commit: Commit, place: tuple[bytes, int, bytes]) -> tuple[Member, ...]:
    """The members of a list that every one of them signed for this manifest in one incarnation, at `place`."""
    keys = set()
    signers = []
    for signed in commit.certificate:
        form = signed.message
        if not isinstance(form, Form) or (form.header.run, form.header.round, form.header.parent) != place:
            raise RemoteProtocolError("certificate", "a certificate holds something else than Forms of its place")
        keys.add(form.key)
        signers.append(form.header.member)
    if len(keys) != 1:
        raise RemoteProtocolError("certificate", "a certificate's Forms differ in list, incarnation or manifest")
    (_, members, digest) = keys.pop()
    if digest != commit.manifest.digest or tuple(sorted(signers)) != members:
        raise RemoteProtocolError("certificate", "not every member of the list signed this manifest")
    return members


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
    members = _signed_by_all(commit, (rules.run, GENESIS_ROUND, rules.placeholder_parent()))
    if members != manifest.group:
        raise RemoteProtocolError("genesis", "the first group is not the list that signed it")
