"""A checkpoint as a Hugging Face folder: model, tokenizer and generation config, for `from_pretrained`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file

from trainables.checkpoint import load_weights
from trainables.config import TrainConfig
from trainables.lora import add_adapters, merge_adapters
from trainables.model import build_model
from trainables.progress import Stage, bars_told
from trainables.tokenizer import load_tokenizer
from trainables.train_state import trained

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

# Letters, composed and not, digits, white space, punctuation and another script: what tokenizers treat unlike.
_SAMPLE = "Hello wOrld's  e\u0301\u00e9 12345\n\n\tx_y(z) != \u4f60\u597d\U0001f916 "
Dtype = Literal["float32", "bfloat16", "float16"]


def export(
    config: TrainConfig, checkpoint: Path, folder: Path, *, dtype: Dtype = "float32", merge: bool = True
) -> None:
    """Writes what a fine-tune has learned as transformers or, without `merge`, peft loads it. Takes host memory only.

    Args:
        config: The fine-tune; its attention kernel need not be here.
        checkpoint: Of that fine-tune, saved by any number of ranks.
        folder: Where to; must exist.
        dtype: Of the weights. float32 is what was trained: the model has the reported loss. Another one rounds it.
        merge: Adapters become part of the weights; else they alone are written.

    Raises:
        ValueError: The model or the tokenizer cannot be had, transformers refuses to save the model, or adapters of an
            inline architecture are to stand alone.
        CheckpointError: The checkpoint cannot be read.
        OSError: The folder cannot be written.
    """
    if config.lora is not None and not merge and isinstance(config.model, dict):
        raise ValueError("adapters alone need a model that can be loaded by its name; this one is inline")
    config = config.with_params({"attention": "auto"})
    tokenizer = load_tokenizer(config)
    host = torch.device("cpu")
    model: Any = build_model(config, tokenizer, host)
    if config.lora is not None:
        add_adapters(model, config, host)
    Stage(f"reads {checkpoint}")
    load_weights(model, checkpoint)
    try:
        tokenizer.save_pretrained(folder)
        if config.lora is not None and not merge:
            _save_adapters(model, config, folder, dtype)
        else:
            _save_model(model, tokenizer, folder, dtype)
            _warn_of_another_tokenizer(tokenizer, folder, config)
    except ValueError:
        raise
    except Exception as error:  # tokenizers and safetensors have errors of their own for a full disk
        raise OSError(str(error)) from error


def _save_model(model: Any, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: Dtype) -> None:
    merge_adapters(model)
    model.to(getattr(torch, dtype))
    model.config.use_cache = True
    _stop_where_examples_end(model, tokenizer)
    _allow_sampling(model.generation_config)
    with bars_told("writes the model"):
        model.save_pretrained(folder)


def _save_adapters(model: Any, config: TrainConfig, folder: Path, dtype: Dtype) -> None:
    # As PeftModel.save_pretrained writes them, whose names have two wrappers more and no name of an adapter.
    weights = {
        f"base_model.model.{name.replace('.default.', '.')}": weight.to(getattr(torch, dtype)).contiguous()
        for name, weight in trained(model, model.state_dict()).items()
    }
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    adapters = model.peft_config["default"]
    adapters.inference_mode = True
    if Path(str(config.model)).exists():
        adapters.base_model_name_or_path = str(Path(str(config.model)).absolute())
    adapters.save_pretrained(folder)


def _stop_where_examples_end(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Has generation stop at the token that closed each example, also where the tokenizer is not the model's own."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends] if ends is not None else []
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        model.generation_config.eos_token_id = [tokenizer.eos_token_id, *ends]


def _allow_sampling(generation: Any) -> None:
    """Switches sampling on where a model brings values for it and does not: transformers loads but never saves that."""
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


def _warn_of_another_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, config: TrainConfig) -> None:
    # Beside some models, Qwen2 among them, transformers takes any tokenizer for the model's own kind.
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=config.trust_remote_code)
    if loaded(_SAMPLE)["input_ids"] != tokenizer(_SAMPLE)["input_ids"]:
        logger.warning(
            "%s: AutoTokenizer does not load the tokenizer as it was trained with; "
            "load it with transformers.PreTrainedTokenizerFast.from_pretrained",
            folder,
        )
