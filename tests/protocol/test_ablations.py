"""The oracle finds the fault that each rule prevents, and finds none with the rule on. Seeds are tried in order, up to 2,000."""

from __future__ import annotations

import dataclasses

import ablations
import pytest


@pytest.mark.parametrize("peers", [3, 4])
def test_two_certificates_exist_when_locks_bind_nobody(peers: int) -> None:
    found = ablations.first_violation(range(2000), peers, ablations.HASTY, ablations.UnlockedMachine, only="agreement")
    assert found[1] == "agreement"


def test_copying_pays_when_the_door_stays_open_after_the_close() -> None:
    found = ablations.first_violation(range(2000), 5, ablations.STRAGGLING, ablations.OpenDoorMachine)
    assert found[1] == "commit-then-reveal"


def test_two_certificates_exist_when_nothing_is_durable_before_it_is_sent() -> None:
    amnesia = dataclasses.replace(ablations.BLACKOUTS, durable=False)
    found = ablations.first_violation(range(2000), 3, amnesia, only="agreement")
    assert found[1] == "agreement"


@pytest.mark.parametrize(("name", "peers"), [("HASTY", 3), ("HASTY", 4), ("STRAGGLING", 5), ("BLACKOUTS", 2), ("BLACKOUTS", 3)])
def test_same_world_breaks_nothing_with_the_rules_on(name: str, peers: int) -> None:
    """60 seeds: past every seed at which a switched-off rule is found above."""
    assert ablations.first_violation(range(60), peers, getattr(ablations, name)) is None
