"""Carry out the faults of a `swarm` on its processes: kill, start again, pause, damage, start late.

The one rule: what a fault began is undone by this object or reported. It knows at any time which nodes a fault keeps away:
those that are down or paused, and those that have not been members of the group as it is now since.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence

from sparseloco.node.durable import rounds_in
from sparseloco.node.swarm_damage import flip_a_byte
from sparseloco.node.swarm_events import NodeRecord
from sparseloco.node.swarm_faults import CORRUPT, KILL, LATE, PAUSE, Fault, RandomFaults, due
from sparseloco.node.swarm_processes import Child
from sparseloco.node.swarm_setup import Layout

STILL_DOWN = (math.inf, 0)


class Injector:
    """The faults of one swarm; `children` are its node processes by number, and `start` begins one of them (again)."""

    def __init__(
        self,
        layout: Layout,
        records: Sequence[NodeRecord],
        children: Mapping[int, Child],
        plan: tuple[Fault, ...],
        *,
        start: Callable[[int], None],
        say: Callable[[str], None],
        now: Callable[[], float],
    ) -> None:
        self.faults: list[Fault] = []  # those carried out
        self.restarts: dict[int, int] = {}
        self._layout, self._records, self._children, self._plan = layout, records, children, plan
        self._start, self._say, self._now = start, say, now
        self._random: RandomFaults | None = None
        self._rng = random.Random(layout.run.run.seed)
        # By node: when its last fault ended (infinity until then), and the round that the furthest node was in.
        self._back: dict[int, tuple[float, int]] = {}
        self._later: list[tuple[float, int, Callable[[], None]]] = []  # what ends a fault: when, of which node

    def begin_random(self, mtbf_seconds: float) -> None:
        """From now on also random faults, as the run's seed gives them."""
        seed = self._layout.run.run.seed
        self._say(f"random faults every {mtbf_seconds:g} s on average, seed {seed}")
        self._random = RandomFaults(seed, len(self._records), mtbf_seconds, self._now())

    def stop(self) -> None:
        """Begin no more faults; those that were begun still end."""
        self._plan, self._random = (), None

    @property
    def pending(self) -> bool:
        """Some node is down or paused and comes back at a known time."""
        return bool(self._later)

    def is_down(self, node: int) -> bool:
        """It was stopped or paused, and is to come back."""
        return self._back.get(node) == STILL_DOWN

    def away(self) -> frozenset[int]:
        """Nodes that a fault took away and that are not back in the group yet.

        A paused node goes on with what it knew: only a round that the others had not left behind shows that it is a member.
        """
        return frozenset(node for node, back in self._back.items() if not self._is_member_since(node, *back))

    def _is_member_since(self, node: int, at: float, round_number: int) -> bool:
        record = self._records[node]
        return record.member_at > at and record.member_round >= round_number

    def look(self) -> None:
        """End the faults whose time is over, then begin those that are due."""
        now = self._now()
        over = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, node, action in over:
            self._back[node] = (now, max(-1 if record.round is None else record.round for record in self._records))
            action()
        away = self.away()
        running = frozenset(node for node, child in self._children.items() if child.running)
        rounds = {node: record.round for node, record in enumerate(self._records)}
        for fault in due(self._plan, self.faults, rounds, running - away):
            self._carry_out(fault)
        if self._random is not None:
            found = self._random.due(now, self.away(), {node: rounds[node] for node in running})
            if found is not None:
                self._carry_out(found)

    def resume_all(self) -> None:
        """Let paused processes run, so that they can be ended in order."""
        for node in filter(self.is_down, self._children):
            self._children[node].resume()

    def _carry_out(self, fault: Fault) -> None:
        self.faults.append(fault)
        node, where = fault.node, f"node {fault.node} in round {fault.round}"
        if fault.kind == LATE:
            self._start(node)
            self._say(f"started {where}, late")
            return
        child, record = self._children[node], self._records[node]
        if fault.kind == PAUSE:
            child.pause()
            record.state = "paused"
            self._say(f"paused {where} for {fault.seconds:g} s")
            self._end_after(fault.seconds, node, child.resume)
            return
        child.kill()
        record.state = "killed"
        if fault.kind == KILL:
            self._say(f"killed {where}")
            return
        what = f"killed {where}"
        if fault.kind == CORRUPT:
            damaged = flip_a_byte(self._layout.node_dir(node), self._rng)
            what = f"stopped {where}, flipped a byte of {damaged.relative_to(self._layout.root)}"
        self._say(f"{what}, starting it again" + (f" in {fault.seconds:g} s" if fault.seconds else ""))
        self._end_after(fault.seconds, node, lambda: self._restart(node))

    def _end_after(self, seconds: float, node: int, action: Callable[[], None]) -> None:
        self._back[node] = STILL_DOWN
        self._later.append((self._now() + seconds, node, action))

    def _restart(self, node: int) -> None:
        own = self._layout.node_dir(node) / "own"
        kept = set(rounds_in(own)) if own.is_dir() else set()
        self._records[node].kept_rounds |= kept - set(self._records[node].committed_at)
        self.restarts[node] = self.restarts.get(node, 0) + 1
        self._start(node)
