"""The verdict: every rule that `agreed` has to pass, one test each, on outcomes written out by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sparseloco.node.swarm_events import EventTail, NodeRecord
from sparseloco.node.swarm_faults import Fault
from sparseloco.node.swarm_report import FINISHED, KILLED, LEFT, NodeOutcome, SwarmOutcome, disagreements, verdict


def a_passing_report() -> dict[str, Any]:
    report = {
        "minutes": 3.0, "faults": {"restart": 10}, "rounds_committed": 10, "longest_gap_seconds": 20.0,
        "digest_disagreements": 0, "contributions": {"lost": []}, "not_back": [], "orphan_processes": [],
        "memory": {"node 0": {"ratio": 1.0}},
    }  # fmt: skip
    return report | {"passed": True}


def digest(round_number: int) -> str:
    return f"{round_number + 1:064x}"


def finished(node: int, rounds: int = 3, **changes: object) -> NodeOutcome:
    record = NodeRecord(f"peer-{node}", digests={number: digest(number) for number in range(rounds)})
    return replace(NodeOutcome(node, record, FINISHED, 0, digest(rounds - 1)), **changes)


def outcome(*nodes: NodeOutcome, **changes: object) -> SwarmOutcome:
    base = SwarmOutcome("ab" * 32, 0, 3, 1, nodes, (), (), 100.0, 9.0)
    return replace(base, **changes)


def the_reason(swarm: SwarmOutcome) -> str:
    reasons = disagreements(swarm)
    assert len(reasons) == 1, reasons
    assert verdict(swarm)["agreed"] is False
    return reasons[0]


def test_equal_nodes_agree():
    found = verdict(outcome(finished(0), finished(1)))
    assert found["agreed"] and found["state_digest"] == digest(2)


def test_unequal_digest_of_one_round_is_named():
    odd = finished(1)
    odd.record.digests[1] = "e" * 64
    assert the_reason(outcome(finished(0), odd, finished(2))) == "the states after round 1 differ: node 1 from the rest"


def test_killed_node_that_committed_something_else_before_is_no_agreement():
    odd = finished(1, rounds=1, ended=KILLED, exit_code=-9)
    odd.record.digests[0] = "e" * 64
    assert "round 0 differ" in the_reason(outcome(finished(0), odd, finished(2)))


def test_unequal_final_states_give_no_state_digest():
    odd = finished(1, digest_of_files="e" * 64)
    odd.record.digests[2] = "e" * 64
    swarm = outcome(finished(0), odd)
    assert verdict(swarm)["state_digest"] is None and not verdict(swarm)["agreed"]


def test_missing_round_is_named():
    short = finished(1)
    del short.record.digests[1]
    assert the_reason(outcome(finished(0), short)) == "node 1 did not commit round 1"


def test_node_that_stopped_early_with_exit_code_zero_is_no_agreement():
    short = finished(1, rounds=2)
    assert the_reason(outcome(finished(0), short)) == "node 1 did not commit round 2"


def test_round_reached_by_download_only_counts_for_a_late_node_only():
    late = finished(1, late=True)
    for number in range(3):
        late.record.caught_up[number] = late.record.digests.pop(number)
    assert verdict(outcome(finished(0), late))["agreed"]
    assert "did not commit rounds 0, 1, 2" in the_reason(outcome(finished(0), replace(late, late=False)))


def test_disturbed_node_may_miss_rounds_and_must_be_on_the_chain_at_the_end():
    away = finished(1, disturbed=True, restarts=2)
    del away.record.digests[1]
    found = verdict(outcome(finished(0), away))
    assert found["agreed"] and found["nodes"][1]["restarts"] == 2
    ahead = finished(1, disturbed=True, digest_of_files=digest(5))  # by time: it fetched a later state than the others hold
    ahead.record.digests.clear()
    ahead.record.caught_up[5] = digest(5)
    assert disagreements(outcome(finished(0), ahead)) == []
    del away.record.digests[2]
    away = replace(away, digest_of_files=digest(0))
    assert the_reason(outcome(finished(0), away)) == "node 1 did not commit round 2"


def test_digest_of_a_disturbed_node_must_agree_wherever_it_reports_one():
    away = finished(1, disturbed=True)
    away.record.digests[1] = "e" * 64
    assert "round 1 differ" in the_reason(outcome(finished(0), away, finished(2)))


def test_rounds_of_a_lost_branch_no_longer_count():
    back = finished(1)
    back.record.digests[1] = back.record.digests[2] = "e" * 64
    back.record.take({"time": 9.0, "event": "rolled_back", "round": 3, "to_round": 0})
    assert back.record.digests == {0: digest(0)}
    back.record.take({"time": 10.0, "event": "caught_up", "round": 2, "state_digest": digest(2)})
    assert verdict(outcome(finished(0), back))["agreed"]  # it need not commit round 1 again itself


def test_fault_entries_name_a_length_only_where_there_is_one():
    faults = (Fault(2, 1, "kill"), Fault(4, 3, "pause", 30.0))
    assert verdict(outcome(finished(0), faults=faults))["faults"] == [
        {"round": 2, "node": 1, "kind": "kill"}, {"round": 4, "node": 3, "kind": "pause", "seconds": 30.0},
    ]  # fmt: skip


def test_soak_that_did_not_pass_is_no_agreement():
    soak = a_passing_report() | {"orphan_processes": [4711]}
    assert the_reason(outcome(finished(0), soak=soak)) == "processes were left behind: 4711"
    assert verdict(outcome(finished(0), soak=a_passing_report()))["soak"]["passed"]


def test_late_node_that_never_reached_the_end_is_no_agreement():
    late = finished(1, rounds=2, late=True)
    assert the_reason(outcome(finished(0), late)) == "node 1 did not commit round 2"


def test_state_that_is_not_on_disk_or_differs_from_the_report_is_no_agreement():
    assert "no state of its final round" in the_reason(outcome(finished(0, digest_of_files=None)))
    assert "its files give eeeeeeeeeeee" in the_reason(outcome(finished(0, digest_of_files="e" * 64)))


def test_killed_nodes_are_excused_as_long_as_min_peers_live():
    killed = finished(1, rounds=1, ended=KILLED, exit_code=-9, digest_of_files=None)
    assert verdict(outcome(finished(0), killed))["agreed"]
    assert the_reason(outcome(finished(0), killed, min_peers=2)) == "1 nodes live at the end, min_peers is 2"


def test_swarm_of_killed_nodes_only_is_no_agreement():
    assert "0 nodes live" in the_reason(outcome(finished(0, ended=KILLED, exit_code=-9), min_peers=1))


def test_node_that_left_by_itself_is_no_agreement():
    gone = finished(1, ended=LEFT, exit_code=-11, note="Segmentation fault")
    assert the_reason(outcome(finished(0), gone)) == "node 1 ended by itself with exit code -11: Segmentation fault"


def test_fault_that_was_never_injected_is_no_agreement():
    missed = (Fault(7, 1, "pause", 30.0),)
    assert the_reason(outcome(finished(0), missed_faults=missed)) == "faults that never became possible: pause 1@7"


def test_stall_is_no_agreement():
    assert the_reason(outcome(finished(0), interrupted_by="no progress")) == "no progress"


def test_swarm_by_time_without_a_round_is_no_agreement():
    assert "no round was committed" in disagreements(outcome(finished(0, rounds=0), rounds=0))


def test_losses_are_means_and_missing_ones_are_null():
    first, second = finished(0), finished(1)
    first.record.train_loss.update({0: 4.0, 1: 3.0})
    second.record.train_loss.update({0: 5.0})
    second.record.eval_loss.update({-1: 5.5, 0: 5.0, 1: 4.0, 2: 3.0})
    found = verdict(outcome(first, second))
    assert found["train_loss"] == [4.5, 3.0, None] and found["eval_loss"] == [5.5, 5.0, 4.0, 3.0]
    assert json.loads(json.dumps(found)) == found


def test_durations_are_medians_between_events_and_refusals_name_both_sides():
    nodes = [finished(node) for node in range(3)]
    for node, seconds in zip(nodes, (1.0, 2.0, 9.0), strict=True):
        node.record.started_at[0], node.record.committed_at[0] = 100.0, 100.0 + seconds
    nodes[0].record.refusals.append((1, "peer-2", "payload length"))
    found = verdict(outcome(*nodes))
    assert found["round_seconds"] == [2.0, None, None] and found["first_commit_seconds"] == 1.0
    assert found["refusals"] == [{"round": 1, "peer_id": "peer-2", "by": "peer-0", "rule": "payload length"}]


def test_tail_waits_for_whole_lines_and_skips_torn_ones(tmp_path: Path):
    path, record = tmp_path / "events.jsonl", NodeRecord("me")
    tail = EventTail(path)
    assert not tail.read_into(record)
    line = json.dumps({"time": 1.0, "event": "committed", "round": 0, "state_digest": digest(0), "contributors": []})
    path.write_text('{"time": 1.0, "event": "join\n' + line + "\n" + line[:20])
    assert tail.read_into(record)
    assert record.digests == {0: digest(0)} and tail.skipped_lines == 1
    with path.open("a") as file:
        file.write(line[20:].replace('"round": 0', '"round": 1') + "\n")
    assert tail.read_into(record) and sorted(record.digests) == [0, 1]


def test_events_of_unknown_name_are_no_progress():
    record = NodeRecord("me")
    record.take({"time": 5.0, "event": "resized", "round": 3})
    assert record.progress_at == 0.0 and record.round is None
