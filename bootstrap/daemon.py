"""The libp2p daemon as a child process: start it, notice its death, leave nothing behind.

hivemind can start its daemon itself, but then the daemon shares the terminal's process group and Ctrl-C kills it before
the node has said goodbye; and its output, which names the cause of a failed start, is reduced to one line. So it is
started here, in a session of its own, and hivemind attaches to it (`P2P.replicate`). The daemon ends by itself when
nobody holds its control connection, so it does not outlive a killed parent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from sparseloco.bootstrap.addresses import parse_listen_address, parse_peer_address
from sparseloco.bootstrap.errors import NetworkError, UsageError

logger = logging.getLogger(__name__)

STOP_SECONDS = 5.0
IDLE_SECONDS = 60  # a daemon whose parent never attached ends after this
KEPT_LINES = 20
MESSAGE_BYTES = 4 * 2**20  # hivemind's own value for its control connection


@dataclass(frozen=True)
class NetworkSettings:
    """How a node is reachable. Addresses are multiaddrs without peer id; `reachability`: "", "public", "private"."""

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    client_mode: bool = False
    relay: bool = True
    auto_relay: bool = False
    trusted_relays: tuple[str, ...] = ()
    port_mapping: bool = False
    reachability: str = ""
    startup_seconds: float = 30.0

    def __post_init__(self) -> None:
        for address in (*self.listen, *self.announce):
            parse_listen_address(address)
        for address in self.trusted_relays:
            parse_peer_address(address)
        if self.reachability not in ("", "public", "private"):
            raise UsageError(f"reachability {self.reachability!r} must be public or private, or be left out")

    def arguments(self, identity_path: Path, control: Path) -> list[str]:
        """The daemon's command line, without its name."""
        arguments = [
            f"-id={identity_path}",
            f"-listen=/unix{control}",
            f"-idleTimeout={IDLE_SECONDS}s",
            f"-persistentConnMaxMsgSize={MESSAGE_BYTES}",
            "-b=0",
            "-connManager=1",
            "-autonat=1",
            "-tls=1",
            f"-natPortMap={int(self.port_mapping)}",
            f"-relay={int(self.relay)}",
            f"-autoRelay={int(self.auto_relay)}",
            "-dhtClient=1" if self.client_mode else "-dhtServer=1",
        ]
        if self.client_mode and not self.listen:
            arguments.append("-noListenAddrs=1")
        for name, addresses in (
            ("hostAddrs", self.listen),
            ("announceAddrs", self.announce),
            ("trustedRelays", self.trusted_relays),
        ):
            if addresses:
                arguments.append(f"-{name}={','.join(addresses)}")
        if self.reachability:
            arguments.append(f"-forceReachability{self.reachability.capitalize()}=1")
        return arguments


class Daemon:
    """A running p2pd. `control` is its control socket, in a directory that only this user may enter."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path) -> None:
        self.process = process
        self.control = directory / "p2pd.sock"
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.on_death: list[Callable[[], None]] = []
        self._directory = directory
        self._ready = asyncio.Event()
        self._closing = False
        self._reader = asyncio.create_task(self._read_output())

    @classmethod
    async def start(cls, settings: NetworkSettings, identity_path: Path) -> Daemon:
        """A daemon that is ready; one more try after a failed start, then NetworkError with the daemon's own words."""
        check_ports(settings.listen)
        for last in (False, True):
            try:
                return await cls._start_once(settings, identity_path)
            except NetworkError as error:
                if last:
                    raise
                logger.info("%s; trying once more", error)
        raise AssertionError("not reached")

    @classmethod
    async def _start_once(cls, settings: NetworkSettings, identity_path: Path) -> Daemon:
        # /tmp and not $TMPDIR: a socket's path has at most about 100 characters
        directory = Path(tempfile.mkdtemp(prefix="sparseloco-", dir="/tmp"))
        program = _program()
        try:
            process = await asyncio.create_subprocess_exec(
                program,
                *settings.arguments(identity_path, directory / "p2pd.sock"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, "GOLOG_LOG_FMT": "json", "GOLOG_LOG_LEVEL": "error"},
                start_new_session=True,
            )
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise NetworkError(
                f"the libp2p daemon cannot run: {program}: {error.strerror}; reinstall hivemind for this platform"
            ) from None
        daemon = cls(process, directory)
        try:
            async with asyncio.timeout(settings.startup_seconds):
                await daemon._ready.wait()
        except TimeoutError:
            await daemon.close()
            raise NetworkError(
                f"the libp2p daemon was not ready in {settings.startup_seconds:g} s (a slow disk or a busy machine); "
                f"it said: {daemon.last_words}. Raise --startup-timeout"
            ) from None
        except asyncio.CancelledError:
            await daemon.close()
            raise
        if not daemon.alive:
            await daemon.close()
            raise NetworkError(f"the libp2p daemon did not start: {daemon.last_words}{_remedy(daemon.last_words)}")
        return daemon

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and not self._reader.done()

    @property
    def last_words(self) -> str:
        return " | ".join(list(self.lines)[-3:]) or "nothing"

    async def close(self) -> None:
        """End the daemon and wait until it is gone; a second call does nothing."""
        self._closing = True
        with suppress(ProcessLookupError):
            if self.process.returncode is None:
                self.process.terminate()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await self._reader
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _read_output(self) -> None:
        """Keep the daemon's output flowing; its end is the daemon's end."""
        assert self.process.stdout is not None
        while True:
            try:
                raw = await self.process.stdout.readline()
            except ValueError:  # a line longer than the reader's buffer is dropped
                continue
            if not raw:
                break
            line = _plain_line(raw)
            if line.startswith("Peer ID:"):
                self._ready.set()
            else:
                self.lines.append(line)
                logger.debug("p2pd: %s", line)
        await self.process.wait()
        was_ready = self._ready.is_set()
        self._ready.set()
        if was_ready and not self._closing:
            logger.error("the libp2p daemon (pid %d) ended: %s", self.pid, self.last_words)
            for callback in self.on_death:
                callback()


def check_ports(listen: Sequence[str]) -> None:
    """NetworkError if a fixed port is taken.

    libp2p shares its ports (SO_REUSEPORT): a second node on one port would start, and the system would hand each
    caller to either of the two.
    """
    for address in listen:
        match = re.match(r"/(ip[46])/([^/]+)/(tcp|udp)/(\d+)", address)
        if not match or match[4] == "0":
            continue
        family = socket.AF_INET if match[1] == "ip4" else socket.AF_INET6
        with socket.socket(family, socket.SOCK_STREAM if match[3] == "tcp" else socket.SOCK_DGRAM) as probe:
            if match[3] == "tcp":
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are just ending are fine
            try:
                probe.bind((match[2], int(match[4])))
            except OSError as error:
                words = (error.strerror or str(error)).lower()
                raise NetworkError(f"cannot listen on {address}: {words}{_remedy(words)}") from None


def _program() -> str:
    spec = find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        raise NetworkError("hivemind is not installed; run `pip install hivemind`")
    return str(Path(spec.submodule_search_locations[0]) / "hivemind_cli" / "p2pd")


def _plain_line(raw: bytes) -> str:
    """The daemon's own words; Go's JSON log lines reduced to their message and error."""
    line = raw.decode("utf-8", "replace").strip()
    if line.startswith("{"):
        with suppress(ValueError, TypeError):
            entry = json.loads(line)
            return ": ".join(str(entry[name]) for name in ("msg", "error") if entry.get(name))
    return re.sub(r"^\d{4}/\d\d/\d\d \d\d:\d\d:\d\d ", "", line)[:500]


def _remedy(words: str) -> str:
    if "address already in use" in words:
        return "; another program has this port: choose another --listen address, or port 0 for any free one"
    if "cannot assign requested address" in words:
        return "; this machine does not have that address: --listen /ip4/0.0.0.0/tcp/PORT listens on all that it has"
    if "permission denied" in words:
        return "; ports below 1024 need rights: choose a higher one in --listen"
    return ""


def reason_of(words: str) -> str:
    """libp2p's words about a failed dial, in one line."""
    for mark, reason in (
        ("peer id mismatch", "another peer answers there (its peer id is not the one in the address)"),
        ("connection refused", "connection refused: nothing listens there"),
        ("no such host", "the name is not known"),
        ("no route to host", "no route to that host"),
        ("network is unreachable", "the network is unreachable"),
        ("i/o timeout", "no answer: the host is down, or a firewall drops the packets"),
        ("deadline exceeded", "no answer: the host is down, or a firewall drops the packets"),
        ("dial to self", "this is the node's own address"),
        ("protocols not supported", "it does not speak this protocol: another program or version"),
        ("dial backoff", "it did not answer a moment ago (waiting before the next try)"),
        ("no addresses", "no address known"),
        ("no good addresses", "no usable address known"),
        ("routing: not found", "the network does not know where it is"),
    ):
        if mark in words:
            return reason
    return " ".join(words.split())[-200:] or "no reason given"
