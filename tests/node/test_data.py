"""The corpus and the assignment of windows."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparseloco.bootstrap.errors import DataError, RunFileError
from sparseloco.bootstrap.run_file import RunFile
from sparseloco.node import corpus as corpus_module
from sparseloco.node.corpus import END, corpus_of_run, decode, encode, load_corpus
from sparseloco.node.windows import (
    MemberData,
    Permutation,
    WindowPlan,
    count_windows,
    cut_windows,
    held_out_windows,
)

HELD_OUT_TOKENS = 64 * 128 + 1


def test_the_built_in_corpus_is_the_same_every_time_quick_and_bounded() -> None:
    load_corpus(HELD_OUT_TOKENS)  # the first reading may wait for the disk
    started = time.monotonic()
    corpus = load_corpus(HELD_OUT_TOKENS)
    seconds = time.monotonic() - started
    print(f"{corpus.text_bytes:,} bytes in {seconds:.2f} s")
    again = load_corpus(HELD_OUT_TOKENS)
    assert corpus.digest == again.digest
    assert np.array_equal(corpus.train, again.train)
    assert 4e6 < corpus.text_bytes <= corpus_module.CORPUS_BYTES
    assert corpus.train.max() == END
    assert seconds < 2  # measured 0.2 s; a busy machine is slower


def test_held_out_text_is_never_in_the_training_text() -> None:
    corpus = load_corpus(HELD_OUT_TOKENS)
    assert len(corpus.held_out) >= max(HELD_OUT_TOKENS, corpus.text_bytes // 40)
    train = corpus.train.tobytes()
    parts = np.split(corpus.held_out, np.flatnonzero(corpus.held_out == END) + 1)
    for part in parts[:-1]:
        if len(part) > 200:  # shorter ones can be a phrase of a longer file
            assert part.tobytes() not in train


def test_text_survives_the_byte_tokenizer() -> None:
    text = "def é(): return '→'\n"
    assert decode(encode(text.encode())) == text
    assert decode([104, 105, END]) == "hi"


def test_a_demanded_digest_is_checked() -> None:
    digest = load_corpus(HELD_OUT_TOKENS).digest.hex()
    load_corpus(HELD_OUT_TOKENS, sources=[("python-stdlib", digest)])
    with pytest.raises(DataError, match="Python version"):
        load_corpus(HELD_OUT_TOKENS, sources=[("python-stdlib", "00" * 32)])
    with pytest.raises(DataError, match="wikipedia"):
        load_corpus(HELD_OUT_TOKENS, sources=[("wikipedia", "")])


def test_the_run_file_names_tokenizer_and_vocabulary_and_misfits_are_refused() -> None:
    run = RunFile()
    assert corpus_of_run(run).digest == load_corpus(HELD_OUT_TOKENS).digest
    with pytest.raises(RunFileError, match="tokenizer 'wordpiece'"):
        corpus_of_run(replace(run, data=replace(run.data, tokenizer="wordpiece")))
    narrow = replace(run.model, config={**run.model.config, "vocab_size": 256})
    with pytest.raises(RunFileError, match="set 259"):
        corpus_of_run(replace(run, model=narrow))


def test_too_much_held_out_is_refused() -> None:
    with pytest.raises(DataError, match="held_out_windows"):
        load_corpus(10**7)


def test_own_files_replace_the_training_text_but_not_the_held_out_one(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("second " * 100)
    (tmp_path / "a.txt").write_text("first " * 100)
    (tmp_path / "image.png").write_bytes(bytes(range(256)))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / ".hidden.txt").write_text("secret")
    built_in = load_corpus(HELD_OUT_TOKENS)
    own = load_corpus(HELD_OUT_TOKENS, own=[tmp_path])
    assert decode(own.train) == "first " * 100 + "second " * 100
    assert np.array_equal(own.held_out, built_in.held_out)
    assert own.digest != built_in.digest
    assert own.documents == 2


def test_own_files_without_usable_text_say_what_was_looked_at(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"looked at 1 files.*UTF-8"):
        load_corpus(HELD_OUT_TOKENS, own=[tmp_path])
    with pytest.raises(DataError, match="no such file"):
        load_corpus(HELD_OUT_TOKENS, own=[tmp_path / "missing"])


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000, 4097, 65536, 84_321])
def test_a_permutation_reaches_every_value_once(count: int) -> None:
    image = Permutation(count, b"key")(np.arange(count))
    assert np.array_equal(np.sort(image), np.arange(count))
    if count > 100:
        assert not np.array_equal(image, Permutation(count, b"other")(np.arange(count)))
        # neighbours are torn apart: no trace of the order is left
        assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.2


def plan(window_count: int = 10_000, per_member: int = 40, group_limit: int = 8, run_id: bytes = b"r" * 32) -> WindowPlan:
    return WindowPlan(run_id, window_count, per_member, group_limit)


def test_no_two_members_draw_the_same_window_in_a_round_nor_one_member_twice() -> None:
    for round_number in (0, 1, 30, 31, 32, 1000):
        drawn = np.concatenate([plan().windows(round_number, member, 0, 40) for member in range(8)])
        assert len(np.unique(drawn)) == 8 * 40


def test_no_window_is_drawn_twice_in_an_epoch_and_epochs_differ() -> None:
    rounds = plan().rounds_per_epoch
    assert rounds == 10_000 // 320
    drawn = np.concatenate([plan().windows(number, member, 0, 40) for number in range(rounds) for member in range(8)])
    assert len(np.unique(drawn)) == rounds * 320
    assert not np.array_equal(plan().windows(0, 0, 0, 40), plan().windows(rounds, 0, 0, 40))


def test_windows_are_a_pure_function_of_run_round_member_and_position() -> None:
    whole = plan().windows(5, 3, 0, 40)
    assert np.array_equal(whole[10:25], plan().windows(5, 3, 10, 15))
    assert not np.array_equal(whole, plan(run_id=b"s" * 32).windows(5, 3, 0, 40))
    assert whole[:4].tolist() == [6959, 7869, 4572, 4165]  # a promise: others recompute it


def test_a_text_too_small_for_the_group_is_shared_and_one_too_small_for_a_peer_refused() -> None:
    small = plan(window_count=130)  # three members of 40 windows each
    assert small.distinct_members == 3
    drawn = np.concatenate([small.windows(2, member, 0, 40) for member in range(3)])
    assert len(np.unique(drawn)) == 120
    assert np.array_equal(small.windows(2, 0, 0, 40), small.windows(2, 3, 0, 40))
    with pytest.raises(DataError, match="inner_steps x batch = 40"):
        plan(window_count=39)


def test_positions_and_members_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="exceed"):
        plan().windows(0, 0, 39, 2)
    with pytest.raises(ValueError, match="out of range"):
        plan().windows(0, 8, 0, 1)


def test_a_window_holds_inputs_and_shifted_targets() -> None:
    tokens = np.arange(21, dtype=np.uint16)
    assert count_windows(tokens, 5) == 4
    cut = cut_windows(tokens, 5, np.array([0, 3]))
    assert cut.tolist() == [[0, 1, 2, 3, 4, 5], [15, 16, 17, 18, 19, 20]]
    assert cut.dtype == np.int64


def test_held_out_windows_are_spread_evenly_and_too_many_refused() -> None:
    tokens = np.arange(101, dtype=np.uint16)
    assert held_out_windows(tokens, 10, 3)[:, 0].tolist() == [0, 30, 60]
    with pytest.raises(DataError, match="10 windows"):
        held_out_windows(tokens, 10, 11)


def test_batches_of_a_round_are_its_windows_in_order() -> None:
    tokens = np.arange(50_001, dtype=np.uint16)
    data = MemberData(plan(per_member=8), tokens, 5, 2, round_number=3, member_index=1)
    batches = np.concatenate([data.batch(step) for step in range(4)])
    assert np.array_equal(batches, cut_windows(tokens, 5, plan(per_member=8).windows(3, 1, 0, 8)))
