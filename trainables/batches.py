"""Batches as a pure function of (seed, step): the position in the data is the step, so a resume needs nothing else.

Examples come in epochs, each a permutation of its own; a batch takes the next batch_size of that endless stream, so
every batch is full and every example is seen once an epoch. A forward pass takes its examples end to end in one row,
or, where they cannot be packed, padded and of like length. Neither changes anything, as the loss is a sum over tokens.

Shapes: B rows, T positions.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.data import TokenStore
from trainables.packing import Packed, pack, to_device

Indices = NDArray[np.int64]

IGNORED = -100


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass takes.

    Attributes:
        tokens_BT: Token ids: one row of several examples, or an example a row, padded on the right; under causal
            attention no real token sees the padding.
        targets_BT: The token after each position, or IGNORED where it does not count (prompt, padding).
        packed: Where the examples of one row lie; None: an example a row.
    """

    tokens_BT: torch.Tensor
    targets_BT: torch.Tensor
    packed: Packed | None = None

    @property
    def num_examples(self) -> int:
        """Examples in it."""
        return len(self.tokens_BT) if self.packed is None else len(self.packed.lengths)

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model takes to return the loss."""
        extra = {} if self.packed is None else self.packed.inputs
        return {"input_ids": self.tokens_BT, "targets_BT": self.targets_BT, **extra}


@dataclass(frozen=True)
class Batch:
    """One optimizer step's examples as one rank sees them.

    Attributes:
        micro_batches: This rank's forward passes; as many on every rank. One without examples has no targets.
        num_targets: Target tokens of the whole batch, over all ranks.
        num_tokens: Tokens of the whole batch without padding, over all ranks.
    """

    micro_batches: list[MicroBatch]
    num_targets: int
    num_tokens: int


def train_indices(seed: int, step: int, batch_size: int, num_examples: int) -> Indices:
    """The examples of one optimizer step.

    Args:
        seed: Of the order of examples.
        step: Optimizer steps done before it.
        batch_size: Examples over all ranks.
        num_examples: Size of the training set.
    """
    positions = np.arange(step * batch_size, (step + 1) * batch_size)
    epochs, places = np.divmod(positions, num_examples)
    return np.concatenate(
        [_epoch_order(seed, int(epoch), num_examples)[places[epochs == epoch]] for epoch in np.unique(epochs)]
    )


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, num_examples: int) -> Indices:
    return np.random.default_rng([seed, epoch]).permutation(num_examples)


def split_batch(indices: Indices, lengths: Indices, world_size: int, micro_batch_size: int) -> list[list[Indices]]:
    """Deals a batch out to ranks and forward passes.

    Args:
        indices: The examples of the batch.
        lengths: Length of each of these examples.
        world_size: Number of ranks.
        micro_batch_size: Most examples in one forward pass.

    Returns:
        For each rank its forward passes, as many on every rank; with fewer examples than ranks some are empty.
    """
    num_passes = -(-len(indices) // (world_size * micro_batch_size))
    by_length = indices[np.argsort(-lengths, kind="stable")]
    groups = np.array_split(by_length, num_passes * world_size)
    # Back and forth, so that no rank gets the longer group of every pass.
    order = [
        rank if turn % 2 == 0 else world_size - 1 - rank for turn in range(num_passes) for rank in range(world_size)
    ]
    dealt: list[list[Indices]] = [[] for _ in range(world_size)]
    for rank, group in zip(order, groups, strict=True):
        dealt[rank].append(group)
    return dealt


def split_packed(indices: Indices, lengths: Indices, world_size: int, micro_batch_size: int) -> list[list[Indices]]:
    """Deals a batch out to ranks and forward passes, each of about as many tokens.

    Args:
        indices: The examples of the batch.
        lengths: Length of each of these examples.
        world_size: Number of ranks.
        micro_batch_size: Most examples in one forward pass.

    Returns:
        For each rank its forward passes, as many on every rank, the longest example of a pass first.
    """
    num_passes = -(-len(indices) // (world_size * micro_batch_size))
    dealt: list[list[list[int]]] = [[[] for _ in range(num_passes)] for _ in range(world_size)]
    fewest = [(0, turn, rank) for turn in range(num_passes) for rank in range(world_size)]
    for place in np.argsort(-lengths, kind="stable"):
        tokens, turn, rank = heapq.heappop(fewest)
        dealt[rank][turn].append(int(indices[place]))
        if len(dealt[rank][turn]) < micro_batch_size:
            heapq.heappush(fewest, (tokens + int(lengths[place]), turn, rank))
    return [[np.array(group, dtype=np.int64) for group in passes] for passes in dealt]


def make_batch(
    store: TokenStore,
    indices: Indices,
    rank: int,
    world_size: int,
    micro_batch_size: int,
    device: torch.device,
    *,
    is_packed: bool = False,
) -> Batch:
    """Builds one rank's part of a batch.

    Args:
        store: The examples.
        indices: The examples of the whole batch.
        rank: Whose part.
        world_size: Number of ranks.
        micro_batch_size: Most examples in one forward pass.
        device: Where the tensors go.
        is_packed: Lay the examples of a pass end to end in one row instead of padding them.
    """
    lengths = store.starts[indices + 1] - store.starts[indices]
    split, lay_out = (split_packed, collate_packed) if is_packed else (split_batch, collate)
    groups = split(indices, lengths, world_size, micro_batch_size)[rank]
    return Batch(
        micro_batches=[lay_out(store, group, device) for group in groups],
        num_targets=int(store.num_targets[indices].sum()),
        num_tokens=int(lengths.sum()),
    )


def collate(store: TokenStore, indices: Indices, device: torch.device) -> MicroBatch:
    """Pads examples to the longest of them.

    Without examples the result is one position without a target: a rank whose share is empty runs it all the same and
    takes part in the collectives with a gradient of zero.
    """
    examples = [store.example(int(index)) for index in indices]
    longest = max((len(tokens) for tokens, _ in examples), default=2) - 1
    tokens_BT = np.zeros((max(len(examples), 1), longest), dtype=np.int64)
    targets_BT = np.full_like(tokens_BT, IGNORED)
    for row, (tokens, counts) in enumerate(examples):
        tokens_BT[row, : len(tokens) - 1] = tokens[:-1]
        targets_BT[row, : len(tokens) - 1] = np.where(counts[1:], tokens[1:].astype(np.int64), IGNORED)
    return MicroBatch(to_device(tokens_BT, device), to_device(targets_BT, device))


def collate_packed(store: TokenStore, indices: Indices, device: torch.device) -> MicroBatch:
    """Lays examples, the longest first, end to end in one row; without any it is one position without a target."""
    examples = [store.example(int(index)) for index in indices]
    if not examples:
        return replace(collate(store, indices, device), packed=pack([1], device))
    tokens_T = np.concatenate([tokens[:-1] for tokens, _ in examples]).astype(np.int64)
    targets_T = np.concatenate([tokens[1:] for tokens, _ in examples]).astype(np.int64)
    counts_T = np.concatenate([counts[1:] for _, counts in examples])
    targets_T = np.where(counts_T, targets_T, IGNORED)
    packed = pack([len(tokens) - 1 for tokens, _ in examples], device)
    return MicroBatch(to_device(tokens_T[None], device), to_device(targets_T[None], device), packed)
