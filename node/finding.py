"""Find the run behind some addresses: connect, ask who serves what, and check the run file against its id.

Every failure names each peer and why; a node that resumes has more patience than one that is new, and more addresses.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from pathlib import Path

from sparseloco import __version__
from sparseloco.bootstrap.addresses import parse_peer_address
from sparseloco.bootstrap.errors import NetworkError, NodeError, RunFileError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.bootstrap.transport import Limits, Transport, TransportError
from sparseloco.node.catch_up import Donor, ask_hello
from sparseloco.node.durable import OutOfDisk, write_atomic
from sparseloco.node.options import JoinOptions
from sparseloco.node.services import RUN_FILE
from sparseloco.node.store import StateDir
from sparseloco.protocol.messages import PROTOCOL_VERSION

logger = logging.getLogger(__name__)

# A node that resumes keeps dialling for so long before it says that nobody answers.
PATIENCE_SECONDS = 60.0
KNOWN_PEERS_FILE = "peers.json"
KNOWN_PEERS = 64


def known_addresses(store: StateDir) -> list[str]:
    """Addresses of peers met earlier: the way back when every bootstrap address is dead."""
    try:
        value = json.loads((store.path / KNOWN_PEERS_FILE).read_text())
        return [str(parse_peer_address(str(address)).text) for address in value][:KNOWN_PEERS]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, NodeError) as error:
        logger.warning("%s: cannot be used (%s)", store.path / KNOWN_PEERS_FILE, error)
        return []


def remember_addresses(store: StateDir, addresses: list[str]) -> None:
    """Keep peers' addresses for the next start; those kept before stay if the disk is full."""
    try:
        write_atomic(store.path / KNOWN_PEERS_FILE, json.dumps(addresses[:KNOWN_PEERS]).encode())
    except OutOfDisk as error:
        logger.debug("%s", error)


async def start_transport(options: JoinOptions, store: StateDir, identity: Identity, kept: RunFile | None) -> Transport:
    """The daemon and at least one peer; a node that resumes keeps trying for a while, one that is new says why not."""

    async def start(peers: tuple[str, ...]) -> Transport:
        return await Transport.start(
            identity,
            listen=options.listen,
            announce=options.announce,
            peers=peers,
            client_mode=options.client_mode,
            relay=options.relay,
            upload_bytes_per_second=options.max_upload_bytes_per_second,
            limits=kept.limits if kept is not None else Limits(),
        )

    if kept is None:
        return await start(options.peers)
    transport = await start(())
    addresses = list(dict.fromkeys([*options.peers, *known_addresses(store)]))
    deadline = time.monotonic() + PATIENCE_SECONDS
    pause = 1.0
    while True:
        try:
            await transport.connect_any(addresses)
            return transport
        except NetworkError as error:
            if time.monotonic() + pause > deadline:
                await transport.close()
                raise
            logger.warning("%s\ntrying again in %.0f s", error, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 10.0)


async def find_run(
    transport: Transport, addresses: tuple[str, ...], wanted: str | None, kept: RunFile | None
) -> tuple[RunFile, list[Donor]]:
    """The run that the given peers serve, its file checked against its id; NetworkError if they serve none or several."""
    peers = [parse_peer_address(address).peer_id for address in addresses]
    donors: list[Donor] = []
    silent: list[str] = []
    for peer in dict.fromkeys([*peers, *await transport.connected()]):
        try:
            donors.append(await ask_hello(transport, peer))
        except TransportError as error:
            silent.append(f"  {peer}: {error}")
    given = RunFile.load(wanted) if wanted is not None and Path(wanted).is_file() else None
    matching = [donor for donor in donors if _matches(donor, wanted, given, kept)]
    if not matching:
        if kept is not None and not donors:
            return kept, []
        seen = "".join(f"\n  {d.peer}: run {d.hello.run_name} ({d.hello.run_id[:12]})" for d in donors)
        sought = f"the run {wanted!r}" if wanted else "a run"
        raise NetworkError(f"none of the given peers serves {sought}{seen}" + "".join(f"\n{line}" for line in silent))
    understood = [donor for donor in matching if donor.hello.protocol == PROTOCOL_VERSION]
    if not understood:
        donor = matching[0]
        raise NetworkError(
            f"{donor.peer} speaks protocol {donor.hello.protocol} (version {donor.hello.version}), this node "
            f"{PROTOCOL_VERSION} (version {__version__}); install the version that the run uses"
        )
    matching = understood
    runs = {donor.hello.run_id: donor.hello.run_name for donor in matching}
    if len(runs) > 1:
        listed = "".join(f"\n  --run {run_id[:12]}  ({name})" for run_id, name in sorted(runs.items()))
        raise NetworkError(f"the given peers serve {len(runs)} runs; choose one:{listed}")
    run_id = next(iter(runs))
    for run in (given, kept):
        if run is not None and run.run_id.hex() == run_id:
            return run, matching
    return await _fetch_run(transport, matching, run_id), matching


def _matches(donor: Donor, wanted: str | None, given: RunFile | None, kept: RunFile | None) -> bool:
    if given is not None:
        return donor.hello.run_id == given.run_id.hex()
    if wanted is not None:
        return donor.hello.run_name == wanted or (len(wanted) >= 6 and donor.hello.run_id.startswith(wanted.lower()))
    return kept is None or donor.hello.run_id == kept.run_id.hex()


async def _fetch_run(transport: Transport, donors: list[Donor], run_id: str) -> RunFile:
    problems = []
    for donor in donors:
        try:
            run = RunFile.parse((await transport.request(donor.peer, RUN_FILE, b"{}")).decode())
        except (TransportError, RunFileError, UnicodeDecodeError) as error:
            problems.append(f"  {donor.peer}: {error}")
            continue
        if run.run_id.hex() == run_id:
            return run
        problems.append(f"  {donor.peer}: its run file has another id than it says")
    raise NetworkError("no peer gave the run file:\n" + "\n".join(problems))
