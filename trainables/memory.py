"""What a fine-tune takes of each worker's memory, from its config and the architecture's numbers. Imports no torch.

What is counted: weights, gradients and optimizer state in float32; what the forward pass keeps of every token for the
backward pass; the head's chunks and gradient (head.py). What is not: the libraries, the device context, and what an
allocator holds back. Decoders of
the shape of Llama's and GPT-2's are known. Measured on a CPU it was within a fifth.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainables.config import TrainConfig

FLOAT_BYTES, HALF_BYTES = 4, 2
# As many tokens a pass takes on a GPU where micro_batch_size is left open.
GPU_TOKENS_PER_PASS = 16_384
# What a chunk of logits may take. On a GPU each chunk costs a pass over the head's gradient, so there are few.
CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
_BYTE_LEVEL_VOCABULARY = 259


@dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder.

    Attributes:
        layers: Number of layers.
        hidden: Features of a token.
        queries: Features of all query heads.
        keys: Features of all key heads.
        heads: Query heads.
        inner: Features inside the MLP; of all experts that a token visits.
        mlp_matrices: 3 where the MLP is gated, else 2.
        experts: Experts of a layer to those that a token visits; 1: there are none.
        vocabulary: Words.
        positions: Learned positions; 0: none.
        is_tied: Whether head and embedding share their weights.
    """

    layers: int
    hidden: int
    queries: int
    keys: int
    heads: int
    inner: int
    mlp_matrices: int
    experts: float
    vocabulary: int
    positions: int
    is_tied: bool

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def layer_parameters(self) -> int:
        """Of the matrices of one layer."""
        attention = 2 * self.hidden * (self.queries + self.keys)
        return attention + round(self.mlp_matrices * self.hidden * self.inner * self.experts)

    @property
    def parameters(self) -> int:
        """All in all; biases and norms are left out."""
        embeddings = self.head_parameters * (1 if self.is_tied else 2) + self.positions * self.hidden
        return embeddings + self.layers * self.layer_parameters

    def lora_parameters(self, rank: int) -> int:
        """Of low-rank adapters on all matrices of the layers."""
        ins_and_outs = 4 * self.hidden + 2 * (self.queries + self.keys) + self.mlp_matrices * (self.hidden + self.inner)
        return self.layers * rank * ins_and_outs


@dataclass(frozen=True)
class Memory:
    """Bytes a worker; `peak` is the most at a time, which is less than the sum.

    Attributes:
        weights: In float32, and in bf16 what autocast makes of them.
        gradients: Of all that is trained.
        optimizer: Its state.
        activations: What the forward pass of `tokens` tokens keeps.
        head: Of the output head and the loss.
        tokens: Tokens of a pass.
        peak: When the forward pass ends, or the optimizer steps.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    tokens: int
    peak: int

    def __str__(self) -> str:
        parts = {name: getattr(self, name) for name in ("weights", "gradients", "optimizer", "activations", "head")}
        listed = ", ".join(f"{name} {_amount(value)}" for name, value in parts.items())
        return f"about {_amount(self.peak)} at most: {listed}, in passes of up to {self.tokens} tokens"


def estimate(
    config: TrainConfig,
    architecture: Architecture,
    *,
    world_size: int = 1,
    is_sharded: bool = False,
    device: str = "cuda",
    tokens: int | None = None,
) -> Memory:
    """What a fine-tune takes.

    Args:
        config: All that counts for memory.
        architecture: Of its model.
        world_size: Workers.
        is_sharded: Weights, gradients and optimizer are divided among the workers (FSDP).
        device: "cuda" or "cpu".
        tokens: Of a forward pass; None: as many as config allows, every example as long as max_length.
    """
    trained = architecture.parameters if config.lora is None else architecture.lora_parameters(config.lora.rank)
    adapters = 0 if config.lora is None else trained
    share = world_size if is_sharded else 1
    # Adapters are whole on every worker.
    share_of_trained = share if config.lora is None else 1
    tokens = tokens or tokens_per_pass(config, world_size, device)
    weights = architecture.parameters * FLOAT_BYTES // share + adapters * FLOAT_BYTES
    weights += _working_copies(config, architecture, is_sharded)
    if config.lora is not None and config.precision == "bf16" and not is_sharded:
        # The layers are kept in bfloat16 alone.
        weights -= architecture.layers * architecture.layer_parameters * FLOAT_BYTES
    gradients = trained * FLOAT_BYTES // share_of_trained
    optimizer = round(trained * _optimizer_bytes(config)) // share_of_trained
    activations, head = _activations(config, architecture, tokens), _head(config, architecture, tokens, device)
    holds_gradients = world_size > 1 or _accumulates(config, world_size, device)
    in_forward = activations + head + (gradients if holds_gradients else 0)
    peak = weights + optimizer + max(in_forward, gradients)
    return Memory(weights, gradients, optimizer, activations, head, tokens, peak)


def tokens_per_pass(config: TrainConfig, world_size: int, device: str) -> int:
    """The most tokens of a forward pass."""
    share = math.ceil(config.batch_size / world_size)
    if config.micro_batch_size is not None:
        return min(share, config.micro_batch_size) * config.max_length
    most = share * config.max_length
    return most if device == "cpu" else min(most, max(GPU_TOKENS_PER_PASS, config.max_length))


def _accumulates(config: TrainConfig, world_size: int, device: str) -> bool:
    return tokens_per_pass(config, world_size, device) < math.ceil(config.batch_size / world_size) * config.max_length


def _working_copies(config: TrainConfig, architecture: Architecture, is_sharded: bool) -> int:
    # Autocast keeps a copy of every matrix for the backward pass; FSDP gathers a layer, and the next one ahead.
    size = HALF_BYTES if config.precision == "bf16" else FLOAT_BYTES
    if is_sharded:
        return size * (2 * architecture.layer_parameters + 2 * architecture.head_parameters)
    return HALF_BYTES * architecture.layers * architecture.layer_parameters if config.precision == "bf16" else 0


def _optimizer_bytes(config: TrainConfig) -> float:
    """For each trained parameter."""
    if config.optimizer == "adamw":
        return 2 * FLOAT_BYTES
    if config.optimizer == "sgd":
        return FLOAT_BYTES if config.beta1 else 0.0
    # Rows and columns of its second moment.
    return 0.01 * FLOAT_BYTES


def _activations(config: TrainConfig, architecture: Architecture, tokens: int) -> int:
    """What is kept of all layers, and what is under way when the backward pass begins."""
    layer, layers = tokens * _bytes_per_token(config, architecture), architecture.layers
    kept_input = tokens * architecture.hidden * FLOAT_BYTES
    under_way = tokens * max(4 * architecture.hidden, 3 * architecture.inner) * FLOAT_BYTES
    if config.gradient_checkpointing == "full":
        return round(layers * kept_input + layer + under_way)
    if config.gradient_checkpointing == "selective":
        return round(layers / 2 * (kept_input + layer) + under_way)
    return round(layers * layer + under_way)


def _bytes_per_token(config: TrainConfig, architecture: Architecture) -> float:
    """What one layer keeps of a token for its backward pass."""
    matrix = HALF_BYTES if config.precision == "bf16" else FLOAT_BYTES
    # Both norms: their input, the normalised one and the output; under autocast the output once more.
    norms = 6 * architecture.hidden * FLOAT_BYTES
    norms += 2 * architecture.hidden * HALF_BYTES if config.precision == "bf16" else 0
    # Queries, keys and values, what attention gives, and that in the order of the row.
    attention: float = (3 * architecture.queries + 2 * architecture.keys) * matrix
    if config.attention == "eager":
        attention += architecture.heads * config.max_length * FLOAT_BYTES
    elif config.packing is not False:
        # Examples of like length are filled up to the longest of them.
        attention *= 1.1
    mlp = (architecture.mlp_matrices + 1) * architecture.inner * matrix
    return norms + attention + mlp


def _head(config: TrainConfig, architecture: Architecture, tokens: int, device: str) -> int:
    is_half = config.precision == "bf16"
    logits = tokens * architecture.vocabulary * FLOAT_BYTES
    chunk = round(logits / math.ceil(logits / CHUNK_BYTES[device]) * (1.5 if is_half else 1))
    hidden = 2 * tokens * architecture.hidden * FLOAT_BYTES
    weight = architecture.head_parameters * HALF_BYTES if is_half else 0
    gradient = 0 if config.lora is not None else architecture.head_parameters * FLOAT_BYTES + weight
    return chunk + hidden + weight + gradient


# -- the architecture of a model, as far as this machine knows it ------------------------------------------------


def architecture_of(config: TrainConfig) -> Architecture | None:
    """The numbers of a config's model: inline, from a local folder, or from the hub's cache; None: not known here."""
    values = config.model if isinstance(config.model, dict) else _read_config(config.model)
    is_byte_level = isinstance(config.model, dict) and config.tokenizer in (None, "byte-level")
    return None if values is None else _from_values(values, _BYTE_LEVEL_VOCABULARY if is_byte_level else None)


def _read_config(model: str) -> Mapping[str, Any] | None:
    for path in (Path(model) / "config.json", *_cached(model)):
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(values, dict):
            return values
    return None


def _cached(model: str) -> list[Path]:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
    return sorted(cache.glob("snapshots/*/config.json"))


def _from_values(values: Mapping[str, Any], vocabulary: int | None) -> Architecture | None:
    values = values.get("text_config", values)

    def number(*names: str) -> int | None:
        return next((int(values[name]) for name in names if isinstance(values.get(name), (int, float))), None)

    layers, hidden = number("num_hidden_layers", "n_layer"), number("hidden_size", "n_embd")
    heads, vocabulary = number("num_attention_heads", "n_head"), number("vocab_size") or vocabulary
    if not layers or not hidden or not heads or not vocabulary:
        return None
    is_gpt2 = values.get("model_type") == "gpt2"
    inner = number("moe_intermediate_size", "intermediate_size", "n_inner") or (4 * hidden if is_gpt2 else None)
    if inner is None:
        return None
    head_size = number("head_dim") or hidden // heads
    visited = number("num_experts_per_tok") or 1
    return Architecture(
        layers=layers,
        hidden=hidden,
        queries=heads * head_size,
        keys=(number("num_key_value_heads") or heads) * head_size,
        heads=heads,
        inner=inner * visited,
        mlp_matrices=2 if is_gpt2 else 3,
        experts=(number("num_experts", "num_local_experts", "n_routed_experts") or visited) / visited,
        vocabulary=vocabulary,
        positions=(number("n_positions") or 1024) if is_gpt2 else 0,
        is_tied=bool(values.get("tie_word_embeddings", is_gpt2)),
    )


def _amount(num_bytes: float) -> str:
    unit, name = (1 << 30, "GiB") if num_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{num_bytes / unit:.3g} {name}"
