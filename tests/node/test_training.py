"""The inner loop and the evaluator: laws of one peer's training between two exchanges."""

import asyncio
import math
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from sparseloco.bootstrap.errors import HardwareError, StateError, UsageError
from sparseloco.bootstrap.run_file import TINY_MODEL, RunFile
from sparseloco.node.device import pick_device
from sparseloco.node.evaluate import Evaluator
from sparseloco.node.genesis import make_genesis
from sparseloco.node.inner_loop import InnerLoop, InnerSettings, RoundResult, learning_rate_at
from sparseloco.node.model import build_model, copy_theta, load_theta
from sparseloco.node.state import state_digest
from sparseloco.node.tensor_file import read_tensors, tensor_file_bytes
from sparseloco.node.windows import Indices, MemberData, WindowPlan

SMALL = {**TINY_MODEL, "hidden_size": 32, "intermediate_size": 64}
SETTINGS = InnerSettings(inner_steps=10, total_steps=100, learning_rate=3e-3, warmup_steps=4)
CPU = pick_device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def genesis() -> dict[str, torch.Tensor]:
    return make_genesis(SMALL, 0)


def some_data(round_number: int = 0) -> MemberData:
    tokens = np.random.default_rng(3).integers(97, 105, 4001).astype(np.uint16)
    return MemberData(WindowPlan(b"r" * 32, 250, 20, 4), tokens, 16, 2, round_number, 0)


def a_loop(theta: dict[str, torch.Tensor], **options: object) -> InnerLoop:
    loop = InnerLoop(build_model(SMALL), SETTINGS, CPU, **options)  # type: ignore[arg-type]
    loop.put_back(theta)
    return loop


def never() -> bool:
    return False


def test_the_learning_rate_warms_up_linearly_and_falls_to_the_final_fraction() -> None:
    settings = replace(SETTINGS, warmup_steps=10)
    rates = [learning_rate_at(settings, step) for step in range(101)]
    assert rates[0] == pytest.approx(3e-4)
    assert rates[9] == rates[10] == pytest.approx(3e-3)
    assert rates[55] == pytest.approx(3e-3 * (0.1 + 0.9 / 2))
    assert rates[100] == pytest.approx(3e-4)
    assert learning_rate_at(settings, 10_000) == pytest.approx(3e-4)
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert learning_rate_at(replace(settings, schedule="constant"), 99) == 3e-3
    assert learning_rate_at(replace(settings, schedule="linear"), 55) == pytest.approx(3e-3 * 0.55)


def test_settings_come_from_the_run_file() -> None:
    run = RunFile()
    settings = InnerSettings.from_run(run)
    assert settings.total_steps == run.run.rounds * run.algorithm.inner_steps
    assert settings.betas == (0.9, 0.95)


def test_a_round_matches_adamw_written_out(genesis: dict[str, torch.Tensor]) -> None:
    loop = a_loop(genesis)
    loop.train_round(0, some_data(), never, last_step=3)

    model = build_model(SMALL)
    load_theta(model, genesis)
    moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()}
    for step in range(3):
        batch = torch.from_numpy(some_data().batch(step))
        logits = model(input_ids=batch[:, :-1]).logits
        loss = -logits.log_softmax(-1).gather(-1, batch[:, 1:, None]).mean()
        gradients = dict(zip(moments, torch.autograd.grad(loss, [p for _, p in model.named_parameters()]), strict=True))
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        rate = 3e-3 * (step + 1) / 4
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                gradient = gradients[name] * min(1.0, 1.0 / norm)
                first, second = moments[name]
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.95).add_(gradient.square(), alpha=0.05)
                decay = 0.1 if parameter.dim() >= 2 else 0.0
                parameter.mul_(1 - rate * decay)
                corrected = second / (1 - 0.95 ** (step + 1))
                parameter.sub_(rate * (first / (1 - 0.9 ** (step + 1))) / (corrected.sqrt() + 1e-8))
    expected = copy_theta(model)
    # A gradient near zero may flip a step's sign in the last bit, so compare the bulk tightly and all loosely.
    for name, tensor in copy_theta(loop.model).items():
        assert torch.quantile((tensor - expected[name]).abs().flatten(), 0.99) < 2e-6, name
        assert (tensor - expected[name]).abs().max() < 5e-3, name


def test_five_steps_a_restart_and_five_more_are_bitwise_ten_straight(genesis: dict[str, torch.Tensor], tmp_path: Path) -> None:
    straight = a_loop(genesis)
    whole = straight.train_round(2, some_data(2), never)
    assert (whole.steps, whole.next_step) == (10, 10)

    before = a_loop(genesis)
    first = before.train_round(2, some_data(2), never, last_step=5)
    assert first.next_step == 5
    (tmp_path / "optimizer").write_bytes(tensor_file_bytes(before.state_tensors()))
    (tmp_path / "theta").write_bytes(tensor_file_bytes(copy_theta(before.model)))

    after = a_loop(read_tensors(tmp_path / "theta"))
    after.load_state_tensors(read_tensors(tmp_path / "optimizer"))
    second = after.train_round(2, some_data(2), never, first_step=first.next_step)
    assert (second.steps, second.next_step) == (5, 10)
    assert second.loss_last == whole.loss_last
    assert state_digest(copy_theta(after.model)) == state_digest(copy_theta(straight.model))
    ours, theirs = after.state_tensors(), straight.state_tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert np.array_equal(some_data(3).batch(0), some_data(3).batch(0))


def test_a_fresh_loops_state_can_be_saved_and_restored(genesis: dict[str, torch.Tensor]) -> None:
    fresh, restored = a_loop(genesis), a_loop(genesis)
    restored.load_state_tensors(fresh.state_tensors())
    for loop in (fresh, restored):
        loop.train_round(0, some_data(), never, last_step=2)
    assert state_digest(copy_theta(fresh.model)) == state_digest(copy_theta(restored.model))


def test_optimizer_state_of_another_model_is_refused(genesis: dict[str, torch.Tensor]) -> None:
    loop = a_loop(genesis)
    state = loop.state_tensors()
    state.pop("exp_avg.model.norm.weight")
    with pytest.raises(StateError, match="another model"):
        loop.load_state_tensors(state)


def test_optimizer_state_is_kept_when_the_weights_are_put_back(genesis: dict[str, torch.Tensor]) -> None:
    loop = a_loop(genesis)
    loop.train_round(0, some_data(), never)
    moments = loop.state_tensors()
    loop.put_back(genesis)
    assert state_digest(copy_theta(loop.model)) == state_digest(genesis)
    assert all(torch.equal(moments[name], tensor) for name, tensor in loop.state_tensors().items())


def test_a_round_that_was_cut_short_does_not_shift_the_schedule(genesis: dict[str, torch.Tensor]) -> None:
    loop = a_loop(genesis)
    answers = iter([False] * 3 + [True])
    result = loop.train_round(4, some_data(4), lambda: next(answers))
    assert (result.steps, result.tokens) == (3, 3 * 2 * 16)
    loop.train_round(5, some_data(5), never, last_step=8)  # 11 steps taken: the joiner's ramp is over
    rates = {group["lr"] for group in loop._optimizer.param_groups}
    assert rates == {learning_rate_at(SETTINGS, 57)}


def test_a_joiners_first_steps_are_short_and_a_founders_follow_the_schedule(genesis: dict[str, torch.Tensor]) -> None:
    joiner, founder = a_loop(genesis), a_loop(genesis)
    joiner.train_round(5, some_data(5), never, last_step=1)
    founder.train_round(0, some_data(0), never, last_step=5)
    assert joiner._optimizer.param_groups[0]["lr"] == pytest.approx(3e-4)
    assert founder._optimizer.param_groups[0]["lr"] == learning_rate_at(SETTINGS, 4)


def test_a_stop_before_the_first_step_is_an_empty_round(genesis: dict[str, torch.Tensor]) -> None:
    result = a_loop(genesis).train_round(0, some_data(), lambda: True)
    assert (result.steps, result.tokens, result.finite) == (0, 0, True)
    assert math.isnan(result.loss_mean)


def test_accumulated_micro_batches_give_the_whole_batchs_gradient(genesis: dict[str, torch.Tensor]) -> None:
    whole, parts = a_loop(genesis), a_loop(genesis, micro_batch=1)
    one = whole.train_round(0, some_data(), never, last_step=1)
    two = parts.train_round(0, some_data(), never, last_step=1)
    assert one.loss_last == pytest.approx(two.loss_last, rel=1e-5)
    expected, moments = whole.state_tensors(), parts.state_tensors()
    assert all(torch.allclose(expected[name], moments[name], rtol=1e-3, atol=1e-6) for name in expected)


def test_out_of_memory_halves_the_micro_batch_and_keeps_the_round(
    genesis: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = a_loop(genesis)
    real = loop._accumulate

    def small_device(batch: torch.Tensor, micro_batch: int) -> float:
        if micro_batch > limit:
            raise torch.cuda.OutOfMemoryError("no room")
        return real(batch, micro_batch)

    monkeypatch.setattr(loop, "_accumulate", small_device)
    limit = 1
    assert loop.train_round(0, some_data(), never).steps == 10
    assert loop.micro_batch == 1
    limit = 0
    with pytest.raises(HardwareError, match="one sequence of 16 tokens"):
        loop.train_round(1, some_data(1), never)


def test_a_step_with_a_non_finite_gradient_is_skipped_and_counted(
    genesis: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = a_loop(genesis)
    real = loop._accumulate
    calls = 0

    def sometimes_nan(batch: torch.Tensor, micro_batch: int) -> float:
        nonlocal calls
        loss = real(batch, micro_batch)
        calls += 1
        if calls in bad:
            next(loop.model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
        return loss

    monkeypatch.setattr(loop, "_accumulate", sometimes_nan)
    bad = {2, 5}
    result = loop.train_round(0, some_data(), never)
    assert (result.steps, result.skipped_steps, result.next_step, result.finite) == (8, 2, 10, True)
    assert loop.adam_steps == 8
    bad = set(range(11, 18))
    assert not loop.train_round(1, some_data(1), never).finite


def test_non_finite_weights_make_the_round_not_finite(genesis: dict[str, torch.Tensor]) -> None:
    loop = a_loop(genesis)
    with torch.no_grad():
        next(loop.model.parameters())[258].fill_(math.inf)
    result = loop.train_round(0, some_data(), never, last_step=1)
    assert not result.finite


def test_evaluation_is_the_mean_loss_and_disturbs_nothing(genesis: dict[str, torch.Tensor]) -> None:
    loop = a_loop(genesis)
    loop.train_round(0, some_data(), never, last_step=2)
    trained = copy_theta(loop.model)
    windows: Indices = np.concatenate([some_data().batch(step) for step in range(9)])
    evaluate = Evaluator(loop.model, windows, CPU)
    ours = evaluate(genesis)
    assert state_digest(copy_theta(loop.model)) == state_digest(trained)

    load_theta(loop.model, genesis)
    batch = torch.from_numpy(windows)
    logits = loop.model(input_ids=batch[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).item()
    assert ours.loss == pytest.approx(expected, rel=1e-5)
    assert ours.bits == pytest.approx(expected / math.log(2), rel=1e-5)
    assert ours.windows == 18
    assert evaluate(genesis) == ours


def test_evaluating_while_another_thread_trains_changes_neither(genesis: dict[str, torch.Tensor]) -> None:
    alone, watched = a_loop(genesis), a_loop(genesis)
    alone.train_round(0, some_data(), never)
    evaluate = Evaluator(watched.model, some_data().batch(9), CPU)
    expected = evaluate(genesis)
    thread = threading.Thread(target=watched.train_round, args=(0, some_data(), never))
    thread.start()
    while thread.is_alive():
        assert evaluate(genesis) == expected
    thread.join()
    assert state_digest(copy_theta(watched.model)) == state_digest(copy_theta(alone.model))


def test_training_in_a_thread_never_blocks_the_event_loop() -> None:
    """Heartbeats every 50 ms must not be late by more than a second while the tiny preset's round trains."""
    run = RunFile()
    settings = InnerSettings.from_run(run)
    tokens = np.random.default_rng(0).integers(0, 256, 300_000).astype(np.uint16)
    batch = run.algorithm.batch
    data = MemberData(WindowPlan(b"r" * 32, 2300, 30 * batch, 4), tokens, run.data.sequence_length, batch, 0, 0)
    loop = InnerLoop(build_model(run.model.config), settings, CPU)

    async def scenario() -> tuple[float, RoundResult]:
        training = asyncio.create_task(asyncio.to_thread(loop.train_round, 0, data, never))
        clock = asyncio.get_running_loop()
        worst = 0.0
        while not training.done():
            due = clock.time() + 0.05
            await asyncio.wait([training], timeout=0.05)
            worst = max(worst, clock.time() - due)
        return worst, training.result()

    worst_seconds, result = asyncio.run(scenario())
    print(f"{result.steps} steps in {result.seconds:.2f} s; worst lateness of a heartbeat {worst_seconds * 1000:.1f} ms")
    assert worst_seconds < 1


def test_devices_are_what_was_asked_for_or_an_error_that_says_what_was_found() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
    for choice, usable in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        if not usable:
            with pytest.raises(HardwareError, match=r"found: .*cpu"):
                pick_device(choice)
    with pytest.raises(UsageError, match="did you mean 'cuda'"):
        pick_device("cuda0")
