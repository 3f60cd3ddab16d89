"""Models: from the hub, from a folder, or an inline architecture with random weights. Single-device code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.head import add_token_loss
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
        config: The model, its precision, the attention kernel and whether remote code may run.
        tokenizer: Gives an inline architecture its vocabulary.
        device: Where the weights go.

    Raises:
        ValueError: The model cannot be loaded, or does not fit the tokenizer.
    """
    model: nn.Module = _load(config, tokenizer, device, _load_model)
    model.to(device)
    add_token_loss(model, device, is_bf16=config.precision == "bf16")
    return model


def build_skeleton(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device) -> nn.Module:
    """Builds the model with its parameters on the meta device: all of it but the weights.

    Args:
        config: As for `build_model`.
        tokenizer: As for `build_model`.
        device: Where it will run.

    Raises:
        ValueError: The model cannot be had, or does not fit the tokenizer.
    """
    with _parameters_on_meta():
        model: nn.Module = _load(config, tokenizer, device, _load_architecture)
    return model


def _load(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, device: torch.device, load: Callable[..., Any]
) -> Any:
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": config.trust_remote_code}
    if config.attention != "auto":
        options["attn_implementation"] = config.attention
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_WEIGHTS_SEED)
        try:
            model = load(config, tokenizer, options)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(f"model {_name_of(config.model)} cannot be loaded: {error}") from error
    num_embeddings = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > num_embeddings:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model only {num_embeddings}")
    model.config.use_cache = False
    kernel = attention_kernel(config, device)
    if config.attention == "auto" and kernel is not None and model._supports_flash_attn:
        model.set_attn_implementation(kernel)
    return model


def _load_model(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> Any:
    from transformers import AutoModelForCausalLM

    if isinstance(config.model, dict):
        return _load_architecture(config, tokenizer, options)
    with bars_told(f"loads {config.model}"):
        return AutoModelForCausalLM.from_pretrained(config.model, tqdm_class=Bar, **options)


def _load_architecture(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if isinstance(config.model, dict):
        architecture = inline_architecture(config.model, tokenizer)
    else:
        architecture = AutoConfig.from_pretrained(config.model, trust_remote_code=config.trust_remote_code)
    return AutoModelForCausalLM.from_config(architecture, **options)  # type: ignore[no-untyped-call]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters that are made meanwhile have a shape and no memory; buffers are computed as ever."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def attention_kernel(config: TrainConfig, device: torch.device) -> str | None:
    """What computes attention; None: what transformers takes for the model, which is sdpa where it can.

    On a GPU, in bfloat16, `auto` is the newest FlashAttention that is installed and runs there.
    """
    if config.attention != "auto":
        return config.attention
    if device.type != "cuda" or config.precision != "bf16":
        return None
    from transformers.utils.import_utils import is_flash_attn_2_available, is_flash_attn_3_available

    if is_flash_attn_3_available() and torch.cuda.get_device_capability(device)[0] == 9:
        return "flash_attention_3"
    return "flash_attention_2" if is_flash_attn_2_available() else None


@contextmanager
def without_packed_rows() -> Iterator[None]:
    """Spares transformers the search for packed examples in each batch's positions, for which a GPU must be waited."""
    from transformers import masking_utils

    search = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = search


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
