"""The flags of every verb, as data: one table that the parser, the environment, the config file and `--help` share.

A value is text from the command line, text from the environment, or a TOML value from a config file; each becomes the
value used by the same function here, so the three sources cannot disagree about what is valid. Nothing here imports
torch or hivemind.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparseloco.bootstrap.errors import nearest
from sparseloco.node.options import FaultAt, ForNode, PauseAt
from sparseloco.protocol.profiles import PROFILES

LOG_LEVELS = ("debug", "info", "warning", "error")
_DEVICE = re.compile(r"auto|cpu|mps|cuda(:[0-9]{1,3})?")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(k|M|G|)(B|bit)?(?:/s|ps)?")
_SCALE = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9}


class BadValue(ValueError):
    """What a value must be instead; the caller adds where the value came from."""


def text(value: str) -> str:
    if not value:
        raise BadValue("must not be empty")
    return value


def path(value: str) -> Path:
    return Path(text(value)).expanduser()


def whole(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"-?[0-9]{1,12}", value) or not low <= int(value) <= high:
            raise BadValue(f"must be a whole number from {low} to {high}")
        return int(value)

    return parse


def minutes(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number <= 100_000:
        raise BadValue("must be a number of minutes above 0")
    return number


def peer_range(value: str) -> tuple[int, int]:
    """`6` or `4:9`: fewest and most peers."""
    found = re.fullmatch(r"([0-9]{1,3})(?::([0-9]{1,3}))?", value)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= low <= high <= 64:
        raise BadValue("must be a number of peers from 1 to 64, or two such as 4:9")
    return low, high


def trust_head(value: str) -> tuple[int, bytes]:
    """`ROUND:DIGEST`, the digest as 64 hex digits."""
    found = re.fullmatch(r"([0-9]{1,12}):([0-9a-fA-F]{64})", value)
    if not found:
        raise BadValue("must be ROUND:DIGEST, such as 12: and the 64 hex digits of that round's manifest")
    return int(found[1]), bytes.fromhex(found[2])


def choice(*allowed: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in allowed:
            raise BadValue(f"is not a choice{nearest(value, allowed)}")
        return value

    return parse


def device(value: str) -> str:
    if not _DEVICE.fullmatch(value):
        raise BadValue(f"is not a device{nearest(value, ('auto', 'cpu', 'cuda', 'cuda:0', 'mps'))}")
    return value


def rate(value: str) -> int:
    """Bytes per second from `500000`, `500kB/s`, `2MB/s` or `10Mbit/s` (decimal prefixes); 0 is no limit."""
    match = _RATE.fullmatch(value)
    if not match:
        raise BadValue("must be a rate such as 500kB/s, 2MB/s or 10Mbit/s; 0 is no limit")
    per_second = float(match[1]) * _SCALE[match[2]] / (8 if match[3] == "bit" else 1)
    if 0 < per_second < 1:
        raise BadValue("must be at least one byte per second; 0 is no limit")
    return int(per_second)


def multiaddr(value: str) -> str:
    if not value.startswith("/"):
        raise BadValue("must be a multiaddr such as /ip4/203.0.113.5/tcp/4001")
    return value


def peer_multiaddr(value: str) -> str:
    if not re.fullmatch(r"/.+/p2p/[1-9A-HJ-NP-Za-km-z]{20,80}", value):
        raise BadValue("must be a multiaddr that ends in /p2p/<peer id>, as `sparseloco-node bootstrap` prints it")
    return value


def fault_at(value: str) -> FaultAt:
    match = re.fullmatch(r"([0-9]{1,4})@([0-9]{1,7})", value)
    if not match:
        raise BadValue("must be NODE@ROUND, both from 0, such as 1@3")
    return FaultAt(node=int(match[1]), round=int(match[2]))


def pause_at(value: str) -> PauseAt:
    match = re.fullmatch(r"([0-9]{1,4})@([0-9]{1,7}):([0-9]{1,6}(?:\.[0-9]{1,3})?)", value)
    if not match or float(match[3]) <= 0:
        raise BadValue("must be NODE@ROUND:SECONDS, such as 3@4:30")
    return PauseAt(node=int(match[1]), round=int(match[2]), seconds=float(match[3]))


def factor(value: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", value) or not 1 <= float(value) <= 1000:
        raise BadValue("must be a factor from 1 to 1000, such as 5")
    return float(value)


def seconds(value: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", value) or float(value) <= 0:
        raise BadValue("must be a number of seconds above 0")
    return float(value)


def for_node(parse: Callable[[str], float], example: str) -> Callable[[str], ForNode]:
    """`NODE:VALUE`, with the value as `parse` takes it."""

    def parse_pair(value: str) -> ForNode:
        node, _, rest = value.partition(":")
        if not re.fullmatch(r"[0-9]{1,4}", node) or not rest:
            raise BadValue(f"must be NODE:VALUE, such as {example}")
        return ForNode(node=int(node), value=parse(rest))

    return parse_pair


@dataclass(frozen=True)
class Flag:
    """One flag; `name` is as typed without dashes, `option` is the options field it fills."""

    name: str
    parse: Callable[[str], Any]
    help: str
    metavar: str = ""
    many: bool = False  # repeats, and takes several values
    switch: bool = False  # takes no value
    negatable: bool = False  # a switch that also has --no-NAME
    required: bool = False
    field: str = ""

    @property
    def key(self) -> str:
        """The name in a config file, and in lower case the end of the environment variable's."""
        return self.name.replace("-", "_")

    @property
    def option(self) -> str:
        return self.field or self.key


@dataclass(frozen=True)
class Verb:
    name: str
    summary: str
    flags: tuple[Flag, ...]

    def flag(self, key: str) -> Flag:
        return next(flag for flag in self.flags if flag.key == key)


def _flag_switch(name: str, help_text: str, negatable: bool = False) -> Flag:
    return Flag(name, text, help_text, switch=True, negatable=negatable)


CONFIG = Flag("config", path, "TOML file with defaults for these flags (default: config.toml in the user's "
              "configuration folder)", "FILE")
_COMMON = (
    Flag("state-dir", path, "where identity, run file, events and state are kept (default: the user's data folder / "
         "role / run id)", "DIR"),
    _flag_switch("json", "print one JSON object on stdout and everything else on stderr"),
    Flag("log-level", choice(*LOG_LEVELS), f"how much to say: {', '.join(LOG_LEVELS)} (default: info)", "LEVEL"),
    CONFIG,
)
_NETWORK = (
    Flag("listen", multiaddr, "address to listen on (default: /ip4/0.0.0.0/tcp/0, a free port)", "ADDR", many=True),
    Flag("announce", multiaddr, "address that others shall dial, such as a router's", "ADDR", many=True),
    _flag_switch("relay", "use relays, and be one for others (default: on)", negatable=True),
    Flag("max-upload", rate, "upload limit, such as 500kB/s or 10Mbit/s (default: no limit)", "RATE",
         field="max_upload_bytes_per_second"),
)

VERBS = (
    Verb("join", "train: find the run at these peers, fetch and check its state, train and exchange", (
        Flag("peers", peer_multiaddr, "address of a bootstrap node or of any peer of the run", "ADDR", many=True,
             required=True),
        Flag("run", text, "run file, run name or run id to insist on (default: the run of those peers)", "RUN"),
        Flag("rounds", whole(1, 10**7), "stop after so many committed rounds (default: the run's end)", "N"),
        Flag("data", path, "files or folders to train on (default: what the run file names)", "PATH", many=True),
        Flag("device", device, "auto, cpu, cuda, cuda:N or mps (default: auto)", "DEVICE"),
        Flag("micro-batch", whole(1, 2**20), "sequences in one forward pass (default: sized to the hardware)", "N"),
        *_NETWORK,
        Flag("trust-head", trust_head, "join only the chain that holds this manifest (64 hex digits) at this round",
             "ROUND:DIGEST"),
        _flag_switch("client-mode", "accept no incoming connections (default: off)", negatable=True),
        Flag("slow-down", factor, "take so many times as long for each inner step, to try out a slow machine (default: 1)",
             "FACTOR"),
        Flag("threads", whole(1, 4096), "CPU threads for training (default: the CPUs this process may use)", "N"),
        *_COMMON,
    )),
    Verb("bootstrap", "be a first contact: seed the DHT, relay, keep the run file and genesis state; trains nothing", (
        Flag("run", path, "run file to start (default: the one in the state directory, or the tiny preset)", "FILE"),
        Flag("peers", peer_multiaddr, "other bootstrap nodes of the same run", "ADDR", many=True),
        *_NETWORK,
        *_COMMON,
    )),
    Verb("swarm", "try it: several real nodes and a bootstrap on this machine, with a verdict", (
        Flag("nodes", whole(1, 256), "node processes (default: 4)", "N"),
        Flag("rounds", whole(1, 10**7), "committed rounds (default: 8)", "R"),
        Flag("minutes", minutes, "run for a time instead of a number of rounds", "M"),
        Flag("run", path, "run file to take settings from (default: the tiny preset; with --mtbf, with shorter rounds)",
             "FILE"),
        Flag("seed", whole(0, 10**12 - 1), "of weights and data (default: the run file's)", "S"),
        Flag("kill", fault_at, "SIGKILL node NODE when it is in round ROUND", "NODE@ROUND", many=True),
        Flag("late", fault_at, "start node NODE only when the others reach round ROUND", "NODE@ROUND", many=True),
        Flag("restart", fault_at, "SIGKILL node NODE in round ROUND and start it again", "NODE@ROUND", many=True),
        Flag("pause", pause_at, "stop node NODE in round ROUND for a time, as a closed laptop is", "NODE@ROUND:SECONDS",
             many=True),
        Flag("corrupt", fault_at, "stop node NODE in round ROUND, flip a byte of its state, start it", "NODE@ROUND", many=True),
        Flag("slow", for_node(factor, "2:5"), "node NODE's inner steps take FACTOR times as long", "NODE:FACTOR", many=True),
        Flag("max-upload", for_node(rate, "2:500kB/s"), "upload limit of node NODE", "NODE:RATE", many=True),
        Flag("mtbf", seconds, "random faults on all nodes but the first two, one every so many seconds on average; the verdict "
             "then says whether the swarm endured", "SECONDS"),
        *_COMMON,
    )),
    Verb("init", "write a commented run file, with its genesis state beside it and its digest inside", (
        Flag("preset", text, "settings to start from (default: tiny)", "NAME"),
        Flag("out", path, "file to write (default: run.toml)", "FILE"),
        _flag_switch("genesis", "renew the genesis state and digest of an existing run file after an edit"),
        _flag_switch("force", "overwrite files that exist"),
        *_COMMON,
    )),
    Verb("simulate", "run the protocol in simulated swarms, with every guarantee checked after every event", (
        Flag("peers", peer_range, "peers of a swarm, as N or FEWEST:MOST (default: 4:9)", "N"),
        Flag("rounds", whole(1, 1000), "committed rounds of each swarm (default: 5)", "R"),
        Flag("seed", whole(0, 10**12 - 1), "number of the first swarm (default: 0)", "S"),
        Flag("seeds", whole(1, 10**9), "swarms (default: 100)", "K"),
        Flag("faults", choice("all", *PROFILES), "what befalls the peers: all of them in turn, or one of "
             f"{', '.join(PROFILES)} (default: all)", "PROFILE"),
        Flag("links", choice(*PROFILES), "take the links of another profile", "PROFILE"),
        Flag("jobs", whole(1, 256), "processes (default: 1)", "N"),
        *_COMMON,
    )),
    Verb("verify", "check everything in a stopped node's state directory: chain, signatures, digests, states", (*_COMMON,)),
    Verb("status", "show what the node with this state directory is doing", (
        Flag("run", text, "name or id of the run, to choose among several state directories", "RUN"),
        *_COMMON,
    )),
)
