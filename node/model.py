"""The model of a run: built from the run file's `[model].config`, and the tensors of it that peers exchange.

The one rule: a tensor is exchanged once, in fp32, in the order of its name. Tied weights count once, under the name
that `named_parameters` gives them first; frozen parameters and buffers are never exchanged. No remote code is run.
The agreed weights are put in by copy, never by adding a difference, which would not be bit-exact.

transformers costs two seconds and 150 MB to import, so it is imported inside the functions that build a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import psutil
import torch
from torch import nn

from sparseloco.bootstrap.errors import HardwareError, RunFileError, nearest
from sparseloco.compression.layout import TensorSpec

# weights, gradients, two AdamW moments and the error feedback in fp32: what training holds at the very least
BYTES_PER_PARAMETER = 20
# Keys that would run foreign code, or choose another precision than the fp32 that peers agree on.
FOREIGN_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")
PRECISION_KEYS = ("dtype", "torch_dtype", "quantization_config")

Theta = Mapping[str, torch.Tensor]  # canonical name -> fp32 tensor; every consumer goes through it sorted by name


def build_model(config: Mapping[str, Any]) -> nn.Module:
    """A causal language model with fresh fp32 weights on the CPU, drawn from torch's current random state.

    RunFileError says which key of `[model].config` is wrong; HardwareError that the model cannot fit this machine.
    Next: `load_theta` puts the agreed weights in.
    """
    parameters = count_parameters(config)
    memory_bytes = psutil.virtual_memory().total
    if parameters * BYTES_PER_PARAMETER > memory_bytes:
        raise HardwareError(
            f"[model].config gives {parameters:,} parameters, which need at least "
            f"{parameters * BYTES_PER_PARAMETER / 1e9:.1f} GB to train; this machine has {memory_bytes / 1e9:.1f} GB "
            "of memory: join a smaller run, or use a larger machine"
        )
    return _construct(config, "cpu")


def count_parameters(config: Mapping[str, Any]) -> int:
    """How many parameters `build_model` would make, tied ones once, found without allocating any of them."""
    return sum(parameter.numel() for parameter in _construct(config, "meta").parameters())


def config_specs(config: Mapping[str, Any]) -> list[TensorSpec]:
    """Name and shape of every tensor that such a model exchanges, found without allocating any of them."""
    return tensor_specs(_construct(config, "meta"))


def _construct(config: Mapping[str, Any], device: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    checked = transformers_config(config)
    try:
        with torch.device(device):
            model: nn.Module = AutoModelForCausalLM.from_config(checked)
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError, AssertionError, KeyError, AttributeError) as error:
        # Whatever a model's constructor trips over, it is the values of this table: transformers checks few of them.
        raise RunFileError(
            f"[model].config of model_type {config['model_type']!r} builds no causal language model: {error}; "
            "correct the shapes, or take a preset from `sparseloco-node init`"
        ) from error
    return model.float()


def transformers_config(config: Mapping[str, Any]) -> Any:
    """The transformers configuration object of a `[model].config` table; RunFileError names key, rule and remedy."""
    from transformers import AutoConfig

    settings = dict(config)
    model_type = settings.pop("model_type", None)
    if not isinstance(model_type, str):
        raise RunFileError("[model].config has no model_type; set one that transformers knows, such as 'llama'")
    for key in settings:
        if key in FOREIGN_CODE_KEYS:
            raise RunFileError(f"[model].config.{key} would run foreign code, which is never done; remove it")
        if key in PRECISION_KEYS:
            raise RunFileError(f"[model].config.{key} is not allowed: peers agree on fp32 weights; remove it")
    try:
        known = AutoConfig.for_model(model_type)
    except ValueError:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

        raise RunFileError(
            f"[model].config.model_type {model_type!r} is not known to this transformers{nearest(model_type, CONFIG_MAPPING_NAMES)}"
        ) from None
    names = set(known.to_dict()) | set(known.attribute_map) | set(vars(known))
    for key in settings:
        if key not in names:
            raise RunFileError(
                f"[model].config.{key} is not a setting of {model_type!r}"
                f"{nearest(key, (name for name in names if not name.startswith('_')))}; correct or remove it"
            )
    try:
        built = AutoConfig.for_model(model_type, **settings)
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError) as error:
        raise RunFileError(f"[model].config is refused by transformers: {error}; correct the value") from error
    except Exception as error:
        # transformers 5 validates with huggingface_hub's own error tree, which older versions do not have.
        if type(error).__module__.split(".")[0] != "huggingface_hub":
            raise
        raise RunFileError(f"[model].config is refused by transformers: {error}; correct the value") from error
    built.use_cache = False  # training and evaluation never continue a sequence
    return built


def trainable_tensors(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of every exchanged tensor in canonical order: sorted by name, tied once, frozen left out."""
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return sorted(found, key=lambda item: item[0])


def tensor_specs(model: nn.Module) -> list[TensorSpec]:
    """Name and shape of every exchanged tensor in canonical order, as the codec wants them."""
    return [TensorSpec(name, tuple(parameter.shape)) for name, parameter in trainable_tensors(model)]


def copy_theta(model: nn.Module) -> dict[str, torch.Tensor]:
    """A CPU copy of the model's exchanged tensors, independent of the model."""
    return {
        name: parameter.detach().to("cpu", torch.float32, copy=True).contiguous() for name, parameter in trainable_tensors(model)
    }


def load_theta(model: nn.Module, theta: Theta) -> None:
    """Put the agreed weights into the model by copy; ValueError (our fault) if names or shapes are not the model's."""
    tensors = trainable_tensors(model)
    if set(theta) != {name for name, _ in tensors}:
        odd = set(theta) ^ {name for name, _ in tensors}
        raise ValueError(f"theta and model differ in {len(odd)} tensors, such as {min(odd)!r}")
    for name, parameter in tensors:
        if theta[name].shape != parameter.shape:
            raise ValueError(f"{name}: theta has shape {tuple(theta[name].shape)}, the model {tuple(parameter.shape)}")
    with torch.no_grad():
        for name, parameter in tensors:
            parameter.copy_(theta[name])
