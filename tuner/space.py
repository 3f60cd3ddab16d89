"""Room for checkpoints: how much a study will need, as far as that can be known, and whether it is there."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainables.checkpoint_dir import read_manifest
from tuner.errors import InputError
from tuner.spec import StudySpec

# Weights, and AdamW's two moments, in float32.
BYTES_PER_PARAMETER = 12
# Of the tokenizer that an inline architecture gets where nothing is said: a token a byte, and three more.
BYTE_LEVEL_VOCABULARY = 259


def check_room(spec: StudySpec, root: Path, num_slots: int) -> None:
    """See that the checkpoints of a study will fit, where the size of its model is known from files or the study file.

    Args:
        spec: The study.
        root: Where studies live; need not exist yet.
        num_slots: Trials at once.

    Raises:
        InputError: They will not.
    """
    # Adapters are small beside the model, and saved without it.
    is_known = not spec.is_custom and spec.train.get("lora") is None
    parameters = count_parameters(spec.train.get("model")) if is_known else None
    if parameters is None:
        return
    each = parameters * BYTES_PER_PARAMETER
    needed, free = num_kept(spec, num_slots) * each, free_bytes(root)
    if needed > free:
        raise InputError(
            f"checkpoint: {num_kept(spec, num_slots)} checkpoints of {gigabytes(each)} each need "
            f"{gigabytes(needed)}, {root} has {gigabytes(free)} free",
            "Make room, choose another --root, or keep fewer: --set checkpoint.keep_best_trials=1",
        )


def num_kept(spec: StudySpec, num_slots: int) -> int:
    """Checkpoints on disk at the most: each slot's, one more while it writes, and those of the best trials."""
    return num_slots * (spec.checkpoint.keep_last + 1) + spec.checkpoint.keep_best_trials


def count_parameters(model: Any) -> int | None:
    """Parameters of a model: from the headers of its safetensors files, else from the numbers of its architecture.

    Args:
        model: A folder, a hub id that is in the cache, or an inline architecture.

    Returns:
        None where they cannot be known, or only with torch.
    """
    if isinstance(model, dict):
        return architecture_parameters(model)
    folder = _folder_of(model) if isinstance(model, str) else None
    if folder is None:
        return None
    return sum(map(_count_in, sorted(folder.glob("*.safetensors")))) or architecture_parameters(_config_in(folder))


def architecture_parameters(config: Mapping[str, Any]) -> int | None:
    """The parameters of a decoder like Llama's or GPT-2's, without biases and norms; None where a number is missing."""
    hidden = config.get("hidden_size") or config.get("n_embd")
    layers = config.get("num_hidden_layers") or config.get("n_layer")
    if not isinstance(hidden, int) or not isinstance(layers, int):
        return None
    heads = config.get("num_attention_heads") or config.get("n_head") or 1
    of_keys = (config.get("num_key_value_heads") or heads) / heads
    inner = config.get("intermediate_size") or config.get("n_inner") or 4 * hidden
    is_gated = "n_embd" not in config
    layer = hidden * hidden * (2 + 2 * of_keys) + hidden * inner * (3 if is_gated else 2)
    is_tied = config.get("tie_word_embeddings", not is_gated)
    embeddings = (config.get("vocab_size") or BYTE_LEVEL_VOCABULARY) * hidden * (1 if is_tied else 2)
    return int(layers * layer + embeddings)


def _folder_of(model: str) -> Path | None:
    """A folder by itself, or where the hub's cache keeps a model."""
    if Path(model).is_dir():
        return Path(model)
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = sorted((cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*"))
    return snapshots[-1] if snapshots else None


def _config_in(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def free_bytes(path: Path) -> int:
    """Free bytes on the file system of a folder that may not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.absolute().parent
    return shutil.disk_usage(path).free


def checkpoint_bytes(path: Path) -> int:
    """Size of a complete checkpoint, from its manifest; 0 where there is none."""
    return sum((read_manifest(path) or {"files": {}})["files"].values())


def gigabytes(size: int) -> str:
    """A size as people say it."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _count_in(file: Path) -> int:
    # Eight bytes of length, then that much JSON: {name: {dtype, shape, data_offsets}, ...}.
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
