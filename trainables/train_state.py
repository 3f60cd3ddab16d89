"""What a trial needs to go on, as nested mappings of tensors: what each rank holds, writes, and takes back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

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
        unreported: What `Interval.steps` says of the steps since then, where this is saved between two reports.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: int = 0
    tokens: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    unreported: tuple[dict[str, float], ...] = ()


def contents(state: TrainState, worker: Worker) -> dict[str, Any]:
    """What this rank writes of a state: nested mappings of the live tensors.

    What all ranks hold alike is divided among them; random states and shards are each rank's own.
    """
    common = {**_live_model_and_optimizer(state), "progress": _progress(state)}
    return {**_share(common, worker), "rng": {_rng_key(worker): _rng_state(worker)}}


def to_be_read(state: TrainState, worker: Worker, saved: Collection[str]) -> dict[str, Any]:
    """What this rank reads of a checkpoint: nested mappings of tensors to be filled.

    Args:
        state: Gives names and shapes.
        worker: This rank; one that did not exist when the checkpoint was made, or had no GPU then, has no random state
            of it there.
        saved: Names of all that is in the checkpoint.
    """
    key = _rng_key(worker)
    wanted = {**_model_and_optimizer(state), "progress": _progress(state)}
    if states := {name: value for name, value in _rng_state(worker).items() if f"rng.{key}.{name}" in saved}:
        wanted["rng"] = {key: states}
    return wanted


def restore(state: TrainState, read: Mapping[str, Any], worker: Worker) -> None:
    """Takes over what `to_be_read` has been filled with."""
    set_state_dict(
        state.model,
        state.optimizer,
        model_state_dict=read["model"],
        optim_state_dict=read["optimizer"],
        # What is missing is frozen, or the read would have failed.
        options=StateDictOptions(strict=False),
    )
    if "rng" in read:
        _set_rng_state(read["rng"][_rng_key(worker)], worker)
    state.step, state.tokens = read["progress"].tolist()


def trained(model: nn.Module, weights: dict[str, Any]) -> dict[str, Any]:
    """Those of a model's named tensors that a checkpoint holds: the frozen base of adapters is where it came from."""
    # A tied weight has two names.
    parameters = model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    return {name: weight for name, weight in weights.items() if name not in frozen}


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
