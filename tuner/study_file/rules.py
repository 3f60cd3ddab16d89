"""Rules between the keys of a study, each a function from values to faults: (path, message)."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tuner.planning.plan import rungs
from tuner.study_file import database_url
from tuner.study_file.search_space import SearchSpace
from tuner.study_file.sections import Checkpoint, Scaling, Scheduler, Search
from tuner.study_file.wording import KeyPath, did_you_mean

Fault = tuple[KeyPath, str]

METRICS = ("eval_loss", "train_loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s", "epoch", "step")
# What decides how long a trial is and where it reports is the same for all: else they could not be compared.
NOT_SEARCHABLE = {
    "max_steps": "it is the length of every trial (the scheduler ends trials early); set it in train",
    "eval_every": "it is where all trials report and are compared; set it in train",
}


def non_finite(value: Any, path: KeyPath = ()) -> Iterator[Fault]:
    """Numbers that are not finite, anywhere in a study."""
    if isinstance(value, float) and not math.isfinite(value):
        yield path, f"must be a finite number, got {value!r}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from non_finite(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from non_finite(item, (*path, index))


def length_faults(scheduler: Scheduler, max_steps: int | None) -> Iterator[Fault]:
    """The length of a trial against the training loop's.

    Args:
        scheduler: As given.
        max_steps: Length of a fine-tune; None for a custom trainable, which does not say.
    """
    key = ("scheduler", "max_t")
    if max_steps is None:
        if scheduler.max_t is None:
            yield key, "missing; a trainable of your own needs it: the step at which a trial is complete"
    elif scheduler.max_t is not None and scheduler.max_t > max_steps:
        yield key, f"must be <= train.max_steps ({max_steps}), got {scheduler.max_t}; lower it or raise train.max_steps"


def rung_faults(
    scheduler: Scheduler, checkpoint: Checkpoint, *, max_t: int, max_steps: int | None, eval_every: int | None
) -> Iterator[Fault]:
    """Decision points and checkpoints against where trials report.

    Args:
        scheduler: Its grace_period resolved.
        checkpoint: As given.
        max_t: Steps of a full trial.
        max_steps: Length of a fine-tune; its last step always reports.
        eval_every: Steps between reports; None for a custom trainable, which does not say.
    """
    grace = scheduler.grace_period
    if scheduler.type != "none" and grace > max_t:
        yield ("scheduler", "grace_period"), f"must be <= max_t ({max_t}), got {grace}; lower it"
    elif scheduler.type in {"asha", "hyperband"} and eval_every and grace < max_t and grace % eval_every:
        yield ("scheduler", "grace_period"), _not_reported(grace, eval_every, max_t)
    if eval_every and max_t != max_steps and max_t % eval_every:
        yield ("scheduler", "max_t"), _not_reported(max_t, eval_every, max_steps or max_t)
    if eval_every and checkpoint.every and checkpoint.every % eval_every:
        yield ("checkpoint", "every"), _not_reported(checkpoint.every, eval_every, math.inf)
    if scheduler.type == "asha" and grace <= max_t:
        count = max(1, len(rungs(grace, max_t, scheduler.reduction_factor)))
        if scheduler.brackets > count:
            message = f"must be <= the number of rungs ({count}), got {scheduler.brackets}"
            yield ("scheduler", "brackets"), f"{message}; lower it, or lower grace_period for more rungs"


def search_faults(search: Search, space: SearchSpace) -> Iterator[Fault]:
    """The storage; the sampler and the initial configurations against the space."""
    if search.storage is not None and (problem := database_url.fault(search.storage)):
        yield ("search", "storage"), problem
    if search.sampler == "grid":
        for name in space.endless():
            message = "sampler grid needs a list of values, and a float without step has none"
            yield ("search_space", name), f"{message}; give it a step, or use another sampler"
    for index, params in enumerate(search.initial):
        for name, message in space.faults_of(params):
            yield ("search", "initial", index, name), message


def scaling_faults(scaling: Scaling) -> Iterator[Fault]:
    """The numbers of workers, and the GPUs of a trial against them."""
    gpus = scaling.gpus_per_worker
    if scaling.min_workers > scaling.max_workers:
        yield ("scaling", "num_workers", "min"), f"must be <= max ({scaling.max_workers}), got {scaling.min_workers}"
    if gpus != "auto" and 0 < gpus < 1 and scaling.max_workers > 1:
        rule = f"must be a whole number where a trial has several workers (num_workers: {scaling.max_workers})"
        why = "NCCL cannot share a GPU between the workers of a trial"
        yield ("scaling", "gpus_per_worker"), f"{rule}, got {gpus}; {why}: use 1, or num_workers: 1"
    if gpus == 0 and scaling.accelerator_type is not None:
        message = f"names GPUs ({scaling.accelerator_type}), and gpus_per_worker is 0; remove one of them"
        yield ("scaling", "accelerator_type"), message


def budget_faults(search: Search, scaling: Scaling) -> Iterator[Fault]:
    """A limit on GPU time against the GPUs there are."""
    if search.max_gpu_hours is not None and scaling.gpus_per_worker == 0:
        message = "counts GPU time, and scaling.gpus_per_worker is 0: nothing would be counted"
        yield ("search", "max_gpu_hours"), f"{message}; use search.max_hours"


def outside_faults(train: Mapping[str, Any], space: SearchSpace) -> Iterator[Fault]:
    """Constants of searched keys that the space does not hold."""
    for name, parameter in space.parameters.items():
        parts = tuple(name.split("."))
        found, value = constant(train, name)
        if found and (problem := parameter.problem(value)):
            remedy = f"change it, remove it, or widen search_space.{name}"
            yield ("train", *parts), f"{problem}. The default trial would run with this value: {remedy}"


def constant(train: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """(whether train gives the dotted key, its value)."""
    value: Any = train
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def locate_file(trainable: str, folder: Path) -> tuple[str, str]:
    """Finds the file of a `file.py:function` trainable.

    Args:
        trainable: As in the study file; a `package.module:function` is left as it is.
        folder: Folder of the study file, where the file may be if it is not in the working directory.

    Returns:
        (the trainable with the file's absolute path, why it cannot be used or nothing).
    """
    file, _, function = trainable.rpartition(":")
    if not file.endswith(".py"):
        return trainable, ""
    path = next((base / file for base in (Path(), folder) if (base / file).is_file()), None)
    if path is None:
        return trainable, f"no file {file} in the working directory or beside the study file; check the path"
    try:
        names = _top_level_names(ast.parse(path.read_bytes()))
    except (OSError, SyntaxError, ValueError) as error:
        return trainable, f"{path} cannot be read as Python: {error}"
    if function not in names and "*" not in names:
        remedy = did_you_mean(function, names) or "; check the name after the colon"
        return trainable, f"{path} defines no {function}{remedy}"
    return f"{path.resolve().as_posix()}:{function}", ""


def _top_level_names(module: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _not_reported(value: int, eval_every: int, highest: float) -> str:
    below = value // eval_every * eval_every
    legal = [str(near) for near in (below, below + eval_every) if 0 < near <= highest]
    use = f"use {' or '.join(legal)}, or " if legal else ""
    divisor = math.gcd(value, eval_every)
    place = f"must be a multiple of train.eval_every ({eval_every}), since trials report only there"
    return f"{place}, got {value}; {use}set train.eval_every: {divisor}"
