"""Saves and loads a trial's state with torch.distributed.checkpoint: every rank writes its part, any number reads it.

A checkpoint is written to a folder beside its place and renamed when all ranks are done, so what has the final name
is whole. Errors are the same on every rank: one that cannot write must not leave the others waiting.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from trainables.checkpoint_dir import PARTIAL_SUFFIX, is_complete, read_manifest, write_manifest
from trainables.errors import CheckpointError
from trainables.parallel import Worker


@dataclass
class TrainState:
    """All that a trial needs to go on. The learning rate and the position in the data are functions of the step.

    Attributes:
        model: The model without its parallel wrapper.
        optimizer: Over the model's parameters.
        step: Optimizer steps done.
        tokens: Tokens seen so far without padding, over all ranks.
        metrics: Values of the last report.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


def save_checkpoint(state: TrainState, path: Path, worker: Worker, notes: Mapping[str, Any] | None = None) -> None:
    """Writes a checkpoint; called on every rank. What was at the path before is replaced.

    Args:
        state: What to save.
        path: The final folder, on a file system that all ranks share.
        worker: This rank.
        notes: Kept in the manifest for whoever resumes.

    Raises:
        CheckpointError: A rank could not write; nothing is at the path then but what was there before.
    """
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    try:
        _on_rank_zero(lambda: _make_empty(partial), worker)
        _write(state, partial, worker)
        _on_rank_zero(lambda: _commit(state, partial, path, notes), worker)
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        if worker.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{path}: cannot be written: {_cause(error)}") from error


def _write(state: TrainState, partial: Path, worker: Worker) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(torch.distributed|TypedStorage).*")
        state_dict_saver.save(
            {
                **_model_and_optimizer(state),
                "rng": {_rng_key(worker): _rng_state(worker)},
                "progress": _progress(state),
            },
            checkpoint_id=partial,
            no_dist=worker.world_size == 1,
        )


def _commit(state: TrainState, partial: Path, path: Path, notes: Mapping[str, Any] | None) -> None:
    write_manifest(partial, state.step, state.metrics, notes)
    replaced = path.with_name(f"{path.name}.replaced{PARTIAL_SUFFIX}")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)


def load_checkpoint(state: TrainState, path: Path, worker: Worker) -> None:
    """Reads a checkpoint into a state; called on every rank, and the number of ranks may differ from the saving one.

    A rank that did not exist when it was saved keeps its own random state.

    Raises:
        CheckpointError: The checkpoint is not complete or does not fit the model or the optimizer.
    """
    if not is_complete(path):
        raise CheckpointError(f"{path}: not a complete checkpoint")
    try:
        _read(state, path, worker)
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        raise CheckpointError(f"{path}: cannot be read: {_cause(error)}") from error


def _read(state: TrainState, path: Path, worker: Worker) -> None:
    reader = FileSystemReader(path)
    key = _rng_key(worker)
    saved = _model_and_optimizer(state)
    saved["progress"] = _progress(state)
    if any(name.startswith(f"rng.{key}.") for name in reader.read_metadata().state_dict_metadata):
        saved["rng"] = {key: _rng_state(worker)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(torch.distributed|TypedStorage).*")
        state_dict_loader.load(saved, storage_reader=reader, no_dist=worker.world_size == 1)
    set_state_dict(state.model, state.optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    if "rng" in saved:
        _set_rng_state(saved["rng"][key], worker)
    state.step, state.tokens = saved["progress"].tolist()
    state.metrics = (read_manifest(path) or {}).get("metrics", {})


def _model_and_optimizer(state: TrainState) -> dict[str, Any]:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": model, "optimizer": optimizer}


def _progress(state: TrainState) -> torch.Tensor:
    return torch.tensor([state.step, state.tokens])


def _rng_key(worker: Worker) -> str:
    return f"rank_{worker.rank}"


def _rng_state(worker: Worker) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if worker.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(worker.device)
    return states


def _set_rng_state(states: dict[str, torch.Tensor], worker: Worker) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], worker.device)


def _on_rank_zero(action: Callable[[], None], worker: Worker) -> None:
    # The others wait, and learn of a failure.
    failure: list[str | None] = [None]
    if worker.rank == 0:
        try:
            action()
        except OSError as error:
            failure = [str(error)]
    if worker.world_size > 1:
        dist.broadcast_object_list(failure, src=0, device=worker.device)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _cause(error: BaseException) -> str:
    # torch lists every rank and its traceback; a user needs the first line of one reason.
    failures = getattr(error, "failures", None)
    reason = next(iter(failures.values()))[0] if failures else error
    return f"{reason}".strip().splitlines()[0] if f"{reason}".strip() else type(reason).__name__
