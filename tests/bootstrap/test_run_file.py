"""The run file: what is written is read back, and what is wrong is named with its remedy."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from sparseloco.bootstrap.errors import RunFileError
from sparseloco.bootstrap.run_file import Algorithm, Limits, Model, RunFile

PEER = "QmYUzQmVAUC7JdvyMavKNuKoHPUC1u9p3amqKHtM1sUumA"


def test_an_empty_file_is_the_tiny_preset() -> None:
    assert RunFile.parse("") == RunFile()


@pytest.mark.parametrize("comments", [True, False])
def test_what_is_written_is_read_back_with_the_same_run_id(comments: bool) -> None:
    odd = {"a b": 'quote " slash \\ tab \t null-ish \x7f é', "deep": {"list": [1, 2.5, {"x": True}]}, "rope": 1e-7}
    run_file = RunFile(
        model=Model(config={**RunFile().model.config, **odd}), algorithm=Algorithm(alpha=((0, 0.5), (9, 0.4)))
    )
    again = RunFile.parse(run_file.to_toml(comments))
    assert again == run_file
    assert again.run_id == run_file.run_id


def test_the_run_id_does_not_see_order_comments_or_defaults() -> None:
    first = RunFile.parse("[algorithm]\ninner_steps = 15 # fewer\nbeta = 1\n[run]\nname = 'x'")
    second = RunFile.parse("[run]\nname = 'x'\nseed = 0\n[algorithm]\nbeta = 1.0\ninner_steps = 15")
    assert first.run_id == second.run_id != RunFile().run_id
    assert json.loads(first.canonical)["algorithm"]["beta"] == 1.0


def test_every_key_is_documented_and_written() -> None:
    text = RunFile().to_toml()
    for table in fields(RunFile):
        assert f"[{table.name}]" in text
        for key in fields(getattr(RunFile(), table.name)):
            assert key.metadata["doc"] in text.replace("\n# ", " ")


def test_alpha_follows_the_round() -> None:
    algorithm = RunFile.parse("[algorithm]\nalpha = [[0, 0.5], [10, 0.4]]").algorithm
    assert [algorithm.alpha_at(r) for r in (-1, 0, 9, 10, 99)] == [0.5, 0.5, 0.5, 0.4, 0.4]
    assert RunFile.parse("[algorithm]\nalpha = 1").algorithm.alpha == ((0, 1.0),)


def test_genesis_is_required_only_when_asked_for() -> None:
    with pytest.raises(RunFileError, match="init --genesis"):
        RunFile().require_genesis()
    filled = RunFile().with_genesis(bytes(range(32)))
    assert filled.require_genesis() == bytes(range(32))
    assert filled.run_id != RunFile().run_id
    with pytest.raises(RunFileError, match="config is empty"):
        replace(filled, model=Model(config={})).require_genesis()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[algoritm]\n", r"no table \[algoritm\]; did you mean 'algorithm'"),
        ("[algorithm]\ninner_step = 3", r"no key 'inner_step'; did you mean 'inner_steps'"),
        ("inner_steps = 3", "no table"),
        ("run = 3", r"\[run\] must be a table"),
        ("[algorithm]\nschedule = 'cosin'", "did you mean 'cosine'"),
        ("[algorithm]\ninner_steps = 0", "inner_steps = 0 is outside 1 to"),
        ("[algorithm]\ninner_steps = true", "whole number"),
        ("[algorithm]\ninner_steps = 3.0", "whole number"),
        ("[algorithm]\nbeta = nan", "beta = nan must be from 0"),
        ("[algorithm]\nlearning_rate = inf", "learning_rate"),
        ("[algorithm]\nlearning_rate = '3'", "must be a number"),
        ("[algorithm]\nadam_betas = [0.9]", "two numbers"),
        ("[algorithm]\ntop_k = 96", "top_k = 96 must be one of 16, 32, 64"),
        ("[algorithm]\nchunk = 32", "chunk = 32 must be one of 4096"),
        ("[data]\nsequence_length = 1024", "sequence_length = 1024 is above"),
        ("[algorithm]\nalpha = [[1, 0.5]]", "begin with round 0"),
        ("[algorithm]\nalpha = []", "1 to"),
        ("[algorithm]\noverlap = true", "leave it at false"),
        ("[run]\nmin_peers = 40", "above .limits. group_size"),
        ("[run]\nfounders = ['me']", "must be a peer id"),
        (f"[run]\nfounders = ['{PEER}', '{PEER}']", "names an entry twice"),
        (f"[run]\nmin_peers = 2\nfounders = ['{PEER}']", "fewer than min_peers"),
        ("[run]\ngenesis = 'ABC'", "64 lower-case hex digits"),
        ("[run]\nname = '../x'", "letters, digits"),
        ("[round]\nmin_budget_seconds = 99", "above budget_seconds"),
        ("[round]\nheartbeat_seconds = 4", "twice heartbeat_seconds"),
        ("[limits]\nmessage_bytes = 4000000", "message_bytes"),
        ("[limits]\nblob_bytes = 3000000000", "stored_blob_bytes"),
        ("[admission]\nmode = 'list'", "admits nobody"),
        (f"[admission]\npeers = ['{PEER}']", "mode = 'open' ignores"),
        ("[data]\nsources = []", "1 to"),
        ("[[data.sources]]\nnam = 'x'", "did you mean 'name'"),
        ("[model]\nconfig = 3", "must be a table"),
        ("[model.config]\nwhen = 2020-01-01", "must be text, a finite number"),
        ("[model.config]\nx = inf", "finite"),
        ("[run\n", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(RunFileError, match=words):
        RunFile.parse(text)


def test_a_table_built_in_code_obeys_the_same_rules() -> None:
    with pytest.raises(RunFileError, match="group_size"):
        Limits(group_size=0)
    with pytest.raises(RunFileError, match="top_k"):
        replace(Algorithm(), top_k=4096)


def test_load_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=r"gone\.toml: no such run file"):
        RunFile.load(tmp_path / "gone.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(RunFileError, match=r"bad\.toml: cannot be read"):
        RunFile.load(tmp_path / "bad.toml")
    (tmp_path / "good.toml").write_text(RunFile().to_toml())
    assert RunFile.load(tmp_path / "good.toml") == RunFile()


def test_reading_a_run_file_imports_neither_torch_nor_hivemind() -> None:
    code = (
        "import sys; import sparseloco.bootstrap.run_file, sparseloco.bootstrap.identity; "
        "print([m for m in ('torch', 'hivemind', 'multiaddr') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
