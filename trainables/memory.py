"""What a fine-tune takes of each worker's memory, from its config and the architecture's numbers. Imports no torch.

What is counted: weights, gradients and optimizer state in float32; what the forward pass keeps of every token for the
backward pass; the head's chunks and gradient (cross_entropy.py). What is not: the libraries, the device context, and
what an allocator holds back. Measured on a CPU it was within a fifth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainables.architecture import Architecture
from trainables.config import TrainConfig

FLOAT_BYTES, HALF_BYTES = 4, 2
# As many tokens a pass takes on a GPU where micro_batch_size is left open.
GPU_TOKENS_PER_PASS = 16_384
# What a chunk of logits may take. On a GPU each chunk costs a pass over the head's gradient, so there are few.
CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}


@dataclass(frozen=True)
class Memory:
    """Bytes a worker; `peak` is the most at a time, which is less than the sum.

    Where FSDP keeps its shards in host memory, those are not counted.

    Attributes:
        weights: In float32, and in bf16 what autocast makes of them.
        gradients: Of all that is trained; a worker's part with FSDP, but all where they wait for later passes.
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
    if is_sharded and device == "cuda" and config.fsdp is not None and config.fsdp.cpu_offload:
        weights -= architecture.parameters * FLOAT_BYTES // share
        gradients, optimizer = (0, 0) if config.lora is None else (gradients, optimizer)
    if is_sharded and _keeps_whole_gradients(config, world_size, device):
        gradients = trained * FLOAT_BYTES
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


def _keeps_whole_gradients(config: TrainConfig, world_size: int, device: str) -> bool:
    """Whether FSDP divides gradients only after the last pass of a step; until then they are on the device."""
    is_every_pass = config.fsdp is not None and config.fsdp.reduce_every_pass
    return config.lora is None and not is_every_pass and _accumulates(config, world_size, device)


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


def _amount(num_bytes: float) -> str:
    unit, name = (1 << 30, "GiB") if num_bytes >= 1 << 30 else (1 << 20, "MiB")
    return f"{num_bytes / unit:.3g} {name}"
