"""A whole swarm in one process and one thread, under seeded latency, loss, duplication, crash, restart and slow peers.

It runs the very `Machine` that nodes run, on virtual time, and checks the guarantees after every event (`oracle.py`). The same
seed gives the same events, so a failing seed is a test.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from sparseloco.protocol.certificates import founding_commit
from sparseloco.protocol.encoding import sha256
from sparseloco.protocol.events import (
    Adopt,
    Announced,
    Committed,
    Effect,
    Event,
    Fetch,
    Formed,
    LeaveRequested,
    Note,
    PeerSeen,
    Persist,
    Received,
    Record,
    Reveal,
    Said,
    Send,
    ServeCommits,
    Settled,
    StateDigest,
    Tick,
    Train,
    Trained,
    Voted,
)
from sparseloco.protocol.machine import COMMITS_PER_ANSWER, Machine
from sparseloco.protocol.manifest import Member, MembershipRules
from sparseloco.protocol.messages import Commit, Message, Signed, encode_body
from sparseloco.protocol.oracle import Oracle, Violation
from sparseloco.protocol.rules import FOUNDER_SESSION, Rules

MachineFactory = Callable[..., Machine]


@dataclass(frozen=True, slots=True)
class Profile:
    """How bad the simulated world is. Seconds; probabilities per message.

    crashes: crashes with restart per run. late_joiners: peers that start after some rounds. slow_peers: peers whose inner steps
    take `slow_factor` times as long. durable: whether records survive a crash (switched off only to test the oracle).
    power_cuts: moments at which every peer crashes at once and restarts. form: no founders in the run file. overrun: how far, as a
    factor, a peer may misjudge the time it has left.
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
    form: bool = False
    min_peers: int = 2
    overrun: float = 1.05
    heartbeat_seconds: float = 1.5
    vote_seconds: float = 2.0


PROFILES = {
    profile.name: profile
    for profile in (
        Profile(),
        Profile(
            name="harsh", loss=0.25, tail_probability=0.15, tail_seconds=5, crashes=3, late_joiners=2, leavers=1, power_cuts=1
        ),
        Profile(name="power", loss=0.15, crashes=2, power_cuts=4),
        Profile(name="churn", loss=0.1, crashes=2, late_joiners=3, leavers=2),
        Profile(name="forming", form=True, loss=0.2, tail_probability=0.1, crashes=2, late_joiners=1, power_cuts=1),
    )
}
SIMULATED_MEMBERSHIP = MembershipRules(
    min_peers=2, group_size=64, joiners_per_round=4, budget_cap_ms=20_000, budget_floor_ms=2_000, straggler_factor=3.0
)
SIMULATED_RUN = sha256(b"simulated run")
GENESIS_STATE = sha256(b"simulated genesis")


def simulated_rules(founders: tuple[str, ...], profile: Profile) -> Rules:
    return Rules(
        run=SIMULATED_RUN,
        genesis_state=GENESIS_STATE,
        membership=replace(SIMULATED_MEMBERSHIP, min_peers=profile.min_peers),
        heartbeat_seconds=profile.heartbeat_seconds,
        detection_seconds=4 * profile.heartbeat_seconds,
        formation_seconds=15.0,
        exchange_seconds=6.0,
        vote_seconds=profile.vote_seconds,
        founders=founders,
    )


@dataclass
class Disk:
    """What survives a crash of one simulated peer."""

    session: bytes = FOUNDER_SESSION
    records: list[Record] = field(default_factory=list)
    chain: list[Commit] = field(default_factory=list)
    states: dict[int, bytes] = field(default_factory=dict)
    payloads: dict[int, bytes] = field(default_factory=dict)  # own payload by round, durable before announcing
    blobs: set[bytes] = field(default_factory=set)


class SimulatedPeer:
    """One peer: a machine while it is up, a disk always."""

    def __init__(self, swarm: SimulatedSwarm, peer: str, speed: float) -> None:
        self.swarm = swarm
        self.peer = peer
        self.speed = speed
        self.disk = Disk()
        self.machine: Machine | None = None
        self.incarnation = 0
        self.crash_after_effects: int | None = None
        self.wakeup = float("inf")

    @property
    def up(self) -> bool:
        return self.machine is not None

    @property
    def head_round(self) -> int:
        return self.disk.chain[-1].manifest.round if self.disk.chain else -2

    def start(self, head: Commit | None, state: bytes | None) -> None:
        if head is not None and not self.disk.chain:
            self.disk.chain.append(head)
            if state is not None:
                self.disk.states[head.manifest.round] = state
        head = self.disk.chain[-1] if self.disk.chain else None
        self.swarm.head_changed = True
        self.swarm.note_start()
        self._catch_up_with_chain()
        known = self.disk.states.get(head.manifest.round) if head is not None else None
        self.incarnation += 1
        self.machine = self.swarm.machine_factory(
            Member(self.peer, self.disk.session),
            self.swarm.rules,
            self.sign,
            random.Random(self.swarm.rng.getrandbits(64)),
            head=head,
            state_digest=known,
            records=tuple(self.disk.records),
        )
        for other in self.swarm.peers:
            if other != self.peer:
                self.handle(PeerSeen(other))
        self.handle(Tick())

    def sign(self, message: Message) -> Signed:
        return Signed(message, b"", b"", encode_body(message))

    def _catch_up_with_chain(self) -> None:
        """Apply what was committed durably but not applied before a crash."""
        for commit in self.disk.chain:
            if commit.manifest.round not in self.disk.states:
                self._apply(commit)

    def handle(self, event: Event) -> None:
        machine = self.machine
        if machine is None:
            return
        self.swarm.events += 1
        for performed, effect in enumerate(machine.handle(event, self.swarm.now)):
            if self.crash_after_effects is not None and performed >= self.crash_after_effects:
                self.crash()
                return
            self.perform(effect)
        if self.crash_after_effects is not None:
            self.crash()
            return
        if machine.next_wakeup < self.wakeup or self.wakeup <= self.swarm.now:
            self.wakeup = machine.next_wakeup
            self.swarm.schedule(self.wakeup, self._wake, self.incarnation)

    def _wake(self, incarnation: int) -> None:
        if incarnation == self.incarnation and self.wakeup <= self.swarm.now:
            self.handle(Tick())

    def crash(self) -> None:
        self.crash_after_effects = None
        if self.machine is None:
            return
        self.machine = None
        self.swarm.disturbed_until = float("inf")
        self.incarnation += 1
        self.wakeup = float("inf")
        if not self.swarm.profile.durable:
            self.disk.records.clear()
        self.swarm.count("crash")

    # --- effects --------------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        swarm = self.swarm
        match effect:
            case Send(peers, frame):
                if isinstance(frame, Signed) and frame.message.header.sender == self.peer:
                    swarm.oracle.said(frame)
                for peer in peers:
                    swarm.send(self.peer, peer, frame)
            case Persist(Committed(commit)):
                self.disk.chain.append(commit)
                self.disk.records.clear()
                swarm.head_changed = True
                swarm.oracle.known(commit)
            case Persist(record):
                self.disk.records.append(record)
                match record:
                    case Announced(announcement):
                        swarm.oracle.said(announcement)
                        swarm.oracle.announced(self.peer, announcement)
                    case Voted(signed) | Said(signed) | Formed(signed):
                        swarm.oracle.said(signed)
            case Train(number, _, _, budget_ms):
                self._train(number, budget_ms)
            case Reveal(announcement, _):
                swarm.reveal(announcement)
            case Fetch(announcement):
                swarm.fetch(self, announcement)
            case Adopt():
                swarm.oracle.adopted(self.peer, effect, self.disk.payloads)
                self._apply(effect.commit)
            case ServeCommits(peer, head_round):
                for commit in [c for c in self.disk.chain if c.manifest.round > head_round][:COMMITS_PER_ANSWER]:
                    swarm.send(self.peer, peer, commit)
            case Note(event, _, fields):
                swarm.count(f"note:{event}")
                if event == "refused":
                    swarm.oracle.refused(self.peer, fields)

    def _train(self, number: int, budget_ms: int) -> None:
        rng = self.swarm.rng
        low, high = self.swarm.profile.train_seconds
        full = rng.uniform(low, high) * self.speed
        # A peer that cannot finish in time does fewer inner steps; a peer whose estimate is off is late all the same.
        taken = min(full, budget_ms / 1000 * rng.uniform(0.8, self.swarm.profile.overrun))
        withheld = rng.random() < self.swarm.profile.withhold
        payload = b"" if withheld else sha256(f"{self.peer} {number} {rng.random()}".encode())
        event = Trained(number, payload, 0 if withheld else 1000, 15, 1000, int(full * 1000))
        self.swarm.schedule(self.swarm.now + taken, self._trained, event, self.incarnation)

    def _trained(self, event: Trained, incarnation: int) -> None:
        if incarnation == self.incarnation:
            if event.payload:
                self.disk.payloads[event.round] = event.payload
                self.disk.blobs.add(event.payload)
            self.handle(event)

    def _apply(self, commit: Commit) -> None:
        manifest = commit.manifest
        if manifest.round == -1:
            self.disk.states[-1] = GENESIS_STATE
            return
        before = self.disk.states[manifest.round - 1]
        payloads = [contribution.payload for contribution in manifest.contributions]
        digest = sha256(b"state" + before + b"".join(payloads)) if payloads else before
        self.disk.states[manifest.round] = digest
        self.disk.blobs.update(payloads)
        self.swarm.oracle.state(self.peer, manifest.round, digest)
        delay = self.swarm.rng.uniform(0.05, 0.5)
        self.swarm.schedule(self.swarm.now + delay, self._hashed, StateDigest(manifest.round, digest), self.incarnation)

    def _hashed(self, event: StateDigest, incarnation: int) -> None:
        if incarnation == self.incarnation:
            self.handle(event)


class SimulatedSwarm:
    """`peers` peers for `rounds` rounds under `profile`; `run()` raises Violation or returns when all are done."""

    def __init__(
        self,
        seed: int,
        peers: int,
        rounds: int,
        profile: Profile,
        *,
        machine_factory: MachineFactory = Machine,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.profile = profile
        self.rounds = rounds
        self.machine_factory = machine_factory
        self.now = 0.0
        self.events = 0
        self.disturbed_until = 0.0  # no round that began before is held to the time bound
        self.head_changed = False  # a peer committed, started or left: only then can the run be over
        self.counts: dict[str, int] = {}
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = itertools.count()
        names = [f"peer{i}" for i in range(peers)]
        founders = names[: max(1, peers - profile.late_joiners)]
        self.rules = simulated_rules(() if profile.form else tuple(founders), profile)
        slow = set(self.rng.sample(names, min(profile.slow_peers, peers)))
        self.peers = {name: SimulatedPeer(self, name, profile.slow_factor if name in slow else 1.0) for name in names}
        self.founders = founders
        self._revealed: dict[bytes, str] = {}
        self._waiting: dict[bytes, list[tuple[SimulatedPeer, Signed, int]]] = {}
        self._gone: set[str] = set()  # asked to leave
        self._departed: set[str] = set()  # left
        self.oracle = Oracle(self)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def schedule(self, at: float, action: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._heap, (at, next(self._sequence), action, arguments))

    def holders(self, payload: bytes) -> int:
        """Peers, up or down, whose disk holds a payload."""
        return sum(payload in peer.disk.blobs for peer in self.peers.values())

    def note_start(self) -> None:
        """A peer started: rounds from here on are undisturbed if nobody else is down."""
        down = any(p.incarnation and not p.up and p.peer not in self._departed for p in self.peers.values())
        self.disturbed_until = float("inf") if down else self.now

    # --- the network ----------------------------------------------------------------------------------------------

    def delay(self) -> float:
        profile, draw = self.profile, self.rng.random
        low, high = profile.latency_seconds
        delay = low + (high - low) * draw()
        if draw() < profile.tail_probability:
            delay += self.rng.expovariate(1 / profile.tail_seconds)
        return delay

    def send(self, sender: str, receiver: str, frame: Any) -> None:
        if receiver not in self.peers or self.rng.random() < self.profile.loss:
            return
        self.schedule(self.now + self.delay(), self._deliver, sender, receiver, frame)
        if self.rng.random() < self.profile.duplication:
            self.schedule(self.now + self.delay(), self._deliver, sender, receiver, frame)

    def _deliver(self, sender: str, receiver: str, frame: Any) -> None:
        self.peers[receiver].handle(Received(sender, frame))

    def reveal(self, announcement: Signed) -> None:
        self._revealed[announcement.digest] = announcement.message.header.sender
        for peer, signed, incarnation in self._waiting.pop(announcement.digest, []):
            self._transfer(peer, signed, incarnation)

    def fetch(self, peer: SimulatedPeer, announcement: Signed) -> None:
        if announcement.digest in self._revealed:
            self._transfer(peer, announcement, peer.incarnation)
        else:
            self._waiting.setdefault(announcement.digest, []).append((peer, announcement, peer.incarnation))

    def _transfer(self, peer: SimulatedPeer, announcement: Signed, incarnation: int) -> None:
        at = self.now + self.rng.uniform(*self.profile.transfer_seconds)
        self.schedule(at, self._settle, peer, announcement, incarnation)

    def _settle(self, peer: SimulatedPeer, announcement: Signed, incarnation: int) -> None:
        if peer.incarnation != incarnation or not peer.up:
            return
        payload = announcement.message.payload  # type: ignore[union-attr]
        holders = [p for p in self.peers.values() if p.up and payload in p.disk.blobs]
        if not holders:
            self._transfer(peer, announcement, incarnation)
            return
        peer.disk.blobs.add(payload)
        self.oracle.payload_seen(peer.peer, announcement)
        peer.handle(Settled(announcement.digest, ""))

    # --- faults ---------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        profile, rng = self.profile, self.rng
        span = self.rounds * 12.0
        head = None if profile.form else founding_commit(self.rules)
        if head is not None:
            self.oracle.known(head)
        for name in self.founders:
            if profile.form:
                self.peers[name].disk.session = sha256(name.encode())[:16]
            self.schedule(rng.uniform(0, 4.0), self.peers[name].start, head, GENESIS_STATE if head else None)
        for name in list(self.peers)[len(self.founders) :]:
            self.peers[name].disk.session = sha256(name.encode())[:16]
            self.schedule(rng.uniform(0.2, 0.6) * span, self._late_join, name)
        for _ in range(profile.crashes):
            self.schedule(rng.uniform(5.0, span * 0.8), self._crash_one)
        for _ in range(profile.power_cuts):
            self.schedule(rng.uniform(5.0, span * 0.8), self._power_cut)
        for _ in range(profile.leavers):
            self.schedule(rng.uniform(0.2, 0.6) * span, self._leave_one)

    def _late_join(self, name: str) -> None:
        donors = [p for p in self.peers.values() if p.up and p.disk.chain]
        if not donors:
            self.schedule(self.now + 2.0, self._late_join, name)
            return
        donor = self.rng.choice(donors)
        head = donor.disk.chain[-1]
        self.count("late join")
        self.peers[name].start(head, donor.disk.states[head.manifest.round])

    def _crash_one(self) -> None:
        alive = [p for p in self.peers.values() if p.up]
        if alive:
            victim = self.rng.choice(alive)
            victim.crash_after_effects = self.rng.randrange(6)
            self.schedule(self.now + self.rng.uniform(*self.profile.down_seconds), self._restart, victim)

    def _power_cut(self) -> None:
        for peer in self.peers.values():
            if peer.up:
                peer.crash()
                self.schedule(self.now + self.rng.uniform(*self.profile.down_seconds), self._restart, peer)

    def _restart(self, peer: SimulatedPeer) -> None:
        if peer.crash_after_effects is not None:
            peer.crash()
        if not peer.up and peer.peer not in self._departed:
            self.count("restart")
            peer.start(None, None)

    def _leave_one(self) -> None:
        staying = [p for p in self.peers.values() if p.up and p.peer not in self._gone]
        if len(staying) > self.rules.membership.min_peers + 1:
            leaver = self.rng.choice(staying)
            self._gone.add(leaver.peer)
            self.head_changed = True
            self.count("leave")
            leaver.handle(LeaveRequested())
            self.schedule(self.now + 2.0, self._go, leaver)

    def _go(self, leaver: SimulatedPeer) -> None:
        """A leaver votes until a manifest dropped it, crashes and restarts in between or not, and then goes."""
        if leaver.machine is not None:
            if leaver.machine.may_go:
                self._departed.add(leaver.peer)
                leaver.crash()
                self.note_start()
                return
            if not leaver.machine.leaving:
                leaver.handle(LeaveRequested())
        self.schedule(self.now + 2.0, self._go, leaver)

    def depart(self, name: str) -> None:
        """`name` dies and never comes back; nobody waits for it any more."""
        self._gone.add(name)
        self._departed.add(name)
        self.peers[name].crash()
        self.head_changed = True

    # --- running --------------------------------------------------------------------------------------------------

    def done(self) -> bool:
        return all(p.up and p.head_round >= self.rounds - 1 for p in self.peers.values() if p.peer not in self._gone)

    def run(self, limit_seconds: float | None = None) -> None:
        """Until every peer that stays has committed all rounds; Violation if that takes longer than the bound."""
        self._plan()
        limit = limit_seconds if limit_seconds is not None else 300.0 + self.rounds * 90.0
        while self._heap and not (self.head_changed and self.done()):
            self.head_changed = False
            at, _, action, arguments = heapq.heappop(self._heap)
            if at > limit:
                heads = {p.peer: p.head_round for p in self.peers.values() if p.up}
                raise Violation("progress", f"after {limit:.0f} simulated seconds the heads are {heads}")
            self.now = max(self.now, at)
            action(*arguments)


def run_seeds(seeds: range, profile: str, *, rounds: int = 5, peers: tuple[int, int] = (1, 9)) -> None:
    """One swarm per seed, of `peers` least to most members; Violation says how to replay the seed that broke a guarantee.

    A swarm whose founders are one peer runs with min_peers 1: alone it would wait for company for ever.
    """
    for seed in seeds:
        size = peers[0] + seed * 7919 % (peers[1] - peers[0] + 1)
        settings = PROFILES[profile]
        if size - settings.late_joiners < settings.min_peers:
            settings = replace(settings, min_peers=1)
        try:
            SimulatedSwarm(seed, size, rounds, settings).run()
        except Exception as error:
            replay = f"--profile {profile} --seeds {seed}:{seed + 1} --peers {size}:{size} --rounds {rounds}"
            raise Violation("seed", f"python -m sparseloco.protocol.simulator {replay}: {error!r}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description="Run seeded swarms and check every guarantee after every event.")
    parser.add_argument("--seeds", default="0:100", help="first:end")
    parser.add_argument("--profile", default="consumer", choices=sorted(PROFILES))
    parser.add_argument("--peers", default="4:9", help="fewest:most")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    first, end = (int(part) for part in options.seeds.split(":"))
    fewest, most = (int(part) for part in options.peers.split(":"))
    run_seeds(range(first, end), options.profile, rounds=options.rounds, peers=(fewest, most))
    print(f"{end - first} seeds of {options.profile}, {fewest} to {most} peers, {options.rounds} rounds each: no violation")


if __name__ == "__main__":
    main()
