"""The rules with one of them switched off, and worlds bad enough that the oracle notices.

A simulator that passes everything proves nothing; these show that it would have caught the fault each rule is there to prevent.
"""

from __future__ import annotations

from sparseloco.protocol.errors import LocalProtocolError
from sparseloco.protocol.machine import Machine
from sparseloco.protocol.manifest import Manifest
from sparseloco.protocol.messages import Proposal
from sparseloco.protocol.oracle import Violation
from sparseloco.protocol.profiles import Profile
from sparseloco.protocol.round import Round
from sparseloco.protocol.simulator import SimulatedSwarm
from sparseloco.protocol.states import Gathering

# Votes are given up about as fast as they travel and repaired late: quorums form that some members do not see in time.
HASTY = Profile(
    name="hasty",
    latency_seconds=(0.05, 0.5),
    tail_probability=0.2,
    tail_seconds=4.0,
    loss=0.6,
    crashes=0,
    slow_peers=0,
    heartbeat_seconds=6.0,
    vote_seconds=0.4,
)
# Every peer loses power at once, several times: what was not durable is gone everywhere.
BLACKOUTS = Profile(name="blackouts", loss=0.2, crashes=3, power_cuts=6, down_seconds=(0.5, 3.0), slow_peers=0)
# A slow peer that misjudges its time announces long after the others have revealed.
STRAGGLING = Profile(name="straggling", crashes=0, slow_peers=1, slow_factor=8.0, overrun=2.0)


class UnlockedRound(Round):
    """Rule 8 off: a lock binds nobody. (Rule 9, that leaders propose again what was prepared, stays on.)"""

    def bound_by_lock(self, proposal: Proposal, manifest: Manifest) -> bool:
        return False


class OpenDoorRound(Round):
    """Rule 4 off: announcing goes on after a Close was accepted and payloads were revealed."""

    def door_open(self) -> bool:
        return True

    def _gather(self, state: Gathering) -> None:
        """The table has no such announcement either."""
        self.gathering = state


class UnlockedMachine(Machine):
    round_factory = UnlockedRound


class OpenDoorMachine(Machine):
    round_factory = OpenDoorRound


def first_violation(
    seeds: range, peers: int, profile: Profile, machine: type[Machine] = Machine, *, only: str = ""
) -> tuple[int, str] | None:
    """The first seed that breaks anything but progress (or just the guarantee `only`), and what it broke; None if none does."""
    for seed in seeds:
        swarm = SimulatedSwarm(seed, peers, 4, profile, machine_factory=machine)
        swarm.oracle.only = only
        try:
            swarm.run()
        except LocalProtocolError:
            continue  # a peer noticed by itself that its memory is gone: this seed shows nothing
        except Violation as violation:
            if violation.guarantee != "progress":
                return seed, violation.guarantee
    return None
