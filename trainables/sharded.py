"""A model in shards: built without memory, divided, and filled tensor by tensor, so that no rank holds it twice.

Where the model is a folder of safetensors, each rank reads its own rows of every tensor from there. Else rank 0 has
the whole model in host memory once, and sends it out one tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainables.config import TrainConfig
from trainables.head import add_token_loss
from trainables.model import build_model, build_skeleton
from trainables.parallel import Worker, fsdp, reshard, shard_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def build_sharded(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, worker: Worker) -> nn.Module:
    """Builds the model of `build_model`, divided among the ranks: the same weights, bit for bit.

    Args:
        config: The model, its precision and how it is divided.
        tokenizer: Gives an inline architecture its vocabulary.
        worker: This rank; called on all of them.

    Raises:
        ValueError: The model cannot be loaded, or does not fit the tokenizer; on every rank alike.
    """
    model = fsdp(build_skeleton(config, tokenizer, worker.device), config, worker)
    offloads = config.fsdp is not None and config.fsdp.cpu_offload
    weights_device = torch.device("cpu") if offloads else worker.device
    # As `to_empty`, which would empty the buffers too.
    model._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device=weights_device) if tensor.is_meta else tensor
    )
    files = tensor_files(config.model) if isinstance(config.model, str) else {}
    with torch.no_grad():
        if holds_all_of(files, model):
            read_shards(model, files)
        else:
            receive_shards(model, config, tokenizer, worker)
    add_token_loss(model, worker.device, is_bf16=config.precision == "bf16")
    reshard(model)
    return model


def _rows(tensor: torch.Tensor) -> slice:
    """Which rows of the whole this rank holds."""
    if not isinstance(tensor, DTensor):
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return slice(offset[0], offset[0] + shape[0])


def saved_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint of the model holds, by name; of tied tensors only the first."""
    seen: set[torch.Tensor] = set()
    parameters = dict(model.named_parameters())
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor not in seen and (name in parameters or not isinstance(tensor, nn.Parameter)):
            seen.add(tensor)
            yield name, tensor


def tensor_files(model: str) -> dict[str, Path]:
    """The safetensors file of each tensor of a hub model or a folder, by the tensor's name there.

    Empty where the model has no such files, or where they cannot be had: then loading it says why.
    """
    import json

    from safetensors import safe_open
    from transformers.utils.hub import cached_file

    def find(name: str) -> Path | None:
        found = cached_file(model, name, _raise_exceptions_for_missing_entries=False)
        return None if found is None else Path(found)

    try:
        index, single = find(_INDEX), find(_SINGLE)
        if index is not None:
            names: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            paths = {file: find(file) for file in set(names.values())}
            return {name: path for name, file in names.items() if (path := paths[file]) is not None}
        if single is not None:
            with safe_open(single, "pt") as opened:
                return dict.fromkeys(opened.keys(), single)
    except OSError:
        pass
    return {}


def holds_all_of(files: Mapping[str, Path], model: nn.Module) -> bool:
    """Whether the files hold the model's tensors as they are: each by its name, in its shape, and no others."""
    from safetensors import safe_open

    needed = dict(saved_tensors(model))
    if not needed.keys() <= files.keys() or not files.keys() <= model.state_dict().keys():
        return False
    shapes: dict[str, tuple[int, ...]] = {}
    for path in set(files.values()):
        with safe_open(path, "pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return all(shapes[name] == tuple(tensor.shape) for name, tensor in needed.items())


def read_shards(model: nn.Module, files: Mapping[str, Path]) -> None:
    """Reads this rank's rows of every tensor."""
    from safetensors import safe_open

    by_file: dict[Path, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in saved_tensors(model):
        by_file.setdefault(files[name], []).append((name, tensor))
    for path, tensors in by_file.items():
        with safe_open(path, "pt") as opened:
            for name, tensor in tensors:
                if (shard := shard_of(tensor)).numel():
                    saved = opened.get_slice(name)
                    shard.copy_(saved[_rows(tensor)] if saved.get_shape() else opened.get_tensor(name))


def receive_shards(model: nn.Module, config: TrainConfig, tokenizer: PreTrainedTokenizerBase, worker: Worker) -> None:
    """Has rank 0 build the model and send it to all, one tensor at a time."""
    whole = _built_on_rank_zero(config, tokenizer, worker)
    for name, tensor in saved_tensors(model):
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=worker.device)
        if worker.rank == 0:
            full.copy_(whole[name])
        dist.broadcast(full, src=0)
        shard_of(tensor).copy_(full[_rows(tensor)] if full.ndim else full)


def _built_on_rank_zero(
    config: TrainConfig, tokenizer: PreTrainedTokenizerBase, worker: Worker
) -> Mapping[str, torch.Tensor]:
    # The others wait, and learn of a failure.
    whole: dict[str, Any] = {}
    failure: list[str | None] = [None]
    if worker.rank == 0:
        try:
            whole = build_model(config, tokenizer, torch.device("cpu")).state_dict()
        except ValueError as error:
            failure = [str(error)]
    dist.broadcast_object_list(failure, src=0, device=worker.device)
    if failure[0] is not None:
        raise ValueError(failure[0])
    return whole
