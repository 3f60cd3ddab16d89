"""Models: from the hub, from a folder, or an inline architecture with random weights. Single-device code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.progress import Bar, bars_told

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Not the trial's seed: all trials of a study start from equal weights.
_WEIGHTS_SEED = 0
# Names that older configs use and transformers translates.
_LEGACY_KEYS = frozenset({"rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype"})


def build_model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> nn.Module:
    """Builds the model with float32 weights, the same on every rank and for every seed.

    Args:
        config: The model, the attention kernel and whether remote code may run.
        tokenizer: Gives an inline architecture its vocabulary.
        device: Where the weights go.

    Raises:
        ValueError: The model cannot be loaded, or does not fit the tokenizer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_WEIGHTS_SEED)
        model: Any = _load_model(config, tokenizer)
    num_embeddings = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > num_embeddings:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model only {num_embeddings}")
    model.config.use_cache = False
    placed: nn.Module = model.to(device)
    return placed


def _load_model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": config.trust_remote_code}
    if config.attention != "auto":
        options["attn_implementation"] = config.attention
    try:
        if isinstance(config.model, dict):
            architecture = inline_architecture(config.model, tokenizer)
            return AutoModelForCausalLM.from_config(architecture, **options)  # type: ignore[no-untyped-call]
        with bars_told(f"loads {config.model}"):
            return AutoModelForCausalLM.from_pretrained(config.model, tqdm_class=Bar, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"model {_name_of(config.model)} cannot be loaded: {error}") from error


def _name_of(model: str | dict[str, Any]) -> str:
    return repr(model) if isinstance(model, str) else f"of type {model['model_type']!r}"


def inline_architecture(architecture: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The transformers config of an inline architecture; vocabulary and special tokens are the tokenizer's when absent.

    Raises:
        ValueError: model_type or a key is unknown to transformers.
    """
    from transformers import AutoConfig

    model_type = architecture["model_type"]
    vocab_size = architecture.get("vocab_size", len(tokenizer))
    if vocab_size < len(tokenizer):
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, vocab_size is {vocab_size}")
    given = {key: value for key, value in architecture.items() if key != "model_type"}
    known = AutoConfig.for_model(model_type)
    unknown = sorted(key for key in given if not hasattr(known, key) and key not in _LEGACY_KEYS)
    if unknown:
        raise ValueError(f"unknown keys {', '.join(unknown)}")
    from_tokenizer = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    result: PretrainedConfig = AutoConfig.for_model(model_type, **(from_tokenizer | given))
    return result


def set_gradient_checkpointing(model: Any, mode: str) -> None:
    """Switches recomputation of activations: in every layer (full), every second (selective), or off (none).

    Raises:
        ValueError: The model does not support it.
    """
    if model.is_activation_checkpointing:
        model.activation_checkpointing_disable()
    if mode != "none":
        model.activation_checkpointing_enable(every_n_layers=2 if mode == "selective" else 1)


def max_positions(model: Any) -> int | None:
    """The longest input a model has positions for, in tokens; None where it does not say."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None
