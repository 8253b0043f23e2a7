"""Models from a run file's table: what is exchanged, what is refused."""

import os
import subprocess
import sys

import psutil
import pytest
import torch

from sparseloco.bootstrap.errors import HardwareError, RunFileError
from sparseloco.node.model import build_model, copy_theta, count_parameters, load_theta, tensor_specs, trainable_tensors

SMALL = {
    "model_type": "llama",
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def test_tensors_are_sorted_by_name_and_tied_ones_count_once() -> None:
    model = build_model(SMALL)
    names = [name for name, _ in trainable_tensors(model)]
    assert names == sorted(names)
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert sum(spec.elements for spec in tensor_specs(model)) == count_parameters(SMALL)
    untied = [name for name, _ in trainable_tensors(build_model({**SMALL, "tie_word_embeddings": False}))]
    assert "lm_head.weight" in untied


def test_everything_exchanged_is_fp32_and_frozen_tensors_and_buffers_are_not() -> None:
    model = build_model(SMALL)
    model.get_parameter("model.norm.weight").requires_grad_(False)
    tensors = trainable_tensors(model)
    assert all(parameter.dtype == torch.float32 for _, parameter in tensors)
    assert "model.norm.weight" not in dict(tensors)
    assert not {name for name, _ in model.named_buffers()} & set(dict(tensors))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2", "vocab_size": 259, "n_embd": 32, "n_layer": 2, "n_head": 4},
        {"model_type": "qwen2", **{key: value for key, value in SMALL.items() if key != "model_type"}},
    ],
)
def test_other_architectures_build_too(config: dict[str, object]) -> None:
    model = build_model(config)
    logits = model(input_ids=torch.zeros(1, 4, dtype=torch.int64)).logits
    assert logits.shape == (1, 4, 259)


def test_load_theta_copies_bit_for_bit_and_checks_names_and_shapes() -> None:
    model, other = build_model(SMALL), build_model(SMALL)
    theta = copy_theta(other)
    load_theta(model, theta)
    assert all(torch.equal(parameter, theta[name]) for name, parameter in trainable_tensors(model))
    theta["model.norm.weight"] += 1  # theta is not the model's memory
    assert not torch.equal(dict(trainable_tensors(model))["model.norm.weight"], theta["model.norm.weight"])
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        load_theta(model, {name: tensor for name, tensor in theta.items() if name != "model.norm.weight"})
    with pytest.raises(ValueError, match="shape"):
        load_theta(model, {**theta, "model.norm.weight": torch.zeros(1)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "lama"}, ["model_type", "'lama'", "llama"]),
        ({"model_type": None}, ["model_type"]),
        ({"hiden_size": 64}, ["hiden_size", "did you mean 'hidden_size'"]),
        ({"auto_map": {"AutoModel": "x--y"}}, ["auto_map", "foreign code"]),
        ({"torch_dtype": "bfloat16"}, ["torch_dtype", "fp32"]),
        ({"hidden_size": "wide"}, ["hidden_size"]),
        ({"num_attention_heads": 5}, ["heads"]),
        ({"hidden_size": -8}, ["[model].config"]),
        ({"model_type": "vit", "hidden_size": 32}, ["vit"]),
    ],
)
def test_a_bad_config_is_refused_naming_the_key(change: dict[str, object], words: list[str]) -> None:
    config = {**SMALL, **change} if change.get("model_type") != "vit" else change
    with pytest.raises(RunFileError) as refusal:
        build_model(config)
    for word in words:
        assert word in str(refusal.value)


def test_a_model_beyond_this_machines_memory_is_refused_before_it_is_built() -> None:
    before = psutil.Process().memory_info().rss
    with pytest.raises(HardwareError, match="memory"):
        build_model({**SMALL, "hidden_size": 65536, "intermediate_size": 262144, "num_hidden_layers": 64})
    assert psutil.Process().memory_info().rss - before < 200e6


def test_a_node_process_with_the_tiny_model_starts_fast_and_small() -> None:
    """The bounds leave room for a busy machine; the measured figures are in docs and the modules' docstrings."""
    program = (
        "import time, psutil\n"
        "started = time.monotonic()\n"
        "import torch; torch.set_num_threads(1)\n"
        "from sparseloco.bootstrap.run_file import TINY_MODEL\n"
        "from sparseloco.node import checkpoints, corpus, evaluate, genesis, inner_loop, model, store, windows\n"
        "genesis.make_genesis(TINY_MODEL, 0)\n"
        "print(time.monotonic() - started, psutil.Process().memory_info().rss / 2**20)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment).stdout
    seconds, megabytes = map(float, output.split())
    print(f"imports and genesis: {seconds:.2f} s, {megabytes:.0f} MB")
    assert seconds < 20
    assert megabytes < 700
