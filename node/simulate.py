"""`simulate`: the rounds' rules under the deterministic simulator, seed after seed, and every guarantee checked after every event.

The same seed gives the same events, whatever else runs: a failing seed is printed as the command that replays it.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial

from rich.console import Console

from sparseloco.node.options import SimulateOptions
from sparseloco.protocol.profiles import EVERY_WORLD, PROFILES, Profile
from sparseloco.protocol.trials import Trials, run_trials

# Seeds handed to a process at once: some seconds of work, so that progress is seen and no process waits for another.
SEEDS_PER_JOB = 100
SAY_SECONDS = 20.0
SHOWN_VIOLATIONS = 20


def run_simulate(options: SimulateOptions) -> int:
    """0 if no seed broke a guarantee, else 1."""
    worlds = [_with_links(PROFILES[name], options.links) for name in _names(options.faults)]
    seeds = range(options.seed, options.seed + options.seeds)
    peers = options.peers
    found = _in_processes(seeds, worlds, options) if options.jobs > 1 else run_trials(
        seeds, worlds, rounds=options.rounds, peers=peers, each=_Progress(len(seeds)), clock=time.process_time
    )  # fmt: skip
    for line in found.violations[:SHOWN_VIOLATIONS]:
        print(f"violation: {line}", file=sys.stderr)
    if options.json:
        print(json.dumps(as_json(found)), flush=True)
    else:
        Console(highlight=False).print(final_line(found, options), markup=False, soft_wrap=True)
    return 1 if found.violations else 0


def _names(faults: str) -> tuple[str, ...]:
    return EVERY_WORLD if faults == "all" else (faults,)


def _with_links(world: Profile, links: str | None) -> Profile:
    """A world's faults on another world's links."""
    if links is None:
        return world
    other = PROFILES[links]
    return replace(
        world,
        latency_seconds=other.latency_seconds,
        tail_probability=other.tail_probability,
        tail_seconds=other.tail_seconds,
        loss=other.loss,
        duplication=other.duplication,
        ocean_seconds=other.ocean_seconds,
        transfer_seconds=other.transfer_seconds,
    )


def _in_processes(seeds: range, worlds: Sequence[Profile], options: SimulateOptions) -> Trials:
    total, say = Trials(), _Progress(len(seeds))
    with ProcessPoolExecutor(options.jobs) as pool:
        parts = [seeds[start : start + SEEDS_PER_JOB] for start in range(0, len(seeds), SEEDS_PER_JOB)]
        run = partial(run_trials, profiles=worlds, rounds=options.rounds, peers=options.peers, clock=time.process_time)
        jobs = [pool.submit(run, part) for part in parts]
        for job in as_completed(jobs):
            part = job.result()
            total.add(part)
            total.seconds += part.seconds
            say(total)
    return total


class _Progress:
    """A line on stderr now and again while a long series runs."""

    def __init__(self, seeds: int) -> None:
        self._seeds = seeds
        self._next = time.monotonic() + SAY_SECONDS

    def __call__(self, found: Trials) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + SAY_SECONDS
            print(f"{found.seeds} of {self._seeds} seeds, {len(found.violations)} violations", file=sys.stderr, flush=True)


def as_json(found: Trials) -> dict[str, object]:
    """What `simulate --json` prints. `seconds` are of CPU, over all processes."""
    return {
        "seeds": found.seeds,
        "events": found.events,
        "seconds": round(found.seconds, 3),
        "rounds_committed": found.rounds_committed,
        "idle_seeds": found.idle_seeds,
        "faultless_seeds": found.faultless_seeds,
        "faults": dict(sorted(found.faults.items())),
        "violations": found.violations,
    }


def final_line(found: Trials, options: SimulateOptions) -> str:
    fewest, most = options.peers
    many = f"{fewest} peers" if fewest == most else f"{fewest} to {most} peers"
    verdict = f"{len(found.violations)} seeds broke a guarantee" if found.violations else "no violation"
    rate = found.events / found.seconds if found.seconds else 0.0
    faults = ", ".join(f"{count} {name}" for name, count in sorted(found.faults.items()))
    return (
        f"{found.seeds} seeds from {options.seed} of {options.faults}, {many}, {options.rounds} rounds each: {verdict}; "
        f"{found.rounds_committed} rounds committed, {found.events} events, {rate:.0f} a CPU second; faults: {faults}"
    )
