"""Settings to start a run from, by name.

`tiny`: four peers with one thread each on two cores see the loss fall within a minute; no download, no GPU. A Llama of
2 layers, 128 wide, over bytes, with tied embeddings: 459,776 parameters, 9,912 bytes a payload (k = 64).

Held-out loss in nats per byte (Python's own sources), seed 0, one run each, from `python tests/node/test_trial.py` with
the flags shown. Genesis 5.355, below ln 259 = 5.56, since tied embeddings favour repeating a byte.

    flags                                        round 0     1     2     3     4     5     6     7
    (none: 4 workers)                              4.388 3.874 3.142 2.676 2.473 2.309 2.223 2.122
    --alpha 0.5                                    4.742 4.236 3.663 2.927 2.568 2.394 2.276 2.203
    --alpha 1.0                                    4.295 3.666 2.878 2.613 2.354 2.243 2.236 2.111
    --learning-rate 0.002                          4.574 3.969 3.308 2.729 2.409 2.271 2.196 2.125
    --alpha 0.5 --learning-rate 0.006              4.739 3.923 3.269 2.859 2.688 2.576 2.497 2.399
    --top-k 128 --warmup-steps 15                  4.404 3.241 2.806 2.684 2.632 2.375 2.271 2.200
    --workers 8                                    4.306 3.564 2.858 2.497 2.398 2.223
    --workers 8 --alpha 0.5                        4.599 3.997 3.245 2.594 2.374 2.268
    --workers 1                                    4.710 4.268 3.834 3.435 3.047 2.849 2.648 2.476

Why these values. H = 30 and batch 8 x 128: a round is 2.1 s of one quiet core per peer, so four peers on two cores
train for about 4.3 s. The learning rate: 0.006 starts faster and ends worse, 0.002 ties.
alpha = 0.8 with contributor-mean: as good as 1.0 at four peers, better than 0.5 at eight over these first rounds. That
rule's step grows with the group and with the rounds that fill the error feedback, so long runs of large groups want
less: alpha x long-run gain of about 1.8 is best, that is 0.5 at 8 peers and 0.3 at 20.
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
