"""A whole swarm in one process and one thread, under seeded latency, loss, duplication, crash, restart and slow peers.

It runs the very `Machine` that nodes run, on virtual time, and checks the guarantees after every event (`oracle.py`). The same
seed gives the same events, so a failing seed is a test.
"""

from __future__ import annotations

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
    BranchFetched,
    Committed,
    Effect,
    Event,
    Fetch,
    FetchBranch,
    Formed,
    LeaveRequested,
    Note,
    PeerSeen,
    Persist,
    Received,
    Record,
    Reveal,
    RollBack,
    Said,
    Send,
    ServeCommits,
    Settled,
    StateDigest,
    StopAndAsk,
    Tick,
    Train,
    Trained,
    Voted,
    still_binding,
)
from sparseloco.protocol.machine import COMMITS_PER_ANSWER, RECENT_COMMITS, Machine
from sparseloco.protocol.manifest import Member, MembershipRules, tolerated_liars
from sparseloco.protocol.messages import NIL, Check, Close, Commit, Message, Signed, Vote, encode_body
from sparseloco.protocol.oracle import Oracle, Violation
from sparseloco.protocol.profiles import Profile
from sparseloco.protocol.rules import FOUNDER_SESSION, Rules

MachineFactory = Callable[..., Machine]


SIMULATED_MEMBERSHIP = MembershipRules(
    min_peers=2, group_size=64, joiners_per_round=4, budget_cap_ms=20_000, budget_floor_ms=2_000, straggler_factor=3.0
)
LOOK_SECONDS = 15.0  # between two looks at the directory of peers
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
    states: dict[bytes, bytes] = field(default_factory=dict)  # by manifest digest
    payloads: dict[bytes, bytes] = field(default_factory=dict)  # own payload by parent manifest, durable before announcing
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
                self.disk.states[head.manifest.digest] = state
        head = self.disk.chain[-1] if self.disk.chain else None
        self.swarm.head_changed = True
        self.swarm.note_start()
        self._catch_up_with_chain()
        known = self.disk.states.get(head.manifest.digest) if head is not None else None
        self.incarnation += 1
        self.machine = self.swarm.machine_factory(
            Member(self.peer, self.disk.session),
            self.swarm.rules,
            self.sign,
            random.Random(self.swarm.rng.getrandbits(64)),
            head=head,
            state_digest=known,
            records=tuple(self.disk.records),
            recent=tuple(self.disk.chain[-RECENT_COMMITS:]),
        )
        self._look_for_peers(self.incarnation)
        self.handle(Tick())

    def _look_for_peers(self, incarnation: int) -> None:
        """Discovery, now and again: who is down or on another island is not found."""
        if incarnation != self.incarnation:
            return
        for other in self.swarm.peers.values():
            if other is not self and (other.up or not other.incarnation) and self.swarm.reach(self.peer, other.peer):
                self.handle(PeerSeen(other.peer))
        self.swarm.schedule(self.swarm.now + LOOK_SECONDS, self._look_for_peers, incarnation)

    def sign(self, message: Message) -> Signed:
        return Signed(message, b"", b"", encode_body(message))

    def _catch_up_with_chain(self) -> None:
        """Apply what was committed durably but not applied before a crash."""
        for commit in self.disk.chain:
            if commit.manifest.digest not in self.disk.states:
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
                self.disk.records[:] = still_binding(self.disk.records, commit)
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
            case FetchBranch(peer):
                swarm.fetch_branch(self, peer)
            case RollBack(fork_round, lost, commits):
                self._roll_back(fork_round, lost, commits)
            case StopAndAsk(depth, _, _):
                swarm.oracle.fail("healing", f"{self.peer} would have to roll {depth} rounds back")
            case Note(event, _, fields):
                swarm.count(f"note:{event}")
                if event == "refused":
                    swarm.oracle.refused(self.peer, fields)

    def _roll_back(self, fork_round: int, lost: tuple[Commit, ...], commits: tuple[Commit, ...]) -> None:
        disk = self.disk
        kept = [commit for commit in disk.chain if commit.manifest.round <= fork_round]
        if [c.manifest.digest for c in disk.chain[len(kept) :]] != [c.manifest.digest for c in lost]:
            self.swarm.oracle.fail("healing", f"{self.peer} gives up other rounds than it had")
        self.swarm.oracle.rolled_back(self.peer, lost, disk.payloads)
        disk.chain[:] = [*kept, *commits]
        self.swarm.head_changed = True
        for commit in commits:
            self.swarm.oracle.known(commit)
            self._apply(commit)

    def _train(self, number: int, budget_ms: int) -> None:
        rng = self.swarm.rng
        low, high = self.swarm.profile.train_seconds
        full = rng.uniform(low, high) * self.speed
        # A peer that cannot finish in time does fewer inner steps; a peer whose estimate is off is late all the same.
        taken = min(full, budget_ms / 1000 * rng.uniform(0.8, self.swarm.profile.overrun))
        withheld = rng.random() < self.swarm.profile.withhold
        payload = b"" if withheld else sha256(f"{self.peer} {number} {rng.random()}".encode())
        event = Trained(number, payload, 0 if withheld else 1000, 15, 1000, int(full * 1000))
        parent = self.disk.chain[-1].manifest.digest
        self.swarm.schedule(self.swarm.now + taken, self._trained, event, parent, self.incarnation)

    def _trained(self, event: Trained, parent: bytes, incarnation: int) -> None:
        if incarnation == self.incarnation and parent == self.disk.chain[-1].manifest.digest:
            assert self.machine is not None and self.machine.round is not None
            if self.machine.round.own_announcement is not None:
                return  # it changed branches and came back: what it announced here stands
            if event.payload:
                self.disk.payloads[parent] = event.payload
                self.disk.blobs.add(event.payload)
            self.handle(event)

    def _apply(self, commit: Commit) -> None:
        manifest = commit.manifest
        if manifest.round == -1:
            self.disk.states[manifest.digest] = GENESIS_STATE
            return
        before = self.disk.states[manifest.parent]
        payloads = [contribution.payload for contribution in manifest.contributions]
        digest = sha256(b"state" + before + b"".join(payloads)) if payloads else before
        self.disk.states[manifest.digest] = digest
        self.disk.blobs.update(payloads)
        self.swarm.oracle.state(self.peer, manifest.digest, digest)
        delay = self.swarm.rng.uniform(0.05, 0.5)
        self.swarm.schedule(self.swarm.now + delay, self._hashed, StateDigest(manifest.round, digest), self.incarnation)

    def _hashed(self, event: StateDigest, incarnation: int) -> None:
        if incarnation == self.incarnation:
            self.handle(event)


class Liar(SimulatedPeer):
    """Says one thing to half of the peers and another to the rest: votes, Closes and Checks; its payloads are its own."""

    def perform(self, effect: Effect) -> None:
        if isinstance(effect, Send) and isinstance(effect.frame, Signed) and effect.frame.message.header.sender == self.peer:
            other = self._contradiction(effect.frame.message)
            if other is not None:
                rng = self.swarm.rng
                fooled = tuple(peer for peer in effect.peers if rng.random() < 0.5)
                told = tuple(peer for peer in effect.peers if peer not in fooled)
                self.swarm.count("lie")
                super().perform(Send(told, effect.frame))
                super().perform(Send(fooled, self.sign(other)))
                return
        super().perform(effect)

    def _contradiction(self, message: Message) -> Message | None:
        rng = self.swarm.rng
        match message:
            case Vote(digest=digest):
                known = [d for d in self.machine.round.evidence.by_digest if d != digest] if self.machine else []  # type: ignore[union-attr]
                return replace(message, digest=rng.choice(known) if known else NIL) if digest or known else None
            case Close(announcements=announcements) if announcements:
                return replace(message, announcements=announcements[1:])
            case Check(valid=valid):
                return replace(message, valid=valid[1:], dead=()) if valid else None
        return None


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
        self.counts["slow peer"] = len(slow)
        lying = names[: tolerated_liars(len(founders))] if profile.liars else []
        self.peers = {
            name: (Liar if name in lying else SimulatedPeer)(self, name, profile.slow_factor if name in slow else 1.0)
            for name in names
        }
        self.liars = frozenset(lying)
        self.islands: list[frozenset[str]] = []  # two peers reach each other only within one of them; none: all do
        self._half = frozenset(names[::2])  # this side of the ocean
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

    def reach(self, sender: str, receiver: str) -> bool:
        return not self.islands or any(sender in island and receiver in island for island in self.islands)

    def delay(self, sender: str, receiver: str) -> float:
        profile, draw = self.profile, self.rng.random
        low, high = profile.latency_seconds
        delay = low + (high - low) * draw()
        if draw() < profile.tail_probability:
            delay += self.rng.expovariate(1 / profile.tail_seconds)
        if profile.ocean_seconds and (sender in self._half) != (receiver in self._half):
            delay += profile.ocean_seconds
        return delay

    def send(self, sender: str, receiver: str, frame: Any) -> None:
        if receiver not in self.peers or self.rng.random() < self.profile.loss:
            return
        self.schedule(self.now + self.delay(sender, receiver), self._deliver, sender, receiver, frame)
        if self.rng.random() < self.profile.duplication:
            self.schedule(self.now + self.delay(sender, receiver), self._deliver, sender, receiver, frame)

    def _deliver(self, sender: str, receiver: str, frame: Any) -> None:
        if not self.islands or self.reach(sender, receiver):
            self.peers[receiver].handle(Received(sender, frame))

    def fetch_branch(self, asker: SimulatedPeer, peer: str) -> None:
        if peer in self.peers:
            at = self.now + 2 * self.delay(asker.peer, peer)
            self.schedule(at, self._branch_fetched, asker, self.peers[peer], asker.incarnation)

    def _branch_fetched(self, asker: SimulatedPeer, peer: SimulatedPeer, incarnation: int) -> None:
        if asker.incarnation != incarnation or not peer.up or not self.reach(asker.peer, peer.peer):
            return
        theirs, mine = peer.disk.chain, asker.disk.chain
        here = {commit.manifest.digest for commit in mine}
        common = [commit for commit in theirs if commit.manifest.digest in here]
        fork = common[-1] if common else None
        after = fork.manifest.round if fork is not None else -2
        parts = [tuple(c for c in chain if c.manifest.round > after) for chain in (mine, theirs)]
        if parts[1]:
            asker.handle(BranchFetched(peer.peer, fork, *parts))

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
        holders = [p for p in self.peers.values() if p.up and payload in p.disk.blobs and self.reach(p.peer, peer.peer)]
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
        for _ in range(profile.partitions):
            self.schedule(rng.uniform(5.0, span * 0.6), self._part)
        for _ in range(profile.outages):
            self.schedule(rng.uniform(5.0, span * 0.8), self._cut_one_off)
        for _ in range(profile.mass_leaves):
            self.schedule(rng.uniform(0.2, 0.6) * span, self._mass_leave)

    def _late_join(self, name: str) -> None:
        donors = [p for p in self.peers.values() if p.up and p.disk.chain]
        if not donors:
            self.schedule(self.now + 2.0, self._late_join, name)
            return
        donor = self.rng.choice(donors)
        head = donor.disk.chain[-1]
        self.count("late join")
        joiner = self.peers[name]
        joiner.disk.chain[:] = donor.disk.chain[:-1]  # verified and downloaded, before it takes part
        joiner.disk.states.update(donor.disk.states)
        joiner.disk.chain.append(head)
        joiner.start(None, None)

    def _crash_one(self) -> None:
        alive = [p for p in self.peers.values() if p.up]
        if alive:
            victim = self.rng.choice(alive)
            victim.crash_after_effects = self.rng.randrange(6)
            self.schedule(self.now + self.rng.uniform(*self.profile.down_seconds), self._restart, victim)

    def _power_cut(self) -> None:
        self.count("power cut")
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

    def _part(self) -> None:
        """Two islands for a while, then one network again."""
        names = list(self.peers)
        self.rng.shuffle(names)
        cut = self.rng.randint(1, max(1, len(names) // 2))
        self._divide([frozenset(names[:cut]), frozenset(names[cut:])], self.profile.partition_seconds, "partition")

    def _cut_one_off(self) -> None:
        name = self.rng.choice(list(self.peers))
        self._divide([frozenset([name]), frozenset(self.peers) - {name}], self.profile.outage_seconds, "outage")

    def _divide(self, islands: list[frozenset[str]], seconds: tuple[float, float], what: str) -> None:
        if self.islands:
            return
        self.islands = islands
        self.disturbed_until = float("inf")
        self.count(what)
        self.schedule(self.now + self.rng.uniform(*seconds), self._heal)

    def _heal(self) -> None:
        self.islands = []
        self.note_start()

    def _mass_leave(self) -> None:
        """So many die for good, at one moment, that those who stay are no quorum but can still be a group."""
        staying = [p for p in self.peers.values() if p.up and p.peer not in self._gone]
        heads = [p.disk.chain[-1].manifest for p in staying if p.disk.chain]
        if not heads or max(head.round for head in heads) < 0:
            self.schedule(self.now + 2.0, self._mass_leave)
            return
        group = max(heads, key=lambda head: head.round)
        members = [p.peer for p in staying if group.member(p.peer) is not None]
        least = self.rules.membership.min_peers
        rest = min(max(least, 1), group.quorum - 1)
        if rest < least or len(members) <= rest:
            return
        self.rng.shuffle(members)
        for name in members[rest:]:
            self.depart(name)
        self.count("mass leave")

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
        """Everybody who stays is on one chain that has all rounds; a liar need not be."""
        staying = [p for p in self.peers.values() if p.peer not in self._gone and p.peer not in self.liars]
        if self.islands or not all(p.up and p.head_round >= self.rounds - 1 for p in staying):
            return False
        last = {p.disk.chain[self.rounds].manifest.digest for p in staying}
        return len(last) == 1

    @property
    def rounds_committed(self) -> int:
        """The furthest round that an honest peer's chain holds, plus one."""
        honest = [peer for name, peer in self.peers.items() if name not in self.liars]
        return max(peer.head_round for peer in honest) + 1

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
