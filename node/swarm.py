"""`swarm`: real node processes and a bootstrap on this machine, faults on demand, and a verdict.

The harness sees only what a person could see: processes, their events.jsonl, their files. It starts a bootstrap, gives
its address to the nodes, follows their events until all have ended, computes each final state digest again from the
node's files, and says whether all agreed.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console

from sparseloco.bootstrap.errors import NodeError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.init import initialise, parameter_count, starting_run
from sparseloco.node.options import SwarmOptions
from sparseloco.node.swarm_events import EventTail, NodeRecord
from sparseloco.node.swarm_faults import KILL, LATE, SPARED, planned
from sparseloco.node.swarm_inject import Injector
from sparseloco.node.swarm_processes import Child, end_all
from sparseloco.node.swarm_report import FINISHED, KILLED, LEFT, NodeOutcome, SwarmOutcome, disagreements, verdict
from sparseloco.node.swarm_setup import Layout, claimed, prepare
from sparseloco.node.swarm_soak import SAMPLE_SECONDS, MemorySamples, soak_line, soak_report, soak_run
from sparseloco.node.swarm_table import Screen, final_table, payload_line
from sparseloco.protocol.manifest import GENESIS_ROUND

LOOK_SECONDS = 0.2  # between two looks at the nodes: short against a round, long against reading a few files
RETURN_SECONDS = 180.0  # after a soak's time is up: for whoever is away to come back
START_SECONDS = 120.0  # importing torch with N processes on two cores and a cold disk takes most of this


def digest_of_files(node_dir: Path, round_number: int) -> str | None:
    """The state digest of a round, computed from a node's files; None if they hold no state of that round."""
    from sparseloco.node.swarm_files import state_digest_of

    return state_digest_of(node_dir, round_number)


@dataclass(frozen=True)
class Parts:
    """What the harness stands on; tests put a scripted node in place of the real one."""

    program: tuple[str, ...] = (sys.executable, "-m", "sparseloco.node.cli")
    initialise: Callable[[RunFile, Path], RunFile] = initialise
    digest_of_files: Callable[[Path, int], str | None] = digest_of_files
    now: Callable[[], float] = time.time  # unix seconds, the clock of the nodes' events


def run_swarm(options: SwarmOptions, parts: Parts | None = None) -> int:
    """0 if all agreed, else 1; KeyboardInterrupt after every process has ended if a person stopped it."""
    parts = parts or Parts()
    started_at = parts.now()
    # SIGINT too: a shell starts background jobs with it ignored, and Python then raises no KeyboardInterrupt by itself.
    previous = {number: signal.signal(number, _as_interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with claimed(options) as root:
            base = _starting_run(options) if options.run is None else RunFile.load(options.run)
            layout = prepare(root, base, options)
            with Screen() as screen:
                screen.say(f"swarm of {options.nodes} nodes in {root}: making the genesis state ...")
                layout = replace(layout, run=parts.initialise(layout.run, layout.run_path))
                outcome = Swarm(layout, options, parts, screen, started_at).run()
            return _report(outcome, layout, options)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _starting_run(options: SwarmOptions) -> RunFile:
    tiny = starting_run("tiny")
    return tiny if options.mtbf is None else soak_run(tiny)


class Swarm:
    """The processes of one swarm and what is known about them."""

    def __init__(
        self, layout: Layout, options: SwarmOptions, parts: Parts, screen: Screen, started_at: float
    ) -> None:
        self.layout, self.options, self.parts, self.screen = layout, options, parts, screen
        self.started_at = started_at
        self.records = [NodeRecord(peer_id) for peer_id in layout.peer_ids]
        self.tails = [EventTail(layout.node_dir(node) / "events.jsonl") for node in range(options.nodes)]
        self.nodes: dict[int, Child] = {}
        self.seed: Child | None = None
        self.peers: list[str] = []
        self.processes: list[Child] = []  # all that were ever started
        self.said_rounds: set[int] = set()
        self.said_ends: set[int] = set()
        self.interrupted_by = ""
        self.time_up = False
        self.injector = Injector(
            layout, self.records, self.nodes, planned(options), start=self._start_node, say=screen.say, now=parts.now
        )
        self._memory, self._sampled_at = MemorySamples(), 0.0
        self._ended_at = 0.0

    def run(self) -> SwarmOutcome:
        """Start everything, follow it to its end, and leave no process behind whatever happens."""
        try:
            self._start_bootstrap()
            late = {fault.node for fault in self.options.late}
            for node in range(self.options.nodes):
                if node not in late:
                    self._start_node(node)
            if self.options.mtbf is not None:
                self.injector.begin_random(self.options.mtbf)
            while not self._look():
                time.sleep(LOOK_SECONDS)
        finally:
            self._ended_at = self.parts.now()
            self.injector.resume_all()
            end_all([*self.nodes.values(), *([self.seed] if self.seed else [])])
        self._read_events()
        return self._outcome()

    def _start_bootstrap(self) -> None:
        """Start the bootstrap node and wait for its addresses; NodeError with its last words if it fails."""
        self.screen.say(f"run {self.layout.run.run_id.hex()}: starting the bootstrap ...")
        log = self.layout.root / "bootstrap.log"
        self.seed = Child("bootstrap", [*self.parts.program, *self.layout.bootstrap_arguments()], log)
        self.processes.append(self.seed)
        deadline = time.monotonic() + START_SECONDS
        while not (addresses := _addresses(self.layout.seed_dir / "node.json")):
            if not self.seed.running:
                raise NodeError(f"the bootstrap ended with exit code {self.seed.exit_code}:\n{self.seed.last_lines()}")
            if time.monotonic() > deadline:
                raise NodeError(f"the bootstrap gave no address in {START_SECONDS:.0f} s; its output is in {log}")
            time.sleep(LOOK_SECONDS)
        self.peers = addresses
        self.screen.say(f"bootstrap at {addresses[0]}")

    def _start_node(self, node: int) -> None:
        arguments = self.layout.node_arguments(node, self.peers, self.options.rounds)
        log = self.layout.root / f"node-{node}.log"
        self.nodes[node] = Child(f"node {node}", [*self.parts.program, *arguments], log)
        self.processes.append(self.nodes[node])
        self.said_ends.discard(node)
        self.records[node].progress_at = self.parts.now()

    def _look(self) -> bool:
        """One look at everything; whether the swarm is over."""
        self._read_events()
        self.injector.look()
        self._sample_memory()
        self._say_news()
        self.screen.draw(self.records)
        if not any(child.running for child in self.nodes.values()) and not self.injector.pending:
            return True
        if self._is_time_up():
            return True
        now = self.parts.now()
        self._read_events()  # after the clock: what a node wrote before that instant is progress
        quiet_seconds = now - max(record.progress_at for record in self.records)
        if quiet_seconds > stall_seconds(self.layout.run):
            self.interrupted_by = f"no progress for {quiet_seconds:.0f} s: {self._waiting()}"
            return True
        return False

    def _is_time_up(self) -> bool:
        """The minutes are over; under random faults, once whoever was away is back as well, or had the time for it."""
        minutes, now = self.options.minutes, self.parts.now()
        if minutes is None or now <= self.started_at + 60 * minutes:
            return False
        if self.options.mtbf is not None:
            self.injector.stop()
            if self.injector.away() and now < self.started_at + 60 * minutes + RETURN_SECONDS:
                return False
        self.time_up = True
        return True

    def _sample_memory(self) -> None:
        now = self.parts.now()
        if self.options.mtbf is None or now < self._sampled_at + SAMPLE_SECONDS:
            return
        self._sampled_at = now
        for node in range(SPARED):
            child = self.nodes.get(node)
            for name, size in (child.resident_bytes() if child is not None else {}).items():
                self._memory.add(name, size)

    def _read_events(self) -> None:
        for node, child in self.nodes.items():
            if self.tails[node].read_into(self.records[node]):
                child.remember_children()

    def _say_news(self) -> None:
        held_out = {number: loss for record in self.records for number, loss in record.eval_loss.items()}
        if GENESIS_ROUND in held_out and GENESIS_ROUND not in self.said_rounds:
            self.said_rounds.add(GENESIS_ROUND)
            self.screen.say(f"genesis: held-out loss {held_out[GENESIS_ROUND]:.3f}")
        for record in self.records:
            for number in sorted(set(record.digests) & set(held_out) - self.said_rounds):
                self.said_rounds.add(number)
                peers, digest = len(record.contributors[number]), record.digests[number][:12]
                self.screen.say(f"round {number}: {peers} contributions, state {digest}, held-out loss {held_out[number]:.3f}")
        for node, child in self.nodes.items():
            if not child.running and node not in self.said_ends and not self.injector.is_down(node):
                self.said_ends.add(node)
                if not self._was_killed(node):
                    self.records[node].state = "left"
                    self.screen.say(f"node {node} ended with exit code {child.exit_code}")

    def _waiting(self) -> str:
        """Which living node stands where, for a swarm that stalled."""
        now = self.parts.now()
        return "; ".join(
            f"node {node} waits after {self.records[node].last_event} ({now - self.records[node].progress_at:.0f} s)"
            for node, child in sorted(self.nodes.items()) if child.running
        )  # fmt: skip

    def _was_killed(self, node: int) -> bool:
        return any(fault.kind == KILL and fault.node == node for fault in self.injector.faults)

    def _outcome(self) -> SwarmOutcome:
        nodes = tuple(self._node_outcome(node) for node in range(self.options.nodes))
        faults = self.injector.faults
        heads = [node.record.last_committed + 1 for node in nodes if node.ended == FINISHED]
        return SwarmOutcome(
            run_id=self.layout.run.run_id.hex(),
            seed=self.layout.run.run.seed,
            rounds=min(heads, default=0) if self.options.rounds is None else self.options.rounds,
            min_peers=self.layout.run.run.min_peers,
            nodes=nodes,
            faults=tuple(faults),
            missed_faults=tuple(fault for fault in planned(self.options) if fault not in faults),
            started_at=self.started_at,
            elapsed_seconds=self.parts.now() - self.started_at,
            interrupted_by=self.interrupted_by,
            soak=self._soak() if self.options.mtbf is not None else None,
        )

    def _soak(self) -> dict[str, Any]:
        return soak_report(
            self.records,
            self.injector.faults,
            self._memory,
            minutes=self.options.minutes or (self._ended_at - self.started_at) / 60,
            ended_at=self._ended_at,
            not_back=sorted(self.injector.away()),
            orphans=[pid for child in self.processes for pid in child.left_behind()],
        )

    def _node_outcome(self, node: int) -> NodeOutcome:
        record, child = self.records[node], self.nodes.get(node)
        late = any(fault.node == node for fault in self.options.late)
        disturbed = any(fault.node == node and fault.kind not in (KILL, LATE) for fault in self.injector.faults)
        restarts = self.injector.restarts.get(node, 0)
        exit_code = child.exit_code if child else None
        if self._was_killed(node):
            return NodeOutcome(node, record, KILLED, exit_code, late=late, restarts=restarts)
        # A swarm by time is stopped with SIGINT, which a node answers with a clean leave and 130.
        if exit_code != 0 and not (self.time_up and exit_code == 130):
            note = child.last_lines(1) if child else "it was never started"
            return NodeOutcome(node, record, LEFT, exit_code, late=late, restarts=restarts, note=note)
        digest = self.parts.digest_of_files(self.layout.node_dir(node), record.last_committed)
        return NodeOutcome(
            node, record, FINISHED, exit_code, digest, late=late, restarts=restarts, disturbed=disturbed
        )


def stall_seconds(run: RunFile) -> float:
    """How long no node may move before the swarm is given up: a start, and twice the longest round without a fault."""
    longest = run.round.budget_seconds + run.round.exchange_seconds + run.round.detection_seconds
    return START_SECONDS + run.round.formation_seconds + 2 * (longest + 3 * run.round.vote_seconds)


def _addresses(path: Path) -> list[str]:
    """The bootstrap's addresses once it has written them."""
    try:
        return [str(address) for address in json.loads(path.read_text())["addresses"]]
    except FileNotFoundError:
        return []


def _report(outcome: SwarmOutcome, layout: Layout, options: SwarmOptions) -> int:
    """Print the verdict for people and, if asked, for programs."""
    found, reasons = verdict(outcome), disagreements(outcome)
    console = Console(stderr=options.json, highlight=False)
    console.print(final_table(outcome.nodes))
    if reasons:
        result = "NOT agreed: " + "; ".join(reasons)
    else:
        living = sum(node.ended == FINISHED for node in outcome.nodes)
        loss = found["eval_loss"]
        learned = f"; held-out loss {loss[0]:.3f} -> {loss[-1]:.3f}" if len(loss) > 1 else ""
        result = f"agreed: {living} nodes hold the same state {found['state_digest']} after {outcome.rounds} rounds{learned}"
    payload = payload_line(found["payload_bytes"], parameter_count(layout.run_path))
    soak = [soak_line(outcome.soak)] if outcome.soak is not None else []
    for line in (payload, *soak, f"files and logs: {layout.root}", result):
        console.print(line, markup=False, soft_wrap=True)
    if options.json:
        print(json.dumps(found), flush=True)
    return 1 if reasons else 0


def _as_interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
