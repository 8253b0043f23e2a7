"""The worlds that simulated swarms live in: how bad the links are, and what befalls the peers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """How bad the simulated world is. Seconds; probabilities per message.

    crashes: crashes with restart per run. late_joiners: peers that start after some rounds. slow_peers: peers whose inner steps
    take `slow_factor` times as long. durable: whether records survive a crash (switched off only to test the oracle).
    power_cuts: moments at which every peer crashes at once and restarts. form: no founders in the run file. overrun: how far, as a
    factor, a peer may misjudge the time it has left. partitions: times at which the network falls into two parts for a while.
    outages: times at which one peer is cut off for a moment. mass_leaves: times at which so many die for good that the rest is
    no quorum, but still `min_peers`. liars: as many members as agreement tolerates say two things on everything. ocean_seconds:
    added to the latency between the two halves of the peers.
    """

    name: str = "consumer"
    latency_seconds: tuple[float, float] = (0.02, 0.4)
    tail_probability: float = 0.02
    tail_seconds: float = 3.0
    loss: float = 0.05
    duplication: float = 0.02
    crashes: int = 1
    down_seconds: tuple[float, float] = (1.0, 20.0)
    late_joiners: int = 0
    leavers: int = 0
    slow_peers: int = 1
    slow_factor: float = 3.0
    train_seconds: tuple[float, float] = (4.0, 8.0)
    transfer_seconds: tuple[float, float] = (0.1, 1.5)
    withhold: float = 0.02
    durable: bool = True
    power_cuts: int = 0
    partitions: int = 0
    partition_seconds: tuple[float, float] = (20.0, 90.0)
    outages: int = 0
    outage_seconds: tuple[float, float] = (2.0, 12.0)
    mass_leaves: int = 0
    liars: bool = False
    ocean_seconds: float = 0.0
    form: bool = False
    min_peers: int = 2
    overrun: float = 1.05
    heartbeat_seconds: float = 1.5
    vote_seconds: float = 2.0


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(
            name="lan", latency_seconds=(0.0002, 0.005), tail_probability=0.001, tail_seconds=0.5, loss=0.0, duplication=0.0,
            transfer_seconds=(0.01, 0.1), late_joiners=1,
        ),
        Profile(),
        Profile(
            name="flaky-wifi", latency_seconds=(0.01, 0.3), tail_probability=0.1, tail_seconds=2.0, loss=0.15, outages=4,
            slow_peers=2,
        ),
        Profile(name="transatlantic", latency_seconds=(0.01, 0.05), ocean_seconds=0.09, loss=0.02, late_joiners=1),
        Profile(name="partition-heal", crashes=0, partitions=1),
        Profile(name="mass-leave", crashes=0, mass_leaves=1, late_joiners=1),
        Profile(name="byzantine-minority", liars=True),
        Profile(
            name="everything", loss=0.15, tail_probability=0.1, tail_seconds=3.0, crashes=2, late_joiners=1, leavers=1,
            power_cuts=1, partitions=1, outages=1, slow_peers=2,
        ),
        Profile(
            name="harsh", loss=0.25, tail_probability=0.15, tail_seconds=5, crashes=3, late_joiners=2, leavers=1, power_cuts=1
        ),
        Profile(name="power", loss=0.15, crashes=2, power_cuts=4),
        Profile(name="churn", loss=0.1, crashes=2, late_joiners=3, leavers=2),
        Profile(name="forming", form=True, loss=0.2, tail_probability=0.1, crashes=2, late_joiners=1, power_cuts=1),
    )
}
# The worlds of `simulate --faults all`, which the swarm numbers go round.
EVERY_WORLD = (
    "lan",
    "consumer",
    "flaky-wifi",
    "transatlantic",
    "partition-heal",
    "mass-leave",
    "byzantine-minority",
    "everything",
)
