"""The run file: the settings that every peer of one run shares, and the run id that names them.

A run file is TOML for people and canonical JSON for machines: sorted keys, no whitespace, every default filled in.
The run id is the SHA-256 of the canonical form, so two files that differ only in comments, order or left-out defaults
are the same run. The one rule: a value that is accepted here has passed its own rule and those it has with its
neighbours, so nobody downstream checks again. Nothing here imports torch or hivemind.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from sparseloco.bootstrap import schema
from sparseloco.bootstrap.errors import RunFileError, nearest
from sparseloco.bootstrap.schema import Table, choice, integer, key, list_of, number, text
from sparseloco.bootstrap.toml_text import toml_key, toml_value

# The largest run file a peer downloads or reads. The shipped ones are about 8 kB; founders and admission lists grow it.
RUN_FILE_BYTES = 1_000_000

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
NAME_WORDS = "1 to 64 letters, digits, dots, dashes or underscores"

# Llama with tied embeddings over bytes (256 values and 3 marks): 459,776 parameters.
TINY_MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Run(Table):
    """[run]: what the run is called, who starts it and from which state."""

    table_name = "run"
    name: str = key("tiny", text(NAME, NAME_WORDS), "what people call the run")
    seed: int = key(0, integer(0, 2**63 - 1), "of the genesis weights and of the assignment of data")
    min_peers: int = key(1, integer(1, 4096), "no contribution is committed with fewer members", "peers")
    founders: tuple[str, ...] = key(
        [],
        list_of(schema.peer_id, longest=4096, distinct=True),
        "peer ids of the first group; empty: the first min_peers that meet",
    )
    genesis: str = key("", schema.digest_or_empty, "digest of the state before round 0; `init` fills it in")
    rounds: int = key(1000, integer(1, 10**7), "the run ends after so many committed rounds", "rounds")

    def check_together(self) -> None:
        if self.founders and len(self.founders) < self.min_peers:
            raise RunFileError(
                f"[run] founders names {len(self.founders)} peers, fewer than min_peers = {self.min_peers}; "
                "name more founders, or none"
            )


@dataclass(frozen=True)
class Model(Table):
    """[model]: what is trained."""

    table_name = "model"
    trainable: str = key("all", choice("all"), "which parameters are trained: all")
    config: dict[str, Any] = key(TINY_MODEL, schema.json_table, "a transformers causal model's configuration")  # noqa: RUF009


@dataclass(frozen=True)
class Source(Table):
    """One entry of [[data.sources]]."""

    table_name = "data.sources"
    name: str = key("python-stdlib", text(r"[^\x00-\x1f\x7f]{1,200}", "1 to 200 printable characters"), "which text")
    weight: float = key(1.0, number(0.0, 1e6, above=True), "its share of the training sequences, before normalising")
    digest: str = key("", schema.digest_or_empty, "SHA-256 of the text; empty: whatever this machine has")


def _source(where: str, value: object) -> Source:
    return value if isinstance(value, Source) else schema.build_table(Source, where.strip("[]"), value)


@dataclass(frozen=True)
class Data(Table):
    """[data]: on which text."""

    table_name = "data"
    tokenizer: str = key("bytes", text(r"[^\x00-\x1f\x7f]{1,200}", "`bytes` or a tokenizer's name"), "text to tokens")
    sequence_length: int = key(128, integer(2, 2**20), "length of one training sequence", "tokens")
    held_out_windows: int = key(64, integer(1, 10**6), "sequences kept out of training for evaluation", "sequences")
    sources: tuple[Source, ...] = key([{}], list_of(_source, longest=1000, shortest=1), "the texts and their shares")


@dataclass(frozen=True)
class Algorithm(Table):
    """[algorithm]: SparseLoCo's inner and outer steps."""

    table_name = "algorithm"
    inner_steps: int = key(30, integer(1, 10**6), "inner steps H between two exchanges, at most", "steps")
    batch: int = key(8, integer(1, 2**20), "sequences in one inner step of one peer", "sequences")
    learning_rate: float = key(0.003, number(0.0, 10.0, above=True), "peak rate of the inner optimizer, AdamW")
    adam_betas: tuple[float, float] = key(
        [0.9, 0.95],
        schema.pair(number(0, 1, below=True), number(0, 1, below=True), "two numbers"),
        "AdamW's decay rates",
    )
    weight_decay: float = key(0.1, number(0.0, 10.0), "decoupled weight decay of the inner optimizer")
    clip_norm: float = key(1.0, number(0.0, 1e6, above=True), "largest norm of one inner step's gradient")
    warmup_steps: int = key(30, integer(0, 10**7), "inner steps of linear warm-up, counted over the whole run", "steps")
    schedule: str = key(
        "cosine",
        choice("cosine", "linear", "constant"),
        "the learning rate after the warm-up: cosine, linear or constant",
    )
    final_learning_rate_fraction: float = key(0.1, number(0.0, 1.0), "where the schedule ends, as a part of the peak")
    top_k: int = key(64, schema.one_of(16, 32, 64, 128, 256, 512), "values kept of each chunk", "values")
    chunk: int = key(4096, schema.one_of(4096), "values in one chunk, fixed by the codec", "values")
    beta: float = key(0.95, number(0.0, 1.0), "decay of the error feedback")
    alpha: tuple[tuple[int, float], ...] = key(
        [[0, 0.8]],
        schema.steps_over_rounds(number(0.0, 100.0, above=True)),
        "outer step size: a number, or [[from_round, value], ...]",
    )
    aggregation: str = key(
        "contributor-mean",
        choice("contributor-mean", "mean"),
        "contributor-mean: over those who sent a value; mean: over all who contributed",
    )
    codec: str = key("ef2-4096", choice("ef2-4096"), "the payload's form")
    overlap: bool = key(
        False, schema.only(False), "train on while the previous round's exchange is under way; not in this version: false"
    )

    def alpha_at(self, round_number: int) -> float:
        """The outer step size of a round (0-based)."""
        return [value for from_round, value in self.alpha if from_round <= max(round_number, 0)][-1]


SECONDS = number(0.0, 86400.0, above=True)


@dataclass(frozen=True)
class Round(Table):
    """[round]: how long the parts of a round may take."""

    table_name = "round"
    budget_seconds: float = key(60.0, SECONDS, "training time of a round, at most", "seconds")
    min_budget_seconds: float = key(1.0, SECONDS, "training time of a round, at least", "seconds")
    formation_seconds: float = key(30.0, SECONDS, "a first group waits so long for more peers", "seconds")
    heartbeat_seconds: float = key(0.5, SECONDS, "between two heartbeats", "seconds")
    detection_seconds: float = key(5.0, SECONDS, "a peer unheard for so long counts as dead", "seconds")
    exchange_seconds: float = key(20.0, SECONDS, "exchange of the payloads, at most", "seconds")
    vote_seconds: float = key(3.0, SECONDS, "one phase of the vote; doubles with each attempt", "seconds")
    straggler_factor: float = key(4.0, number(1.0, 1000.0), "the budget reaches so many deviations past the median")
    checkpoint_every: int = key(5, integer(1, 10**6), "rounds between two checkpoints", "rounds")

    def check_together(self) -> None:
        if self.min_budget_seconds > self.budget_seconds:
            raise RunFileError(
                f"[round] min_budget_seconds = {self.min_budget_seconds} is above budget_seconds = "
                f"{self.budget_seconds}; lower it"
            )
        if self.detection_seconds < 2 * self.heartbeat_seconds:
            raise RunFileError(
                f"[round] detection_seconds = {self.detection_seconds} must be at least twice heartbeat_seconds = "
                f"{self.heartbeat_seconds}, or one lost heartbeat is a death"
            )


@dataclass(frozen=True)
class Limits(Table):
    """[limits]: what one peer may cost another."""

    table_name = "limits"
    group_size: int = key(32, integer(1, 4096), "members of a group, at most", "peers")
    joiners_per_round: int = key(4, integer(1, 4096), "members added by one round, at most", "peers")
    message_bytes: int = key(1_000_000, integer(64_000, 1_000_000), "one signed message, at most", "bytes")
    check_resends: int = key(8, integer(0, 1000), "times that a peer may correct its Check in one round", "messages")
    blob_bytes: int = key(0, integer(0, 10**13), "one payload, at most; 0: what model and codec give", "bytes")
    stored_blob_bytes: int = key(2 * 10**9, integer(10**6, 10**15), "payloads kept on disk, at most", "bytes")
    requests_in_flight: int = key(8, integer(1, 1024), "transfers served to one peer at once", "transfers")
    upload_bytes_per_second: int = key(0, integer(0, 10**12), "bulk upload of one peer; 0: no limit", "bytes/second")
    max_rollback_rounds: int = key(16, integer(0, 10**6), "a lost fork deeper than this stops the node", "rounds")
    clock_offset_seconds: float = key(3.0, number(0.1, 3600.0), "a clock off by more is named", "seconds")

    def check_together(self) -> None:
        if self.blob_bytes > self.stored_blob_bytes:
            raise RunFileError(
                f"[limits] blob_bytes = {self.blob_bytes} is above stored_blob_bytes = {self.stored_blob_bytes}; "
                "raise stored_blob_bytes"
            )


@dataclass(frozen=True)
class Robustness(Table):
    """[robustness]: what a strange contribution can do."""

    table_name = "robustness"
    clip: str = key(
        "median-norm",
        choice("median-norm", "none"),
        "shrink contributions far above the median norm: median-norm or none",
    )
    clip_multiple: float = key(3.0, number(1.0, 1e6), "the norm allowed, as a multiple of the median")


@dataclass(frozen=True)
class Admission(Table):
    """[admission]: who may join."""

    table_name = "admission"
    mode: str = key("open", choice("open", "list"), "open: everybody; list: the peers named here or by the organiser")
    peers: tuple[str, ...] = key([], list_of(schema.peer_id, longest=4096, distinct=True), "peer ids that may join")
    organiser: str = key("", schema.only(""), "peer id whose key signs admissions; not in this version: empty")

    def check_together(self) -> None:
        if self.mode == "list" and not self.peers and not self.organiser:
            raise RunFileError("[admission] mode = 'list' admits nobody; name peers or an organiser")
        if self.mode == "open" and (self.peers or self.organiser):
            raise RunFileError("[admission] mode = 'open' ignores peers and organiser; set mode = 'list' or empty them")


@dataclass(frozen=True)
class RunFile:
    """All settings of a run. `RunFile()` is the tiny preset, not yet initialised (no genesis digest)."""

    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    algorithm: Algorithm = field(default_factory=Algorithm)
    round: Round = field(default_factory=Round)
    limits: Limits = field(default_factory=Limits)
    robustness: Robustness = field(default_factory=Robustness)
    admission: Admission = field(default_factory=Admission)

    def __post_init__(self) -> None:
        for what, count in (("min_peers", self.run.min_peers), ("founders", len(self.run.founders))):
            if count > self.limits.group_size:
                raise RunFileError(
                    f"[run] {what}: {count} is above [limits] group_size = {self.limits.group_size}; raise group_size"
                )
        positions = self.model.config.get("max_position_embeddings")
        if isinstance(positions, int) and positions < self.data.sequence_length:
            raise RunFileError(
                f"[data] sequence_length = {self.data.sequence_length} is above [model].config.max_position_embeddings = "
                f"{positions}; lower the one or raise the other"
            )
        outside = set(self.run.founders) - set(self.admission.peers)
        if self.admission.mode == "list" and not self.admission.organiser and outside:
            raise RunFileError(f"[run] founders: {min(outside)} is not in [admission] peers; add it there")

    @classmethod
    def load(cls, path: Path | str) -> RunFile:
        """Read a run file; RunFileError names the file and what is wrong in it."""
        try:
            with Path(path).open("rb") as file:
                raw = file.read(RUN_FILE_BYTES + 1)
            return cls.parse(raw.decode())
        except FileNotFoundError:
            raise RunFileError(f"{path}: no such run file; `sparseloco-node init` writes one") from None
        except (OSError, UnicodeDecodeError) as error:
            raise RunFileError(f"{path}: cannot be read as a run file: {error}") from None
        except RunFileError as error:
            raise RunFileError(f"{path}: {error}") from None

    @classmethod
    def parse(cls, text_of_file: str) -> RunFile:
        """A run file from its TOML text; RunFileError names key, value, rule and remedy."""
        if len(text_of_file) > RUN_FILE_BYTES:
            raise RunFileError(f"a run file has at most {RUN_FILE_BYTES} bytes; this is another kind of file")
        try:
            given = tomllib.loads(text_of_file)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise RunFileError(f"not valid TOML: {error}") from None
        kinds = {item.name: item.default_factory for item in fields(cls)}
        for word in given:
            if word not in kinds:
                raise RunFileError(f"there is no table [{word}]{nearest(word, kinds)}")
        return cls(**{name: schema.build_table(kinds[name], name, table) for name, table in given.items()})  # type: ignore[arg-type]

    @property
    def canonical(self) -> bytes:
        """The canonical form: JSON with sorted keys, no whitespace, every default filled in."""
        return json.dumps(_plain(self), sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @property
    def run_id(self) -> bytes:
        """32 bytes that name the run."""
        return hashlib.sha256(self.canonical).digest()

    def require_genesis(self) -> bytes:
        """The genesis state's digest, 32 bytes; RunFileError for a run file that is not initialised."""
        if not self.model.config:
            raise RunFileError("[model] config is empty; give a transformers configuration, or start from `init`")
        if not self.run.genesis:
            raise RunFileError("[run] genesis is empty: run `sparseloco-node init --genesis` on this run file first")
        return bytes.fromhex(self.run.genesis)

    def with_genesis(self, state_digest: bytes) -> RunFile:
        """The same settings with the genesis state's digest filled in: another run id."""
        return replace(self, run=replace(self.run, genesis=state_digest.hex()))

    def to_toml(self, comments: bool = True) -> str:
        """The file that `init` writes; parsing it gives an equal RunFile."""
        lines = (
            ["# A run: every peer of it has this file. Changing any value makes another run.", ""] if comments else []
        )
        for item in fields(self):
            lines += [*_table_lines(getattr(self, item.name), comments), ""]
        return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Dataclasses and tuples as what JSON has."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _table_lines(table: Table, comments: bool) -> Iterator[str]:
    """One table; keys that hold tables come last, as TOML wants."""
    nested: list[str] = []
    if comments:
        yield f"# {(type(table).__doc__ or '').split(': ', 1)[-1]}"
    yield f"[{table.table_name}]"
    for item in fields(table):  # type: ignore[arg-type]
        value = _plain(getattr(table, item.name))
        unit = f" ({item.metadata['unit']})" if item.metadata["unit"] else ""
        comment = textwrap.wrap(f"{item.metadata['doc']}{unit}", 110, initial_indent="# ", subsequent_indent="# ")
        lines = comment if comments else []
        if isinstance(value, dict):
            inner = [f"{toml_key(name)} = {toml_value(entry)}" for name, entry in value.items()]
            nested += ["", *lines, f"[{table.table_name}.{item.name}]", *inner]
        elif value and isinstance(value, list) and isinstance(value[0], dict):
            for entry in value:
                nested += ["", *lines, f"[[{table.table_name}.{item.name}]]"]
                nested += [f"{name} = {toml_value(part)}" for name, part in entry.items()]
                lines = []
        else:
            yield from lines
            yield f"{item.name} = {toml_value(value)}"
    yield from nested
