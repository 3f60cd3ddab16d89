"""The numbers of a model's architecture, as far as this machine knows them: no library is asked, no weight is read."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTE_LEVEL_VOCABULARY = 259
# What transformers takes for a number that an inline architecture leaves out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
              "intermediate_size": 22016},
    "qwen3": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
              "intermediate_size": 22016, "head_dim": 128},
    "llama": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "intermediate_size": 11008},
    "mistral": {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
                "intermediate_size": 14336},
    "gemma2": {"num_hidden_layers": 26, "hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4,
               "intermediate_size": 9216, "head_dim": 256, "tie_word_embeddings": True},
    "phi3": {"num_hidden_layers": 32, "hidden_size": 3072, "num_attention_heads": 32, "intermediate_size": 8192},
    "smollm3": {"num_hidden_layers": 36, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4,
                "intermediate_size": 11008, "tie_word_embeddings": True},
    "gpt2": {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "n_positions": 1024,
             "tie_word_embeddings": True},
}  # fmt: skip
_OTHER_NAMES = {
    "n_layer": "num_hidden_layers", "n_embd": "hidden_size", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "num_local_experts": "num_experts", "n_routed_experts": "num_experts",
}  # fmt: skip
# Other decoders have a gate beside the MLP's first matrix.
_WITHOUT_GATE = frozenset({"gpt2", "gpt_neox", "phi", "starcoder2"})


@dataclass(frozen=True)
class Architecture:
    """The numbers of a decoder of the shape of Llama's or GPT-2's.

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


def architecture_of(model: str | Mapping[str, Any], tokenizer: str | None = None) -> Architecture | None:
    """The numbers of a model.

    Args:
        model: An inline architecture, a local folder, or a hub id, which is looked for in the hub's cache.
        tokenizer: Gives an inline architecture its vocabulary.

    Returns:
        None where they are not known here.
    """
    if not isinstance(model, str):
        is_byte_level = tokenizer in (None, "byte-level")
        return _from_values(model, BYTE_LEVEL_VOCABULARY if is_byte_level else None)
    folder = model_folder(model)
    values = None if folder is None else _read_config(folder)
    return None if values is None else _from_values(values, None)


def model_folder(model: str) -> Path | None:
    """A folder by itself, or where the hub's cache keeps the model's newest version; None: it is not here."""
    if Path(model).is_dir():
        return Path(model)
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / f"models--{model.replace('/', '--')}"
    return max(cache.glob("snapshots/*"), key=lambda folder: folder.stat().st_mtime, default=None)


def _read_config(folder: Path) -> Mapping[str, Any] | None:
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _from_values(values: Mapping[str, Any], vocabulary: int | None) -> Architecture | None:
    given: dict[str, Any] = dict(values.get("text_config", values))
    model_type = str(given.get("model_type"))
    values = _DEFAULTS.get(model_type, {}) | {_OTHER_NAMES.get(key, key): value for key, value in given.items()}

    def number(*names: str) -> int | None:
        return next((int(values[name]) for name in names if isinstance(values.get(name), (int, float))), None)

    layers, hidden, heads = number("num_hidden_layers"), number("hidden_size"), number("num_attention_heads")
    vocabulary = number("vocab_size") or vocabulary
    if not layers or not hidden or not heads or not vocabulary:
        return None
    is_gpt2 = model_type == "gpt2"
    inner = number("moe_intermediate_size", "intermediate_size") or (4 * hidden if is_gpt2 else None)
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
        mlp_matrices=2 if model_type in _WITHOUT_GATE else 3,
        experts=(number("num_experts") or visited) / visited,
        vocabulary=vocabulary,
        positions=(number("n_positions") or 0) if is_gpt2 else 0,
        is_tied=bool(values.get("tie_word_embeddings", False)),
    )
