"""Batches: a pure function of seed and step, dealt out to ranks without loss."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.tiny import tiny_config, write_texts
from trainables.batches import IGNORED, collate, make_batch, split_batch, train_indices
from trainables.data import TokenStore, prepare
from trainables.tokenizer import byte_level_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    folder = tmp_path_factory.mktemp("batches")
    config = tiny_config(write_texts(folder / "texts.jsonl"))
    return prepare(config, "train", folder / "cache", byte_level_tokenizer)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 11])
def test_every_example_is_seen_once_an_epoch_and_every_batch_is_full(batch_size: int) -> None:
    batches = [train_indices(0, step, batch_size, 11) for step in range(11)]
    assert {len(batch) for batch in batches} == {batch_size}
    stream = np.concatenate(batches)
    for epoch in range(len(stream) // 11):
        assert sorted(stream[epoch * 11 : (epoch + 1) * 11]) == list(range(11))


def test_the_order_depends_on_the_seed_and_the_epoch() -> None:
    first, other_seed = train_indices(0, 0, 50, 50), train_indices(1, 0, 50, 50)
    next_epoch = train_indices(0, 1, 50, 50)
    assert first.tolist() != other_seed.tolist()
    assert first.tolist() != next_epoch.tolist()
    assert first.tolist() == train_indices(0, 0, 50, 50).tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, 64])
@pytest.mark.parametrize("num", [1, 2, 7, 16])
def test_a_batch_is_dealt_out_without_loss(world_size: int, micro_batch_size: int, num: int) -> None:
    indices = np.random.default_rng(0).permutation(100)[:num]
    lengths = np.random.default_rng(1).integers(2, 50, num)
    dealt = split_batch(indices, lengths, world_size, micro_batch_size)
    assert len(dealt) == world_size
    assert len({len(passes) for passes in dealt}) == 1
    groups = [group for passes in dealt for group in passes]
    assert max(len(group) for group in groups) <= micro_batch_size
    assert sorted(np.concatenate(groups)) == sorted(indices)


def test_examples_of_like_length_share_a_pass() -> None:
    lengths = np.array([2, 90, 3, 80, 4, 85, 5, 95])
    dealt = split_batch(np.arange(8), lengths, 2, 2)
    padded = sum(len(group) * lengths[group].max() for passes in dealt for group in passes)
    assert padded == 2 * (95 + 85 + 5 + 3)


def test_padding_and_the_prompt_are_not_targets(store: TokenStore) -> None:
    indices = np.arange(8)
    micro_batch = collate(store, indices, CPU)
    assert micro_batch.tokens_BT.shape == (8, store.lengths[:8].max() - 1)
    for row, index in enumerate(indices):
        tokens, _ = store.example(int(index))
        targets = micro_batch.targets_BT[row]
        assert targets[: len(tokens) - 1].tolist() == tokens[1:].tolist()
        assert (targets[len(tokens) - 1 :] == IGNORED).all()


def test_an_empty_share_has_one_position_and_no_target(store: TokenStore) -> None:
    batch = make_batch(store, np.arange(1), rank=1, world_size=2, micro_batch_size=4, device=CPU)
    [micro_batch] = batch.micro_batches
    assert micro_batch.tokens_BT.shape == (1, 1)
    assert (micro_batch.targets_BT == IGNORED).all()
    assert batch.num_targets == store.num_targets[0]


def test_the_totals_are_those_of_all_ranks(store: TokenStore) -> None:
    batches = [make_batch(store, np.arange(7), rank, 2, 2, CPU) for rank in range(2)]
    in_passes = sum(
        int((micro_batch.targets_BT != IGNORED).sum()) for batch in batches for micro_batch in batch.micro_batches
    )
    assert {batch.num_targets for batch in batches} == {in_passes}
    assert {batch.num_tokens for batch in batches} == {int(store.lengths[:7].sum())}
