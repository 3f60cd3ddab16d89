"""The numbers of a model are those of the one that transformers builds, whatever its file leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trainables.architecture import BYTE_LEVEL_VOCABULARY, architecture_of
from trainables.tokenizer import byte_level_tokenizer

SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN2 = {"model_type": "qwen2", "intermediate_size": 256, **SMALL}
PLAIN = ("qwen2", "qwen3", "llama", "gemma2", "phi3", "smollm3", "gpt2")
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": QWEN2,
    "tied": QWEN2 | {"tie_word_embeddings": True},
    "vocabulary": QWEN2 | {"vocab_size": 5000},
    "mlp left out": {"model_type": "qwen2", **SMALL},
    "key heads left out": {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2},
    "almost all left out": {"model_type": "mistral", "num_hidden_layers": 1},
    "head size": QWEN2 | {"model_type": "llama", "head_dim": 64},
    "experts": QWEN2
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "mixtral": QWEN2 | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 4},
    "gpt2 by other names": {"model_type": "gpt2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "no gate": {"model_type": "phi", "intermediate_size": 256, **SMALL},
    "starcoder2": {"model_type": "starcoder2", "intermediate_size": 256, "tie_word_embeddings": True, **SMALL},
    **{
        f"plain {name}": {"model_type": name}
        for name in ("qwen2", "qwen3", "llama", "gemma2", "phi3", "smollm3", "gpt2")
    },
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_counted_as_torch_counts_them(name: str) -> None:
    given = ARCHITECTURES[name]
    known = architecture_of(given)
    assert known is not None
    numbers = {"vocab_size": BYTE_LEVEL_VOCABULARY, "pad_token_id": None, "eos_token_id": 1, "bos_token_id": 1, **given}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**numbers))
    assert known.parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)


def test_the_vocabulary_that_is_counted_is_the_built_in_tokenizers() -> None:
    assert len(byte_level_tokenizer()) == BYTE_LEVEL_VOCABULARY


@pytest.mark.parametrize(
    ("model", "tokenizer"),
    [
        ({"model_type": "unheard-of", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}, None),
        ({"model_type": "unheard-of"}, None),
        (QWEN2, "org/tokenizer"),
        ("org/model", None),
    ],
)
def test_what_is_not_known_is_not_guessed_at(model: Any, tokenizer: str | None) -> None:
    assert architecture_of(model, tokenizer) is None


def test_the_numbers_come_from_a_local_folder_or_from_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "0123"
    for folder in (tmp_path / "model", snapshot):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(QWEN2 | {"vocab_size": 1000}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    assert architecture_of(str(tmp_path / "model")) == architecture_of("org/model") is not None
    assert architecture_of("org/other") is None
