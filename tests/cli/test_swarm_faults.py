"""Which fault is due when: planned ones at their rounds, random ones as the seed says and never too many at once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from sparseloco.bootstrap.errors import StateError
from sparseloco.node.options import FaultAt, PauseAt, SwarmOptions
from sparseloco.node.swarm_damage import flip_a_byte
from sparseloco.node.swarm_faults import RANDOM_KINDS, RANDOM_SECONDS, SPARED, Fault, RandomFaults, due, planned

KILL, LATE = Fault(3, 1, "kill"), Fault(2, 2, "late")


def test_flags_become_faults_with_their_kinds():
    options = SwarmOptions(
        kill=(FaultAt(node=1, round=2),), restart=(FaultAt(node=2, round=3), FaultAt(node=2, round=5)),
        pause=(PauseAt(node=3, round=4, seconds=30.0),), corrupt=(FaultAt(node=0, round=1),),
    )  # fmt: skip
    assert planned(options) == (
        Fault(2, 1, "kill"), Fault(3, 2, "restart"), Fault(5, 2, "restart"), Fault(1, 0, "corrupt"), Fault(4, 3, "pause", 30.0),
    )  # fmt: skip


def test_fault_is_due_once_and_when_its_node_is_there():
    both = frozenset({0, 1})
    assert due([KILL, LATE], [], {0: 2, 1: 1, 2: None}, both) == []
    assert due([KILL, LATE], [], {0: 2, 1: 2, 2: None}, both) == [LATE]
    assert due([KILL, LATE], [LATE], {0: 2, 1: 4, 2: None}, both) == [KILL]
    assert due([KILL, LATE], [LATE], {0: 2, 1: 4, 2: None}, frozenset({0})) == []  # it died by itself


def test_late_start_does_not_wait_for_a_node_that_is_away():
    assert due([LATE], [], {0: 2, 1: 0, 2: None}, frozenset({0})) == [LATE]


def test_several_faults_of_one_node_come_one_after_the_other():
    plan = [Fault(1, 0, "restart"), Fault(2, 0, "restart"), Fault(2, 1, "restart")]
    here = frozenset({0, 1})
    assert due(plan, [], {0: 2, 1: 2}, here) == [plan[0], plan[2]]
    assert due(plan, [plan[0], plan[2]], {0: 2, 1: 2}, frozenset()) == []  # neither is back yet
    assert due(plan, [plan[0], plan[2]], {0: 2, 1: 2}, here) == [plan[1]]


def a_day(seed: int, nodes: int = 7, mean: float = 10.0, back_after: float = 20.0) -> list[tuple[float, Fault, int]]:
    """Random faults of a simulated hour: (time, fault, nodes away when it came); each node is back some seconds later."""
    faults, away, found = RandomFaults(seed, nodes, mean, 0.0), {}, []
    for tick in range(36000):
        now = tick / 10
        away = {node: until for node, until in away.items() if until > now}
        fault = faults.due(now, frozenset(away), dict.fromkeys(range(nodes), 5))
        if fault is not None:
            assert fault.node not in away
            away[fault.node] = now + back_after
            found.append((now, fault, len(away)))
    return found


def test_random_faults_come_as_often_as_asked_and_spare_a_quorum_and_the_first_nodes():
    found = a_day(seed=0, back_after=2.0)
    assert 300 < len(found) < 420  # 360 on average
    assert {fault.node for _, fault, _ in found} == set(range(SPARED, 7))
    assert {fault.kind for _, fault, _ in found} == set(RANDOM_KINDS)
    counts = Counter(fault.kind for _, fault, _ in found)
    assert counts["restart"] > counts["pause"] > counts["corrupt"]
    for _, fault, _ in found:
        low, high = RANDOM_SECONDS.get(fault.kind, (0.0, 0.0))
        assert low <= fault.seconds <= high


@pytest.mark.parametrize(("nodes", "at_once"), [(4, 1), (5, 1), (7, 2), (10, 3)])
def test_never_more_nodes_are_away_than_leave_a_quorum_of_all(nodes, at_once):
    found = a_day(seed=1, nodes=nodes, mean=1.0, back_after=60.0)
    assert max(away for _, _, away in found) == at_once


def test_seed_decides_every_random_fault():
    assert a_day(seed=3) == a_day(seed=3) != a_day(seed=4)


def test_node_that_has_not_joined_yet_gets_no_random_fault():
    faults = RandomFaults(0, 4, 1.0, 0.0)
    assert faults.due(1000.0, frozenset(), {0: 1, 1: 1, 2: None}) is None
    found = faults.due(1000.0, frozenset(), {0: 1, 1: 1, 2: 7})
    assert found is not None and (found.node, found.round) == (2, 7)


def test_one_bit_of_one_file_that_the_state_depends_on_is_flipped(tmp_path: Path):
    files = {"chain/00000001.bin": b"a" * 40, "checkpoints/00000001/theta.safetensors": b"b" * 40, "votes.log": b"c" * 40,
             "own/00000001/a.safetensors": b"d" * 40, "identity.key": b"key", "events.jsonl": b"{}\n"}  # fmt: skip
    touched = set()
    for seed in range(30):
        for name, data in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
        path = flip_a_byte(tmp_path, Random(seed))
        changed = [name for name, data in files.items() if (tmp_path / name).read_bytes() != data]
        assert changed == [path.relative_to(tmp_path).as_posix()]
        before, after = files[changed[0]], path.read_bytes()
        bits = sum((old ^ new).bit_count() for old, new in zip(before, after, strict=True))
        assert bits == 1, f"seed {seed}"
        touched.add(changed[0])
    assert touched == {"chain/00000001.bin", "checkpoints/00000001/theta.safetensors", "votes.log"}


def test_node_without_files_cannot_be_damaged(tmp_path: Path):
    with pytest.raises(StateError, match="give --corrupt a later round"):
        flip_a_byte(tmp_path, Random(0))
