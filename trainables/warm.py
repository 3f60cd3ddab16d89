"""What outlives a trial in one worker process: the built model with its pristine weights, the tokenizer, the data."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainables.config import LoraConfig, TrainConfig
from trainables.data import Role, TokenStore, prepare
from trainables.lora import add_adapters, halve_frozen_layers, initialise_adapters, remove_adapters
from trainables.model import attention_kernel, build_model
from trainables.parallel import Parallelism, Worker, is_sharded, reshard, shard_of, transformer_layers
from trainables.sharded import build_sharded
from trainables.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Warm:
    """Hands out model, tokenizer and data; keeps them as long as what they depend on stays the same.

    A trial through a Warm gives bit for bit the losses of one in a fresh process: weights and buffers are copied back
    before it, adapters are as new over the same weights, and nothing else of the model is changed by training.

    Args:
        keep_weights: Keep a pristine copy of the weights for the next trial; needless for a single one.
    """

    def __init__(self, keep_weights: bool = True) -> None:
        self._keep_weights = keep_weights
        self._tokenizer: tuple[Any, PreTrainedTokenizerBase] | None = None
        self._model: tuple[Any, nn.Module] | None = None
        # Those that the model has now.
        self._adapters: LoraConfig | None = None
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

    def model(self, config: TrainConfig, worker: Worker, parallel: Parallelism = "ddp") -> nn.Module:
        """The model of a config, with fsdp a rank's part of it, with its initial weights and no gradients."""
        is_divided = parallel == "fsdp" and worker.world_size > 1
        key = _model_key(config, worker, is_divided)
        if self._model is not None and self._model[0] == key:
            self._restore(self._model[1], config)
            return self._prepared(self._model[1], config, worker)
        # The old one goes first: two may not fit.
        self._model, self._adapters, self._pristine_weights = None, None, []
        gc.collect()
        self._model = (key, self._build(config, worker, is_divided))
        model = self._prepared(self._model[1], config, worker)
        # The lazy imports of transformers and peft leave exceptions in cycles; their frames would keep this trial's
        # tensors alive.
        gc.collect()
        return model

    def _build(self, config: TrainConfig, worker: Worker, is_divided: bool) -> nn.Module:
        if is_divided:
            model = build_sharded(config, self.tokenizer(config), worker)
        else:
            model = build_model(config, self.tokenizer(config), worker.device)
        if config.compile:
            # One by one: they are alike, so that one of them is compiled and all run it.
            for layer in transformer_layers(model):
                layer.compile(dynamic=True)
        if self._keep_weights:
            self._pristine_buffers = [_host_copy(buffer) for buffer in model.buffers()]
        return model

    def _prepared(self, model: nn.Module, config: TrainConfig, worker: Worker) -> nn.Module:
        if config.lora is not None and config.lora == self._adapters:
            initialise_adapters(model, worker.device)
        elif config.lora is not None:
            add_adapters(model, config, worker.device)
            if _are_layers_halved(config) and not is_sharded(model):
                halve_frozen_layers(model)
            if config.compile:
                # Other adapters are other code to the compiler, which gives up after a few.
                torch.compiler.reset()
            self._adapters = config.lora
        elif self._keep_weights and not self._pristine_weights:
            self._pristine_weights = [_host_copy(shard_of(weight)) for weight in model.parameters()]
        return model

    def _restore(self, model: nn.Module, config: TrainConfig) -> None:
        assert self._keep_weights, "a Warm without pristine weights serves one trial"
        if config.lora != self._adapters:
            remove_adapters(model)
            self._adapters = None
        reshard(model)
        with torch.no_grad():
            _copy_back(model.buffers(), self._pristine_buffers)
            # Beside adapters they have stayed as they are.
            if self._pristine_weights and self._adapters is None:
                _copy_back(model.parameters(), self._pristine_weights)
        model.zero_grad(set_to_none=True)


def _are_layers_halved(config: TrainConfig) -> bool:
    # A callback may well use the model without autocast.
    return config.lora is not None and config.precision == "bf16" and not config.callbacks


def _copy_back(tensors: Iterable[torch.Tensor], pristine: list[torch.Tensor]) -> None:
    for tensor, copy in zip(tensors, pristine, strict=True):
        shard_of(tensor).copy_(copy, non_blocking=True)


def _model_key(config: TrainConfig, worker: Worker, is_divided: bool) -> tuple[Any, ...]:
    kernel = attention_kernel(config, worker.device)
    division = (config.precision, config.fsdp) if is_divided else None
    names = (config.model, config.tokenizer, config.trust_remote_code)
    return (*names, kernel, config.compile, str(worker.device), _are_layers_halved(config), division)


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    # Pinned, the copy back runs at the full speed of the bus.
    pin = tensor.device.type == "cuda"
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pin)
    return copy.copy_(tensor.detach())
