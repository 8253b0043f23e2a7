"""`init`: a commented run file, the genesis state beside it, and that state's digest inside.

The one rule: what a person wrote is never overwritten without --force. `--genesis` takes the edited run file as it is
and renews only the state and the digest.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

from sparseloco.bootstrap.errors import RunFileError, StateError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node.options import InitOptions
from sparseloco.node.tensor_file import read_header

_GENESIS_LINE = re.compile(r'^genesis\s*=\s*("[0-9a-f]*"|\'[0-9a-f]*\')', re.MULTILINE)


def run_init(options: InitOptions) -> int:
    """Write run file and genesis state, and say where they are; RunFileError if that would overwrite."""
    out, state_path = options.out, genesis_path(options.out)
    if options.genesis:
        run = RunFile.load(out)
    else:
        for path in (out, state_path):
            if path.exists() and not options.force:
                raise RunFileError(
                    f"{path} exists; choose another --out, renew only the genesis state with --genesis, or overwrite "
                    "with --force"
                )
        run = starting_run(options.preset)
    if not out.parent.is_dir():
        raise RunFileError(f"{out.parent}: no such folder; make it first")
    kept = out.read_text() if options.genesis else None
    run = initialise(run, out, kept)
    summary = {
        "run_file": str(out),
        "genesis_file": str(state_path),
        "genesis": run.run.genesis,
        "run_id": run.run_id.hex(),
        "parameters": parameter_count(out),
    }
    if options.json:
        print(json.dumps(summary))
    print(
        f"wrote {out} and {state_path}: run {run.run.name}, {summary['parameters']:,} parameters, "
        f"run id {summary['run_id']}\nnext: sparseloco-node bootstrap --run {out}",
        file=sys.stderr if options.json else sys.stdout,
    )
    return 0


def starting_run(preset_name: str) -> RunFile:
    """The settings of a preset, without genesis state."""
    from sparseloco.node.presets import preset

    return preset(preset_name)


def genesis_path(run_path: Path) -> Path:
    """Where the genesis state of a run file lies: beside it."""
    return run_path.with_name(f"{run_path.stem}.genesis.safetensors")


def initialise(run: RunFile, run_path: Path, kept: str | None = None) -> RunFile:
    """Make the genesis state of a run, write it beside `run_path`, then the run file with its digest inside.

    `kept` is the text of an edited run file: only its genesis line is changed, comments stay.
    """
    from sparseloco.node.corpus import corpus_of_run
    from sparseloco.node.durable import write_atomic
    from sparseloco.node.genesis import make_genesis, write_genesis
    from sparseloco.node.windows import WindowPlan

    WindowPlan.of_run(run, corpus_of_run(run).train)  # says now what would stop every peer later
    digest = write_genesis(genesis_path(run_path), make_genesis(run.model.config, run.run.seed), run.model.config)
    run = run.with_genesis(digest)
    written = run.to_toml() if kept is None else with_digest(kept, run)
    write_atomic(run_path, written.encode())
    return run


def with_digest(kept: str, run: RunFile) -> str:
    """An edited run file's text with the run's genesis digest; written anew if it has no such line of its own."""
    changed, count = _GENESIS_LINE.subn(f'genesis = "{run.run.genesis}"', kept)
    if count == 1 and RunFile.parse(changed) == run:
        return changed
    return run.to_toml()


def parameter_count(run_path: Path) -> int:
    """Parameters of the genesis state beside a run file, from its header alone; 0 if there is none to read."""
    try:
        tensors, _ = read_header(genesis_path(run_path))
    except StateError:
        return 0
    return sum(math.prod(entry["shape"]) for entry in tensors.values())
