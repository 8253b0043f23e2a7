"""The training text: what ships with Python's standard library, or the volunteer's own files; and the byte tokenizer.

The built-in corpus needs no download: the .py, .txt and .rst files under this interpreter's standard library, in the
order of their paths, without third-party packages, tests and character tables, up to 16 MiB. Another Python version
has other text; so the corpus has a digest, which peers announce and a run file may demand.

The byte tokenizer needs no files: token 0 to 255 is that byte of the UTF-8 text; END ends a document. START and PAD
are in the vocabulary of 259 for later use, and training never draws them.

The one rule: held-out text is never trained on. Documents are cut into parts of at most 64 KiB and ordered by the
digest of their content, so equal parts, wherever they lie, fall on one side; the first ones of that order, 1/32 of the
text or what the held-out windows need, are held out. Choosing by digest makes them a fair sample of the whole.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sparseloco.bootstrap.errors import DataError, RunFileError
from sparseloco.bootstrap.run_file import RunFile

BUILT_IN = "python-stdlib"
END, START, PAD = 256, 257, 258
VOCABULARY = 259

CORPUS_BYTES = 16 * 2**20  # all of the standard library's text but its tests; 32 MiB in memory as tokens
OWN_DATA_BYTES = 256 * 2**20  # a volunteer's own text beyond this is left out: it is held in memory
FILE_BYTES = 16 * 2**20  # a longer own file is no text that somebody wrote; skipped
PART_BYTES = 64 * 2**10
HELD_OUT_FRACTION = 1 / 32
CORPUS_DOMAIN = b"sparseloco/corpus/1\0"

BUILT_IN_SUFFIXES = (".py", ".txt", ".rst")
# Third-party packages, tests, and tables that are no prose and no programs.
SKIPPED_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__")
# fmt: off
OWN_SUFFIXES = (
    ".txt", ".md", ".rst", ".tex", ".org", ".csv", ".json", ".jsonl", ".xml", ".html", ".toml", ".yaml", ".yml",
    ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java", ".js", ".ts", ".rb", ".sh", ".sql", ".lean",
)
# fmt: on

Tokens = NDArray[np.uint16]


@dataclass(frozen=True)
class Corpus:
    """Text as tokens: `train` and `held_out` are one-dimensional; `digest` names the text that was read."""

    train: Tokens
    held_out: Tokens
    digest: bytes
    documents: int
    text_bytes: int


def encode(text: bytes) -> Tokens:
    """Text as tokens, without a mark at its end."""
    return np.frombuffer(text, dtype=np.uint8).astype(np.uint16)


def decode(tokens: Iterable[int]) -> str:
    """Tokens as text; the marks are left out and what is no UTF-8 is shown as such."""
    return bytes(token for token in tokens if token < END).decode("utf-8", errors="replace")


def load_corpus(
    held_out_tokens: int, *, sources: Sequence[tuple[str, str]] = ((BUILT_IN, ""),), own: Sequence[Path] = ()
) -> Corpus:
    """The run's corpus, or the volunteer's `own` files for training with the run's held-out text.

    `sources` are (name, digest in hex or ""), from the run file; `held_out_tokens` is the least to hold out. DataError
    names what was looked at when there is nothing usable, or when the digest is not the one that the run demands.
    """
    for name, _ in sources:
        if name != BUILT_IN:
            raise DataError(f"[[data.sources]] name {name!r} is not known to this version; it has only {BUILT_IN!r}")
    documents = list(_built_in_documents())
    if not documents:
        raise DataError(
            f"{sysconfig.get_path('stdlib')}: Python's standard library holds no readable source text here; "
            "install a Python with its sources, or give own text with --data"
        )
    digest = _digest(documents)
    wanted = {demanded for _, demanded in sources if demanded}
    if wanted - {digest.hex()} and not own:
        raise DataError(
            f"[[data.sources]] {BUILT_IN!r} must have digest {min(wanted)[:16]}..., but this Python's text has "
            f"{digest.hex()[:16]}...; use the Python version that the run was made with, or give own text with --data"
        )
    held_out, train = _split(documents, held_out_tokens)
    if own:
        documents = list(_own_documents(own))
        digest = _digest(documents)
        held_out_parts = set(held_out)
        train = [part for part in _parts(documents) if part not in held_out_parts]
    size = sum(len(document) for document in documents)
    return Corpus(_tokens(train), _tokens(held_out), digest, len(documents), size)


def corpus_of_run(run: RunFile, own: Sequence[Path] = ()) -> Corpus:
    """The corpus that a run file asks for; RunFileError for a tokenizer or vocabulary that bytes do not fit."""
    data = run.data
    if data.tokenizer != "bytes":
        raise RunFileError(f"[data] tokenizer {data.tokenizer!r} is not known to this version; set 'bytes'")
    vocabulary = run.model.config.get("vocab_size")
    if isinstance(vocabulary, int) and vocabulary <= END:
        raise RunFileError(f"[model].config.vocab_size = {vocabulary} is too small for bytes; set {VOCABULARY}")
    return load_corpus(
        data.held_out_windows * data.sequence_length + 1,
        sources=[(source.name, source.digest) for source in data.sources],
        own=own,
    )


def _built_in_documents() -> Iterator[bytes]:
    yield from _read(_files(Path(sysconfig.get_path("stdlib")), BUILT_IN_SUFFIXES), CORPUS_BYTES)


def _own_documents(paths: Sequence[Path]) -> list[bytes]:
    """The usable text of the volunteer's files and folders, in the order given; DataError if there is none."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            files += _files(path, OWN_SUFFIXES)
        elif path.is_file():
            files.append(path)  # named by hand: whatever its suffix
        else:
            raise DataError(f"--data {path}: no such file or folder; give a text file or a folder of text files")
    documents = list(_read(files, OWN_DATA_BYTES))
    if not documents:
        raise DataError(
            f"--data {' '.join(map(str, paths))}: looked at {len(files)} files, none is UTF-8 text of 1 to "
            f"{FILE_BYTES} bytes; in folders, files with these endings are read: {' '.join(OWN_SUFFIXES)}"
        )
    return documents


def _files(root: Path, suffixes: Sequence[str]) -> list[Path]:
    """Files under a folder with one of these endings, in the order of their paths; hidden ones are left out."""
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(tuple(suffixes)) and not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _read(files: Iterable[Path], budget_bytes: int) -> Iterator[bytes]:
    """Whole files of UTF-8 text until the budget is spent; unreadable, empty, huge and binary ones are skipped."""
    left_bytes = budget_bytes
    for path in files:
        try:
            if not 0 < path.stat().st_size <= min(FILE_BYTES, left_bytes):
                continue
            data = path.read_bytes()
            data.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if b"\0" not in data:
            left_bytes -= len(data)
            yield data


def _digest(documents: Sequence[bytes]) -> bytes:
    digest = hashlib.sha256(CORPUS_DOMAIN)
    for document in documents:
        digest.update(len(document).to_bytes(8, "little"))
        digest.update(document)
    return digest.digest()


def _parts(documents: Iterable[bytes]) -> list[bytes]:
    """Documents cut into parts of at most PART_BYTES, each different part once."""
    return list(
        dict.fromkeys(
            document[start : start + PART_BYTES] for document in documents for start in range(0, len(document), PART_BYTES)
        )
    )


def _split(documents: Sequence[bytes], held_out_tokens: int) -> tuple[list[bytes], list[bytes]]:
    """(held-out parts, training parts); DataError if holding out enough would leave less than half for training."""
    parts = _parts(documents)
    size = sum(len(part) + 1 for part in parts)
    wanted = max(size * HELD_OUT_FRACTION, held_out_tokens)
    by_digest = sorted(parts, key=lambda part: hashlib.sha256(part).digest())
    held_out: list[bytes] = []
    taken = 0
    while taken < wanted and by_digest:
        held_out.append(by_digest.pop(0))
        taken += len(held_out[-1]) + 1
    if taken < wanted or taken * 2 > size:
        raise DataError(
            f"[data] held_out_windows and sequence_length hold out {held_out_tokens} tokens of a text of {size}; "
            "that leaves less than half for training: lower them, or use a larger source"
        )
    chosen = set(held_out)
    return held_out, [part for part in parts if part not in chosen]


def _tokens(parts: Sequence[bytes]) -> Tokens:
    """Parts one after the other, each closed by END."""
    tokens = np.full(sum(len(part) + 1 for part in parts), END, dtype=np.uint16)
    offset = 0
    for part in parts:
        tokens[offset : offset + len(part)] = np.frombuffer(part, dtype=np.uint8)
        offset += len(part) + 1
    return tokens
