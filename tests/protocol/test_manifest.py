"""Rule 7's pure function: the same evidence, the same bytes; who contributes, who stays, who enters, how long the next round is."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from sparseloco.protocol.encoding import sha256
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.manifest import (
    CheckFacts,
    CloseFacts,
    Contribution,
    Manifest,
    Member,
    MembershipRules,
    genesis_manifest,
    next_budget_ms,
    next_manifest,
    quorum,
    tolerated_liars,
)

STATE = sha256(b"state")
RULES = MembershipRules(
    min_peers=1, group_size=8, joiners_per_round=2, budget_cap_ms=10_000, budget_floor_ms=1_000, straggler_factor=3.0
)


def group_of(count: int, first: int = 0) -> tuple[Member, ...]:
    return tuple(Member(f"peer{i}", bytes(16)) for i in range(first, first + count))


def parent_of(count: int) -> Manifest:
    return genesis_manifest(bytes(32), STATE, group_of(count), 8_000)


def check(valid: Any = (), dead: Any = (), ready: Any = (), duration_ms: int = 4_000) -> CheckFacts:
    return CheckFacts(frozenset(valid), frozenset(dead), frozenset(ready), duration_ms)


def closing(*peers: str, leavers: Any = ()) -> CloseFacts:
    announced = tuple((sha256(peer.encode()), Contribution(peer, sha256(b"p" + peer.encode()), 10, 1, 1)) for peer in peers)
    return CloseFacts(announced, frozenset(leavers))


def after(count: int, close: CloseFacts, checks: list[CheckFacts], **changes: Any) -> Manifest:
    return next_manifest(parent_of(count), STATE, close, checks, dataclasses.replace(RULES, **changes))


def test_quorum_is_a_majority_up_to_three_and_more_than_two_thirds_from_four() -> None:
    assert [quorum(members) for members in range(1, 11)] == [1, 2, 2, 3, 4, 5, 5, 6, 7, 7]
    assert [tolerated_liars(members) for members in range(1, 11)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    with pytest.raises(ValueError, match="at least one"):
        quorum(0)


def test_two_quorums_share_an_honest_member() -> None:
    for members in range(1, 200):
        assert 2 * quorum(members) - members > tolerated_liars(members)


def test_manifest_is_the_same_for_the_same_evidence_in_any_order() -> None:
    close = closing("peer0", "peer1", "peer2")
    digests = [digest for digest, _ in close.announced]
    checks = [check(digests[: i + 1], ready=group_of(1, 9), duration_ms=1_000 * i) for i in range(4)]
    expected = after(4, close, checks)
    for seed in range(20):
        random.Random(seed).shuffle(checks)
        shuffled = CloseFacts(tuple(random.Random(seed).sample(close.announced, 3)), close.leavers)
        assert after(4, shuffled, checks).body == expected.body
    assert Manifest.decode(expected.body) == expected
    assert Manifest.decode(expected.body).digest == expected.digest


def test_contribution_counts_with_a_quorum_of_valid_marks_only() -> None:
    close = closing("peer0", "peer1")
    first, second = (digest for digest, _ in close.announced)
    manifest = after(4, close, [check([first, second]), check([first, second]), check([first])])
    assert [c.peer for c in manifest.contributions] == ["peer0"]


def test_manifest_needs_a_quorum_of_checks() -> None:
    with pytest.raises(RemoteProtocolError, match="checks"):
        after(4, closing(), [check(), check()])


def test_member_is_dropped_with_a_quorum_of_dead_marks_only() -> None:
    gone = group_of(4)[3]
    assert gone not in after(4, closing(), [check(dead=[gone])] * 3).group
    assert gone in after(4, closing(), [check(dead=[gone])] * 2 + [check()]).group


def test_leaver_is_dropped_by_its_own_signature() -> None:
    leaver = group_of(3)[0]
    assert after(3, closing(leavers=[leaver]), [check()] * 2).group == group_of(3)[1:]


def test_group_is_never_empty() -> None:
    assert after(1, closing(leavers=group_of(1)), [check()]).group == group_of(1)


def test_joiner_enters_with_a_quorum_of_ready_marks_only() -> None:
    joiner = group_of(1, 9)
    assert set(joiner) <= set(after(4, closing(), [check(ready=joiner)] * 3 + [check()]).group)
    assert not set(joiner) & set(after(4, closing(), [check(ready=joiner)] * 2 + [check()] * 2).group)


@pytest.mark.parametrize(
    ("members", "checks", "entered"),
    [(1, 1, 1), (2, 2, 1), (3, 3, 1), (3, 2, 0), (4, 4, 1), (4, 3, 0), (6, 6, 2), (7, 7, 1)],
)
def test_joiners_enter_only_as_far_as_those_present_can_carry(members: int, checks: int, entered: int) -> None:
    """q(n + j) <= Checks present; a single member takes one joiner all the same, or it would stay alone for ever."""
    joiners = group_of(4, first=20)
    manifest = after(members, closing(), [check(ready=joiners)] * checks)
    assert len(manifest.group) - members == entered


def test_group_size_and_joiners_per_round_bound_admission() -> None:
    joiners = group_of(4, first=20)
    assert len(after(7, closing(), [check(ready=joiners)] * 7, group_size=7).group) == 7
    assert len(after(7, closing(), [check(ready=joiners)] * 7, joiners_per_round=0).group) == 7


def test_peer_enters_once_though_two_sessions_are_ready() -> None:
    twice = [Member("peer9", bytes(16)), Member("peer9", b"x" * 16)]
    manifest = after(3, closing(), [check(ready=twice)] * 3)
    assert [m.peer for m in manifest.group].count("peer9") == 1


def test_nothing_is_contributed_below_min_peers() -> None:
    close = closing("peer0")
    valid = [close.announced[0][0]]
    assert after(2, close, [check(valid)] * 2, min_peers=3).contributions == ()
    dead = [group_of(3)[2]]
    assert after(3, close, [check(valid, dead=dead)] * 2, min_peers=3).contributions == ()
    assert len(after(3, close, [check(valid)] * 2, min_peers=3).contributions) == 1


def test_budget_is_median_plus_spread_within_its_bounds() -> None:
    assert next_budget_ms(8_000, [2_000, 2_000, 2_000], RULES) == 2_000 + 3 * 250  # spread is floored at an eighth
    assert next_budget_ms(8_000, [1_000, 2_000, 4_000], RULES) == 2_000 + 3 * 1_000
    assert next_budget_ms(8_000, [100, 100, 100], RULES) == 1_000
    assert next_budget_ms(8_000, [9_000, 9_000, 90_000], RULES) == 10_000
    assert next_budget_ms(8_000, [0, 0], RULES) == 8_000


def test_one_slow_member_does_not_set_the_pace() -> None:
    assert next_budget_ms(8_000, [2_000, 2_100, 2_200, 90_000], RULES) < 4_000


def test_leader_order_differs_from_round_to_round_and_holds_everybody() -> None:
    manifest = parent_of(7)
    orders = set()
    for _ in range(6):
        assert sorted(manifest.leader_order()) == [m.peer for m in manifest.group]
        orders.add(manifest.leader_order())
        manifest = next_manifest(manifest, STATE, closing(), [check()] * 7, RULES)
    assert len(orders) > 1


def test_manifest_refuses_what_no_group_decides() -> None:
    good = parent_of(3)
    for rule, changes in [
        ("group-size", {"group": ()}),
        ("order", {"group": good.group[::-1]}),
        ("order", {"contributions": (Contribution("a", bytes(32), 1, 0, 0), Contribution("a", b"x" * 32, 1, 0, 0))}),
        ("field-length", {"base": b""}),
        ("field-range", {"budget_ms": -1}),
    ]:
        with pytest.raises(RemoteProtocolError) as caught:
            dataclasses.replace(good, **changes)
        assert caught.value.rule == rule
