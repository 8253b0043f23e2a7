"""What is left of a group goes on (rule 17), and which of two branches wins (rule 19): one machine's stories."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from swarm_messages import (
    LIMITS,
    STATE,
    Fellow,
    genesis,
    make_machine,
    make_rules,
    member,
    notes,
    refusals,
    said,
    saved,
    unsigned,
)

from sparseloco.protocol.certificates import founding_commit, verify_commit
from sparseloco.protocol.encoding import sha256
from sparseloco.protocol.errors import LocalProtocolError, RemoteProtocolError
from sparseloco.protocol.events import (
    Adopt,
    Announced,
    BranchFetched,
    Effect,
    FetchBranch,
    Formed,
    Proof,
    Received,
    RollBack,
    StopAndAsk,
    Tick,
    Voted,
    still_binding,
)
from sparseloco.protocol.forks import Branch, theirs_wins
from sparseloco.protocol.manifest import Contribution, Manifest, regroup_manifest
from sparseloco.protocol.messages import Commit, Form, Heartbeat, Signed, Vote
from sparseloco.protocol.states import Gathering, Voting, markdown, step

NAMES = ("alice", "bob", "carol", "dave")
PARENT = genesis(*NAMES)
RULES = make_rules(*NAMES)
PATIENCE = 40.0  # seconds after which a quorum's absence is certain, before round 0 too


def form(manifest: Manifest, peer: str, *peers: str, incarnation: int = 0, parent: Manifest = PARENT) -> Signed:
    members = tuple(member(name) for name in sorted(peers))
    return unsigned(Form(Fellow(parent, peer).header, incarnation, members, manifest.digest))


def regroup(*peers: str, parent: Manifest = PARENT, base: bytes = STATE) -> Manifest:
    return regroup_manifest(parent, base, [member(peer) for peer in peers], LIMITS)


def regroup_commit(*peers: str, parent: Manifest = PARENT) -> Commit:
    manifest = regroup(*peers, parent=parent)
    return Commit(manifest, tuple(form(manifest, peer, *peers, parent=parent) for peer in sorted(peers)))


def voted_commit(parent: Manifest, *voters: str, group: tuple[str, ...] = NAMES, contributors: tuple[str, ...] = ()) -> Commit:
    given = tuple(Contribution(peer, sha256(f"{parent.round}{peer}".encode()), 10, 1, 1) for peer in sorted(contributors))
    members = tuple(member(peer) for peer in sorted(group))
    manifest = Manifest(parent.run, parent.round + 1, parent.digest, STATE, given, members, 1000)
    return Commit(manifest, tuple(Fellow(parent, peer).precommits(manifest.digest) for peer in sorted(voters)))


class Story:
    """One member, the clock, and the fellows that heartbeat every second."""

    def __init__(self, peer: str, records: Any = (), rules: Any = RULES, heads: tuple[Commit, ...] = ()) -> None:
        self.now = 0.0
        chain = (founding_commit(rules), *heads)
        self.machine = make_machine(member(peer), rules, chain[-1], list(records), recent=chain)

    def hear(self, frame: Any, link: str = "") -> list[Effect]:
        return self.machine.handle(Received(link or frame.message.header.sender, frame), self.now)

    def live(self, seconds: float, *peers: str, head: Manifest | None = None) -> list[Effect]:
        """Time passes while `peers` are heard at `head` (the machine's own by default)."""
        effects: list[Effect] = []
        for _ in range(int(seconds)):
            self.now += 1.0
            for peer in peers:
                at = head or (self.machine.head.manifest if self.machine.head else PARENT)
                beat = Heartbeat(PARENT.run, bytes(16), at.round, at.digest, 0, False, frozenset())
                effects += self.machine.handle(Received(peer, beat), self.now)
            effects += self.machine.handle(Tick(), self.now)
        return effects


def forms(effects: list[Effect]) -> list[Form]:
    """What the machine itself signed: its Forms are durable before they are sent."""
    return [r.form.message for r in saved(effects) if isinstance(r, Formed) and r.form.message in said(effects)]


def adopted(effects: list[Effect]) -> list[Commit]:
    return [effect.commit for effect in effects if isinstance(effect, Adopt)]


# --- rule 17 ----------------------------------------------------------------------------------------------------------


def test_lowest_survivor_proposes_durably_and_completes_when_all_on_the_list_signed() -> None:
    story = Story("alice")
    effects = story.live(PATIENCE, "bob")
    (proposed,) = forms(effects)
    assert [m.peer for m in proposed.members] == ["alice", "bob"] and proposed.manifest == regroup("alice", "bob").digest
    assert [r.form.message for r in saved(effects) if isinstance(r, Formed)] == [proposed]
    (commit,) = adopted(story.hear(form(regroup("alice", "bob"), "bob", "alice", "bob")))
    assert commit.manifest == regroup("alice", "bob")
    verify_commit(commit, PARENT, RULES)


def test_member_signs_what_the_lowest_proposed_and_takes_the_commit_from_it() -> None:
    story = Story("bob")
    assert not forms(story.live(PATIENCE, "alice"))
    (signed,) = forms(story.hear(form(regroup("alice", "bob"), "alice", "alice", "bob")))
    assert signed.manifest == regroup("alice", "bob").digest
    assert adopted(story.hear(regroup_commit("alice", "bob"), "alice"))


def test_nobody_regroups_while_a_quorum_is_heard_or_below_min_peers() -> None:
    assert not forms(Story("alice").live(PATIENCE, "bob", "carol"))
    assert not forms(Story("alice").live(PATIENCE))
    heard = Story("bob")
    heard.live(PATIENCE, "alice", "carol")
    assert not forms(heard.hear(form(regroup("alice", "bob"), "alice", "alice", "bob")))


def test_whoever_signed_a_regroup_votes_no_more_after_a_restart_too() -> None:
    story = Story("bob")
    story.live(PATIENCE, "alice")
    effects = story.hear(form(regroup("alice", "bob"), "alice", "alice", "bob"))
    records = [record for record in saved(effects) if isinstance(record, Formed)]
    for again in (story, Story("bob", records)):
        effects = again.live(2 * PATIENCE, "alice", "carol", "dave")
        assert not [record for record in saved(effects) if isinstance(record, Voted | Announced)]


def test_member_joins_a_regroup_once_too_many_are_bound_for_a_quorum() -> None:
    """carol hears everybody, but alice and bob signed: two of four vote no more, and three are a quorum."""
    story = Story("carol")
    story.live(PATIENCE, "alice", "bob", "dave")
    story.hear(form(regroup("alice", "bob"), "alice", "alice", "bob"))
    story.hear(form(regroup("alice", "bob"), "bob", "alice", "bob"))
    everybody = regroup(*NAMES)
    assert not forms(story.live(1, "alice", "bob", "dave"))
    (signed,) = forms(story.hear(form(everybody, "alice", *NAMES, incarnation=1)))
    assert signed.manifest == everybody.digest


def test_member_with_its_quorum_does_not_follow_a_regroup_that_it_did_not_sign() -> None:
    story = Story("carol")
    story.live(PATIENCE, "bob", "dave")
    assert not adopted(story.hear(regroup_commit("alice", "bob"), "alice"))
    left_behind = Story("carol")
    left_behind.live(PATIENCE)
    assert adopted(left_behind.hear(regroup_commit("alice", "bob"), "alice"))


def test_regroup_takes_the_prepared_manifest_whose_payloads_its_members_hold() -> None:
    """Three prevoted; then carol and dave are gone: what could have been committed by them is what goes on."""
    story = Story("alice")
    announced = [Fellow(PARENT, peer).announces() for peer in NAMES[1:]]
    leader = Fellow(PARENT, PARENT.leader_order()[0])
    close = leader.closes(*announced)
    checks = [Fellow(PARENT, peer).checks(*announced) for peer in NAMES[1:]]
    proposal = leader.proposes(close, *checks)
    story.live(1, "bob", "carol", "dave")
    for signed in (*announced, close, *checks, proposal):
        story.hear(signed)
    (prepared,) = story.machine.round.evidence.by_digest.values()
    for peer in NAMES[1:]:
        story.hear(Fellow(PARENT, peer).prevotes(prepared[0].digest))
    effects = story.live(PATIENCE, "bob")
    assert forms(effects)[-1].manifest == prepared[0].digest
    signers = tuple(form(prepared[0], peer, "alice", "bob") for peer in ("alice", "bob"))
    verify_commit(Commit(prepared[0], signers), PARENT, RULES)


@pytest.mark.parametrize(
    ("why", "peers", "signers", "changes"),
    [
        ("not everybody signed", ("alice", "bob"), ("alice",), {}),
        ("below min_peers", ("alice",), ("alice",), {}),
        ("somebody from outside", ("alice", "zoe"), ("alice", "zoe"), {}),
        ("a strange contribution", ("alice", "bob"), ("alice", "bob"), {"contributions": (Contribution("zoe", STATE, 1, 1, 1),)}),
    ],
)
def test_regroup_certificate_is_refused(why: str, peers: tuple[str, ...], signers: tuple[str, ...], changes: Any) -> None:
    manifest = dataclasses.replace(regroup(*peers), **changes)
    with pytest.raises(RemoteProtocolError, match="certificate"):
        verify_commit(Commit(manifest, tuple(form(manifest, peer, *peers) for peer in signers)), PARENT, RULES)


# --- rule 19 ----------------------------------------------------------------------------------------------------------

MANY = (voted_commit(PARENT, *NAMES[:3], contributors=NAMES[:3]),)
FEW = (regroup_commit("carol", "dave"),)


def test_live_branch_beats_a_dead_one_and_more_signers_beat_fewer() -> None:
    assert theirs_wins(PARENT, Branch(FEW, True), Branch(MANY, True))
    assert not theirs_wins(PARENT, Branch(MANY, True), Branch(FEW, True))
    assert theirs_wins(PARENT, Branch(MANY, False), Branch(FEW, True))
    assert not theirs_wins(PARENT, Branch(FEW, True), Branch(MANY, False))


def test_newcomers_contributions_do_not_make_a_branch_win() -> None:
    mine = (regroup_commit("alice", "bob"),)
    first = regroup_commit("carol", "dave")
    crowd = ("carol", "dave", "zoe")
    fast = voted_commit(first.manifest, "carol", "dave", contributors=("zoe",), group=crowd)
    own = voted_commit(mine[0].manifest, "alice", "bob", contributors=("alice",))
    assert not theirs_wins(PARENT, Branch((*mine, own), True), Branch((first, fast), True))


def test_exactly_one_of_two_equal_branches_wins_seen_from_either_side() -> None:
    left, right = (regroup_commit("alice", "bob"),), (regroup_commit("carol", "dave"),)
    there, back = (theirs_wins(PARENT, Branch(a, True), Branch(b, True)) for a, b in ((left, right), (right, left)))
    assert there != back


def test_copies_of_one_certificate_with_more_votes_weigh_the_same() -> None:
    three, four = (voted_commit(PARENT, *NAMES[:n]) for n in (3, 4))
    other = (voted_commit(PARENT, *NAMES[:3], contributors=("alice",)),)
    assert theirs_wins(PARENT, Branch((three,), True), Branch(other, True))
    assert theirs_wins(PARENT, Branch((four,), True), Branch(other, True))


def test_machine_asks_for_a_branch_it_hears_of_and_changes_to_the_winner() -> None:
    story = Story("carol", heads=FEW)
    effects = story.live(1, "alice", "bob", head=MANY[0].manifest)
    assert [e.peer for e in effects if isinstance(e, FetchBranch)] == ["alice", "bob"]
    story.live(5, "alice", "bob", "dave", head=MANY[0].manifest)
    effects = story.machine.handle(BranchFetched("alice", founding_commit(RULES), FEW, MANY), story.now)
    (change,) = [e for e in effects if isinstance(e, RollBack)]
    assert (change.fork_round, change.lost, change.commits) == (-1, FEW, MANY)
    assert "rolled_back" in notes(effects) and story.machine.head == MANY[0]


def test_winner_stays_and_an_invalid_branch_is_refused_by_name() -> None:
    story = Story("alice", heads=MANY)
    story.live(5, "bob", "carol")
    effects = story.machine.handle(BranchFetched("dave", founding_commit(RULES), MANY, FEW), story.now)
    assert not [effect for effect in effects if isinstance(effect, RollBack)]
    unsigned_branch = (Commit(FEW[0].manifest, FEW[0].certificate[:1]),)
    effects = story.machine.handle(BranchFetched("dave", founding_commit(RULES), MANY, unsigned_branch), story.now)
    assert refusals(effects) == ["certificate"]


def test_branch_longer_than_the_run_allows_is_not_left_unasked() -> None:
    rules = make_rules(*NAMES, max_rollback_rounds=0)
    story = Story("carol", rules=rules, heads=FEW)
    story.live(5, "alice", "bob", "dave", head=MANY[0].manifest)
    effects = story.machine.handle(BranchFetched("alice", founding_commit(rules), FEW, MANY), story.now)
    assert [e.depth_rounds for e in effects if isinstance(e, StopAndAsk)] == [1]
    assert story.machine.head == FEW[0]


def test_node_that_comes_back_to_a_head_it_left_is_bound_by_what_it_said_there() -> None:
    vote = unsigned(Vote(Fellow(FEW[0].manifest, "carol").header, 1, 0, b""))
    restarted = Story("carol", [Voted(vote)], heads=MANY)  # the vote was cast on the branch that was left
    restarted.live(1)
    restarted.machine._change_branch(-1, MANY, FEW)
    assert restarted.machine.head == FEW[0]
    assert vote.held_id in restarted.machine.round.evidence.messages
    kept = still_binding([Voted(vote)], MANY[0])
    assert kept == [Voted(vote)] and not still_binding([Voted(vote)], voted_commit(FEW[0].manifest, "carol", "dave"))


# --- rule 15 ----------------------------------------------------------------------------------------------------------


def test_two_votes_of_one_member_are_a_proof_and_it_is_dead_in_ones_checks_from_then_on() -> None:
    story = Story("alice")
    story.live(1, "bob", "carol", "dave")
    liar = Fellow(PARENT, "bob")
    story.hear(liar.prevotes(b"\1" * 32))
    effects = story.hear(liar.prevotes(b"\2" * 32))
    (proof,) = [e for e in effects if isinstance(e, Proof)]
    assert proof.peer == "bob" and proof.first.message.digest != proof.second.message.digest
    assert "evidence" in notes(effects) and story.machine.banned == {"bob"}
    assert story.machine.round._is_gone(member("bob")) and not story.machine.round._is_gone(member("carol"))


# --- the table of states ----------------------------------------------------------------------------------------------


def test_documentation_holds_the_table_of_states_as_the_code_has_it() -> None:
    text = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    assert markdown() in text, "print it anew with python -m sparseloco.protocol.states"


def test_a_move_that_is_not_in_the_table_is_the_machines_own_fault() -> None:
    assert step(Voting.AWAITING, Voting.PREVOTED) is Voting.PREVOTED
    with pytest.raises(LocalProtocolError, match="announced cannot become training"):
        step(Gathering.ANNOUNCED, Gathering.TRAINING)
