"""Whole rounds of SparseLoCo in one process, with the real corpus, inner loop, codec and outer step.

`python tests/node/test_trial.py [--workers 4] [--rounds 8] [--key value ...]` prints the loss of each round; the
figures in `presets.py` come from it.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sparseloco.bootstrap.run_file import RunFile
from sparseloco.compression.codec import encode
from sparseloco.compression.error_feedback import accumulate, pseudo_gradient, residual
from sparseloco.compression.layout import CodecSpec, PayloadLayout
from sparseloco.node.corpus import Corpus, corpus_of_run
from sparseloco.node.device import pick_device
from sparseloco.node.evaluate import Evaluator
from sparseloco.node.genesis import make_genesis
from sparseloco.node.inner_loop import InnerLoop, InnerSettings
from sparseloco.node.model import build_model, tensor_specs
from sparseloco.node.outer_step import outer_step
from sparseloco.node.presets import preset
from sparseloco.node.state import state_digest
from sparseloco.node.windows import MemberData, WindowPlan, held_out_windows


class Trial:
    """R workers with their own inner loops and error feedback around one agreed theta."""

    def __init__(self, run: RunFile, workers: int, corpus: Corpus) -> None:
        self.run, self.corpus = run, corpus
        data, algorithm = run.data, run.algorithm
        self.settings = InnerSettings.from_run(run)
        self.theta = make_genesis(run.model.config, run.run.seed)
        self.names = sorted(self.theta)
        self.loops = [InnerLoop(build_model(run.model.config), self.settings, pick_device("cpu")) for _ in range(workers)]
        specs = tensor_specs(self.loops[0].model)
        self.layout = PayloadLayout(specs, CodecSpec(k=algorithm.top_k))
        self.residuals = [[torch.zeros(spec.shape) for spec in specs] for _ in range(workers)]
        self.plan = WindowPlan.of_run(run, corpus.train)
        windows = held_out_windows(corpus.held_out, data.sequence_length, data.held_out_windows)
        self.evaluate = Evaluator(self.loops[0].model, windows, pick_device("cpu"))
        self.payload_bytes = 0

    def round(self, number: int) -> list[float]:
        """Train and exchange one round; the workers' mean training losses."""
        algorithm = self.run.algorithm
        payloads, losses = [], []
        for member, loop in enumerate(self.loops):
            loop.put_back(self.theta)
            result = loop.train_round(number, self.data(number, member), lambda: False)
            assert result.finite
            losses.append(result.loss_mean)
            trained = dict(loop.model.named_parameters())
            deltas = [pseudo_gradient(self.theta[name], trained[name].detach()) for name in self.names]
            a = [accumulate(old, delta, algorithm.beta) for old, delta in zip(self.residuals[member], deltas, strict=True)]
            encoded = encode(a, self.layout)
            self.residuals[member] = [residual(buffer, tensor) for buffer, tensor in zip(a, encoded.decoded(), strict=True)]
            payloads.append(encoded.payload)
        self.payload_bytes = len(payloads[0])
        new = outer_step(
            [self.theta[name] for name in self.names],
            payloads,
            self.layout,
            rule=algorithm.aggregation,
            alpha=algorithm.alpha_at(number),
        )
        self.theta = dict(zip(self.names, new, strict=True))
        return losses

    def data(self, number: int, member: int) -> MemberData:
        data = self.run.data
        return MemberData(self.plan, self.corpus.train, data.sequence_length, self.run.algorithm.batch, number, member)


def with_algorithm(run: RunFile, **changes: Any) -> RunFile:
    return replace(run, algorithm=replace(run.algorithm, **changes))


def corpus_of(run: RunFile) -> Corpus:
    return corpus_of_run(run)


@pytest.mark.full
def test_four_workers_of_the_tiny_preset_bring_the_held_out_loss_below_three() -> None:
    torch.set_num_threads(1)
    run = preset("tiny")
    trial = Trial(run, 4, corpus_of_run(run))
    first = trial.evaluate(trial.theta).loss
    for number in range(8):
        trial.round(number)
    last = trial.evaluate(trial.theta).loss
    print(f"held-out loss {first:.3f} -> {last:.3f}")
    assert 5.2 < first < 5.8
    assert last < 2.8


def test_one_worker_alone_learns_as_local_training_does() -> None:
    """With R = 1 the exchange only delays what the codec leaves out, so the loss must fall nearly as fast."""
    torch.set_num_threads(1)
    run = with_algorithm(preset("tiny"), inner_steps=10, top_k=512, alpha=((0, 1.0),), warmup_steps=10, batch=4)
    corpus = corpus_of_run(run)
    trial = Trial(run, 1, corpus)
    start = trial.evaluate(trial.theta).loss
    for number in range(8):
        trial.round(number)
    alone = trial.evaluate(trial.theta).loss

    local = Trial(run, 1, corpus)
    local.loops[0].put_back(local.theta)
    for number in range(8):
        local.loops[0].train_round(number, local.data(number, 0), lambda: False)
    theta = {name: tensor.detach() for name, tensor in local.loops[0].model.named_parameters()}
    plain = local.evaluate(theta).loss

    print(f"start {start:.3f}, with exchange {alone:.3f}, plain local training {plain:.3f}")
    assert plain < start - 1.5
    assert alone < start - 0.75 * (start - plain)


def test_a_trial_is_bitwise_repeatable() -> None:
    torch.set_num_threads(1)
    run = with_algorithm(preset("tiny"), inner_steps=2, batch=2)
    corpus = corpus_of_run(run)
    digests = []
    for _ in range(2):
        trial = Trial(run, 2, corpus)
        for number in range(2):
            trial.round(number)
        digests.append(state_digest(trial.theta))
    assert digests[0] == digests[1]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--of-rounds", type=int, help="[run] rounds, which the schedule spans (default: the preset's)")
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--aggregation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", help="KEY=VALUE,... of [model].config")
    for name, kind in (("inner-steps", int), ("batch", int), ("learning-rate", float), ("top-k", int)):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--warmup-steps", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = ("inner_steps", "batch", "learning_rate", "top_k", "warmup_steps", "aggregation")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.alpha is not None:
        changes["alpha"] = ((0, options.alpha),)
    run = with_algorithm(preset(options.preset), **changes)
    run = replace(run, run=replace(run.run, seed=options.seed, rounds=options.of_rounds or run.run.rounds))
    if options.model:
        config = dict(run.model.config)
        config.update((key, int(value)) for key, value in (item.split("=") for item in options.model.split(",")))
        run = replace(run, model=replace(run.model, config=config))
    started = time.monotonic()
    corpus = corpus_of_run(run)
    print(f"corpus {corpus.documents} documents, {corpus.text_bytes:,} bytes, {time.monotonic() - started:.2f} s")
    trial = Trial(run, options.workers, corpus)
    evaluation = trial.evaluate(trial.theta)
    print(f"{trial.layout.parameters:,} parameters; {changes}; genesis {evaluation.loss:.3f}")
    for number in range(options.rounds):
        started = time.process_time()
        losses = trial.round(number)
        seconds = time.process_time() - started
        loss = trial.evaluate(trial.theta).loss
        print(f"round {number}: train {np.mean(losses):.3f}, held-out {loss:.3f}, {seconds:.2f} s of CPU", flush=True)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"payload {trial.payload_bytes:,} bytes, peak memory {peak_mb:.0f} MB")


if __name__ == "__main__":
    main()
