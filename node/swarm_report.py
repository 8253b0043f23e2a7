"""The verdict of a `swarm`: from what every node wrote, whether they agreed, and the JSON that says so.

The one rule: `agreed` has to be earned. Every node that was not ended on purpose has finished all rounds, enough of
them live, their digests are equal in every round, and each one's last digest was computed again from its files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from sparseloco.node.swarm_events import NodeRecord, differing_rounds
from sparseloco.node.swarm_faults import Fault
from sparseloco.node.swarm_soak import soak_failures
from sparseloco.protocol.manifest import GENESIS_ROUND

FINISHED, KILLED, LEFT = "finished", "killed", "left"


@dataclass(frozen=True)
class NodeOutcome:
    """One node at the end: its events, how its process ended, and the digest recomputed from its files."""

    node: int
    record: NodeRecord
    ended: str  # FINISHED, KILLED by the harness, or LEFT for anything else
    exit_code: int | None
    digest_of_files: str | None = None  # None: there is no state of the final round on disk
    late: bool = False
    restarts: int = 0
    disturbed: bool = False  # restarted, paused or damaged: it may have missed rounds, and must be on the chain at the end
    note: str = ""  # why it did not finish, for people


@dataclass(frozen=True)
class SwarmOutcome:
    """Everything the verdict is made of. `rounds` is R; times in seconds."""

    run_id: str
    seed: int
    rounds: int
    min_peers: int
    nodes: tuple[NodeOutcome, ...]
    faults: tuple[Fault, ...]
    missed_faults: tuple[Fault, ...]  # that were asked for and could not be injected
    started_at: float  # unix time
    elapsed_seconds: float
    interrupted_by: str = ""  # why the harness stopped early, such as a stall
    soak: Mapping[str, Any] | None = None  # of a swarm under random faults


def disagreements(outcome: SwarmOutcome) -> list[str]:
    """Every reason why the swarm did not agree; empty if it did."""
    reasons = [outcome.interrupted_by] if outcome.interrupted_by else []
    missed = [f"{fault.kind} {fault.node}@{fault.round}" for fault in outcome.missed_faults]
    if missed:
        reasons.append(f"faults that never became possible: {', '.join(missed)}")
    if outcome.rounds < 1:
        reasons.append("no round was committed")
    living = [node for node in outcome.nodes if node.ended == FINISHED]
    for node in outcome.nodes:
        if node.ended == LEFT:
            reasons.append(f"node {node.node} ended by itself with exit code {node.exit_code}" + _colon(node.note))
        elif node.ended == FINISHED:
            reasons += _missing(node, outcome.rounds)
    if len(living) < max(outcome.min_peers, 1):
        reasons.append(f"{len(living)} nodes live at the end, min_peers is {outcome.min_peers}")
    reasons += _unequal(outcome.nodes)
    if outcome.soak is not None:
        reasons += soak_failures(outcome.soak)
    for node in living:
        if node.digest_of_files is None:
            reasons.append(f"node {node.node} has no state of its final round on disk")
        elif node.digest_of_files != node.record.final_digest:
            reasons.append(
                f"node {node.node} reported final state {_short(node.record.final_digest)}, its files give "
                f"{_short(node.digest_of_files)}"
            )
    return reasons


def verdict(outcome: SwarmOutcome) -> dict[str, Any]:
    """The object that `swarm --json` prints."""
    records = [node.record for node in outcome.nodes]
    finals = {node.record.final_digest for node in outcome.nodes if node.ended == FINISHED}
    commits = [at for record in records for at in record.committed_at.values()]
    rounds = range(outcome.rounds)
    return {
        "run_id": outcome.run_id,
        "seed": outcome.seed,
        "rounds": outcome.rounds,
        "agreed": not disagreements(outcome),
        "state_digest": finals.pop() if len(finals) == 1 else None,
        "elapsed_seconds": round(outcome.elapsed_seconds, 3),
        "first_commit_seconds": round(min(commits) - outcome.started_at, 3) if commits else None,
        "nodes": [node_verdict(node) for node in outcome.nodes],
        "payload_bytes": max((size for record in records for size in record.payloads.values()), default=0),
        "train_loss": [_mean(record.train_loss.get(number) for record in records) for number in rounds],
        "eval_loss": [_first(record.eval_loss.get(number) for record in records)
                      for number in range(GENESIS_ROUND, outcome.rounds)],
        "tokens": sum(record.tokens for record in records),
        "round_seconds": [_between(records, "started_at", "committed_at", number) for number in rounds],
        "exchange_seconds": [_between(records, "closed_at", "checked_at", number) for number in rounds],
        "faults": [fault_entry(fault) for fault in outcome.faults],
        **({"soak": outcome.soak} if outcome.soak is not None else {}),
        "refusals": [
            {"round": number, "peer_id": peer_id, "by": record.peer_id, "rule": rule}
            for record in records for number, peer_id, rule in record.refusals
        ],
    }  # fmt: skip


def fault_entry(fault: Fault) -> dict[str, Any]:
    """One entry of `faults`; `seconds` of what has a length only."""
    entry: dict[str, Any] = {"round": fault.round, "node": fault.node, "kind": fault.kind}
    return entry | ({"seconds": fault.seconds} if fault.seconds else {})


def node_verdict(node: NodeOutcome) -> dict[str, Any]:
    """One entry of `nodes`; a killed node said no last word, so its counts come from its other events."""
    record, said = node.record, node.record.left or {}
    committed = sum(record.peer_id in peers for peers in record.contributors.values())
    return {
        "node": node.node,
        "peer_id": record.peer_id,
        "ended": node.ended,
        "rounds": len(record.digests),
        "round_digests": {str(number): digest for number, digest in sorted(record.digests.items())},
        "state_digest": record.final_digest,
        "exit_code": node.exit_code,
        "restarts": node.restarts,
        "late_joins": int(node.late),
        "steps": said.get("steps", record.steps),
        "contributions_committed": said.get("contributions_committed", committed),
        "contributions_returned": said.get("contributions_returned", record.returned),
        "bytes_sent": said.get("bytes_sent", 0),
        "bytes_received": said.get("bytes_received", 0),
        "payload_bytes_sent": said.get("payload_bytes_sent", 0),
        "peak_rss_bytes": said.get("peak_rss_bytes", 0),
    }


def _missing(node: NodeOutcome, rounds: int) -> list[str]:
    """Rounds that a finished node did not commit; one that was away only has to be on the chain at the end."""
    if node.late or node.disturbed or node.record.rollbacks:
        missing = [rounds - 1] if node.record.last_committed < rounds - 1 else []
    else:
        missing = [number for number in range(rounds) if number not in node.record.digests]
    if not missing:
        return []
    return [f"node {node.node} did not commit round{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"]


def _unequal(nodes: Sequence[NodeOutcome]) -> list[str]:
    """Rounds in which two nodes, living or not, reported different states."""
    return [
        f"the states after round {number} differ: node {', '.join(map(str, others))} from the rest"
        for number, others in differing_rounds([node.record for node in nodes]).items()
    ]


def _between(records: Sequence[NodeRecord], first: str, last: str, number: int) -> float | None:
    """Median over the nodes of the seconds between two events of a round."""
    spans = []
    for record in records:
        starts: Mapping[int, float] = getattr(record, first)
        ends: Mapping[int, float] = getattr(record, last)
        if number in starts and number in ends:
            spans.append(ends[number] - starts[number])
    return round(median(spans), 3) if spans else None


def _mean(values: Any) -> float | None:
    present = [value for value in values if value is not None]
    return fmean(present) if present else None


def _first(values: Any) -> float | None:
    return next((value for value in values if value is not None), None)


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "nothing"


def _colon(note: str) -> str:
    return f": {note}" if note else ""
