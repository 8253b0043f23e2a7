"""Swarms in a simulated bad world: every guarantee, seed after seed.

Replay a failing seed with `sparseloco-node simulate --faults NAME --seed S --peers N`.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from sparseloco.protocol.oracle import Violation
from sparseloco.protocol.profiles import PROFILES, Profile
from sparseloco.protocol.simulator import SimulatedSwarm
from sparseloco.protocol.trials import run_seeds


def test_swarms_keep_every_guarantee_in_every_profile() -> None:
    for name in PROFILES:
        run_seeds(range(12), name, rounds=4)


@pytest.mark.full
def test_thousand_swarms_keep_every_guarantee() -> None:
    run_seeds(range(1000), "consumer", rounds=5, peers=(4, 9))


@pytest.mark.full
def test_thousands_of_worse_swarms_keep_every_guarantee() -> None:
    for name in PROFILES:
        run_seeds(range(1000, 1500), name, rounds=5)


# Each of these seeds broke something once; what it was is its id. Its draws have changed since, so test_machine.py tells the
# same faults as stories.
@pytest.mark.parametrize(
    ("seed", "peers", "profile"),
    [
        pytest.param(36, 6, "harsh", id="restarted-member-makes-another-check-of-one-revision"),
        pytest.param(32, 2, "harsh", id="crash-between-committing-and-applying"),
        pytest.param(1010, 4, "harsh", id="leaver-of-a-pair-crashes-before-it-is-dropped"),
        pytest.param(2347, 4, "churn", id="joiner-leaves-while-its-join-is-granted"),
        pytest.param(2635, 4, "churn", id="joiner-leaves-while-its-join-is-granted-again"),
    ],
)
def test_swarm_survives_what_once_broke_it(seed: int, peers: int, profile: str) -> None:
    run_seeds(range(seed, seed + 1), profile, rounds=5, peers=(peers, peers))


def test_simulation_repeats_itself_for_one_seed() -> None:
    counts = []
    for _ in range(2):
        swarm = SimulatedSwarm(5, 5, 3, Profile())
        swarm.run()
        counts.append((swarm.events, swarm.now, swarm.counts))
    assert counts[0] == counts[1]


def quiet(**changes: object) -> Profile:
    base = Profile(name="quiet", tail_probability=0.0, loss=0.0, duplication=0.0, crashes=0, slow_peers=0, withhold=0.0)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_undisturbed_swarm_commits_everything_well_within_the_bound() -> None:
    swarm = SimulatedSwarm(1, 6, 5, quiet(overrun=0.95))
    swarm.run()
    assert swarm.oracle.longest_part_of_bound < 0.5
    assert swarm.counts.get("note:attempt", 0) == 0
    assert all(len(commit.manifest.contributions) == 6 for commit in swarm.peers["peer0"].disk.chain[1:])


@pytest.mark.parametrize("seed", range(8))
def test_killed_leader_costs_at_most_about_two_detection_times(seed: int) -> None:
    """Round 2's first leader dies for good at a random moment of that round."""
    swarm = SimulatedSwarm(seed, 5, 6, quiet())
    rng = random.Random(seed)
    victims: list[str] = []

    def kill_leader() -> None:
        heads = [p.disk.chain[-1].manifest for p in swarm.peers.values() if p.disk.chain]
        head = max(heads, key=lambda manifest: manifest.round, default=None)
        if head is None or head.round < 1:
            swarm.schedule(swarm.now + 0.1, kill_leader)
            return
        victims.append(head.leader_order()[0])
        swarm.schedule(swarm.now + rng.uniform(0, 8.0), kill)

    def kill() -> None:
        swarm.depart(victims[0])

    swarm.schedule(0.0, kill_leader)
    swarm.run()
    times = sorted(swarm.oracle.first_adopted.values())
    rounds = [after - before for before, after in itertools.pairwise(times)]
    undisturbed = sorted(rounds)[len(rounds) // 2]
    assert max(rounds) - undisturbed < 2 * swarm.rules.detection_seconds + swarm.rules.vote_seconds + 2


def test_oracle_sees_a_violation_of_progress_when_a_quorum_is_gone() -> None:
    swarm = SimulatedSwarm(0, 4, 3, quiet(min_peers=3))
    swarm.schedule(10.0, swarm.depart, "peer0")
    swarm.schedule(10.0, swarm.depart, "peer1")
    with pytest.raises(Violation, match="progress"):
        swarm.run()
