"""Settings to start a run from, by name.

`tiny`: four peers with one thread each on two cores see the loss fall within a minute; no download, no GPU.
A Llama of 2 layers, 128 wide, over bytes, with tied embeddings: 459,776 parameters, 9,912 bytes a payload (k = 64).

Held-out loss in nats per byte (Python's own sources), measured with `python tests/node/test_trial.py --workers 4`
and the flags shown; genesis 5.355 (below ln 259 = 5.56, since tied embeddings favour repeating a byte):

MEASURED

Why these values. H = 30 and batch 8 x 128: a round is 3 s of one core's training per peer, so a round of four peers
on two cores takes about 5 s. alpha = 0.8 with contributor-mean: nearly as fast as 1.0 at four peers, and since that
rule's step grows with the group, it keeps a margin for eight. Larger groups want less: 0.5 at 8 to 16, 0.3 at 32.
"""

from __future__ import annotations

from collections.abc import Callable

from sparseloco.bootstrap.errors import UsageError, nearest
from sparseloco.bootstrap.run_file import TINY_MODEL, Algorithm, Model, Run, RunFile


def _tiny() -> RunFile:
    return RunFile(
        run=Run(name="tiny"),
        model=Model(config=dict(TINY_MODEL)),
        algorithm=Algorithm(
            inner_steps=30,
            batch=8,
            learning_rate=3e-3,
            warmup_steps=30,
            top_k=64,
            alpha=((0, 0.8),),
            aggregation="contributor-mean",
        ),
    )


PRESETS: dict[str, Callable[[], RunFile]] = {"tiny": _tiny}


def preset(name: str) -> RunFile:
    """The run file of a preset, without its genesis digest; UsageError for an unknown name."""
    if name not in PRESETS:
        raise UsageError(f"--preset {name!r} is not known{nearest(name, PRESETS)}")
    return PRESETS[name]()
