"""Saves and loads a trial's state with torch.distributed.checkpoint: every rank writes its part, any number reads it.

A checkpoint is written to a folder beside its place and renamed when all ranks are done, so what has the final name
is whole. Errors are the same on every rank: one that cannot write must not leave the others waiting.

`save_checkpoint` returns when all is on disk; `saver.CheckpointSaver` writes beside the loop.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from trainables.checkpoint_dir import PARTIAL_SUFFIX, is_complete, keep_last, read_manifest, write_manifest
from trainables.checkpoint_files import CheckpointReader, CheckpointWriter
from trainables.errors import CheckpointError, DamagedCheckpointError
from trainables.parallel import Worker

# What torch says of every save and load of a single process.
NOISE = ".*(torch.distributed is disabled|TypedStorage is deprecated).*"


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
    """A checkpoint on its way to disk; the same on every rank.

    Attributes:
        path: The final folder.
        step: Optimizer steps done.
        metrics: Values of the last report.
        notes: Kept in the manifest for whoever resumes.
        keep: How many complete checkpoints may be beside it and itself in the end; None: all.
        protected: Checkpoints that stay in any case.
        is_abandoned: Set when nobody wants it any more; it is given up at the next tensor then.
    """

    path: Path
    step: int
    metrics: Mapping[str, float]
    notes: Mapping[str, Any]
    keep: int | None = None
    protected: Collection[Path] = ()
    is_abandoned: threading.Event = field(default_factory=threading.Event)

    @property
    def partial(self) -> Path:
        """Where it is written before it is whole."""
        return self.path.with_name(self.path.name + PARTIAL_SUFFIX)

    def check_wanted(self) -> None:
        """Raises when it is abandoned."""
        if self.is_abandoned.is_set():
            raise RuntimeError("abandoned")


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
    if worker.rank == 0:
        # Where this fails, so does what `write` does there, on all ranks.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NOISE)
        write(draft, lambda: contents(state, worker), worker)


def contents(state: TrainState, worker: Worker) -> dict[str, Any]:
    """What this rank writes of a state: nested mappings of the live tensors.

    What all ranks hold alike is divided among them; random states and shards are each rank's own.
    """
    common = {**_live_model_and_optimizer(state), "progress": _progress(state)}
    return {**_share(common, worker), "rng": {_rng_key(worker): _rng_state(worker)}}


def write(
    draft: Draft, make_contents: Callable[[], dict[str, Any]], worker: Worker, group: dist.ProcessGroup | None = None
) -> None:
    """Writes a checkpoint; called on every rank, in any thread. The folder around it must be there.

    Args:
        draft: What to write beside the contents, and where.
        make_contents: Returns what this rank writes; where it raises, every rank fails.
        worker: This rank.
        group: All ranks, in a group that no other thread uses; None: the default one.

    Raises:
        CheckpointError: A rank could not write; nothing is at the path then but what was there before.
    """
    try:
        _on_rank_zero(lambda: _make_empty(draft.partial), worker, group)
        state_dict_saver.save(
            {},
            storage_writer=CheckpointWriter(draft.partial),
            planner=_Planner(draft, make_contents),
            process_group=group,
            no_dist=worker.world_size == 1,
        )
        _on_rank_zero(lambda: _commit(draft), worker, group)
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        if worker.rank == 0:
            shutil.rmtree(draft.partial, ignore_errors=True)
        raise CheckpointError(f"{draft.path}: cannot be written: {_cause(error)}") from error


class _Planner(DefaultSavePlanner):
    """Asks for the contents where torch passes an exception on to all ranks."""

    def __init__(self, draft: Draft, make_contents: Callable[[], dict[str, Any]]) -> None:
        super().__init__()
        self._draft = draft
        self._make_contents = make_contents

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(self._make_contents(), storage_meta, is_coordinator)

    def resolve_data(self, write_item: Any) -> Any:
        self._draft.check_wanted()
        return super().resolve_data(write_item)


def _commit(draft: Draft) -> None:
    path, partial = draft.path, draft.partial
    # Each rank has waited for its own files to reach the disk.
    write_manifest(partial, draft.step, draft.metrics, draft.notes, are_files_synced=True)
    draft.check_wanted()
    replaced = path.with_name(f"{path.name}.replaced{PARTIAL_SUFFIX}")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        path.rename(replaced)
    partial.rename(path)
    shutil.rmtree(replaced, ignore_errors=True)
    if draft.keep is not None:
        keep_last(path.parent, draft.keep, draft.protected)


def load_checkpoint(state: TrainState, path: Path, worker: Worker) -> None:
    """Reads a checkpoint into a state; called on every rank, and the number of ranks may differ from the saving one.

    A rank that did not exist when it was saved keeps its own random state.

    Raises:
        DamagedCheckpointError: What is read is not what was written. The state is of no use then.
        CheckpointError: The checkpoint is not complete or does not fit the model or the optimizer.
    """
    if not is_complete(path):
        raise CheckpointError(f"{path}: not a complete checkpoint")
    try:
        _read(state, path, worker)
    except (Exception, CheckpointException) as error:  # torch derives the latter from BaseException
        kind = DamagedCheckpointError if _is_damage(error) else CheckpointError
        raise kind(f"{path}: cannot be read: {_cause(error)}") from error


def load_weights(model: nn.Module, path: Path) -> None:
    """Reads what was trained of a model, and nothing else, in this process alone; any number of ranks has saved it.

    Raises:
        CheckpointError: The checkpoint is not complete or does not fit the model.
    """
    if not is_complete(path):
        raise CheckpointError(f"{path}: not a complete checkpoint")
    try:
        _load({"model": trained(model, model.state_dict())}, CheckpointReader(path), no_dist=True)
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{path}: cannot be read: {_cause(error)}") from error


def _load(contents: dict[str, Any], reader: CheckpointReader, *, no_dist: bool) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=NOISE)
        state_dict_loader.load(contents, storage_reader=reader, no_dist=no_dist)


def _read(state: TrainState, path: Path, worker: Worker) -> None:
    reader = CheckpointReader(path)
    key = _rng_key(worker)
    saved = _model_and_optimizer(state)
    saved["progress"] = _progress(state)
    if any(name.startswith(f"rng.{key}.") for name in reader.read_metadata().state_dict_metadata):
        saved["rng"] = {key: _rng_state(worker)}
    _load(saved, reader, no_dist=worker.world_size == 1)
    set_state_dict(
        state.model,
        state.optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        # What is missing is frozen, or the read would have failed.
        options=StateDictOptions(strict=False),
    )
    if "rng" in saved:
        _set_rng_state(saved["rng"][key], worker)
    state.step, state.tokens = saved["progress"].tolist()
    state.metrics = (read_manifest(path) or {}).get("metrics", {})


def _model_and_optimizer(state: TrainState) -> dict[str, Any]:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return {"model": trained(state.model, model), "optimizer": optimizer}


def _live_model_and_optimizer(state: TrainState) -> dict[str, Any]:
    # What get_state_dict returns, in a fraction of its time. Only that one makes up what an optimizer lacks at first.
    if not state.optimizer.state:
        return _model_and_optimizer(state)
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    states = {names[parameter]: values for parameter, values in state.optimizer.state.items()}
    groups = [{**group, "params": [names[p] for p in group["params"]]} for group in state.optimizer.param_groups]
    weights = trained(state.model, state.model.state_dict())
    return {"model": weights, "optimizer": {"state": states, "param_groups": groups}}


def trained(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Those of a model's named tensors that a checkpoint holds: the frozen base of adapters is where it came from."""
    # A tied weight has two names.
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: weight for name, weight in weights.items() if name not in frozen}


def _share(common: dict[str, Any], worker: Worker) -> dict[str, Any]:
    """This rank's part of what all ranks hold alike: tensors of about the same size in sum; the rest is rank 0's."""
    if worker.world_size == 1:
        return common
    sizes = sorted(_replicated("", common), key=lambda named: named[1], reverse=True)
    owners: dict[str, int] = {}
    loads = [0] * worker.world_size
    for name, num_bytes in sizes:
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += num_bytes
    share: dict[str, Any] = _owned("", common, owners, worker.rank)
    return share


def _replicated(name: str, value: Any) -> Iterator[tuple[str, int]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _replicated(f"{name}.{key}", item)
    elif isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        yield name, value.nbytes


def _owned(name: str, value: Any, owners: Mapping[str, int], rank: int) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {
        key: _owned(f"{name}.{key}", item, owners, rank)
        for key, item in value.items()
        if isinstance(item, (Mapping, DTensor)) or owners.get(f"{name}.{key}", 0) == rank
    }


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


def _on_rank_zero(action: Callable[[], None], worker: Worker, group: dist.ProcessGroup | None) -> None:
    # The others wait, and learn of a failure.
    failure: list[str | None] = [None]
    if worker.rank == 0:
        try:
            action()
        except Exception as error:
            failure = [str(error) or type(error).__name__]
    if worker.world_size > 1:
        device = worker.device if group is None else torch.device("cpu")
        dist.broadcast_object_list(failure, src=0, group=group, device=device)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _is_damage(error: BaseException) -> bool:
    return any(isinstance(reason, DamagedCheckpointError) for reason in _reasons(error))


def _reasons(error: BaseException) -> list[BaseException]:
    """An error, or what torch says that befell each rank."""
    failures = getattr(error, "failures", None)
    return [reason for reason, _ in failures.values()] if failures else [error]


def _cause(error: BaseException) -> str:
    # torch lists every rank and its traceback; a user needs the first line of one reason.
    reason = _reasons(error)[0]
    return f"{reason}".strip().splitlines()[0] if f"{reason}".strip() else type(reason).__name__
