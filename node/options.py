"""What each verb was asked to do, as plain values: the command line builds these, the verbs only read them.

Every value is checked and complete when it arrives here (flags over environment over config file over default), so a
verb never looks at arguments, the environment or a config file itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

LISTEN_EVERYWHERE = ("/ip4/0.0.0.0/tcp/0",)


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """What every verb takes; `state_dir` None means the default place (see `places.default_state_dir`)."""

    state_dir: Path | None = None
    json: bool = False  # exactly one JSON object on stdout, everything for people on stderr
    log_level: str = "info"


@dataclass(frozen=True, kw_only=True)
class JoinOptions(CommonOptions):
    """`join`: find the run at `peers`, train and exchange until its end, `rounds` committed rounds, or Ctrl-C."""

    peers: tuple[str, ...]  # multiaddrs ending in /p2p/<peer id>
    run: str | None = None  # a run file's path, a run's name, or a run id (hex, may be shortened)
    rounds: int | None = None  # committed rounds after which to stop; None: the run's end
    data: tuple[Path, ...] = ()  # files or folders; empty: what the run file names
    device: str = "auto"  # auto, cpu, cuda, cuda:<n> or mps
    micro_batch: int | None = None  # sequences per forward pass; None: sized to the hardware
    listen: tuple[str, ...] = LISTEN_EVERYWHERE
    announce: tuple[str, ...] = ()  # multiaddrs told to others; empty: what the daemon finds out
    relay: bool = True  # use and offer relays
    client_mode: bool = False  # accept no incoming connection
    max_upload_bytes_per_second: int = 0  # 0: no limit
    threads: int = 1  # torch threads
    slow_down: float = 1.0  # inner steps take so many times as long
    trust_head: tuple[int, bytes] | None = None  # a round and its manifest's digest that the chain must hold


@dataclass(frozen=True, kw_only=True)
class BootstrapOptions(CommonOptions):
    """`bootstrap`: a peer that trains nothing and keeps the run file, the genesis state and blobs."""

    run: Path | None = None  # None: the run kept in the state directory, or else the tiny preset
    peers: tuple[str, ...] = ()  # other bootstrap nodes of the same run
    listen: tuple[str, ...] = LISTEN_EVERYWHERE
    announce: tuple[str, ...] = ()
    relay: bool = True
    max_upload_bytes_per_second: int = 0


@dataclass(frozen=True, kw_only=True)
class FaultAt:
    """A fault given to `swarm` as NODE@ROUND."""

    node: int
    round: int


@dataclass(frozen=True, kw_only=True)
class PauseAt(FaultAt):
    """NODE@ROUND:SECONDS."""

    seconds: float


@dataclass(frozen=True, kw_only=True)
class ForNode:
    """NODE:VALUE, something that holds for one node of a `swarm`."""

    node: int
    value: float


@dataclass(frozen=True, kw_only=True)
class SwarmOptions(CommonOptions):
    """`swarm`: `nodes` real processes and a bootstrap on this machine, for `rounds` rounds or `minutes` minutes."""

    nodes: int = 4
    rounds: int | None = 8  # None exactly if `minutes` is given
    minutes: float | None = None
    run: Path | None = None  # None: the tiny preset
    seed: int | None = None  # None: the run file's
    kill: tuple[FaultAt, ...] = ()
    late: tuple[FaultAt, ...] = ()
    restart: tuple[FaultAt, ...] = ()
    corrupt: tuple[FaultAt, ...] = ()
    pause: tuple[PauseAt, ...] = ()
    slow: tuple[ForNode, ...] = ()  # factor by which a node's inner steps take longer
    max_upload: tuple[ForNode, ...] = ()  # bytes per second
    mtbf: float | None = None  # seconds between two random faults, on average


@dataclass(frozen=True, kw_only=True)
class InitOptions(CommonOptions):
    """`init`: write a commented run file, with its genesis state beside it."""

    preset: str = "tiny"
    out: Path = Path("run.toml")
    genesis: bool = False  # renew the genesis state and digest of an existing, edited run file
    force: bool = False  # overwrite


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(CommonOptions):
    """`simulate`: the protocol under the deterministic simulator, `seeds` swarms from number `seed` on."""

    peers: tuple[int, int] = (4, 9)  # fewest, most; a seed's number picks one
    rounds: int = 5
    seed: int = 0
    seeds: int = 100
    faults: str = "all"  # a world of protocol/profiles.py, or each of them in turn
    links: str | None = None  # the links of another world
    jobs: int = 1  # processes


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(CommonOptions):
    """`verify`: the offline audit of a state directory."""


@dataclass(frozen=True, kw_only=True)
class StatusOptions(CommonOptions):
    """`status`: what the node with this state directory is doing."""

    run: str | None = None  # name or id, to choose among several state directories
