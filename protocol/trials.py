"""Many simulated swarms, one a seed: what happened in them, and which seeds broke a guarantee."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from sparseloco.protocol.machine import Machine
from sparseloco.protocol.oracle import Violation
from sparseloco.protocol.profiles import PROFILES, Profile
from sparseloco.protocol.simulator import MachineFactory, SimulatedSwarm

# What the simulator counts that is a fault and not an event of the protocol.
FAULTS = ("crash", "restart", "late join", "leave", "partition", "outage", "mass leave", "lie", "slow peer", "power cut")


@dataclass
class Trials:
    """What a series of seeds came to. `violations` say how to replay each seed that broke a guarantee."""

    seeds: int = 0
    events: int = 0
    seconds: float = 0.0
    rounds_committed: int = 0
    idle_seeds: int = 0
    faultless_seeds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: Trials) -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.rounds_committed += other.rounds_committed
        self.idle_seeds += other.idle_seeds
        self.faultless_seeds += other.faultless_seeds
        self.faults += other.faults
        self.violations += other.violations


def peers_of(seed: int, peers: tuple[int, int]) -> int:
    """How many peers a seed has, between fewest and most."""
    return peers[0] + seed * 7919 % (peers[1] - peers[0] + 1)


def run_seed(
    seed: int, profile: Profile, rounds: int, peers: tuple[int, int], machine_factory: MachineFactory = Machine
) -> Trials:
    """One swarm. A swarm whose founders are one peer runs with min_peers 1: alone it would wait for company for ever.

    A seed that commits nothing is a violation: every profile leaves a quorum, or `min_peers` to regroup, and heals.
    """
    size = peers_of(seed, peers)
    if size - profile.late_joiners < profile.min_peers:
        profile = replace(profile, min_peers=1)
    swarm = SimulatedSwarm(seed, size, rounds, profile, machine_factory=machine_factory)
    found = Trials(seeds=1)
    try:
        swarm.run()
        if swarm.rounds_committed == 0:
            raise Violation("progress", f"seed {seed} committed nothing")
    except Exception as error:  # whatever a rule raises is that seed's failure, and the others are still to be run
        replay = f"sparseloco-node simulate --faults {profile.name} --seed {seed} --peers {size} --rounds {rounds}"
        found.violations.append(f"{replay}: {error!r}")
    found.events = swarm.events
    found.rounds_committed = swarm.rounds_committed
    found.idle_seeds = int(swarm.rounds_committed == 0)
    found.faults.update({name: count for name, count in swarm.counts.items() if name in FAULTS})
    found.faultless_seeds = int(not found.faults)
    return found


def run_trials(
    seeds: Sequence[int],
    profiles: Sequence[Profile],
    *,
    rounds: int = 5,
    peers: tuple[int, int] = (4, 9),
    each: Callable[[Trials], None] = lambda _: None,
    clock: Callable[[], float] = lambda: 0.0,
) -> Trials:
    """Each seed under the profile that its number picks, so that a range of seeds covers all of them evenly.

    `clock` gives the seconds of CPU that this process has used; `each` is told after every seed.
    """
    total, started = Trials(), clock()
    for seed in seeds:
        total.add(run_seed(seed, profiles[seed % len(profiles)], rounds, peers))
        total.seconds = clock() - started
        each(total)
    return total


def run_seeds(seeds: range, profile: str, *, rounds: int = 5, peers: tuple[int, int] = (1, 9)) -> None:
    """Every seed under one profile; Violation at the first that breaks a guarantee."""
    for seed in seeds:
        found = run_seed(seed, PROFILES[profile], rounds, peers)
        if found.violations:
            raise Violation("seed", found.violations[0])
