"""The verdict of a swarm under random faults: did it keep its word for as long as it ran?

Pure functions of what the harness saw: the nodes' events, the faults, memory samples and processes left behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean
from typing import Any

from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.swarm_events import NodeRecord, differing_rounds
from sparseloco.node.swarm_faults import Fault

# What half an hour must hold at least; shorter and longer runs in proportion.
FAULTS_PER_MINUTE = ROUNDS_PER_MINUTE = 100 / 30
LONGEST_GAP_SECONDS = 120.0
# Mean memory of a process in the last third of the run over the middle third: not above this. That it shrinks is no fault.
MEMORY_GROWTH = 1.10
MEMORY_SAMPLES_NEEDED = 9
SAMPLE_SECONDS = 5.0
# A run longer than any soak, so that none reaches its end.
SOAK_ROUNDS = 1_000_000


def soak_run(base: RunFile) -> RunFile:
    """`base` with rounds short enough for seven nodes on two cores, restarts included: about 8 s a round."""
    return replace(
        base,
        run=replace(base.run, name="soak", rounds=SOAK_ROUNDS),
        data=replace(base.data, sequence_length=64, held_out_windows=16),
        algorithm=replace(base.algorithm, inner_steps=10),
    )


@dataclass
class MemorySamples:
    """Resident bytes of the processes that no fault touches, by process name, in the order taken."""

    by_process: dict[str, list[int]] = field(default_factory=dict)

    def add(self, process: str, resident_bytes: int) -> None:
        self.by_process.setdefault(process, []).append(resident_bytes)

    def thirds(self) -> dict[str, dict[str, float]]:
        """Means of the middle and the last third in bytes, and their ratio, of the processes with enough samples."""
        found = {}
        for process, samples in self.by_process.items():
            third = len(samples) // 3
            if len(samples) >= MEMORY_SAMPLES_NEEDED:
                middle, last = fmean(samples[third : 2 * third]), fmean(samples[-third:])
                found[process] = {
                    "samples": len(samples),
                    "middle_third_bytes": round(middle),
                    "last_third_bytes": round(last),
                    "ratio": round(last / middle, 4),
                }
        return found


def contributions(records: Sequence[NodeRecord]) -> dict[str, Any]:
    """What became of every announced contribution: counts by fate, and `lost` for those that nothing accounts for.

    committed: its peer is among the round's contributors on anybody's chain. returned: the node said that it stays in its
    error feedback. restored: the round was decided while the node was down, and its restart found its own state of that
    round on the disk. undecided: of a round that nobody has committed yet when the swarm ends.
    """
    committed = {(peer, number) for record in records for number, peers in record.contributors.items() for peer in peers}
    head = max((record.last_committed for record in records), default=-1)
    counts = dict.fromkeys(("committed", "returned", "restored", "undecided"), 0)
    lost = []
    for node, record in enumerate(records):
        for number in sorted(record.payloads):
            if (record.peer_id, number) in committed:
                fate = "committed"
            elif number in record.returned_rounds:
                fate = "returned"
            elif number in record.kept_rounds and number not in record.committed_at:
                fate = "restored"
            elif number > head:
                fate = "undecided"
            else:
                lost.append({"node": node, "round": number})
                continue
            counts[fate] += 1
    return {"announced": sum(counts.values()) + len(lost), **counts, "lost": lost}


def longest_gap_seconds(records: Sequence[NodeRecord], ended_at: float) -> float:
    """The longest time between two commits that were each the first of their round, and from the last one to the end."""
    first: dict[int, float] = {}
    for record in records:
        for number, at in record.committed_at.items():
            first[number] = min(at, first.get(number, at))
    times = sorted([*first.values(), ended_at])
    return round(max((later - earlier for earlier, later in pairwise(times)), default=0.0), 3)


def soak_report(
    records: Sequence[NodeRecord],
    faults: Sequence[Fault],
    memory: MemorySamples,
    *,
    minutes: float,
    ended_at: float,
    not_back: Sequence[int],
    orphans: Sequence[int],
) -> dict[str, Any]:
    """The `soak` entry of `swarm --json`. `not_back`: nodes that a fault took away and that are no members at the end."""
    report: dict[str, Any] = {
        "minutes": round(minutes, 2),
        "faults": dict(Counter(fault.kind for fault in faults)),
        "rounds_committed": max((record.last_committed for record in records), default=-1) + 1,
        "longest_gap_seconds": longest_gap_seconds(records, ended_at),
        "digest_disagreements": len(differing_rounds(records)),
        "contributions": contributions(records),
        "not_back": sorted(not_back),
        "orphan_processes": list(orphans),
        "memory": memory.thirds(),
    }
    return report | {"passed": not soak_failures(report)}


def soak_failures(report: Mapping[str, Any]) -> list[str]:
    """Why a soak did not pass; empty if it did."""
    minutes = report["minutes"]
    faults, rounds = sum(report["faults"].values()), report["rounds_committed"]
    reasons = []
    if faults < int(FAULTS_PER_MINUTE * minutes):
        reasons.append(f"{faults} faults in {minutes:g} minutes, at least {int(FAULTS_PER_MINUTE * minutes)} are asked for")
    if rounds < int(ROUNDS_PER_MINUTE * minutes):
        reasons.append(f"{rounds} rounds in {minutes:g} minutes, at least {int(ROUNDS_PER_MINUTE * minutes)} are asked for")
    if report["longest_gap_seconds"] > LONGEST_GAP_SECONDS:
        reasons.append(f"no commit for {report['longest_gap_seconds']:.0f} s, at most {LONGEST_GAP_SECONDS:.0f} s are allowed")
    if report["digest_disagreements"]:
        reasons.append(f"the states of {report['digest_disagreements']} rounds differ between nodes")
    lost = [f"node {entry['node']} in round {entry['round']}" for entry in report["contributions"]["lost"]]
    if lost:
        reasons.append(f"announced contributions are unaccounted for: {', '.join(lost)}")
    if report["not_back"]:
        reasons.append(f"not back in the group after a fault: node {', '.join(map(str, report['not_back']))}")
    if report["orphan_processes"]:
        reasons.append(f"processes were left behind: {', '.join(map(str, report['orphan_processes']))}")
    if not report["memory"]:
        reasons.append("too short to measure memory")
    for name, memory in report["memory"].items():
        if memory["ratio"] > MEMORY_GROWTH:
            reasons.append(f"the memory of {name} grew by {100 * (memory['ratio'] - 1):.0f} % in the last third")
    return reasons


def soak_line(report: Mapping[str, Any]) -> str:
    """The soak in one line, for people."""
    fates = {fate: count for fate, count in report["contributions"].items() if fate != "lost"}
    return (
        f"soak of {report['minutes']:g} minutes: {_counts(report['faults'])} faults; {report['rounds_committed']} rounds, longest "
        f"gap {report['longest_gap_seconds']:.0f} s; contributions: {_counts(fates)}, {len(report['contributions']['lost'])} lost; "
        + "memory of the last third over the middle third: "
        + ", ".join(f"{name} {memory['ratio']:.3f}" for name, memory in report["memory"].items())
    )


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counted.items())
