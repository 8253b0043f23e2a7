"""`simulate`: the JSON that checks rely on, the line for people, and a failing seed's replay command."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from sparseloco.node import simulate as verb
from sparseloco.node.cli import run
from sparseloco.node.options import SimulateOptions
from sparseloco.protocol.profiles import EVERY_WORLD, PROFILES
from sparseloco.protocol.trials import Trials, run_seed


def test_simulate_prints_one_json_object_with_the_contracts_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--seeds", "8", "--rounds", "3", "--json"], {}) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["seeds"] == 8 and found["violations"] == [] and found["idle_seeds"] == 0 and found["rounds_committed"] >= 24
    assert found["events"] > 1000 and found["seconds"] > 0
    assert {"partition", "lie", "crash"} <= set(found["faults"])


def test_simulate_with_a_seed_runs_that_one_and_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    seen = []
    for _ in range(2):
        assert run(["simulate", "--seed", "11", "--faults", "everything", "--peers", "5", "--json"], {}) == 0
        found = json.loads(capsys.readouterr().out)
        seen.append({key: value for key, value in found.items() if key != "seconds"})
    assert seen[0] == seen[1] and seen[0]["seeds"] == 1


def test_two_processes_come_to_what_one_does() -> None:
    options = SimulateOptions(seeds=16, rounds=2, jobs=2)
    worlds = [PROFILES[name] for name in EVERY_WORLD]
    both = verb._in_processes(range(16), worlds, options)
    alone = verb.run_trials(range(16), worlds, rounds=2)
    assert (both.events, both.faults, both.rounds_committed) == (alone.events, alone.faults, alone.rounds_committed)


def test_a_violation_is_told_as_the_command_that_replays_it_and_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "sparseloco-node simulate --faults lan --seed 3 --peers 5 --rounds 5: Violation('agreement')"
    broken = Trials(1, 10, 0.1, 1, 0, 0, Counter(), [line])
    monkeypatch.setattr(verb, "run_trials", lambda *_, **__: broken)
    assert run(["simulate", "--seeds", "1"], {}) == 1
    told = capsys.readouterr()
    assert line in told.err and "1 seeds broke a guarantee" in told.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--faults", "lam"], "lan"), (["--peers", "9:4"], "4:9"), (["--seeds", "0"], "from 1"), (["--link", "lan"], "--links")],
)
def test_wrong_flags_are_refused_with_the_remedy(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *arguments], {}) == 2
    assert said in capsys.readouterr().err


def test_every_world_has_a_fault_in_every_seed() -> None:
    for name in EVERY_WORLD:
        for seed in range(4):
            assert run_seed(seed, PROFILES[name], 2, (4, 6)).faultless_seeds == 0, name
