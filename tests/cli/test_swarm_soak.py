"""The soak's accounts: every announced contribution has a fate, every gap and every sample counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sparseloco.node.presets import preset
from sparseloco.node.swarm_events import NodeRecord
from sparseloco.node.swarm_faults import Fault
from sparseloco.node.swarm_soak import (
    LONGEST_GAP_SECONDS,
    MemorySamples,
    contributions,
    longest_gap_seconds,
    soak_failures,
    soak_line,
    soak_report,
    soak_run,
)


def event(record: NodeRecord, name: str, number: int, at: float = 0.0, **fields: Any) -> None:
    record.take({"time": at, "event": name, "round": number, **fields})


def announced(record: NodeRecord, number: int) -> None:
    event(record, "announced", number, payload="ab" * 32, bytes=84)


def committed(record: NodeRecord, number: int, *contributors: str, at: float = 0.0) -> None:
    event(record, "committed", number, at, state_digest=f"{number + 1:064x}", manifest="cd" * 32,
          contributors=list(contributors), attempt=0, group_size=4)  # fmt: skip


def test_contribution_that_is_committed_returned_or_of_an_open_round_is_accounted_for():
    me, other = NodeRecord("me"), NodeRecord("other")
    for number in range(3):
        announced(me, number)
    committed(other, 0, "me", "other")  # I was killed before I could write it
    committed(other, 1, "other")
    event(me, "returned", 1, why="not committed by the group")
    assert contributions([me, other]) == {
        "announced": 3, "committed": 1, "returned": 1, "restored": 0, "undecided": 1, "lost": [],
    }  # fmt: skip


def test_contribution_that_was_not_committed_nor_given_back_is_lost():
    me, other = NodeRecord("me"), NodeRecord("other")
    announced(me, 4)
    committed(other, 4, "other")
    assert contributions([other, me])["lost"] == [{"node": 1, "round": 4}]


def test_contribution_of_a_round_decided_while_the_node_was_down_is_restored_if_its_own_state_was_kept():
    me, other = NodeRecord("me"), NodeRecord("other")
    announced(me, 4)
    committed(other, 4, "other")
    me.kept_rounds = {3, 4}
    assert contributions([me, other])["restored"] == 1
    committed(me, 4, "other")  # it was not down: it took the outer step, and must say what became of its contribution
    assert contributions([me, other])["lost"] == [{"node": 0, "round": 4}]


def test_contribution_to_a_lost_branch_must_be_given_back():
    me, other = NodeRecord("me"), NodeRecord("other")
    announced(me, 4)
    committed(me, 4, "me")
    event(me, "rolled_back", 4, to_round=3)
    committed(other, 4, "other")
    assert contributions([me, other])["lost"] == [{"node": 0, "round": 4}]
    event(me, "returned", 4, why="its branch lost")
    assert contributions([me, other])["returned"] == 1
    announced(me, 5)
    event(me, "returned", 5, why="its branch lost")
    event(me, "rolled_back", 5, to_round=4)
    announced(me, 5)  # the same round again, on the winning branch: an account of its own
    committed(other, 5, "other")
    assert contributions([me, other])["lost"] == [{"node": 0, "round": 5}]


def test_withheld_contribution_needs_no_account():
    me = NodeRecord("me")
    event(me, "announced", 0, payload="", bytes=0)
    assert contributions([me])["announced"] == 0


def test_longest_gap_is_between_first_commits_and_to_the_end():
    first, second = NodeRecord("first"), NodeRecord("second")
    committed(first, 0, at=100.0)
    committed(second, 1, at=110.0)
    committed(first, 1, at=160.0)  # it was slow: the round was there already
    committed(first, 2, at=170.0)
    assert longest_gap_seconds([first, second], 171.0) == 60.0
    assert longest_gap_seconds([first, second], 300.0) == 130.0


def test_memory_is_compared_by_thirds_and_only_with_enough_samples():
    memory = MemorySamples()
    for size in (900, 900, 900, 100, 100, 100, 110, 120, 130):
        memory.add("node 0", size)
        memory.add("node 0's p2pd", 50)
    memory.add("node 1", 5)
    assert memory.thirds() == {
        "node 0": {"samples": 9, "middle_third_bytes": 100, "last_third_bytes": 120, "ratio": 1.2},
        "node 0's p2pd": {"samples": 9, "middle_third_bytes": 50, "last_third_bytes": 50, "ratio": 1.0},
    }


def a_soak(**changes: Any) -> dict[str, Any]:
    """Three minutes that pass, with changes."""
    record = NodeRecord("me")
    for number in range(10):
        announced(record, number)
        committed(record, number, "me", at=10.0 * number)
    memory = MemorySamples()
    for _ in range(30):
        memory.add("node 0", 100)
    faults = [Fault(number, 2, "restart") for number in range(10)]
    settings = {"minutes": 3.0, "ended_at": 95.0, "not_back": [], "orphans": []}
    return soak_report([record], faults, memory, **settings) | changes


def test_soak_that_keeps_within_the_limits_passes_and_is_json():
    report = a_soak()
    assert soak_failures(report) == [] and report["passed"]
    assert report["faults"] == {"restart": 10} and report["rounds_committed"] == 10
    assert report["contributions"] == {
        "announced": 10, "committed": 10, "returned": 0, "restored": 0, "undecided": 0, "lost": [],
    }  # fmt: skip
    assert json.loads(json.dumps(report)) == report
    assert "10 restart faults; 10 rounds, longest gap 10 s" in soak_line(report)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"faults": {"restart": 5, "pause": 4}}, "9 faults in 3 minutes, at least 10 are asked for"),
        ({"rounds_committed": 9}, "9 rounds in 3 minutes, at least 10 are asked for"),
        ({"longest_gap_seconds": LONGEST_GAP_SECONDS + 1}, "no commit for 121 s"),
        ({"digest_disagreements": 2}, "the states of 2 rounds differ"),
        ({"contributions": {"lost": [{"node": 3, "round": 7}]}}, "unaccounted for: node 3 in round 7"),
        ({"not_back": [4]}, "not back in the group after a fault: node 4"),
        ({"orphan_processes": [4711]}, "left behind: 4711"),
        ({"memory": {"node 1's p2pd": {"ratio": 1.11}}}, "the memory of node 1's p2pd grew by 11 %"),
        ({"memory": {}}, "too short to measure memory"),
    ],
)
def test_each_broken_limit_is_named(changes, words):
    (reason,) = soak_failures(a_soak(**changes))
    assert words in reason


def test_half_an_hour_asks_for_a_hundred_faults_and_rounds():
    reasons = soak_failures(a_soak(minutes=30.0))
    assert [reason.split(" in ")[1] for reason in reasons] == ["30 minutes, at least 100 are asked for"] * 2


def test_settings_of_a_soak_are_a_run_with_shorter_rounds():
    tiny = preset("tiny")
    run = soak_run(tiny)
    assert run.algorithm.inner_steps < tiny.algorithm.inner_steps and run.data.sequence_length < tiny.data.sequence_length
    assert run.model == tiny.model and run.round == tiny.round
