"""Room for checkpoints: how much a study will need, as far as that can be known, and whether it is there."""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainables.architecture import architecture_of, model_folder
from trainables.checkpoint_dir import read_manifest
from tuner.errors import InputError
from tuner.study_file.spec import StudySpec

# Weights, and AdamW's two moments, in float32.
BYTES_PER_PARAMETER = 12


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
    parameters = count_parameters(spec.train.get("model"), spec.train.get("tokenizer")) if is_known else None
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


def count_parameters(model: Any, tokenizer: str | None = None) -> int | None:
    """Parameters of a model: from the headers of its safetensors files, else from the numbers of its architecture.

    Args:
        model: A folder, a hub id that is in the cache, or an inline architecture.
        tokenizer: Gives an inline architecture its vocabulary.

    Returns:
        None where they cannot be known, or only with torch.
    """
    if not isinstance(model, (str, Mapping)):
        return None
    folder = model_folder(model) if isinstance(model, str) else None
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    architecture = architecture_of(model, tokenizer)
    return sum(map(_count_in, files)) or (None if architecture is None else architecture.parameters)


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
