"""Examples in one row: the same losses and gradients as apart, and no way from one to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.tiny import CPU as WORKER
from tests.tiny import MODEL, tiny_config, write_texts
from trainables.batches import Batch, make_batch, split_packed
from trainables.config import TrainConfig
from trainables.data import TokenStore, prepare
from trainables.finetune import token_loss_sum
from trainables.model import build_model
from trainables.packing import IMPLEMENTATION, pack, set_packing
from trainables.tokenizer import byte_level_tokenizer
from tuner.record.study_dir import read_spec, write_spec
from tuner.study_file.spec import load_spec

CPU = torch.device("cpu")
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "embd_pdrop": 0,
    "attn_pdrop": 0,
    "resid_pdrop": 0,
}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MISTRAL = SMALL | {"model_type": "mistral", "num_key_value_heads": 2}
MAMBA = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 1, "state_size": 4}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": MODEL,
    "llama": SMALL | {"model_type": "llama", "tie_word_embeddings": False},
    "gpt2": GPT2,
    "gemma3": SMALL | {"model_type": "gemma3_text", "head_dim": 8, "num_key_value_heads": 1},
    "window": MISTRAL | {"sliding_window": 16},
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("packing")
    return tiny_config(write_texts(folder / "texts.jsonl", num=16))


@pytest.fixture(scope="module")
def store(config: TrainConfig) -> TokenStore:
    return prepare(config, "train", Path(config.dataset.path).parent / "cache", byte_level_tokenizer)


def batch_of(store: TokenStore, *, micro_batch_size: int, is_packed: bool) -> Batch:
    return make_batch(store, np.arange(8), 0, 1, micro_batch_size, CPU, is_packed=is_packed)


def loss_and_gradients(
    model: nn.Module, batch: Batch, config: TrainConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad(set_to_none=True)
    loss = torch.stack([token_loss_sum(model, micro_batch, config) for micro_batch in batch.micro_batches]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_row_has_the_loss_and_the_gradients_of_its_examples_apart(
    config: TrainConfig, store: TokenStore, name: str, attention: str
) -> None:
    config = config.with_params({"model": ARCHITECTURES[name], "attention": attention, "packing": True})
    model = build_model(config, byte_level_tokenizer(), CPU)
    assert set_packing(model, config, WORKER)
    assert model.config._attn_implementation == (  # type: ignore[union-attr]
        IMPLEMENTATION if attention == "sdpa" and name != "window" else attention
    )
    loss, gradients = loss_and_gradients(model, batch_of(store, micro_batch_size=8, is_packed=True), config)
    assert not set_packing(model, config.with_params({"packing": False}), WORKER)
    expected, apart = loss_and_gradients(model, batch_of(store, micro_batch_size=1, is_packed=False), config)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradients, apart, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_token_sees_another_example(config: TrainConfig, attention: str) -> None:
    config = config.with_params({"attention": attention, "packing": True})
    model = build_model(config, byte_level_tokenizer(), CPU)
    set_packing(model, config, WORKER)
    packed, places = pack([9, 7, 7, 2], CPU), torch.arange(25)
    of_example = torch.repeat_interleave(torch.arange(4), torch.tensor(packed.lengths))
    embedded = torch.randn(1, 25, MODEL["hidden_size"], requires_grad=True)  # type: ignore[arg-type]
    logits = model(inputs_embeds=embedded, **packed.inputs).logits[0]
    for place in range(25):
        [gradient] = torch.autograd.grad(logits[place].square().sum(), embedded, retain_graph=True)
        seen = gradient[0].abs().sum(1) > 0
        assert seen.tolist() == ((of_example == of_example[place]) & (places <= place)).tolist()


def test_a_model_that_cannot_be_packed_is_refused_or_padded(config: TrainConfig) -> None:
    config = config.with_params({"model": MAMBA})
    model = build_model(config, byte_level_tokenizer(), CPU)
    assert not set_packing(model, config, WORKER)
    with pytest.raises(ValueError, match="packing: MambaForCausalLM cannot be packed: its tokens see those of other"):
        set_packing(model, config.with_params({"packing": True}), WORKER)


def test_auto_leaves_alone_what_would_become_slow(config: TrainConfig) -> None:
    for params in ({"attention": "eager"}, {"compile": True}, {"model": MISTRAL | {"sliding_window": 127}}):
        model = build_model(config.with_params(params), byte_level_tokenizer(), CPU)
        assert not set_packing(model, config.with_params(params), WORKER)
        assert set_packing(model, config.with_params(params | {"packing": True}), WORKER)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch_size", [1, 3, 64])
@pytest.mark.parametrize("num", [1, 7, 16])
def test_a_batch_is_dealt_out_by_tokens(world_size: int, micro_batch_size: int, num: int) -> None:
    indices = np.random.default_rng(0).permutation(100)[:num]
    lengths = np.random.default_rng(1).integers(2, 50, 100)
    dealt = split_packed(indices, lengths[indices], world_size, micro_batch_size)
    assert len(dealt) == world_size
    assert {len(passes) for passes in dealt} == {-(-num // (world_size * micro_batch_size))}
    groups = [group for passes in dealt for group in passes]
    assert max(len(group) for group in groups) <= micro_batch_size
    assert sorted(np.concatenate(groups)) == sorted(indices)
    assert all((np.diff(lengths[group]) <= 0).all() for group in groups)
    if micro_batch_size == 64:
        tokens = [lengths[group].sum() for group in groups]
        assert max(tokens) - min(tokens) <= 50


def test_a_study_made_before_packing_goes_on_without(tmp_path: Path, demo_file: Path) -> None:
    spec = load_spec(demo_file)
    assert spec.train["packing"] == "auto"
    train = {key: value for key, value in spec.train.items() if key != "packing"}
    write_spec(tmp_path / "spec.json", spec.model_copy(update={"train": train}))
    assert read_spec(tmp_path).train_config(spec.default_params()).packing is False
