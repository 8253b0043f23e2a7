"""`join`: from a command line to a node in its run, and out again cleanly.

The order matters: first what is cheap and may fail (state directory, identity, network, run file), then what is heavy (model,
data, state), and only then the rounds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import torch

from sparseloco import __version__
from sparseloco.bootstrap.addresses import parse_peer_address
from sparseloco.bootstrap.directory import Directory, PeerRecord
from sparseloco.bootstrap.errors import NetworkError, NodeError, RunFileError, StateError
from sparseloco.bootstrap.identity import Identity
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.bootstrap.transport import Limits, Transport, TransportError
from sparseloco.node.catch_up import CatchUp, Chain, Donor, ask_hello, find_donors
from sparseloco.node.device import pick_device
from sparseloco.node.driver import Driver
from sparseloco.node.durable import write_atomic
from sparseloco.node.exchange import Exchange
from sparseloco.node.interrupts import run_until_interrupted
from sparseloco.node.options import JoinOptions
from sparseloco.node.places import default_state_dir
from sparseloco.node.progress import Progress
from sparseloco.node.run_rules import rules_of
from sparseloco.node.services import RUN_FILE, Services
from sparseloco.node.store import StateDir
from sparseloco.node.view import View
from sparseloco.node.worker import Worker
from sparseloco.protocol.encoding import SESSION_BYTES
from sparseloco.protocol.events import PeerSeen
from sparseloco.protocol.manifest import GENESIS_ROUND
from sparseloco.protocol.messages import PROTOCOL_VERSION
from sparseloco.protocol.rules import FOUNDER_SESSION, Rules

logger = logging.getLogger(__name__)

# Discovery looks often while the group is forming and rarely once peers are known.
LOOK_SECONDS, LOOK_LATER_SECONDS = 1.0, 15.0
# A node that resumes keeps dialling for so long before it says that nobody answers.
PATIENCE_SECONDS = 60.0
KNOWN_PEERS_FILE = "peers.json"
KNOWN_PEERS = 64
# Peers whose clock is compared with ours at the start.
CLOCKS_COMPARED = 3


def run_on_fast_loop(work: Coroutine[Any, Any, int]) -> int:
    """Run to the end or to Ctrl-C, on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return run_until_interrupted(work)
    return run_until_interrupted(work, uvloop.new_event_loop)


def run_join(options: JoinOptions) -> int:
    """0 at the run's end or after the rounds asked for, 130 after an interrupt; NodeError for what a person can mend."""
    torch.set_num_threads(options.threads)
    device = pick_device(options.device)
    for address in options.peers:
        parse_peer_address(address)
    return run_on_fast_loop(_join(options, device))


async def _join(options: JoinOptions, device: torch.device) -> int:
    state_dir = options.state_dir or await _default_state_dir(options)
    with StateDir.open(state_dir) as store:
        identity = Identity.load_or_create(store.path / "identity.key")
        with identity.lock():
            return await _join_with(options, device, store, identity)


async def _default_state_dir(options: JoinOptions) -> Path:
    """The directory of this run: its id is in the run file given, or what the peers answer to a passing stranger."""
    if options.run is not None and Path(options.run).is_file():
        return default_state_dir("peer", RunFile.load(options.run).run_id)
    with tempfile.TemporaryDirectory(prefix="sparseloco-") as folder:
        identity = Identity.load_or_create(Path(folder) / "identity.key")
        transport = await Transport.start(identity, peers=options.peers, client_mode=True, relay=options.relay)
        try:
            run, _ = await find_run(transport, options.peers, options.run, None)
        finally:
            await transport.close()
    return default_state_dir("peer", run.run_id)


async def _join_with(options: JoinOptions, device: torch.device, store: StateDir, identity: Identity) -> int:
    kept = _kept_run(store)
    transport = await _start_transport(options, store, identity, kept)
    try:
        run, donors = await find_run(transport, options.peers, options.run, kept)
        if kept is not None and kept.run_id != run.run_id:
            raise StateError(
                f"{store.path}: holds the state of run {kept.run_id.hex()[:12]}, the peers serve run {run.run_id.hex()[:12]}; "
                "use another --state-dir for it"
            )
        if not rules_of(run).admits(identity.peer_id):
            raise NetworkError(
                f"run {run.run.name} is by invitation: peer id {identity.peer_id} is not in [admission] peers of its run file; "
                "ask the organiser to add it"
            )
        store.write_run_file(run.to_toml())
        transport.use_limits(run.limits)
        store.blobs.budget_bytes = run.limits.stored_blob_bytes
        node = Node(options, device, store, identity, transport, run)
        return await node.live(donors)
    finally:
        await transport.close()


def _kept_run(store: StateDir) -> RunFile | None:
    path = store.path / "run.toml"
    return RunFile.load(path) if path.is_file() else None


def _known_addresses(store: StateDir) -> list[str]:
    """Addresses of peers met earlier: the way back when every bootstrap address is dead."""
    try:
        value = json.loads((store.path / KNOWN_PEERS_FILE).read_text())
        return [str(parse_peer_address(str(address)).text) for address in value][:KNOWN_PEERS]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, NodeError) as error:
        logger.warning("%s: cannot be used (%s)", store.path / KNOWN_PEERS_FILE, error)
        return []


async def _start_transport(options: JoinOptions, store: StateDir, identity: Identity, kept: RunFile | None) -> Transport:
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
    addresses = list(dict.fromkeys([*options.peers, *_known_addresses(store)]))
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
            logger.warning("%s; trying again in %.0f s", str(error).splitlines()[0], pause)
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


class Node:
    """A joined node's life: load, catch up, take part, leave."""

    def __init__(
        self,
        options: JoinOptions,
        device: torch.device,
        store: StateDir,
        identity: Identity,
        transport: Transport,
        run: RunFile,
    ) -> None:
        self.options = options
        self.device = device
        self.store = store
        self.identity = identity
        self.transport = transport
        self.run = run
        self.rules: Rules = rules_of(run)
        self.directory = Directory(transport)
        self.progress = Progress()
        self.driver: Driver | None = None

    async def live(self, donors: list[Donor]) -> int:
        """Prepare, take part until the end or a cancellation (a clean leave follows it), and finish."""
        view = View(self.progress, self.run, self.transport.counters, json_output=self.options.json)
        helpers: list[asyncio.Task[Any]] = []
        try:
            with view:
                helpers.append(asyncio.create_task(view.refresh_forever()))
                self.progress.phase = "loading the model"
                self.driver = driver = await self._prepare(donors)
                helpers.append(asyncio.create_task(self.directory.publish_forever(self._record)))
                helpers.append(asyncio.create_task(self._look_for_peers(driver)))
                why = await self._take_part(driver)
                await self._finish(driver, why)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
        return 0

    async def _take_part(self, driver: Driver) -> str:
        running = asyncio.create_task(driver.run())
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            driver.leave()
            return await running

    # --- before the rounds ----------------------------------------------------------------------------------------

    async def _prepare(self, donors: list[Donor]) -> Driver:
        worker = await asyncio.to_thread(
            Worker,
            self.run,
            self.identity.peer_id,
            self.store,
            device=self.device,
            micro_batch=self.options.micro_batch,
            own_data=self.options.data,
        )
        exchange = Exchange(self.transport, self.store, worker.layout, random.Random())
        chain = Chain(self.store, self.rules)
        catch_up = CatchUp(self.transport, exchange, worker, chain)
        donors = await self._donors(donors)
        await self._refuse_if_alive_elsewhere(donors)
        await self._compare_clocks(donors)
        self.progress.phase = "catching up"
        was = chain.head_round
        await catch_up.run(donors, self._show_download)
        await asyncio.to_thread(worker.recover_own, chain.manifest)
        session = self._session(donors, chain)
        if chain.head_round > max(was, GENESIS_ROUND):
            digest = await asyncio.to_thread(worker.digest, worker.theta)
            self.store.events.write("caught_up", chain.head_round, state_digest=digest.hex())
            logger.info("caught up: round %d, state %s", chain.head_round, digest.hex()[:12])
        driver = Driver(
            identity=self.identity,
            session=session,
            rules=self.rules,
            transport=self.transport,
            exchange=exchange,
            worker=worker,
            chain=chain,
            catch_up=catch_up,
            rounds=self.options.rounds,
            progress=self.progress,
        )
        Services(self.transport, hello=driver.hello, run_toml=self.run.to_toml(), chain=self.store.chain, offer=driver.offer)
        for donor in donors:
            driver.put(PeerSeen(donor.peer))
        self._write_node_info(session)
        return driver

    async def _donors(self, met: list[Donor]) -> list[Donor]:
        """Peers of the run as the DHT and the given addresses know them, furthest ahead first."""
        records = await self.directory.peers(self.run.run_id.hex())
        peers = [record.peer_id for record in records] + [donor.peer for donor in met]
        return await find_donors(self.transport, peers, self.run.run_id)

    async def _refuse_if_alive_elsewhere(self, donors: list[Donor]) -> None:
        """One key is one peer: if others hear it now in another session, this process must not speak for it."""
        mine = self.store.read_session()
        own = mine.hex() if mine is not None else ""
        waited = 0.0
        while any(_hears_another(donor, own, self.rules.detection_seconds) for donor in donors):
            if waited > self.rules.detection_seconds + 1.0:
                raise StateError(
                    f"peer {self.identity.peer_id} is alive elsewhere, in another session; stop that node, or use another "
                    "identity (another --state-dir)"
                )
            await asyncio.sleep(1.0)
            waited += 1.0
            donors = await find_donors(self.transport, [donor.peer for donor in donors], self.run.run_id)

    async def _compare_clocks(self, donors: list[Donor]) -> None:
        """The DHT refuses records across clocks that differ by seconds; say so before a volunteer wonders."""
        limit = self.run.limits.clock_offset_seconds
        for donor in donors[:CLOCKS_COMPARED]:
            try:
                offset = await self.transport.clock_offset(donor.peer)
            except TransportError as error:
                logger.debug("the clock of %s: %s", donor.peer, error)
                continue
            if abs(offset) > limit:
                logger.warning(
                    "this machine's clock is %.1f s %s that of %s; above %.1f s peers do not find each other: set it by NTP",
                    abs(offset),
                    "behind" if offset > 0 else "ahead of",
                    donor.peer,
                    limit,
                )

    def _session(self, donors: list[Donor], chain: Chain) -> bytes:
        """The session that the votes log belongs to; a new one if that log is lost (rule 13)."""
        session = self.store.read_session()
        if session is not None:
            try:
                self.store.open_votes()
                return session
            except StateError as error:
                logger.warning("%s; this node votes under a new session and joins anew", error)
                self.store.abandon_votes()
        furthest = max([chain.head_round, *(donor.hello.head_round for donor in donors)])
        first_start = session is None and furthest <= GENESIS_ROUND
        founder = self.identity.peer_id in self.run.run.founders
        session = FOUNDER_SESSION if founder and first_start else secrets.token_bytes(SESSION_BYTES)
        self.store.write_session(session)
        return session

    def _show_download(self, done: int, total: int) -> None:
        self.progress.phase = f"downloading the state: {done / 1e6:.1f} of {total / 1e6:.1f} MB"

    def _write_node_info(self, session: bytes) -> None:
        self.store.write_node_info(
            {
                "pid": os.getpid(),
                "peer_id": self.identity.peer_id,
                "session": session.hex(),
                "role": "node",
                "run_id": self.run.run_id.hex(),
                "addresses": self.transport.addresses(),
            }
        )

    # --- beside the rounds ----------------------------------------------------------------------------------------

    def _record(self) -> PeerRecord:
        driver = self.driver
        assert driver is not None
        return PeerRecord(
            self.identity.peer_id,
            self.run.run_id.hex(),
            addresses=tuple(self.transport.addresses()[:8]),
            session=driver.me.session.hex(),
            head_round=max(driver.head_round, GENESIS_ROUND),
            corpus_digest=driver.worker.corpus.digest.hex(),
            version=__version__,
        )

    async def _look_for_peers(self, driver: Driver) -> None:
        """Tell the machine whom discovery finds, for as long as the node lives; dial again when nobody is left."""
        while True:
            try:
                records = await self.directory.peers(self.run.run_id.hex())
            except TransportError as error:
                logger.debug("looking for peers: %s", error)
                records = []
            found = [record for record in records if record.peer_id != self.identity.peer_id and record.role == "node"]
            for record in found:
                driver.put(PeerSeen(record.peer_id))
            if found:
                self._remember(found)
            if not await self.transport.connected():
                await self._dial_again()
            await asyncio.sleep(LOOK_LATER_SECONDS if driver.head_round > GENESIS_ROUND else LOOK_SECONDS)

    async def _dial_again(self) -> None:
        try:
            await self.transport.connect_any(list(dict.fromkeys([*self.options.peers, *_known_addresses(self.store)])))
            logger.info("connected again")
        except NetworkError as error:
            logger.debug("dialling again: %s", error)

    def _remember(self, records: list[PeerRecord]) -> None:
        addresses = [address for record in records for address in record.addresses][:KNOWN_PEERS]
        write_atomic(self.store.path / KNOWN_PEERS_FILE, json.dumps(addresses).encode())

    # --- after the rounds -----------------------------------------------------------------------------------------

    async def _finish(self, driver: Driver, why: str) -> None:
        await driver.farewell()
        worker = driver.worker
        manifest = driver.chain.manifest(worker.state_round)
        if worker.state_round not in self.store.checkpoints.rounds():
            digest = manifest.digest if manifest else bytes(32)
            await driver.work.checkpoint(worker.state_round, worker.theta, digest)
        progress, counters = self.progress, self.transport.counters
        self.store.events.write(
            "left",
            driver.head_round,
            why=why,
            rounds=progress.committed_rounds,
            bytes_sent=counters.bytes_sent,
            bytes_received=counters.bytes_received,
            payload_bytes_sent=counters.payload_bytes_sent,
            peak_rss_bytes=_peak_rss_bytes(),
            steps=progress.steps,
            contributions_committed=progress.contributions_committed,
            contributions_returned=progress.contributions_returned,
        )
        logger.info(
            "left (%s): %d rounds, %d contributions committed, %d inner steps",
            why,
            progress.committed_rounds,
            progress.contributions_committed,
            progress.steps,
        )
        if self.options.json:
            _print_summary(driver, why)


def _hears_another(donor: Donor, own_session: str, detection_seconds: float) -> bool:
    heard, silence = donor.hello.your_session, donor.hello.your_silence_seconds
    return bool(heard) and heard != own_session and 0 <= silence < detection_seconds


def _peak_rss_bytes() -> int:
    """This process's own peak; getrusage would report the parent's where that was larger."""
    status = Path("/proc/self/status")
    if status.is_file():
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
        return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _print_summary(driver: Driver, why: str) -> None:
    progress = driver.progress
    digest: Callable[[], bytes] = lambda: driver.worker.digest(driver.worker.theta)  # noqa: E731
    print(
        json.dumps(
            {
                "run_id": driver.rules.run.hex(),
                "peer_id": driver.me.peer,
                "ended": why,
                "round": driver.worker.state_round,
                "state_digest": digest().hex(),
                "rounds": progress.committed_rounds,
                "contributions_committed": progress.contributions_committed,
                "contributions_returned": progress.contributions_returned,
                "steps": progress.steps,
                "tokens": progress.tokens,
            }
        ),
        flush=True,
    )
