"""One machine's story, event by event: what it says, what it makes durable first, and what it refuses.

Four founders; alice is the machine, her fellows' words come from `Fellow`. Every story uses the order in which round 0's
attempts are led, whatever it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from swarm_messages import (
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
    tick_until,
    unsigned,
)

from sparseloco.protocol.certificates import founding_commit
from sparseloco.protocol.encoding import sha256
from sparseloco.protocol.errors import LocalProtocolError
from sparseloco.protocol.events import (
    Adopt,
    Announced,
    Committed,
    DoorClosed,
    Effect,
    Fetch,
    FetchBranch,
    LeaveRequested,
    Note,
    PeerSeen,
    Persist,
    Received,
    Record,
    Reveal,
    Said,
    Send,
    Settled,
    StateDigest,
    Tick,
    Train,
    Trained,
    Voted,
)
from sparseloco.protocol.machine import Machine
from sparseloco.protocol.messages import (
    NIL,
    NO_HEAD_ROUND,
    PRECOMMIT,
    PREVOTE,
    Announce,
    Check,
    Close,
    Commit,
    Form,
    Header,
    Heartbeat,
    Join,
    Leave,
    Proposal,
    Signed,
    Vote,
)

PARENT = genesis("alice", "bob", "carol", "dave")
LEADERS = PARENT.leader_order()
ME = LEADERS[1]  # follows in attempt 0, leads attempt 1
OTHERS = tuple(peer for peer in sorted(LEADERS) if peer != ME)
RULES = make_rules("alice", "bob", "carol", "dave")
FELLOWS = {peer: Fellow(PARENT, peer) for peer in LEADERS}
LEADER = FELLOWS[LEADERS[0]]


class Story:
    """A machine and the clock; each step returns the effects of one event."""

    def __init__(self, peer: str = ME, records: list[Record] | None = None, rules: Any = RULES, now: float = 0.0) -> None:
        self.now = now
        self.machine = make_machine(member(peer), rules, founding_commit(rules), records)

    def tick(self, seconds: float = 0.0) -> list[Effect]:
        self.now += seconds
        return self.machine.handle(Tick(), self.now)

    def hear(self, signed: Any, link: str = "") -> list[Effect]:
        author = link or (signed.message.header.sender if isinstance(signed, Signed) else OTHERS[0])
        return self.machine.handle(Received(author, signed), self.now)

    def beats(self, *peers: str, **changes: Any) -> list[Effect]:
        effects: list[Effect] = []
        for peer in peers or OTHERS:
            if peer != self.machine.me.peer:
                effects += self.hear(FELLOWS[peer].beats(**changes), peer)
        return effects

    def trains(self) -> Signed:
        effects = self.machine.handle(Trained(0, sha256(b"my payload"), 1000, 15, 4000, 3000), self.now)
        (record,) = [r for r in saved(effects) if isinstance(r, Announced)]
        return record.announcement


def started(**settings: Any) -> tuple[Story, dict[str, Signed]]:
    """Everybody is alive and has announced."""
    story = Story(**settings)
    story.beats()
    mine = story.trains() if story.machine.me.peer in FELLOWS else None
    announced = {peer: FELLOWS[peer].announces() for peer in LEADERS if peer != story.machine.me.peer}
    for signed in announced.values():
        story.hear(signed)
    return story, announced | ({story.machine.me.peer: mine} if mine else {})


def closed(**settings: Any) -> tuple[Story, dict[str, Signed], Signed]:
    story, announced = started(**settings)
    close = LEADER.closes(*announced.values())
    story.hear(close)
    return story, announced, close


def proposed(**settings: Any) -> tuple[Story, Signed, bytes]:
    """Closed, everything settled, and the leader has proposed; the manifest digest all honest members now prevote."""
    story, announced, close = closed(**settings)
    for signed in announced.values():
        story.machine.handle(Settled(signed.digest, ""), story.now)
    proposal = LEADER.proposes(close, *(FELLOWS[peer].checks(*announced.values()) for peer in OTHERS))
    story.hear(proposal)
    assert story.machine.round is not None
    return story, proposal, story.machine.round.evidence.manifests[0].digest


def votes(effects: list[Effect]) -> list[tuple[int, int, bytes]]:
    return [(m.phase, m.attempt, m.digest) for m in said(effects) if isinstance(m, Vote) and m.header.sender == ME]


def durable_first(effects: list[Effect]) -> None:
    """Own Announces, Closes, Checks, Proposals and votes are persisted before they are sent."""
    durable = set()
    for effect in effects:
        if isinstance(effect, Persist):
            record = effect.record
            match record:
                case Announced(signed, _) | Said(signed) | Voted(signed):
                    durable.add(signed.digest)
        elif isinstance(effect, Send) and isinstance(effect.frame, Signed):
            own = effect.frame.message.header.sender == ME
            if own and not isinstance(effect.frame.message, Join | Leave | Form):
                assert effect.frame.digest in durable, effect.frame


# --- train, announce, close -------------------------------------------------------------------------------------------


def test_founder_trains_once_a_quorum_is_heard() -> None:
    story = Story()
    assert not [e for e in story.tick() if isinstance(e, Train)]
    assert not [e for e in story.beats(OTHERS[0]) if isinstance(e, Train)]
    (train,) = [e for e in story.beats(OTHERS[1]) if isinstance(e, Train)]
    assert (train.round, train.size, train.budget_ms) == (0, 4, 10_000)


def test_member_announces_durably_before_it_sends() -> None:
    story = Story()
    story.beats()
    effects = story.machine.handle(Trained(0, sha256(b"p"), 1000, 15, 4000, 3000), story.now)
    durable_first(effects)
    (announce,) = [m for m in said(effects) if isinstance(m, Announce)]
    assert (announce.base, announce.payload, announce.steps) == (STATE, sha256(b"p"), 15)


def test_leader_closes_when_all_living_members_announced() -> None:
    story = Story(LEADERS[0])
    story.beats(*LEADERS)
    story.trains()
    silent = LEADERS[3]
    for peer in LEADERS[1:3]:
        assert not [m for m in said(story.hear(FELLOWS[peer].announces())) if isinstance(m, Close)]
    (close,) = [m for m in said(story.hear(FELLOWS[silent].announces())) if isinstance(m, Close)]
    assert close.covered == frozenset(LEADERS)


def test_leader_closes_without_the_dead_before_the_budget_is_over() -> None:
    story = Story(LEADERS[0])
    story.beats(*LEADERS)
    story.trains()
    for peer in LEADERS[1:3]:
        story.hear(FELLOWS[peer].announces())
    story.tick(4.0)
    story.beats(*LEADERS[1:3])
    (close,) = [m for m in said(story.tick(1.5)) if isinstance(m, Close)]  # silent for 5.5 s, detection takes 5
    assert close.covered == frozenset(LEADERS[:3])


def test_member_accepts_an_early_close_only_if_it_covers_everybody_it_sees_alive() -> None:
    story, announced = started()
    left_out = next(peer for peer in OTHERS if peer != LEADERS[0])
    effects = story.hear(LEADER.closes(*(s for peer, s in announced.items() if peer != left_out)))
    assert "closed" not in notes(effects)
    story.now += 9.9
    story.beats()
    assert "closed" not in notes(story.tick())
    assert "closed" in notes(story.tick(0.2))  # the budget of 10 s is over


def test_member_reveals_its_payload_when_it_accepts_the_close_and_not_before() -> None:
    story, announced = started()
    effects = story.hear(LEADER.closes(*announced.values()))
    kinds = [type(e.record) if isinstance(e, Persist) else type(e) for e in effects]
    assert kinds.index(DoorClosed) < kinds.index(Reveal)  # what may be valid is durable before anything is shown
    assert [e.announcement for e in effects if isinstance(e, Fetch)] == [
        s for s in LEADER.closes(*announced.values()).message.announcements if s.message.header.sender != ME
    ]


def test_announcement_heard_after_the_close_is_never_marked_valid() -> None:
    story = Story()
    story.beats()
    mine = story.trains()
    late, *timely = OTHERS
    on_time = [FELLOWS[peer].announces() for peer in timely]
    for signed in on_time:
        story.hear(signed)
    story.now += 10.5  # budget over: a Close need not cover everybody
    story.beats()
    story.hear(LEADER.closes(mine, *on_time))
    copied = FELLOWS[late].announces("copied after the reveal")
    story.hear(copied)
    story.hear(FELLOWS[LEADERS[2]].closes(mine, copied, *on_time, attempt=2))
    for signed in (*on_time, copied):
        story.machine.handle(Settled(signed.digest, ""), story.now)
    assert story.machine.round is not None and copied.digest not in story.machine.round.eligible
    own_check = story.machine.round.evidence.checks[ME].message
    assert isinstance(own_check, Check) and copied.digest not in own_check.valid


def test_member_does_not_announce_after_it_accepted_a_close() -> None:
    story = Story()
    story.beats()
    theirs = [FELLOWS[peer].announces() for peer in OTHERS]
    story.now += 10.5
    story.beats()
    story.hear(LEADER.closes(*theirs))
    effects = story.machine.handle(Trained(0, sha256(b"late"), 1000, 15, 4000, 3000), story.now)
    assert "late" in notes(effects)
    assert not said(effects)


# --- check and propose ------------------------------------------------------------------------------------------------


def test_member_checks_when_everything_closed_is_settled() -> None:
    story, announced, _ = closed()
    effects: list[Effect] = []
    for peer in OTHERS:
        assert not said(effects)
        effects = story.machine.handle(Settled(announced[peer].digest, "" if peer != OTHERS[0] else "norm"), story.now)
    durable_first(effects)
    (check,) = [m for m in said(effects) if isinstance(m, Check)]
    assert set(check.valid) == {s.digest for peer, s in announced.items() if peer != OTHERS[0]}


def test_member_checks_again_with_more_when_a_payload_arrives_late() -> None:
    story, announced, _ = closed()
    story.now += 6.0  # the exchange time
    first = [m for m in said(story.beats() + story.tick()) if isinstance(m, Check)]
    late = announced[OTHERS[0]].digest
    again = [m for m in said(story.machine.handle(Settled(late, ""), story.now)) if isinstance(m, Check)]
    assert [(c.revision, len(c.valid)) for c in (*first, *again)] == [(0, 1), (1, 2)]


def test_leader_proposes_when_everybody_alive_has_checked() -> None:
    story, announced = started(peer=LEADERS[0])
    effects: list[Effect] = []
    for peer in LEADERS[1:]:
        story.machine.handle(Settled(announced[peer].digest, ""), story.now)
    for peer in LEADERS[1:]:
        assert not [m for m in said(effects) if isinstance(m, Proposal)]
        effects = story.hear(FELLOWS[peer].checks(*announced.values()))
    (proposal,) = [m for m in said(effects) if isinstance(m, Proposal)]
    assert (proposal.attempt, len(proposal.checks), proposal.prepared) == (0, 4, ())


# --- voting -----------------------------------------------------------------------------------------------------------


def test_member_prevotes_what_recomputes_though_it_holds_no_payload() -> None:
    story, announced, close = closed()
    effects = story.hear(LEADER.proposes(close, *(FELLOWS[peer].checks(*announced.values()) for peer in OTHERS)))
    durable_first(effects)
    assert story.machine.round is not None
    assert votes(effects) == [(PREVOTE, 0, story.machine.round.evidence.manifests[0].digest)]


def test_member_locks_and_precommits_on_a_quorum_of_prevotes() -> None:
    story, proposal, digest = proposed()
    assert votes(story.hear(FELLOWS[OTHERS[0]].prevotes(digest))) == []
    effects = story.hear(FELLOWS[OTHERS[1]].prevotes(digest))
    assert votes(effects) == [(PRECOMMIT, 0, digest)]
    durable_first(effects)
    (record,) = [r for r in saved(effects) if isinstance(r, Voted)]
    assert record.proposal == proposal and len(record.prepared) == 3  # the lock and its certificate are durable with the vote


def test_member_commits_on_a_quorum_of_precommits_and_begins_the_next_round() -> None:
    story, _, digest = proposed()
    for peer in OTHERS[:2]:
        story.hear(FELLOWS[peer].prevotes(digest))
    story.hear(FELLOWS[OTHERS[0]].precommits(digest))
    effects = story.hear(FELLOWS[OTHERS[1]].precommits(digest))
    assert [type(e) for e in effects if isinstance(e, Persist | Adopt)] == [Persist, Adopt]
    (adopt,) = [e for e in effects if isinstance(e, Adopt)]
    assert (adopt.commit.manifest.digest, adopt.committed, adopt.announced) == (digest, True, True)
    assert [c.peer for c in adopt.commit.manifest.contributions] == ["alice", "bob", "carol", "dave"]
    assert story.machine.round is not None and story.machine.round.number == 1


def test_member_prevotes_nil_when_the_leader_is_dead() -> None:
    story = Story()
    story.beats()
    story.now += 4.0
    story.beats(*(peer for peer in OTHERS if peer != LEADERS[0]))
    assert votes(story.tick(1.5)) == [(PREVOTE, 0, NIL)]  # detection time, not the budget of 10 s


def test_member_waits_for_the_budget_when_the_leader_is_alive() -> None:
    story = Story()
    while story.now < 11.0:
        story.beats()
        assert votes(story.tick(1.0)) == []
    effects = story.beats() + story.tick(1.0) + story.beats()
    assert votes(effects) == [(PREVOTE, 0, NIL)]  # 10 s of budget and 2 s of voting time


def locked_in_attempt_one() -> tuple[Story, bytes, list[Signed]]:
    """Locked on attempt 0's manifest, and a quorum precommitted nothing: attempt 1."""
    story, _, digest = proposed()
    prevotes = [FELLOWS[peer].prevotes(digest) for peer in OTHERS]
    for signed in prevotes[:2]:
        story.hear(signed)
    for peer in OTHERS:
        story.hear(FELLOWS[peer].precommits(NIL))
    assert story.machine.round is not None and story.machine.round.attempt == 1
    return story, digest, prevotes


def other_proposal(story: Story, attempt: int, prepared: Any = ()) -> tuple[Signed, bytes]:
    """Another manifest on the same Close: fewer payloads are valid."""
    assert story.machine.round is not None
    evidence = story.machine.round.evidence
    close = evidence.closes[0]
    proposal = FELLOWS[LEADERS[attempt]].proposes(close, *(FELLOWS[p].checks(revision=1) for p in OTHERS), attempt=attempt)
    digest = evidence.evaluate(proposal.message).digest  # type: ignore[arg-type]
    if prepared:
        proposal = FELLOWS[LEADERS[attempt]].proposes(
            close, *(FELLOWS[p].checks(revision=1) for p in OTHERS), attempt=attempt, prepared=prepared(digest)
        )
    return proposal, digest


def test_locked_member_prevotes_nil_for_another_manifest() -> None:
    story, _, _ = locked_in_attempt_one()
    for peer in OTHERS[:2]:
        story.hear(FELLOWS[peer].precommits(NIL, 2))  # f + 1 members are in attempt 2, led by another
    proposal, _ = other_proposal(story, 2)
    assert votes(story.hear(proposal)) == [(PREVOTE, 2, NIL)]


def test_locked_leader_proposes_its_locked_manifest_again_with_the_certificate() -> None:
    story, digest, _ = locked_in_attempt_one()
    assert LEADERS[1] == ME
    round_ = story.machine.round
    assert round_ is not None
    again = round_.evidence.proposals[1].message
    assert isinstance(again, Proposal)
    assert len(again.prepared) == 3 and round_.evidence.manifests[1].digest == digest


def test_prepare_certificate_of_a_later_attempt_frees_a_locked_member() -> None:
    story, _, _ = locked_in_attempt_one()
    target = 3  # led by another than the story's member
    assert LEADERS[target] != ME
    for peer in OTHERS[:2]:
        story.hear(FELLOWS[peer].precommits(NIL, target))  # f + 1 members are there
    proposal, digest = other_proposal(story, target, lambda d: [FELLOWS[p].prevotes(d, 2) for p in OTHERS])
    assert votes(story.hear(proposal)) == [(PREVOTE, target, digest)]


def test_member_jumps_when_f_plus_one_members_are_in_a_higher_attempt() -> None:
    story = Story()
    story.beats()
    story.beats(OTHERS[0], attempt=5)
    assert story.machine.round is not None and story.machine.round.attempt == 0  # one may lie
    story.beats(OTHERS[1], attempt=7)
    assert story.machine.round.attempt == 5


def test_member_adopts_a_commit_whenever_it_is_seen() -> None:
    story = Story()
    story.tick()
    other, _, digest = proposed()
    manifest = other.machine.round.evidence.by_digest[digest][0]  # type: ignore[union-attr]
    commit = Commit(manifest, tuple(FELLOWS[peer].precommits(digest, 9) for peer in OTHERS))
    effects = story.hear(commit, "a stranger")
    assert [type(e) for e in effects if isinstance(e, Persist | Adopt)] == [Persist, Adopt]
    (adopt,) = [e for e in effects if isinstance(e, Adopt)]
    assert (adopt.committed, adopt.announced) == (False, False)


def committed() -> tuple[Story, Commit]:
    story, _, digest = proposed()
    for peer in OTHERS:
        story.hear(FELLOWS[peer].prevotes(digest))
        effects = story.hear(FELLOWS[peer].precommits(digest))
    (adopt,) = [e for e in story.tick() + effects if isinstance(e, Adopt)] or [None]  # type: ignore[list-item]
    commit = story.machine.head if adopt is None else adopt.commit
    assert commit is not None
    return story, commit


def test_member_answers_a_message_of_a_decided_round_with_its_commit() -> None:
    story, commit = committed()
    story.tick(5.0)
    assert Send((OTHERS[0],), commit) in story.hear(FELLOWS[OTHERS[0]].prevotes(NIL, 3))


# --- restarts ---------------------------------------------------------------------------------------------------------


def restarted_after(*effects: list[Effect]) -> Story:
    records = [record for some in effects for record in saved(some) if not isinstance(record, Committed)]
    story = Story(records=records, now=100.0)
    story.tick()
    return story


def test_restarted_member_announces_the_same_again_and_does_not_train() -> None:
    story = Story()
    story.beats()
    effects = story.machine.handle(Trained(0, sha256(b"p"), 1000, 15, 4000, 3000), story.now)
    (before,) = [m for m in said(effects) if isinstance(m, Announce)]
    story = restarted_after(effects)
    effects = story.beats() + story.tick(1.5) + story.beats()
    assert before in said(effects)  # repaired to whoever lacks it
    assert not [e for e in effects if isinstance(e, Train)]


def test_restarted_member_casts_no_contradicting_vote() -> None:
    story, announced, close = closed()
    opening = [Persist(Announced(announced[ME], 3000))]
    proposal = LEADER.proposes(close, *(FELLOWS[peer].checks(*announced.values()) for peer in OTHERS))
    effects = story.hear(proposal)
    story = restarted_after(opening, effects)  # prevoted, then crashed
    story.beats()
    story.now += 60.0
    story.beats()
    cast = votes(story.tick() + story.hear(proposal))
    assert [vote for vote in cast if vote[:2] == (PREVOTE, 0)] == []


def test_restarted_member_is_still_locked() -> None:
    story, _, digest = proposed()
    before: list[Effect] = []
    for peer in OTHERS[:2]:
        before += story.hear(FELLOWS[peer].prevotes(digest))
    story = restarted_after(before)
    assert story.machine.round is not None and story.machine.round.lock is not None
    assert (story.machine.round.lock.attempt, story.machine.round.lock.manifest.digest) == (0, digest)


def test_restarted_leader_says_its_close_word_for_word() -> None:
    """It heard one announcement more in its second life: the Close of attempt 0 stays what it was."""
    story = Story(LEADERS[0])
    story.beats(*LEADERS)
    effects = story.tick(10.5) + story.beats(*LEADERS)
    (close,) = [r.message for r in saved(effects) if isinstance(r, Said) and isinstance(r.message.message, Close)]
    again = Story(LEADERS[0], records=[Said(close)], now=100.0)  # crashed before even the shut door was durable
    again.tick()
    again.hear(FELLOWS[LEADERS[1]].announces())
    again.beats(*LEADERS)
    assert again.machine.round is not None and again.machine.round.evidence.closes == {0: close}
    later = tick_until(again.machine, 101.0, 111.0)
    assert not [m for m in said(later) if isinstance(m, Close) and m != close.message]


def test_restarted_member_never_makes_another_check_of_one_revision() -> None:
    story, announced = started()
    effects = story.hear(LEADER.closes(*announced.values()))
    for peer in OTHERS:
        effects += story.machine.handle(Settled(announced[peer].digest, ""), story.now)
    (check,) = [r.message for r in saved(effects) if isinstance(r, Said)]
    story = restarted_after([Persist(Announced(announced[ME], 3000))], effects)
    story.beats()
    for signed in announced.values():
        story.hear(signed)
    story.hear(LEADER.closes(*announced.values()))
    story.now += 20.0
    story.beats()
    story.tick()
    assert story.machine.round is not None and story.machine.round.evidence.checks[ME] == check


def test_member_whose_vote_log_is_gone_stops_rather_than_contradict_itself() -> None:
    story = Story()
    story.beats()
    forgotten = FELLOWS[ME].announces("before the disk was lost")
    story.hear(forgotten, OTHERS[0])
    with pytest.raises(LocalProtocolError, match="new session"):
        story.trains()


# --- membership -------------------------------------------------------------------------------------------------------


def test_joiner_asks_each_round_and_is_ready_only_while_it_is_heard() -> None:
    story, announced, _ = closed()
    joiner = Fellow(PARENT, "erin", b"e" * 16)
    ghost = Fellow(PARENT, "ghost", b"g" * 16)
    story.hear(joiner.joins())
    story.hear(ghost.joins())
    story.hear(joiner.beats(), "erin")
    effects: list[Effect] = []
    for peer in OTHERS:
        effects += story.machine.handle(Settled(announced[peer].digest, ""), story.now)
    (check,) = [m for m in said(effects) if isinstance(m, Check)]
    assert check.ready == (member("erin", b"e" * 16),)


def test_joiner_named_by_a_manifest_trains_in_the_round_after_it() -> None:
    machine = make_machine(member("erin", b"e" * 16), RULES, founding_commit(RULES))
    assert [type(m) for m in said(machine.handle(Tick(), 0.0))] == [Join]
    next_group = tuple(sorted((*PARENT.group, member("erin", b"e" * 16))))
    manifest = dataclasses.replace(PARENT, round=0, parent=PARENT.digest, group=next_group)
    commit = Commit(manifest, tuple(FELLOWS[peer].precommits(manifest.digest) for peer in OTHERS))
    effects = machine.handle(Received(OTHERS[0], commit), 1.0)
    assert [e.round for e in effects if isinstance(e, Train)] == [1]


def test_leaver_signs_votes_on_and_may_go_when_dropped() -> None:
    story = Story()
    story.beats()
    assert [type(m) for m in said(story.machine.handle(LeaveRequested(), story.now))][:1] == [Leave]
    assert not story.machine.may_go
    group = tuple(m for m in PARENT.group if m.peer != ME)
    manifest = dataclasses.replace(PARENT, round=0, parent=PARENT.digest, group=group)
    story.hear(Commit(manifest, tuple(FELLOWS[peer].precommits(manifest.digest) for peer in OTHERS)))
    assert story.machine.may_go


def test_joiner_that_leaves_waits_for_the_round_that_may_grant_its_join() -> None:
    machine = make_machine(member("erin", b"e" * 16), RULES, founding_commit(RULES))
    machine.handle(Tick(), 0.0)
    machine.handle(LeaveRequested(), 1.0)
    assert not machine.may_go  # a group of two that admitted a ghost could never decide again
    manifest = dataclasses.replace(PARENT, round=0, parent=PARENT.digest)
    machine.handle(Received("x", Commit(manifest, tuple(FELLOWS[p].precommits(manifest.digest) for p in OTHERS))), 2.0)
    assert machine.may_go


def test_group_below_min_peers_waits_idle_until_somebody_joins() -> None:
    rules = make_rules("alice")
    parent = genesis("alice")
    machine = make_machine(member("alice"), rules, founding_commit(rules))
    effects = tick_until(machine, 0.0, 60.0)
    assert not said(effects) and not [e for e in effects if isinstance(e, Train)]
    joiner = Fellow(parent, "erin", b"e" * 16)
    machine.handle(Received("erin", joiner.joins()), 61.0)
    effects = machine.handle(Received("erin", joiner.beats()), 61.0)
    (adopt,) = [e for e in effects if isinstance(e, Adopt)]
    assert [m.peer for m in adopt.commit.manifest.group] == ["alice", "erin"]


def test_unheard_join_does_not_make_an_idle_group_turn_rounds() -> None:
    rules = make_rules("alice")
    machine = make_machine(member("alice"), rules, founding_commit(rules))
    machine.handle(Received("erin", Fellow(genesis("alice"), "erin", b"e" * 16).joins()), 0.0)
    assert not [e for e in tick_until(machine, 0.5, 30.0) if isinstance(e, Adopt)]


# --- forming ----------------------------------------------------------------------------------------------------------


def forming(peer: str) -> Machine:
    return make_machine(member(peer), make_rules(), None)


def candidate(peer: str) -> Heartbeat:
    return Heartbeat(PARENT.run, bytes(16), NO_HEAD_ROUND, PARENT.run, 0, False, frozenset())


def form(peer: str, incarnation: int, *peers: str) -> Signed:
    rules = make_rules()
    header = Header(PARENT.run, -1, rules.placeholder_parent(), peer, bytes(16))
    members = tuple(member(p) for p in sorted(peers))
    return unsigned(Form(header, incarnation, members, genesis(*peers, rules=rules).digest))


def test_first_group_forms_when_every_member_signed() -> None:
    bob, alice = forming("bob"), forming("alice")
    for now in (0.0, 1.0, 2.0, 3.0):
        bob.handle(Received("alice", candidate("alice")), now)
        effects = alice.handle(Received("bob", candidate("bob")), now)
    proposal = next(m for m in said(effects) if isinstance(m, Form))  # the lowest id proposes once its view has settled
    effects = bob.handle(Received("alice", unsigned(proposal)), 3.5)
    assert [type(r).__name__ for r in saved(effects)] == ["Formed"]
    answer = next(m for m in said(effects) if isinstance(m, Form))
    effects = alice.handle(Received("bob", unsigned(answer)), 4.0)
    (adopt,) = [e for e in effects if isinstance(e, Adopt)]
    assert adopt.commit.manifest.group == (member("alice"), member("bob"))
    assert [type(r).__name__ for r in saved(effects)] == ["Committed"]
    assert [e for e in bob.handle(Received("alice", adopt.commit), 5.0) if isinstance(e, Adopt)]


def test_only_the_proposer_completes_a_list() -> None:
    """It may have left the list behind; completing both, two peers would begin two chains."""
    machine = forming("bob")
    for peer in ("alice", "carol"):
        machine.handle(Received(peer, candidate(peer)), 0.0)
    machine.handle(Received("alice", form("alice", 0, "alice", "bob", "carol")), 1.0)
    machine.handle(Received("alice", form("alice", 1, "alice", "bob", "carol")), 2.0)
    effects = machine.handle(Received("carol", form("carol", 0, "alice", "bob", "carol")), 3.0)
    assert not [e for e in effects if isinstance(e, Adopt)]


def test_candidate_refuses_an_incarnation_that_would_use_up_all_others() -> None:
    machine = forming("bob")
    machine.handle(Received("alice", candidate("alice")), 0.0)
    assert refusals(machine.handle(Received("alice", form("alice", 2**30, "alice", "bob")), 1.0)) == ["incarnation"]


def test_candidate_keeps_few_forms_of_one_sender_and_none_of_a_stranger() -> None:
    machine = forming("bob")
    machine.handle(Received("zoe", candidate("zoe")), 0.0)
    for incarnation in range(100):
        machine.handle(Received("zoe", form("zoe", incarnation, "bob", "zoe")), 0.1)
        machine.handle(Received("yan", form("yan", incarnation, "bob", "yan")), 0.1)
    assert len(machine.forming.messages) <= 8


# --- refusals and bounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "signed"),
    [
        ("other-run", unsigned(Leave(Header(bytes(32), 0, PARENT.digest, OTHERS[0], bytes(16))))),
        ("not-a-member", Fellow(PARENT, "mallory").prevotes(NIL)),
        ("not-a-member", Fellow(PARENT, OTHERS[0], b"s" * 16).prevotes(NIL)),
        ("leader", FELLOWS[next(p for p in OTHERS if p != LEADERS[0])].closes()),
        ("leader", FELLOWS[next(p for p in OTHERS if p != LEADERS[0])].proposes(LEADER.closes())),
        ("checks", LEADER.proposes(LEADER.closes(), LEADER.checks())),
        ("base", LEADER.proposes(LEADER.closes(), *(FELLOWS[p].checks(base=sha256(p.encode())) for p in OTHERS))),
        ("check-resends", FELLOWS[OTHERS[0]].checks(revision=9)),
        ("attempt-window", FELLOWS[OTHERS[0]].prevotes(NIL, 65)),
        ("join", FELLOWS[OTHERS[0]].joins()),
        (
            "certificate",
            LEADER.proposes(
                LEADER.closes(),
                *(FELLOWS[p].checks() for p in OTHERS),
                attempt=4,
                prepared=[FELLOWS[p].prevotes(bytes(32)) for p in OTHERS],
            ),
        ),
    ],
)
def test_machine_refuses_by_the_name_of_the_rule(rule: str, signed: Signed) -> None:
    story = Story()
    story.tick()
    assert refusals(story.hear(signed)) == [rule]


def test_machine_refuses_two_different_words_on_one_matter() -> None:
    story = Story()
    fellow = FELLOWS[OTHERS[0]]
    story.hear(fellow.announces())
    assert refusals(story.hear(fellow.announces("another"))) == ["equivocation"]
    assert refusals(story.hear(fellow.announces("a third"))) == []  # the same peer and rule is noted once a round


@pytest.mark.parametrize("count", [1, 2])
def test_machine_refuses_a_commit_without_a_quorum(count: int) -> None:
    story = Story()
    manifest = dataclasses.replace(PARENT, round=0, parent=PARENT.digest)
    votes_ = tuple(FELLOWS[peer].precommits(manifest.digest) for peer in OTHERS[:count])
    assert refusals(story.hear(Commit(manifest, votes_))) == ["certificate"]
    elsewhere = Commit(dataclasses.replace(manifest, parent=bytes(32)), votes_)  # perhaps another branch: it is asked for
    assert [effect for effect in story.hear(elsewhere) if isinstance(effect, FetchBranch)] and not refusals(story.hear(elsewhere))


def test_strangers_fill_no_table_without_bound() -> None:
    story = Story(rules=dataclasses.replace(RULES, max_observers=8))
    story.tick()
    for number in range(500):
        stranger = Fellow(PARENT, f"stranger{number}", bytes(16))
        story.hear(stranger.beats(), stranger.peer)
        story.hear(stranger.joins())
        story.hear(stranger.beats(behind=1), stranger.peer)
        story.machine.handle(PeerSeen(f"seen{number}"), story.now)
        early = Header(PARENT.run, 1, bytes(32), stranger.peer, bytes(16))
        story.hear(unsigned(Vote(early, PREVOTE, 0, NIL)))
    machine = story.machine
    assert machine.round is not None
    assert len(machine.liveness.peers) <= 8 and len(machine.round.evidence.joins) <= 8 and len(machine._candidates) <= 8
    assert len(machine._future) <= 8
    story.beats()
    assert set(OTHERS) <= set(machine.liveness.peers)  # members always have room
    sends = [e for e in story.tick(1.0) if isinstance(e, Send)]
    assert all(len(e.peers) <= 3 + 8 + 8 for e in sends)


def test_repairs_are_paced_and_for_members_only() -> None:
    story, _ = started()
    story.now += 2.0
    assert [e for e in story.beats(OTHERS[0]) if isinstance(e, Send) and isinstance(e.frame, Signed)]
    again = [story.beats(OTHERS[0]) for _ in range(20)]
    assert not [e for some in again for e in some if isinstance(e, Send) and isinstance(e.frame, Signed)]
    stranger = Fellow(PARENT, "stranger", bytes(16))
    assert not [e for e in story.hear(stranger.beats(), "stranger") if isinstance(e, Send) and isinstance(e.frame, Signed)]


def test_state_digest_of_an_older_round_is_not_taken_for_the_heads() -> None:
    story, commit = committed()
    story.machine.handle(StateDigest(-1, sha256(b"old")), story.now)
    assert story.machine.state_digest is None
    story.machine.handle(StateDigest(commit.manifest.round, sha256(b"new")), story.now)
    assert story.machine.state_digest == sha256(b"new")


def test_time_that_goes_backwards_is_the_drivers_fault() -> None:
    story = Story(now=5.0)
    story.tick()
    with pytest.raises(LocalProtocolError, match="backwards"):
        story.machine.handle(Tick(), 4.0)



# --- leaving a pair, admission by list --------------------------------------------------------------------------------


def talk(machines: dict[str, Any], first: dict[str, list[Effect]], now: float) -> None:
    """Deliver everything the machines send each other, at once, until they are silent."""
    pending = [(peer, effect) for peer, effects in first.items() for effect in effects if isinstance(effect, Send)]
    while pending:
        sender, send = pending.pop(0)
        for receiver in send.peers:
            for effect in machines[receiver].handle(Received(sender, send.frame), now):
                if isinstance(effect, Send):
                    pending.append((receiver, effect))


def test_pair_decides_at_once_when_one_of_it_leaves_in_mid_training() -> None:
    rules = make_rules("alice", "bob")
    machines = {peer: make_machine(member(peer), rules, founding_commit(rules)) for peer in ("alice", "bob")}
    talk(machines, {peer: machine.handle(Tick(), 1.0) for peer, machine in machines.items()}, 1.0)
    talk(machines, {"bob": machines["bob"].handle(LeaveRequested(), 2.0)}, 2.0)
    assert machines["bob"].may_go
    assert machines["alice"].head is not None
    assert [m.peer for m in machines["alice"].head.manifest.group] == ["alice"]
    assert machines["alice"].head.manifest.contributions == ()


def test_member_does_not_take_an_early_close_for_a_leaver_whom_a_quorum_can_do_without() -> None:
    story = Story()
    story.beats()
    leave = FELLOWS[OTHERS[0]].leaves()
    close = LEADER.closes(leaves=(leave,))
    story.hear(leave)
    assert not [r for r in saved(story.hear(close)) if isinstance(r, DoorClosed)]


def test_join_of_a_peer_that_is_not_on_the_list_is_refused() -> None:
    rules = dataclasses.replace(RULES, admitted=frozenset(LEADERS))
    story = Story(rules=rules)
    story.beats()
    effects = story.hear(Fellow(PARENT, "erin", b"e" * 16).joins())
    assert [e.fields["rule"] for e in effects if isinstance(e, Note) and e.event == "refused"] == ["not-admitted"]
