"""`bootstrap`: a peer that trains nothing. It seeds the DHT, relays, and keeps the run file and the genesis state.

It needs the genesis file beside the run file (`init` writes both) or its own copy in the state directory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import sys
from pathlib import Path
from typing import Any

from sparseloco import __version__
from sparseloco.bootstrap.directory import Directory, PeerRecord
from sparseloco.bootstrap.errors import NetworkError, StateError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.bootstrap.transport import Transport
from sparseloco.node.exchange import GatedBlobs
from sparseloco.node.genesis import GENESIS_FILE
from sparseloco.node.init import genesis_path, initialise, starting_run
from sparseloco.node.node import run_on_fast_loop
from sparseloco.node.options import BootstrapOptions
from sparseloco.node.places import default_state_dir, default_state_root
from sparseloco.node.services import Hello, Services, StateOffer, make_hello
from sparseloco.node.state import state_digest, total_bytes
from sparseloco.node.store import StateDir
from sparseloco.node.tensor_file import read_tensors
from sparseloco.protocol.manifest import GENESIS_ROUND

logger = logging.getLogger(__name__)

# A bootstrap knows no chain: peers ask each other for it.
NO_CHAIN = GENESIS_ROUND - 1


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
        genesis = _keep(store, run, genesis)
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
                return await _serve(options, store, identity, transport, run, genesis)
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


def _keep(store: StateDir, run: RunFile, genesis: Path) -> Path:
    """A copy of the run file and the genesis state in the state directory."""
    mine = store.path / GENESIS_FILE
    if not mine.is_file():
        if not genesis.is_file():
            raise StateError(f"{genesis}: the genesis state belongs beside the run file; `sparseloco-node init` writes both")
        shutil.copyfile(genesis, mine)
    store.write_run_file(run.to_toml())
    return mine


async def _serve(
    options: BootstrapOptions, store: StateDir, identity: Identity, transport: Transport, run: RunFile, genesis: Path
) -> int:
    blobs, offer = await asyncio.to_thread(_genesis_offer, store, run, genesis)
    transport.serve_blobs(blobs)
    session = secrets.token_bytes(16)

    def hello(asker: str) -> Hello:
        return make_hello(run.run_id, run.run.name, "bootstrap", session, NO_CHAIN, bytes(32), bytes(32))

    Services(transport, hello=hello, run_toml=run.to_toml(), chain=None, offer=lambda: offer)
    if options.peers:
        try:
            await transport.connect_any(options.peers)
        except NetworkError as error:
            logger.warning("%s; serving alone until they come", error)
    info = {
        "pid": os.getpid(),
        "peer_id": identity.peer_id,
        "session": session.hex(),
        "role": "bootstrap",
        "run_id": run.run_id.hex(),
        "addresses": transport.addresses(),
    }
    store.write_node_info(info)
    _announce(options, info, run)

    def record() -> PeerRecord:
        return PeerRecord(
            identity.peer_id,
            run.run_id.hex(),
            addresses=tuple(transport.addresses()[:8]),
            session=session.hex(),
            version=__version__,
            role="bootstrap",
        )

    publishing = asyncio.create_task(Directory(transport).publish_forever(record))
    died = asyncio.Event()
    transport.on_death(died.set)
    try:
        await died.wait()
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
    raise NetworkError("the libp2p daemon ended by itself; start the bootstrap again")


def _genesis_offer(store: StateDir, run: RunFile, genesis: Path) -> tuple[GatedBlobs, StateOffer]:
    """The genesis state as a checkpoint of the state directory, and what is served of it."""
    theta = read_tensors(genesis)
    if state_digest(theta) != run.require_genesis():
        raise StateError(f"{genesis}: is not the state that [run] genesis names; `init --genesis` makes both anew")
    if GENESIS_ROUND not in store.checkpoints.rounds():
        store.checkpoints.save(GENESIS_ROUND, theta, bytes(32))
    info = store.checkpoints.info(GENESIS_ROUND)
    length = total_bytes(theta)
    blobs = GatedBlobs(store.blobs, store.checkpoints)
    blobs.offer_checkpoints(length)
    return blobs, StateOffer(GENESIS_ROUND, length, tuple(piece.hex() for piece in info.piece_digests))


def _announce(options: BootstrapOptions, info: dict[str, Any], run: RunFile) -> None:
    """The exact line for others to copy."""
    if options.json:
        print(json.dumps(info), flush=True)
        return
    line = "sparseloco-node join --peers " + " ".join(info["addresses"])
    print(f"bootstrap for run {run.run.name} ({run.run_id.hex()[:12]}); others join with:\n  {line}", flush=True)
    print("Ctrl-C to stop", file=sys.stderr, flush=True)
