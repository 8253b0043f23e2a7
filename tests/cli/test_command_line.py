"""Flags, environment and config file: what is accepted, what is refused, and that nothing heavy is loaded for it."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from sparseloco.bootstrap.errors import DataError, NetworkError
from sparseloco.bootstrap.identity import Identity
from sparseloco.node import cli
from sparseloco.node.arguments import VERBS
from sparseloco.node.options import BootstrapOptions, FaultAt, ForNode, JoinOptions, PauseAt, SwarmOptions

PEER = "/ip4/203.0.113.5/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
OTHER = "/ip4/203.0.113.6/tcp/4001/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list:
    """Collects the options each verb was started with, and hides the user's own config file."""
    seen: list = []
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(cli, "_ENTRIES", {verb.name: lambda options: seen.append(options) or 0 for verb in VERBS})
    return seen


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str, **environment: str) -> str:
    assert cli.run(list(arguments), environment) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err


@pytest.mark.parametrize("verb", ["", *[verb.name for verb in VERBS]])
def test_help_is_immediate_and_loads_nothing_heavy(verb: str):
    script = (
        "import sys\nfrom sparseloco.node.cli import run\n"
        "try:\n"
        f"    run({[*verb.split(), '--help']!r}, {{}})\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'hivemind', 'transformers', 'numpy', 'safetensors', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "usage: sparseloco-node" in shown
    # CPU time: what the clock shows depends on who else uses the machine
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


def test_flags_arrive_as_options(started):
    assert cli.run(["join", "--peers", PEER, OTHER, "--peers", PEER, "--rounds=3", "--max-upload", "10Mbit/s",
                    "--no-relay", "--client-mode", "--data", "a", "b c", "--threads", "2"], {}) == 0  # fmt: skip
    assert started == [JoinOptions(
        peers=(PEER, OTHER, PEER), rounds=3, max_upload_bytes_per_second=1_250_000, relay=False, client_mode=True,
        data=(Path("a"), Path("b c")), threads=2,
    )]  # fmt: skip


def test_threads_default_to_the_cpus_of_this_process(started):
    assert cli.run(["join", "--peers", PEER], {}) == 0
    assert started[0].threads >= 1


def test_swarm_faults_and_minutes(started):
    assert cli.run(["swarm", "--kill", "1@3", "2@4", "--late", "3@2"], {}) == 0
    assert cli.run(["swarm", "--minutes", "1.5"], {}) == 0
    assert started[0] == SwarmOptions(
        kill=(FaultAt(node=1, round=3), FaultAt(node=2, round=4)), late=(FaultAt(node=3, round=2),)
    )
    assert started[1] == SwarmOptions(rounds=None, minutes=1.5)


def test_swarm_takes_faults_of_every_kind(started):
    assert cli.run(["swarm", "--restart", "2@3", "2@5", "--pause", "3@4:30", "--corrupt", "1@2", "--slow", "2:2.5",
                    "--max-upload", "2:500kB/s", "--mtbf", "7.5"], {}) == 0  # fmt: skip
    assert started == [SwarmOptions(
        restart=(FaultAt(node=2, round=3), FaultAt(node=2, round=5)), pause=(PauseAt(node=3, round=4, seconds=30.0),),
        corrupt=(FaultAt(node=1, round=2),), slow=(ForNode(node=2, value=2.5),), max_upload=(ForNode(node=2, value=500_000),),
        mtbf=7.5,
    )]  # fmt: skip


def test_join_can_be_slowed_down(started):
    assert cli.run(["join", "--peers", PEER, "--slow-down", "3"], {}) == 0
    assert started[0].slow_down == 3.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["jion"], "no verb 'jion'; did you mean 'join'?"),
        (["--json"], "a verb comes first"),
        (["join", "--pears", PEER], "join has no flag --pears; did you mean '--peers'?"),
        (["join", "--peer", PEER], "did you mean '--peers'?"),  # not taken as an abbreviation
        (["join"], "join needs --peers ADDR (or SPARSELOCO_PEERS"),
        (["join", "--peers"], "expected at least one argument"),
        (["join", "--peers", "1.2.3.4:4001"], "must be a multiaddr that ends in /p2p/<peer id>"),
        (["join", "--peers", PEER, "--rounds", "0"], "--rounds: '0' must be a whole number from 1"),
        (["join", "--peers", PEER, "--rounds", "3.5"], "whole number"),
        (["join", "--peers", PEER, "--device", "cud"], "'cud' is not a device; did you mean 'cuda'?"),
        (["join", "--peers", PEER, "--log-level", "inof"], "'inof' is not a choice; did you mean 'info'?"),
        (["join", "--peers", PEER, "--max-upload", "fast"], "must be a rate such as 500kB/s"),
        (["join", "--peers", PEER, "--listen", "4001"], "must be a multiaddr such as"),
        (["join", "--peers", PEER, "--dtype", "bf16"], "join has no flag --dtype"),  # not implemented: not accepted
        (["status", "now"], "status takes flags only, and got 'now'"),
        (["swarm", "--kill", "1"], "must be NODE@ROUND"),
        (["swarm", "--kill", "4@1"], "numbered from 0 to 3"),
        (["swarm", "--late", "1@8"], "numbered from 0 to 7"),
        (["swarm", "--kill", "1@1", "1@2"], "names a node twice"),
        (["swarm", "--nodes", "1", "--late", "0@1"], "at least one must start"),
        (["swarm", "--rounds", "3", "--minutes", "3"], "not both"),
        (["swarm", "--minutes", "nan"], "number of minutes"),
        (["swarm", "--restart", "1@2", "1@2"], "--restart names a node and a round twice"),
        (["swarm", "--restart", "9@2"], "--restart 9@2: the nodes are numbered from 0 to 3"),
        (["swarm", "--pause", "1@2"], "must be NODE@ROUND:SECONDS"),
        (["swarm", "--pause", "1@2:0"], "must be NODE@ROUND:SECONDS"),
        (["swarm", "--corrupt", "1@9"], "--corrupt 1@9: the rounds are numbered from 0 to 7"),
        (["swarm", "--kill", "1@2", "--restart", "1@5"], "--restart 1@5: --kill ends that node for good before"),
        (["swarm", "--slow", "1:0.5"], "must be a factor from 1 to 1000"),
        (["swarm", "--slow", "1"], "must be NODE:VALUE, such as 2:5"),
        (["swarm", "--slow", "4:2"], "--slow 4: the nodes are numbered from 0 to 3"),
        (["swarm", "--slow", "1:2", "1:3"], "--slow names a node twice"),
        (["swarm", "--max-upload", "1:fast"], "must be a rate such as 500kB/s"),
        (["swarm", "--mtbf", "0"], "must be a number of seconds above 0"),
        (["swarm", "--mtbf", "5", "--nodes", "3"], "--mtbf needs at least --nodes 4"),
        (["swarm", "--mtbf", "5", "--late", "2@1"], "--mtbf takes no --kill and no --late"),
        (["join", "--peers", PEER, "--slow-down", "0"], "must be a factor from 1 to 1000"),
    ],
)
def test_usage_errors_exit_2_and_say_what_to_do(arguments, words, started, capsys):
    assert words in refused(capsys, 2, *arguments)
    assert not started


def test_flag_beats_environment_beats_config_file(started, tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text('listen = ["/ip4/10.0.0.1/tcp/1"]\nrelay = false\n[join]\nrounds = 7\nmicro_batch = 2\n')
    environment = {"SPARSELOCO_CONFIG": str(config), "SPARSELOCO_ROUNDS": "5", "SPARSELOCO_PEERS": f"{PEER} {OTHER}"}
    assert cli.run(["join"], environment) == 0
    assert cli.run(["join", "--rounds", "3", "--relay"], environment) == 0
    assert cli.run(["bootstrap", "--config", str(config)], {}) == 0
    first, second, third = started
    assert (first.rounds, first.micro_batch, first.relay, first.peers) == (5, 2, False, (PEER, OTHER))
    assert first.listen == ("/ip4/10.0.0.1/tcp/1",)
    assert (second.rounds, second.relay) == (3, True)
    assert third == BootstrapOptions(listen=("/ip4/10.0.0.1/tcp/1",), relay=False)


def test_config_file_in_the_users_folder_is_read(started, monkeypatch, tmp_path):
    monkeypatch.setattr("sparseloco.node.config.user_config_path", lambda *_, **__: tmp_path / "there")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.toml").write_text("nodes = 3\n")
    assert cli.run(["swarm"], {}) == 0
    assert started[0].nodes == 3


def test_value_of_the_environment_is_refused_by_its_name(started, capsys):
    assert "SPARSELOCO_ROUNDS: 'x' must be a whole number" in refused(capsys, 2, "swarm", SPARSELOCO_ROUNDS="x")
    assert "SPARSELOCO_JSON: 'maybe' must be 1 or 0" in refused(capsys, 2, "swarm", SPARSELOCO_JSON="maybe")
    message = refused(capsys, 2, "swarm", SPARSELOCO_ROUDNS="3")
    assert "SPARSELOCO_ROUDNS is not a setting; did you mean 'SPARSELOCO_ROUNDS'?" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = 0", "mine.toml: rounds: '0' must be a whole number"),
        ("rounds = true", "must be a text or a number"),
        ("roundz = 3", "there is no key 'roundz'; did you mean 'rounds'?"),
        ("[swarm]\ndevice = 'cpu'", "[swarm] has no key 'device'"),
        ("[swarn]\nnodes = 3", "there is no key 'swarn'; did you mean 'swarm'?"),
        ("json = 1", "must be true or false"),
        ("rounds = ", "cannot be read as a config file"),
    ],
)
def test_value_of_a_config_file_is_refused_by_its_place(text, words, started, tmp_path, capsys):
    (tmp_path / "mine.toml").write_text(text)
    assert words in refused(capsys, 3, "swarm", "--config", str(tmp_path / "mine.toml"))
    assert not started


def test_config_file_that_was_named_must_exist(started, capsys, tmp_path):
    assert "--config: there is no config file" in refused(capsys, 3, "swarm", "--config", str(tmp_path / "no.toml"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NetworkError("all dead"), 4),
        (DataError("no text"), 7),
        (OSError(errno.EROFS, "Read-only file system", "/state/votes.log"), 5),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_and_interrupts_become_exit_codes_without_traceback(error, code, monkeypatch, capsys):
    def fails(options):
        raise error

    monkeypatch.setattr(cli, "_ENTRIES", {"status": fails})
    said = refused(capsys, code, "status")
    assert (f"{error.filename}: {error.strerror}; " if isinstance(error, OSError) else str(error)) in said


def test_state_directory_in_use_exits_5_with_the_same_command_and_a_free_one(monkeypatch, capsys, tmp_path):
    taken = tmp_path / "mine"
    (tmp_path / "mine-2").mkdir()

    def locks(options):
        with Identity.load_or_create(options.state_dir / "identity.key").lock():
            raise AssertionError("the lock was free")

    monkeypatch.setattr(cli, "_ENTRIES", {"join": locks})
    with Identity.load_or_create(taken / "identity.key").lock():
        message = refused(capsys, 5, "join", "--state-dir", str(taken), "--peers", PEER)
    assert message.rstrip().endswith(f"sparseloco-node join --peers {PEER} --state-dir {tmp_path / 'mine-3'}")


def test_state_directory_held_by_the_store_gives_a_free_one_beside_it(monkeypatch, capsys, tmp_path):
    def opens(options):
        from sparseloco.node.store import StateDir

        with StateDir.open(tmp_path / "derived"):
            StateDir.open(tmp_path / "derived")

    monkeypatch.setattr(cli, "_ENTRIES", {"join": opens})
    message = refused(capsys, 5, "join", "--peers", PEER)
    assert message.rstrip().endswith(f"--state-dir {tmp_path / 'derived-2'}")


def test_join_speaks_before_the_heavy_imports():
    script = (
        "import sys\nfrom sparseloco.node import cli\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'sparseloco.node.node':\n"
        "            raise SystemExit(9)\n"
        "sys.meta_path.insert(0, Stop())\n"
        f"cli.main(['join', '--peers', {PEER!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 9
    assert done.stderr.startswith("sparseloco-node 0.1.0: joining by /ip4/203.0.113.5") and done.stdout == ""


def test_version_is_the_packages(capsys):
    assert cli.run(["--version"], {}) == 0
    assert capsys.readouterr().out == "sparseloco-node 0.1.0\n"


def test_reader_that_stops_reading_is_no_traceback(tmp_path):
    (tmp_path / "node.json").write_text('{"pid": 1}')
    command = [sys.executable, "-m", "sparseloco.node.cli", "status", "--state-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1
