"""`bootstrap`: a peer that trains nothing. It seeds the DHT, relays, and keeps the run file, the genesis state and the log.

It needs the genesis file beside the run file (`init` writes both) or its own copy in the state directory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparseloco import __version__
from sparseloco.bootstrap.directory import Directory, PeerRecord
from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.bootstrap.transport import Transport, TransportError
from sparseloco.compression.layout import PayloadLayout, TensorSpec
from sparseloco.node.chain import Chain
from sparseloco.node.durable import write_atomic
from sparseloco.node.exchange import Exchange
from sparseloco.node.finding import known_addresses, remember_addresses
from sparseloco.node.genesis import GENESIS_FILE, require_model
from sparseloco.node.init import genesis_path, initialise, starting_run
from sparseloco.node.interrupts import run_on_fast_loop
from sparseloco.node.keeper import Keeper
from sparseloco.node.options import BootstrapOptions
from sparseloco.node.places import default_state_dir, default_state_root
from sparseloco.node.run_rules import codec_of, rules_of
from sparseloco.node.services import Hello, Services, StateOffer, make_hello
from sparseloco.node.state import state_digest
from sparseloco.node.store import StateDir
from sparseloco.node.tensor_file import read_tensors
from sparseloco.protocol.events import PeerSeen
from sparseloco.protocol.manifest import GENESIS_ROUND

logger = logging.getLogger(__name__)

ROLE = "bootstrap"
# The bootstrap hears of most peers by their own heartbeats; looking in the DHT finds the rest.
LOOK_SECONDS = 5.0


def run_bootstrap(options: BootstrapOptions) -> int:
    """Until Ctrl-C (130); NodeError for what a person can mend."""
    return run_on_fast_loop(_bootstrap(options))


async def _bootstrap(options: BootstrapOptions) -> int:
    run, genesis = _find_run(options)
    state_dir = options.state_dir or default_state_dir("bootstrap", run.run_id)
    with StateDir.open(state_dir) as store:
        kept = store.path / "run.toml"
        if kept.is_file() and options.run is not None and RunFile.load(kept).run_id != run.run_id:
            raise StateError(f"{store.path}: keeps another run; use another --state-dir")
        specs = _keep(store, run, genesis)
        store.blobs.budget_bytes = run.limits.stored_blob_bytes
        identity = Identity.load_or_create(store.path / "identity.key")
        with identity.lock():
            transport = await Transport.start(
                identity,
                listen=options.listen,
                announce=options.announce,
                relay=options.relay,
                upload_bytes_per_second=options.max_upload_bytes_per_second,
                limits=run.limits,
            )
            try:
                return await _serve(options, store, identity, transport, run, specs)
            finally:
                await transport.close()


def _find_run(options: BootstrapOptions) -> tuple[RunFile, Path]:
    """The run file given, the one kept, or the tiny preset made now; with the place of its genesis state."""
    if options.run is not None:
        run = RunFile.load(options.run)
        run.require_genesis()
        return run, genesis_path(options.run)
    root = options.state_dir or default_state_root("bootstrap") / "tiny"
    kept = root / "run.toml"
    if kept.is_file():
        return RunFile.load(kept), root / GENESIS_FILE
    root.mkdir(parents=True, exist_ok=True)
    made = root / "made.toml"
    run = initialise(starting_run("tiny"), made)
    logger.info("made a run of the tiny preset: %s", made)
    return run, genesis_path(made)


def _keep(store: StateDir, run: RunFile, genesis: Path) -> list[TensorSpec]:
    """See to a good copy of run file and genesis state in the state directory, the latter also as its first checkpoint.

    Returns what the state consists of; StateError if there is none to be had.
    """
    mine = store.path / GENESIS_FILE
    problems = []
    for source in (mine, genesis):
        try:
            theta = read_tensors(source)
        except StateError as error:
            problems.append(str(error))
            continue
        if state_digest(theta) != run.require_genesis():
            problems.append(f"{source}: is not the state that [run] genesis names")
            continue
        if source != mine:
            require_model(source, run.model.config)
            write_atomic(mine, source.read_bytes())
        store.write_run_file(run.to_toml())
        if GENESIS_ROUND not in store.checkpoints.rounds():
            store.checkpoints.save(GENESIS_ROUND, theta, bytes(32))
        return [TensorSpec(name, tuple(tensor.shape)) for name, tensor in sorted(theta.items())]
    raise StateError(
        "; ".join(dict.fromkeys(problems)) + "; the genesis state belongs beside the run file: `sparseloco-node init` writes "
        "both, `init --genesis` makes it anew"
    )


async def _serve(
    options: BootstrapOptions,
    store: StateDir,
    identity: Identity,
    transport: Transport,
    run: RunFile,
    specs: Sequence[TensorSpec],
) -> int:
    session = secrets.token_bytes(16)
    rules = rules_of(run)
    layout = PayloadLayout(specs, codec_of(run))
    state_bytes = 4 * layout.parameters
    exchange = Exchange(transport, store, layout, random.Random())
    exchange.served.offer_checkpoints(state_bytes)
    pieces = store.checkpoints.info(GENESIS_ROUND).piece_digests
    offer = StateOffer(GENESIS_ROUND, state_bytes, tuple(piece.hex() for piece in pieces))
    keeper = Keeper(identity, session, rules, transport, exchange, Chain(store, rules))

    def hello(asker: str) -> Hello:
        head = keeper.chain.head
        digest = head.manifest.digest if head else bytes(32)
        heard = keeper.machine.liveness.last_word(asker, time.monotonic())
        return make_hello(run.run_id, run.run.name, ROLE, session, keeper.chain.head_round, digest, bytes(32), heard=heard)

    Services(transport, hello=hello, run_toml=run.to_toml(), chain=store.chain, offer=lambda: offer)
    known = list(dict.fromkeys([*options.peers, *known_addresses(store)]))
    if known:
        try:
            await transport.connect_any(known)
        except NetworkError as error:
            logger.warning("%s; serving alone until they come", str(error).splitlines()[0])
    info = {
        "pid": os.getpid(),
        "peer_id": identity.peer_id,
        "session": session.hex(),
        "role": ROLE,
        "run_id": run.run_id.hex(),
        "addresses": transport.addresses(),
    }
    store.write_node_info(info)
    _announce(options, info, run)
    await _keep_on(transport, keeper, run, session, store)
    raise NetworkError("the libp2p daemon ended by itself; start the bootstrap again")


async def _keep_on(transport: Transport, keeper: Keeper, run: RunFile, session: bytes, store: StateDir) -> None:
    """Publish, find peers and follow the chain until the daemon dies or the caller cancels."""
    directory = Directory(transport)

    def record() -> PeerRecord:
        return PeerRecord(
            transport.peer_id,
            run.run_id.hex(),
            addresses=tuple(transport.addresses()[:8]),
            session=session.hex(),
            head_round=max(keeper.chain.head_round, GENESIS_ROUND),
            version=__version__,
            role=ROLE,
        )

    async def look_for_peers() -> None:
        while True:
            with suppress(TransportError):
                others = [r for r in await directory.peers(run.run_id.hex()) if r.peer_id != transport.peer_id]
                for found in others:
                    keeper.put(PeerSeen(found.peer_id))
                if others:  # the way back into the run after a restart
                    remember_addresses(store, [address for found in others for address in found.addresses])
            await asyncio.sleep(LOOK_SECONDS)

    died = asyncio.Event()
    transport.on_death(died.set)
    tasks = [
        asyncio.create_task(died.wait()),
        asyncio.create_task(directory.publish_forever(record)),
        asyncio.create_task(look_for_peers()),
        asyncio.create_task(keeper.run()),
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _announce(options: BootstrapOptions, info: dict[str, Any], run: RunFile) -> None:
    """The exact line for others to copy."""
    if options.json:
        print(json.dumps(info), flush=True)
        return
    line = "sparseloco-node join --peers " + " ".join(info["addresses"])
    print(f"bootstrap for run {run.run.name} ({run.run_id.hex()[:12]}); others join with:\n  {line}", flush=True)
    print("Ctrl-C to stop", file=sys.stderr, flush=True)
