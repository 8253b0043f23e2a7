"""Real nodes in one process and one event loop: everything but the network and the amount of text is the real thing.

`LoopbackNetwork` stands for libp2p: seeded delays (and with them another order), loss, partitions, killed peers and peers that
lie. `Swarm` starts nodes through the same `Node._prepare` that `join` uses, takes a node's files as a crash would leave them,
and ends every story with `check()`: all chains agree, and every state digest follows from the files by arithmetic alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sparseloco.bootstrap.errors import TransportError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.rate import Counters
from sparseloco.bootstrap.run_file import TINY_MODEL, RunFile
from sparseloco.compression.codec import decode
from sparseloco.compression.layout import PayloadLayout, TensorSpec
from sparseloco.node.catch_up import Donor
from sparseloco.node.contribution import ContributionHeader, open_contribution
from sparseloco.node.corpus import Corpus
from sparseloco.node.exchange import GatedBlobs
from sparseloco.node.genesis import make_genesis
from sparseloco.node.node import Node
from sparseloco.node.options import JoinOptions
from sparseloco.node.run_rules import codec_of
from sparseloco.node.services import Hello, Services, StateOffer, make_hello
from sparseloco.node.state import state_digest, total_bytes
from sparseloco.node.store import StateDir
from sparseloco.node.tensor_file import read_tensors
from sparseloco.node.worker import Worker
from sparseloco.protocol.errors import RemoteProtocolError
from sparseloco.protocol.events import decode_commit
from sparseloco.protocol.messages import Form, Signed
from sparseloco.protocol.messages import decode as decode_frame

CPU = torch.device("cpu")
MODEL = {**TINY_MODEL, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL["num_key_value_heads"] = 2
SCRATCH = int(os.environ.get("LOOPBACK_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)


# --- the network ------------------------------------------------------------------------------------------------------

# What a lying peer does to what it sends: (kind, receiver, data) -> data, or None to send nothing.
Lie = Callable[[str, str, bytes], bytes | None]


class LoopbackNetwork:
    """All transports of one story. `kind` is "message", "answer:<request>" or "blob" where a lie is asked."""

    def __init__(self, seed: int, delay_seconds: tuple[float, float] = (0.0002, 0.004), loss: float = 0.0) -> None:
        print(f"network seed {seed}")
        self.rng = random.Random(seed)
        self.delay_seconds = delay_seconds
        self.loss = loss
        self.transports: dict[str, LoopbackTransport] = {}
        self.lies: dict[str, Lie] = {}
        self.islands: list[set[str]] = []  # two peers reach each other only within one of them; none: all do
        self.log: list[tuple[str, str, str, int]] = []  # (kind, sender, receiver, bytes) of what was delivered
        self.said: dict[bytes, None] = {}  # every different message but heartbeats, as bytes

    def transport(self, identity: Identity, limits: Any) -> LoopbackTransport:
        made = LoopbackTransport(self, identity, limits)
        self.transports[identity.peer_id] = made
        return made

    def drop(self, peer: str) -> None:
        """The peer's machine is gone."""
        gone = self.transports.pop(peer, None)
        if gone is not None:
            gone.alive = False

    def lie(self, sender: str, kind: str, receiver: str, data: bytes) -> bytes | None:
        told = self.lies.get(sender)
        return data if told is None else told(kind, receiver, data)

    async def way(self, sender: LoopbackTransport, receiver: str, *, lossy: bool = False) -> LoopbackTransport:
        """The other end after a delay, or TransportError."""
        await asyncio.sleep(self.rng.uniform(*self.delay_seconds))
        other = self.transports.get(receiver)
        cut = self.islands and not any({sender.peer_id, receiver} <= island for island in self.islands)
        if other is None or cut or not sender.alive or self.transports.get(sender.peer_id) is not sender:
            raise TransportError("unreachable", "no way there")
        if lossy and self.rng.random() < self.loss:
            raise TransportError("timeout", "lost on the way")
        return other


class LoopbackTransport:
    """What node/ uses of a Transport."""

    def __init__(self, network: LoopbackNetwork, identity: Identity, limits: Any) -> None:
        self.network = network
        self.identity, self.peer_id, self.limits = identity, identity.peer_id, limits
        self.counters = Counters()
        self.alive = True
        self.handler: Callable[[str, bytes], None] | None = None
        self.requests: dict[str, Callable[[str, bytes], Awaitable[bytes]]] = {}
        self.source: Any = None
        self.accept: Callable[[str, bytes, int], bool] = lambda *_: False
        self.deliver: Callable[[str, bytes, bytes], None] = lambda *_: None
        self.death: list[Callable[[], None]] = []
        self.before_send: Callable[[str, bytes], None] = lambda *_: None

    def on_death(self, callback: Callable[[], None]) -> None:
        self.death.append(callback)

    def addresses(self) -> list[str]:
        return [f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer_id}"]

    async def clock_offset(self, peer: str, timeout_seconds: float = 5.0) -> float:
        await self.network.way(self, peer)
        return 0.0

    def remember(self, peer: str, addresses: Iterable[str]) -> None:
        """Peers on one loopback network need no addresses."""

    async def connect_any(self, addresses: Iterable[str]) -> list[str]:
        return list(addresses)

    async def connected(self) -> set[str]:
        return set(self.network.transports) - {self.peer_id}

    def on_message(self, handler: Callable[[str, bytes], None]) -> None:
        self.handler = handler

    def on_request(self, name: str, handler: Callable[[str, bytes], Awaitable[bytes]]) -> None:
        self.requests[name] = handler

    async def send(self, peer: str, message: bytes, timeout_seconds: float = 5.0) -> None:
        self.before_send(peer, message)
        if len(message) > self.limits.message_bytes:
            raise TransportError("too-large", "above message_bytes")
        other = await self.network.way(self, peer, lossy=True)
        told = self.network.lie(self.peer_id, "message", peer, message)
        if told is None:
            return
        if other.handler is None:
            raise TransportError("busy", "not listening yet")
        self.counters.bytes_sent += len(told)
        self.network.said[told] = None
        self.network.log.append(("message", self.peer_id, peer, len(told)))
        other.handler(self.peer_id, told)

    async def request(self, peer: str, name: str, body: bytes, timeout_seconds: float = 10.0) -> bytes:
        other = await self.network.way(self, peer)
        handler = other.requests.get(name)
        if handler is None:
            raise TransportError("not-found", "no such request")
        try:
            answer = await handler(self.peer_id, body)
        except TransportError:
            raise
        except Exception as error:  # as calls.py: the asker learns the code only
            raise TransportError("refused", "says the other side") from error
        told = self.network.lie(peer, f"answer:{name}", self.peer_id, answer)
        await self.network.way(other, self.peer_id)
        if told is None:
            raise TransportError("timeout", "no answer")
        return told

    def serve_blobs(self, source: Any) -> None:
        self.source = source

    def accept_pushes(self, accept: Callable[[str, bytes, int], bool], deliver: Callable[[str, bytes, bytes], None]) -> None:
        self.accept, self.deliver = accept, deliver

    async def push(self, peer: str, digest: bytes, data: bytes, no_progress_seconds: float = 10.0) -> None:
        other = await self.network.way(self, peer)
        if not other.accept(self.peer_id, digest, len(data)):
            raise TransportError("refused", "says the other side")
        told = self.network.lie(self.peer_id, "blob", peer, data)
        await self.network.way(self, peer)
        if told is None or hashlib.sha256(told).digest() != digest:
            raise TransportError("digest", "the other side received something else")
        self.network.log.append(("push", self.peer_id, peer, len(told)))
        self.counters.payload_bytes_sent += len(told)
        other.deliver(self.peer_id, digest, told)

    async def pull(
        self, peer: str, digest: bytes, length: int, *, have: bytes = b"", no_progress_seconds: float = 10.0
    ) -> bytes:
        other = await self.network.way(self, peer)
        size = other.source.size(digest) if other.source is not None else None
        if size is None:
            raise TransportError("not-found", "says the other side")
        if size != length:
            raise TransportError("refused", f"the other side has {size} bytes")
        rest = other.source.read(digest, len(have), length - len(have))
        told = self.network.lie(peer, "blob", self.peer_id, rest)
        await self.network.way(other, self.peer_id)
        if told is None:
            raise TransportError("timeout", "nothing came")
        data = have + told
        if len(data) < length:
            raise TransportError("short", "the stream ended early", data)
        if hashlib.sha256(data).digest() != digest:
            raise TransportError("digest", "not what was asked for")
        self.network.log.append(("pull", peer, self.peer_id, len(told)))
        return data

    async def close(self) -> None:
        if self.network.transports.get(self.peer_id) is self:
            self.network.drop(self.peer_id)


# --- one node ---------------------------------------------------------------------------------------------------------


class Crash(Exception):
    """The power is cut here."""


class NodeFiles:
    """What a node left in its state directory, whoever ran it."""

    def __init__(self, path: Path, peer: str) -> None:
        self.path, self.peer = path, peer

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        path = self.path / "events.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []
        return [line for line in lines if name is None or line["event"] == name]

    @property
    def lives(self) -> list[Path]:
        """The state directories of this node's earlier processes and of the last, oldest first: the same one, unless copied."""
        return [self.path]


class LoopNode(NodeFiles):
    """One node of a story: its folder, and while it lives its driver."""

    def __init__(self, swarm: Swarm, identity: Identity, path: Path) -> None:
        super().__init__(path, identity.peer_id)
        self.swarm, self.identity = swarm, identity
        self.task: asyncio.Task[str] | None = None
        self.node: Node
        self.store: StateDir
        self.snapshot: Path | None = None
        self._power = threading.Lock()  # whoever takes it cuts the power; the node's other threads only fall over

    async def start(self, arrange: Callable[[LoopNode], None] = lambda _: None) -> LoopNode:
        """`arrange(self)` puts hooks in after the node is prepared and before it runs."""
        await self.prepare()
        arrange(self)
        self.task = asyncio.create_task(self.driver.run())
        self.swarm.living.append(self)
        return self

    async def prepare(self) -> None:
        """All that comes before the rounds: run file, model, chain, state."""
        swarm = self.swarm
        self.store = StateDir.open(self.path, blob_budget_bytes=swarm.blob_budget_bytes)
        self.store.write_run_file(swarm.run.to_toml())
        self.transport = swarm.network.transport(self.identity, swarm.run.limits)
        self.node = Node(
            JoinOptions(peers=(), device="cpu"), CPU, self.store, self.identity, self.transport, swarm.run  # type: ignore[arg-type]
        )
        self.node.directory = swarm.directory  # type: ignore[assignment]
        try:
            self.driver = self.node.driver = await self.node._prepare([])
        except BaseException:
            self.end()
            raise

    @property
    def worker(self) -> Any:
        return self.driver.worker

    def end(self) -> None:
        self.swarm.network.drop(self.peer)
        self.store.close()
        if self in self.swarm.living:
            self.swarm.living.remove(self)

    async def kill(self) -> None:
        """Gone at once: nothing is said, nothing more is written than what threads had begun."""
        self.swarm.network.drop(self.peer)
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.end()

    def cut_power(self) -> None:
        """Take the files as they are now; to be called from a hook, which then ends in Crash."""
        if self._power.acquire(blocking=False):
            target = self.path.with_name(f"{self.path.name}-{len(list(self.path.parent.iterdir()))}")
            shutil.copytree(self.path, target)
            self.swarm.network.drop(self.peer)
            self.snapshot = target  # from here on it may be restarted
            self.swarm.loop.call_soon_threadsafe(self.driver.fail, Crash("power cut"))
        raise Crash(f"{self.peer}: power cut")

    async def restart(self, arrange: Callable[[LoopNode], None] = lambda _: None) -> LoopNode:
        """After `cut_power`: the same node from the files as they were."""
        assert self.task is not None and self.snapshot is not None
        outcome = (await asyncio.gather(self.task, return_exceptions=True))[0]
        assert isinstance(outcome, Crash), outcome
        self.end()
        again = LoopNode(self.swarm, self.identity, self.snapshot)
        return await again.start(arrange)

    @property
    def lives(self) -> list[Path]:
        """A power cut goes on in a copy of the folder, whose name begins with that of the one before."""
        copies = [path for path in self.path.parent.iterdir() if f"{self.path.name}-".startswith(f"{path.name}-")]
        return sorted(copies, key=lambda path: len(path.name))

    @property
    def head(self) -> int:
        return self.driver.head_round

    def states(self) -> dict[int, str]:
        """State digests by round as this node committed them; those of a branch that it left do not count."""
        found: dict[int, str] = {}
        for event in self.events():
            if event["event"] == "committed":
                found[event["round"]] = event["state_digest"]
            elif event["event"] == "rolled_back":
                found = {number: digest for number, digest in found.items() if number <= event["to_round"]}
        return found


# --- a run ------------------------------------------------------------------------------------------------------------


def small_corpus(run: RunFile, own: Any = ()) -> Corpus:
    """Text that a model of 20,000 parameters learns something of in a few rounds; the same for everybody."""
    rng = np.random.default_rng(11)
    held_out_tokens = run.data.held_out_windows * run.data.sequence_length + 1
    words = [rng.integers(97, 123, length) for length in (3, 4, 5, 6, 7)]
    train = np.concatenate([words[i] for i in rng.integers(0, 5, 4000)]).astype(np.uint16)
    held_out = np.concatenate([words[i] for i in rng.integers(0, 5, held_out_tokens)]).astype(np.uint16)
    return Corpus(train, held_out[: max(held_out_tokens, 64)], hashlib.sha256(b"small").digest(), 1, len(train))


def settings(**changes: Any) -> dict[str, dict[str, Any]]:
    """Run file tables; `changes` are `table__key=value`."""
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "loop", "min_peers": 1, "rounds": 1000},
        "data": {"sequence_length": 32, "held_out_windows": 4},
        "algorithm": {"inner_steps": 3, "batch": 2, "warmup_steps": 2, "top_k": 64, "alpha": 0.7},
        "round": {
            "budget_seconds": 20.0, "min_budget_seconds": 6.0, "formation_seconds": 15.0, "heartbeat_seconds": 0.05,
            "detection_seconds": 1.5, "exchange_seconds": 4.0, "vote_seconds": 1.0, "checkpoint_every": 3,
        },
        "limits": {},
        "robustness": {},
    }  # fmt: skip
    for name, value in changes.items():
        table, key = name.split("__")
        tables[table][key] = value
    return tables


class Directory:
    """What discovery finds: whoever is on the network."""

    def __init__(self, network: LoopbackNetwork) -> None:
        self.network = network

    async def peers(self, run_id: str) -> list[Any]:
        return [SimpleNamespace(peer_id=peer, role="node", addresses=()) for peer in self.network.transports]


class RunFiles:
    """One run by its files: run file, genesis, and the nodes' state directories `node*` in `folder`."""

    def __init__(self, folder: Path, run: RunFile, genesis: dict[str, torch.Tensor]) -> None:
        self.folder, self.run, self.genesis = folder, run, genesis
        specs = [TensorSpec(name, tuple(genesis[name].shape)) for name in sorted(genesis)]
        self.layout = PayloadLayout(specs, codec_of(run))

    def manifests(self, node: NodeFiles) -> list[Any]:
        commits = [decode_commit(path.read_bytes()) for path in (node.path / "chain").glob("*.bin")]
        return sorted((commit.manifest for commit in commits), key=lambda manifest: manifest.round)

    def residual_from_files(self, path: Path, peer: str) -> dict[str, torch.Tensor] | None:
        """What error feedback a node must hold: from its newest own a_t that the chain has decided, and payload bytes."""
        commits = {int(p.stem): decode_commit(p.read_bytes()) for p in (path / "chain").glob("0*.bin")}
        rounds = [int(p.name) for p in (path / "own").iterdir() if p.name.isdecimal() and int(p.name) in commits]
        if not rounds:
            return None
        manifest = commits[max(rounds)].manifest
        a = read_tensors(path / "own" / f"{max(rounds):08d}" / "a.safetensors")
        own = next((c for c in manifest.contributions if c.peer == peer), None)
        if own is None:
            return a
        blob = (path / "blobs" / own.payload.hex()).read_bytes()
        payload = blob[len(blob) - self.layout.total_bytes :]
        for spec, tensor in zip(self.layout.specs, decode(payload, self.layout), strict=True):
            flat = a[spec.name].clone().flatten().numpy()
            flat[tensor.indices.numpy()] -= tensor.values.numpy()
            a[spec.name] = torch.from_numpy(flat).view(spec.shape)
        return a


class Swarm(RunFiles):
    """One run on one loopback network, with a bootstrap node that serves the genesis state."""

    def __init__(
        self,
        folder: Path,
        identities: list[Identity],
        *,
        seed: int = 0,
        founders: int = 0,
        network: dict[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        self.identities = identities
        self.network = LoopbackNetwork(seed or SCRATCH, **(network or {}))
        self.directory = Directory(self.network)
        self.living: list[LoopNode] = []
        self.blob_budget_bytes = 2 * 10**9
        tables = settings(**changes)
        tables["run"]["founders"] = sorted(identity.peer_id for identity in identities[:founders])
        start = genesis()
        draft = RunFile.parse(toml_of(tables))
        super().__init__(folder, draft.with_genesis(state_digest(start)), start)
        self.seed_store: StateDir | None = None

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, *exception: object) -> None:
        for node in list(self.living):
            node.end()
        if self.seed_store is not None:
            self.seed_store.close()

    def start_seed(self) -> LoopbackTransport:
        """A bootstrap that serves the genesis state and nothing else."""
        self.seed_store = store = StateDir.open(self.folder / "seed")
        transport = self.network.transport(self.identities[-1], self.run.limits)
        store.checkpoints.save(-1, self.genesis, bytes(32))
        pieces = store.checkpoints.info(-1).piece_digests
        blobs = GatedBlobs(store.blobs, store.checkpoints)
        blobs.offer_checkpoints(total_bytes(self.genesis))
        transport.serve_blobs(blobs)
        offer = StateOffer(-1, total_bytes(self.genesis), tuple(piece.hex() for piece in pieces))

        def hello(asker: str) -> Hello:
            return make_hello(self.run.run_id, "loop", "bootstrap", bytes(16), -2, bytes(32), bytes(32))

        Services(transport, hello=hello, run_toml=self.run.to_toml(), chain=None, offer=lambda: offer)  # type: ignore[arg-type]
        return transport

    def new(self, index: int) -> LoopNode:
        return LoopNode(self, self.identities[index], self.folder / f"node{index}")

    async def start(self, *indices: int, arrange: Callable[[LoopNode], None] = lambda _: None) -> list[LoopNode]:
        self.loop = asyncio.get_running_loop()
        if self.seed_store is None:
            self.start_seed()
        return list(await asyncio.gather(*(self.new(index).start(arrange) for index in indices)))

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Wait for a condition; a node that ended in an error, and isn't meant to, ends the story at once."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not (value := condition()):
            for node in self.living:
                error = node.task.exception() if node.task is not None and node.task.done() else None
                if error is not None and not isinstance(error, Crash):
                    raise AssertionError(f"{node.path.name} ended while waiting for {what}") from error
            assert loop.time() < end, f"never happened: {what}\n{self.describe()}"
            await asyncio.sleep(0.02)
        return value

    async def until_round(self, number: int, nodes: Iterable[LoopNode] | None = None, seconds: float = 60.0) -> None:
        chosen = list(nodes if nodes is not None else self.living)
        await self.until(lambda: all(number in node.states() for node in chosen), f"round {number} everywhere", seconds)

    def describe(self) -> str:
        lines = []
        for node in self.living:
            tail = [{k: v for k, v in e.items() if k not in ("time", "group")} for e in node.events()][-8:]
            lines.append(f"--- {node.path.name} {node.peer[-6:]} head {node.head}")
            lines += [str(event) for event in tail]
        return "\n".join(lines)

    async def stop(self) -> None:
        """Every node is killed; what they hold on disk stays to be looked at."""
        for node in list(self.living):
            await node.kill()

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self, nodes: Iterable[LoopNode] | None = None) -> int:
        """All chains agree and every digest follows from genesis and the files; returns how many states were compared."""
        chosen = list(nodes if nodes is not None else self.living)
        digests: dict[int, str] = {}
        compared = 0
        replayed: dict[bytes, dict[int, str]] = {}
        for node in chosen:
            for number, digest in node.states().items():
                assert digests.setdefault(number, digest) == digest, f"{node.path.name} differs after round {number}"
                compared += 1
        self.check_no_contradiction()
        blobs = {path.name: path for node in chosen for path in (node.path / "blobs").iterdir() if len(path.name) == 64}
        for node in chosen:
            commits = [decode_commit(path.read_bytes()) for path in sorted((node.path / "chain").glob("*.bin"))]
            commits.sort(key=lambda commit: commit.manifest.round)
            key = commits[-1].manifest.digest
            if key not in replayed:
                replayed[key] = self.replay([commit.manifest for commit in commits], blobs)
            for number, digest in node.states().items():
                assert replayed[key][number] == digest, f"round {number}: recomputed from files it is another state"
        return compared

    def check_no_contradiction(self) -> None:
        """Nobody honest ever signed two different things where one is allowed, restarts included."""
        once: dict[Any, bytes] = {}
        for data in self.network.said:
            try:
                frame = decode_frame(data, 10**6)
            except RemoteProtocolError:
                continue
            for signed in (frame, *frame.inner) if isinstance(frame, Signed) else getattr(frame, "inner", ()):
                message = signed.message
                header = message.header
                if header.sender in self.network.lies or isinstance(message, Form):
                    continue
                which = tuple(getattr(message, name, None) for name in ("phase", "attempt", "revision"))
                key = (header.member, header.parent, type(message), which)
                assert once.setdefault(key, signed.digest) == signed.digest, f"{header.sender} contradicted itself: {message}"

    def replay(self, manifests: list[Any], blobs: dict[str, Path]) -> dict[int, str]:
        """Digest by round, by plain numpy from genesis: theta - alpha * (sum over senders / number of senders)."""
        from sparseloco.compression.codec import norm

        theta = {name: tensor.numpy().copy() for name, tensor in self.genesis.items()}
        states: dict[int, str] = {}
        base = state_digest(self.genesis)
        for manifest in manifests:
            if manifest.round < 0:
                continue
            assert manifest.base == base, f"round {manifest.round} is based on another state"
            payloads = []
            for contribution in manifest.contributions:
                blob = blobs[contribution.payload.hex()].read_bytes()
                assert hashlib.sha256(blob).digest() == contribution.payload and len(blob) == contribution.payload_bytes
                header = ContributionHeader(manifest.run, manifest.round, manifest.base, contribution.peer)
                payloads.append(open_contribution(blob, header, self.layout.total_bytes))
            norms = [norm(payload, self.layout) for payload in payloads]
            limit = 3.0 * sorted(norms)[(len(norms) - 1) // 2] if norms else 0.0
            factors = [np.float32(1.0) if value <= limit else np.float32(limit / value) for value in norms]
            decoded = [list(decode(payload, self.layout)) for payload in payloads]
            alpha = np.float32(self.run.algorithm.alpha_at(manifest.round))
            for position, spec in enumerate(self.layout.specs):
                total = np.zeros(spec.elements, np.float32)
                senders = np.zeros(spec.elements, np.float32)
                for tensors, factor in zip(decoded, factors, strict=True):
                    indices, values = tensors[position].indices.numpy(), tensors[position].values.numpy()
                    total[indices] = total[indices] + values * factor
                    senders[indices] += np.float32(1.0)
                mean = total / np.maximum(senders, np.float32(1.0))
                if payloads:
                    theta[spec.name] = theta[spec.name] - (mean * alpha).reshape(spec.shape)
            base = state_digest({name: torch.from_numpy(array) for name, array in theta.items()})
            states[manifest.round] = base.hex()
        return states


_GENESIS: dict[str, torch.Tensor] = {}


def check_twin(run: RunFiles, node: NodeFiles, folder: Path) -> int:
    """A twin that was never interrupted, given the same committed sets, holds the same bits as `node`'s files.

    The twin trains every round that `node` trained, from the same states, and applies what the chain committed. Returns how
    many rounds it trained. Payloads, buffers, AdamW's moments and error feedback are compared, and by them the batches.
    """
    manifests = run.manifests(node)
    blobs = {path.name: path for other in run.folder.glob("node*/blobs") for path in other.iterdir() if len(path.name) == 64}
    own_rounds = {int(p.name) for p in (node.path / "own").iterdir() if p.name.isdecimal()}
    committed = {(m.round, c.payload) for m in manifests for c in m.contributions if c.peer == node.peer}
    steps_of = steps_trained(node) | {m.round: c.steps for m in manifests for c in m.contributions if c.peer == node.peer}
    trained = own_rounds | {e["round"] for e in node.events("trained")} | {number for number, _ in committed}
    compared = 0
    with StateDir.open(folder) as store:
        twin = Worker(run.run, node.peer, store, device=CPU)
        twin.hold(-1, run.genesis)
        for parent, manifest in zip(manifests, [*manifests[1:], None], strict=True):
            number = parent.round + 1
            base = state_digest(twin.theta)
            index = [member.peer for member in parent.group].index(node.peer) if parent.member(node.peer) else None
            if number in trained and index is not None:
                left = steps_of[number]  # cut short or not; a round that nothing tells of would be no twin's
                steps = iter(range(left))
                result = twin.train(number, index, float("inf"), lambda: next(steps, None) is None, lambda: base)  # noqa: B023
                mine = {payload for at, payload in committed if at == number}
                assert mine <= {result.digest}, f"round {number}: another payload than the twin's was committed"
                if number in own_rounds and (node.path / "own" / f"{number:08d}").is_dir():
                    for name in ("a", "optimizer"):
                        file = Path(f"{number:08d}", f"{name}.safetensors")
                        mine_a, twins = read_tensors(node.path / "own" / file), read_tensors(store.path / "own" / file)
                        assert same(mine_a, twins), f"round {number}: {name} differs from the twin's"
                compared += 1
            if manifest is not None:
                twin.apply(manifest, [blobs[c.payload.hex()].read_bytes() for c in manifest.contributions])
        expected = run.residual_from_files(node.path, node.peer)
        if expected is not None and (not own_rounds or max(own_rounds) <= manifests[-1].round):
            assert same(twin.residual, expected), "the error feedback that files give differs from the twin's"
        if isinstance(node, LoopNode) and node.worker.state_round == manifests[-1].round:
            assert same(twin.residual, node.worker.residual), "the error feedback differs from the twin's"
            assert same(twin.theta, node.worker.theta)
    return compared


def steps_trained(node: NodeFiles) -> dict[int, int]:
    """Inner steps by round, from the events and the own states that this node's lives left; a later life's count wins."""
    steps: dict[int, int] = {}
    for path in node.lives:
        steps |= {event["round"]: event["steps"] for event in NodeFiles(path, node.peer).events("trained")}
        for kept in (path / "own").glob("*/own.json"):
            steps[int(kept.parent.name)] = json.loads(kept.read_text())["record"]["result"]["next_step"]
    return steps


def genesis() -> dict[str, torch.Tensor]:
    if not _GENESIS:
        _GENESIS.update(make_genesis(MODEL, 5))
    return dict(_GENESIS)


def toml_of(tables: dict[str, dict[str, Any]]) -> str:
    lines = []
    for table, values in tables.items():
        lines.append(f"[{table}]")
        for key, value in values.items():
            lines.append(f"{key} = {json.dumps(value)}")
    lines.append("[model.config]")
    lines += [f"{key} = {json.dumps(value)}" for key, value in MODEL.items()]
    return "\n".join(lines)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Bit for bit, signs of zeros included."""
    return set(left) == set(right) and all(
        torch.equal(left[name].contiguous().view(torch.int32), right[name].contiguous().view(torch.int32))
        if left[name].dtype == torch.float32
        else torch.equal(left[name], right[name])
        for name in left
    )


def donor(peer: str, hello: Hello) -> Donor:
    return Donor(peer, hello)
