"""Saves and loads a trial's state with torch.distributed.checkpoint: every rank writes its part, any number reads it.

A checkpoint is written to a folder beside its place and renamed when all ranks are done, so what has the final name
is whole. Errors are the same on every rank: one that cannot write must not leave the others waiting.

`save_checkpoint` returns when all is written; `saver.CheckpointSaver` writes beside the loop.
"""

from __future__ import annotations

import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as load_distributed
from torch.distributed.checkpoint import save as save_distributed
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from trainables.checkpoint_dir import PARTIAL_SUFFIX, is_complete, keep_last, read_manifest, write_manifest
from trainables.errors import CheckpointError
from trainables.parallel import Worker
from trainables.shares import own_share

# What torch says at every save and load of a single process.
NOISE = ".*(torch.distributed|TypedStorage).*"


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


@dataclass(frozen=True)
class Draft:
    """A checkpoint on its way to disk.

    Attributes:
        path: The final folder, in one that exists.
        step: Optimizer steps done.
        metrics: Values of the last report.
        notes: Kept in the manifest for whoever resumes.
        keep: How many complete checkpoints to leave beside it in the end; None: all.
        protected: Checkpoints that stay in any case.
        is_abandoned: Set when nobody wants it any more; it is then given up at the next tensor.
    """

    path: Path
    step: int
    metrics: Mapping[str, float]
    notes: Mapping[str, Any] = field(default_factory=dict)
    keep: int | None = None
    protected: Collection[Path] = ()
    is_abandoned: threading.Event = field(default_factory=threading.Event)


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
    draft = Draft(path, state.step, state.metrics, notes or {})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NOISE)
        write(draft, lambda: contents(state, worker), worker)


def contents(state: TrainState, worker: Worker) -> dict[str, Any]:
    """What this rank writes of a state: tensors in nested mappings, live ones. Every rank's random state is its own."""
    replicated = {**_model_and_optimizer(state), "progress": _progress(state)}
    return {**own_share(replicated, worker.rank, worker.world_size), "rng": {_rng_key(worker): _rng_state(worker)}}


def write(
    draft: Draft, contents: Callable[[], dict[str, Any]], worker: Worker, group: dist.ProcessGroup | None = None
) -> None:
    """Writes a checkpoint from this rank's contents; called on every rank, in whichever thread.

    Args:
        draft: Where to, and what its manifest says.
        contents: Makes what this rank writes; where it raises, all ranks fail.
        worker: This rank.
        group: The processes' own group for this, where collectives of other threads may run; the default one else.

    Raises:
        CheckpointError: A rank could not write; nothing is at the path then but what was there before.
    """
    path, partial = draft.path, draft.path.with_name(draft.path.name + PARTIAL_SUFFIX)
    try:
        _on_rank_zero(lambda: _make_empty(partial, parents=group is None), worker, group)
        _write_files(partial, _Planner(contents, draft.is_abandoned), worker, group)
        _on_rank_zero(lambda: _commit(draft, partial), worker, group)
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        if worker.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"{path}: cannot be written: {_cause(error)}") from error
