"""What outlives a trial in one worker process: the built model with its pristine weights, the tokenizer, the data."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.data import Role, TokenStore, prepare
from trainables.lora import add_adapters, halve_frozen_layers, remove_adapters
from trainables.model import build_model
from trainables.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Warm:
    """Hands out model, tokenizer and data; keeps them as long as what they depend on stays the same.

    A trial through a Warm gives bit for bit the losses of one in a fresh process: weights and buffers are copied back
    before it, adapters are made anew over the same weights, and nothing else of the model is changed by training.

    Args:
        keep_weights: Keep a pristine copy of the weights for the next trial; needless for a single one.
    """

    def __init__(self, keep_weights: bool = True) -> None:
        self._keep_weights = keep_weights
        self._tokenizer: tuple[Any, PreTrainedTokenizerBase] | None = None
        self._model: tuple[Any, nn.Module] | None = None
        self._pristine_buffers: list[torch.Tensor] = []
        # Taken when a trial is about to train all weights: beside adapters they stay as they are.
        self._pristine_weights: list[torch.Tensor] = []
        self._data: dict[Role, tuple[Any, TokenStore]] = {}

    def tokenizer(self, config: TrainConfig) -> PreTrainedTokenizerBase:
        """The tokenizer of a config."""
        key = (config.tokenizer, config.model, config.trust_remote_code)
        if self._tokenizer is None or self._tokenizer[0] != key:
            self._tokenizer = (key, load_tokenizer(config))
        return self._tokenizer[1]

    def data(self, config: TrainConfig, role: Role, cache_dir: Path) -> TokenStore:
        """The tokenised examples of a config."""
        dataset = config.dataset
        if role == "eval":
            dataset = dataset.model_copy(update={"limit": None})
        key = (dataset, config.max_length, config.response_only, config.tokenizer, config.model, cache_dir)
        if role not in self._data or self._data[role][0] != key:
            self._data[role] = (key, prepare(config, role, cache_dir, lambda: self.tokenizer(config)))
        return self._data[role][1]

    def model(self, config: TrainConfig, device: torch.device) -> nn.Module:
        """The model of a config with its initial weights and no gradients."""
        names = (config.model, config.tokenizer, config.trust_remote_code, config.attention)
        key = (*names, config.compile, str(device), _are_layers_halved(config))
        if self._model is not None and self._model[0] == key:
            self._restore(self._model[1])
            return self._prepared(self._model[1], config)
        # The old one goes first: two may not fit.
        self._model, self._pristine_weights = None, []
        self._model = (key, self._build(config, device))
        model = self._prepared(self._model[1], config)
        # The lazy imports of transformers and peft leave exceptions in cycles; their frames would keep this trial's
        # tensors alive.
        gc.collect()
        return model

    def _build(self, config: TrainConfig, device: torch.device) -> nn.Module:
        model = build_model(config, self.tokenizer(config), device)
        if config.compile:
            model.compile(dynamic=True)
        if self._keep_weights:
            self._pristine_buffers = [_host_copy(buffer) for buffer in model.buffers()]
        return model

    def _prepared(self, model: nn.Module, config: TrainConfig) -> nn.Module:
        if config.lora is not None:
            add_adapters(model, config)
            if _are_layers_halved(config):
                halve_frozen_layers(model)
            if config.compile:
                # Other adapters are other code to the compiler, which gives up after a few.
                torch.compiler.reset()
        elif self._keep_weights and not self._pristine_weights:
            self._pristine_weights = [_host_copy(weight) for weight in model.parameters()]
        return model

    def _restore(self, model: nn.Module) -> None:
        assert self._keep_weights, "a Warm without pristine weights serves one trial"
        remove_adapters(model)
        with torch.no_grad():
            _copy_back(model.buffers(), self._pristine_buffers)
            if self._pristine_weights:
                _copy_back(model.parameters(), self._pristine_weights)
        model.zero_grad(set_to_none=True)


def _are_layers_halved(config: TrainConfig) -> bool:
    # A callback may well use the model without autocast.
    return config.lora is not None and config.precision == "bf16" and not config.callbacks


def _copy_back(tensors: Iterable[torch.Tensor], pristine: list[torch.Tensor]) -> None:
    for tensor, copy in zip(tensors, pristine, strict=True):
        tensor.copy_(copy, non_blocking=True)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    # Pinned, the copy back runs at the full speed of the bus.
    pin = tensor.device.type == "cuda"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
    return copy.copy_(tensor.detach())
