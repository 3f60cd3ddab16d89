"""Low-rank adapters (Hu et al., 2021, https://arxiv.org/abs/2106.09685) beside frozen weights, through peft."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from trainables.config import LoraConfig, TrainConfig

# Not the trial's seed: trials of equal rank start from equal adapters.
_ADAPTERS_SEED = 0


def add_adapters(model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Freezes a model's weights and puts adapters beside them, in place; the model must have none.

    The initial adapters are the same on every rank and device and for every seed, and change no output. Beside the
    weights of a model in shards they are whole on every rank.

    Raises:
        ValueError: target_modules names a layer that is not there or cannot have an adapter.
    """
    assert config.lora is not None, "add_adapters is for configs with lora"
    _check_layers(model, config.lora)
    from peft import inject_adapter_in_model

    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(peft_config(config), model)
    initialise_adapters(model, device)


def initialise_adapters(model: nn.Module, device: torch.device) -> None:
    """Makes a model's adapters as new, in place."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_ADAPTERS_SEED)
        for _, adapted in _adapted_layers(model):
            _initialise(adapted.lora_A["default"], adapted.lora_B["default"], device)


def _initialise(down: nn.Linear, up: nn.Linear, device: torch.device) -> None:
    # As peft does, but on the host for every device, and in float32 whatever the layer beside them has.
    initial = nn.init.kaiming_uniform_(torch.empty(down.weight.shape), a=math.sqrt(5))
    down.to(device, torch.float32).weight.data.copy_(initial)
    nn.init.zeros_(up.to(device, torch.float32).weight)


def remove_adapters(model: nn.Module) -> None:
    """Takes the adapters out of a model again, in place; its own weights are as they were, and trained as before."""
    for name, adapted in _adapted_layers(model):
        model.set_submodule(name, adapted.get_base_layer())
    if hasattr(model, "peft_config"):
        del model.peft_config
        model.requires_grad_(True)


def merge_adapters(model: nn.Module) -> None:
    """Makes the adapters part of the model's weights, in place."""
    for _, adapted in _adapted_layers(model):
        adapted.merge()
    remove_adapters(model)


def halve_frozen_layers(model: nn.Module) -> None:
    """Keeps the weights beside adapters in bfloat16, in place, to which autocast would round them in every pass.

    No loss changes by a bit. Without autocast the model cannot be used then.
    """
    for _, adapted in _adapted_layers(model):
        adapted.get_base_layer().to(torch.bfloat16)


def _adapted_layers(model: nn.Module) -> list[tuple[str, Any]]:
    # peft takes seconds to import, and a model without adapters has no need of it.
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def peft_config(config: TrainConfig) -> Any:
    """The adapters of a config in peft's own terms."""
    import peft

    lora = config.lora or LoraConfig()
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=config.model if isinstance(config.model, str) else None,
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=lora.layers,
    )


def _check_layers(model: Any, lora: LoraConfig) -> None:
    # peft refuses a list only where none of its names is found, and would adapt a head that is tied to the embedding.
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    linear = [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    for target in [] if isinstance(lora.layers, str) else lora.layers:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ValueError(f"lora.target_modules: no layer {target!r} that can have an adapter; there are: {known}")
