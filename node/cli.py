"""`sparseloco-node VERB [flags]`: read flags, environment and config file, then hand over to the verb.

The one rule: nothing heavy is imported before the verb starts, so `--help` and every refusal are immediate. Only this
module reads the environment and ends the process. Exit codes are listed in docs/exit-codes.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from sparseloco import __version__
from sparseloco.bootstrap.errors import NodeError, StateError, UsageError, nearest
from sparseloco.node.arguments import VERBS, Verb
from sparseloco.node.config import resolve
from sparseloco.node.options import (
    BootstrapOptions,
    CommonOptions,
    InitOptions,
    JoinOptions,
    SimulateOptions,
    StatusOptions,
    SwarmOptions,
    VerifyOptions,
)
from sparseloco.node.places import default_state_root, free_beside

PROGRAM = "sparseloco-node"
INTERRUPTED = 130  # Ctrl-C, after a clean leave (`interrupts` gives the coroutines of `join` and `bootstrap` theirs)
# Importing torch and transformers takes 2 to 20 s on a volunteer's disk; a silent start looks like a hang.
_FIRST_LINE = "sparseloco-node %s: joining by %s; loading torch ..."


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The console script: run a verb and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    code = run(arguments, os.environ)
    if "torch" in sys.modules:
        # All is closed and on the disk by now; taking torch and hivemind apart would add 1 to 3 s to every Ctrl-C.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code for these arguments; a NodeError is printed without a traceback, Ctrl-C becomes 130."""
    options: CommonOptions | None = None
    try:
        if not arguments or arguments[0] in ("-h", "--help"):
            print(overview())
            return 0
        if arguments[0] == "--version":
            print(f"{PROGRAM} {__version__}")
            return 0
        verb = _verb(arguments[0])
        typed = _typed(verb, arguments[1:])
        options = build_options(verb, resolve(verb, typed, environment))
        _set_up_logging(options.log_level)
        return _ENTRIES[verb.name](options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except StateError as error:
        print(f"{PROGRAM}: {error}{_free_command(error, arguments, options)}", file=sys.stderr)
        return error.exit_code
    except NodeError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        return 1
    except OSError as error:  # a file that the system refuses: unreadable, read-only, a bad disk
        if error.filename is None:
            raise
        remedy = "this user must be able to read and write it, on a disk that works; then start again"
        print(f"{PROGRAM}: {error.filename}: {error.strerror}; {remedy}", file=sys.stderr)
        return StateError.exit_code


def _reader_is_gone() -> bool:
    """Whether stdout's reader left, as in `sparseloco-node status | head`; if so, nothing is flushed there at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False


def overview() -> str:
    """What `sparseloco-node --help` prints."""
    verbs = "\n".join(f"  {verb.name:<10} {verb.summary}" for verb in VERBS)
    return (
        f"usage: {PROGRAM} VERB [flags]\n\nTrain one language model together with others over the internet.\n\n"
        f"verbs:\n{verbs}\n\n{PROGRAM} VERB --help shows the flags of a verb. Flags beat environment variables "
        "(SPARSELOCO_<FLAG>)\nbeat the config file."
    )


def build_options(verb: Verb, values: Mapping[str, Any]) -> CommonOptions:
    """The options of a verb from resolved values, with the rules that concern several of them."""
    given = dict(values)
    if verb.name == "join":
        given.setdefault("threads", _usable_cpus())
        return JoinOptions(**given)
    if verb.name == "bootstrap":
        return BootstrapOptions(**given)
    if verb.name == "init":
        return InitOptions(**given)
    if verb.name == "status":
        return StatusOptions(**given)
    if verb.name == "verify":
        return VerifyOptions(**given)
    if verb.name == "simulate":
        return SimulateOptions(**{"seeds": 1 if "seed" in given else 100, **given})
    return _swarm_options(given)


def _swarm_options(given: dict[str, Any]) -> SwarmOptions:
    if given.get("minutes") is not None:
        if given.get("rounds") is not None:
            raise UsageError("swarm takes --rounds or --minutes, not both")
        given["rounds"] = None
    options = SwarmOptions(**given)
    _check_nodes(options)
    by_flag = {
        "--kill": options.kill, "--late": options.late,
        "--restart": options.restart, "--corrupt": options.corrupt, "--pause": options.pause,
    }  # fmt: skip
    for name, faults in by_flag.items():
        nodes = [fault.node for fault in faults]
        for fault in faults:
            shown = f"{name} {fault.node}@{fault.round}"
            if fault.node >= options.nodes:
                raise UsageError(f"{shown}: the nodes are numbered from 0 to {options.nodes - 1}")
            if options.rounds is not None and fault.round >= options.rounds:
                raise UsageError(f"{shown}: the rounds are numbered from 0 to {options.rounds - 1}")
            if name != "--kill" and any(kill.node == fault.node and kill.round <= fault.round for kill in options.kill):
                raise UsageError(f"{shown}: --kill ends that node for good before")
        if name in ("--kill", "--late") and len(set(nodes)) < len(nodes):
            raise UsageError(f"{name} names a node twice")
        if len(set(faults)) < len(faults):
            raise UsageError(f"{name} names a node and a round twice")
    if len({fault.node for fault in options.late}) == options.nodes:
        raise UsageError("--late names every node: at least one must start the run")
    return options


def _check_nodes(options: SwarmOptions) -> None:
    """Rules of `swarm` for settings of single nodes and for random faults."""
    for name, settings in (("--slow", options.slow), ("--max-upload", options.max_upload)):
        nodes = [setting.node for setting in settings]
        if any(node >= options.nodes for node in nodes):
            raise UsageError(f"{name} {max(nodes)}: the nodes are numbered from 0 to {options.nodes - 1}")
        if len(set(nodes)) < len(nodes):
            raise UsageError(f"{name} names a node twice")
    if options.mtbf is not None and options.nodes < 4:
        raise UsageError("--mtbf needs at least --nodes 4: the first two are spared, and a quorum of all must stay")
    if options.mtbf is not None and (options.kill or options.late):
        raise UsageError("--mtbf takes no --kill and no --late: a quorum of all nodes must be there throughout")


def _usable_cpus() -> int:
    """CPUs this process may run on; containers and `taskset` allow fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _verb(word: str) -> Verb:
    by_name = {verb.name: verb for verb in VERBS}
    if word in by_name:
        return by_name[word]
    if word.startswith("-"):
        raise UsageError(f"a verb comes first, not {word!r}: one of {', '.join(by_name)}")
    raise UsageError(f"there is no verb {word!r}{nearest(word, by_name)}")


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def _parser(verb: Verb) -> _Parser:
    parser = _Parser(
        prog=f"{PROGRAM} {verb.name}", description=verb.summary, allow_abbrev=False,
        argument_default=argparse.SUPPRESS, epilog="Every flag can also be set as SPARSELOCO_<FLAG> in the environment "
        "or, with underscores, in the config file.",
    )  # fmt: skip
    for flag in verb.flags:
        name = f"--{flag.name}"
        if flag.switch:
            action: Any = argparse.BooleanOptionalAction if flag.negatable else "store_true"
            parser.add_argument(name, dest=flag.key, action=action, help=flag.help)
        elif flag.many:
            parser.add_argument(name, dest=flag.key, action="extend", nargs="+", metavar=flag.metavar, help=flag.help)
        else:
            parser.add_argument(name, dest=flag.key, metavar=flag.metavar, help=flag.help)
    return parser


def _typed(verb: Verb, arguments: Sequence[str]) -> dict[str, Any]:
    """What was typed, by flag key, still as text; UsageError for an unknown flag, with the nearest right one."""
    parsed, unknown = _parser(verb).parse_known_args(arguments)
    for word in unknown:
        if word.startswith("-"):
            known = [f"--{flag.name}" for flag in verb.flags]
            raise UsageError(f"{verb.name} has no flag {word.split('=')[0]}{nearest(word.split('=')[0], known)}")
    if unknown:
        raise UsageError(f"{verb.name} takes flags only, and got {unknown[0]!r}; see {PROGRAM} {verb.name} --help")
    return vars(parsed)


def _set_up_logging(level: str) -> None:
    """People's output of all our modules on stderr; other libraries only when something is wrong."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S"))
    ours = logging.getLogger("sparseloco")
    ours.setLevel(level.upper())
    ours.handlers[:] = [handler]
    ours.propagate = False


def _free_command(error: StateError, arguments: Sequence[str], options: CommonOptions | None) -> str:
    """For a state directory in use: the same command with a free one, ready to copy."""
    taken = None if options is None else _taken_state_dir(error, options, arguments[0])
    if taken is None:
        return ""
    kept = list(arguments)
    for index, word in reversed(list(enumerate(arguments))):
        if word == "--state-dir":
            del kept[index : index + 2]
        elif word.startswith("--state-dir="):
            del kept[index]
    command = shlex.join([PROGRAM, *kept, "--state-dir", str(free_beside(taken))])
    return f"\nwith a free state directory:\n  {command}"


def _taken_state_dir(error: StateError, options: CommonOptions, verb: str) -> Path | None:
    """The state directory that another process holds, if that is what the error says."""
    from sparseloco.bootstrap.identity import IdentityInUse

    store = sys.modules.get("sparseloco.node.store")  # it imports torch; if the error is its own, it is loaded
    if store is not None and isinstance(error, store.StateDirInUse):
        return Path(error.path)
    if isinstance(error, IdentityInUse):
        return options.state_dir or default_state_root("peer" if verb == "join" else verb) / "other"
    return None


def _join(options: Any) -> int:
    print(_FIRST_LINE % (__version__, ", ".join(options.peers)), file=sys.stderr, flush=True)
    from sparseloco.node.node import run_join

    return run_join(options)


def _bootstrap(options: Any) -> int:
    from sparseloco.node.seed import run_bootstrap

    return run_bootstrap(options)


def _swarm(options: Any) -> int:
    from sparseloco.node.swarm import run_swarm

    return run_swarm(options)


def _init(options: Any) -> int:
    from sparseloco.node.init import run_init

    return run_init(options)


def _simulate(options: Any) -> int:
    from sparseloco.node.simulate import run_simulate

    return run_simulate(options)


def _verify(options: Any) -> int:
    from sparseloco.node.verify import run_verify

    return run_verify(options)


def _status(options: Any) -> int:
    from sparseloco.node.status import run_status

    return run_status(options)


_ENTRIES: dict[str, Callable[[Any], int]] = {
    "join": _join, "bootstrap": _bootstrap, "swarm": _swarm, "init": _init, "status": _status,
    "simulate": _simulate, "verify": _verify,
}  # fmt: skip

if __name__ == "__main__":
    main()
