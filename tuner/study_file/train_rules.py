"""The `train` section and the searched keys of a built-in trainable against TrainConfig."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from trainables import config
from trainables.config import TrainConfig, set_dotted
from tuner.study_file.parameters import Float, Parameter
from tuner.study_file.rules import NOT_SEARCHABLE, Fault, constant
from tuner.study_file.schema import default_of, faults, field_at
from tuner.study_file.search_space import SearchSpace
from tuner.study_file.wording import KeyPath, dotted


def searched_fault(name: str) -> str:
    """Why `name` cannot be searched; empty when it can."""
    if name in NOT_SEARCHABLE:
        return f"cannot be searched: {NOT_SEARCHABLE[name]}"
    return field_at(TrainConfig, name)


def whole_config(train: dict[str, Any], space: SearchSpace, max_t: int | None) -> dict[str, Any]:
    """One complete configuration: the constants, and a value of the space for each searched key without a default.

    Args:
        train: The constants.
        space: Parameters without a fault of their own.
        max_t: Length of a trial in steps; it is max_steps where train has none.
    """
    values = copy.deepcopy(train)
    for name in _filled_in(train, space):
        _try_set(values, name, next(_bounds(space.parameters[name]))[1])
    if max_t is not None:
        values.setdefault("max_steps", max_t)
    return values


def constant_faults(values: dict[str, Any], train: dict[str, Any], space: SearchSpace) -> Iterator[Fault]:
    """Faults of the constants in `values`, which `whole_config` made of the other two."""
    for path, message in _validate(values):
        if dotted(path) not in _filled_in(train, space):
            yield ("train", *path), message


def _filled_in(train: dict[str, Any], space: SearchSpace) -> list[str]:
    return [name for name in space.parameters if not constant(train, name)[0] and not default_of(TrainConfig, name)[0]]


def range_faults(values: dict[str, Any], space: SearchSpace) -> Iterator[Fault]:
    """Bounds and choices that TrainConfig refuses, each tried as part of a whole configuration."""
    known = {path for path, _ in _validate(values)}
    for name, parameter in space.parameters.items():
        context = _context(space, name)
        failed = False
        for where, value in _bounds(parameter):
            # A value between two bounds only tells more where both are legal.
            if where == ("type",) and failed:
                break
            for message in _refusals(values, context | {name: value}, name, known):
                failed = True
                key, text = _whole_number(parameter, where, message)
                yield ("search_space", name, *key), text


def parallel_faults(values: dict[str, Any], space: SearchSpace, trainable: str, num_workers: int) -> Iterator[Fault]:
    """Constants in `values`, bounds and choices that do not go with how the trainable spreads a model over workers."""
    known = dict(_parallel_faults(values, trainable, num_workers))
    yield from ((("train", *path), message) for path, message in known.items())
    for name, parameter in space.parameters.items():
        found = {}
        for where, value in _bounds(parameter):
            tried = copy.deepcopy(values)
            _try_set(tried, name, value)
            for path, message in _parallel_faults(tried, trainable, num_workers):
                if path not in known and name.startswith(dotted(path)):
                    found[where] = message
        if found and len(found) == len(list(_bounds(parameter))):
            # Not a value, the key itself.
            found = {(): next(iter(found.values()))}
        yield from ((("search_space", name, *where), message) for where, message in found.items())


def _parallel_faults(values: dict[str, Any], trainable: str, num_workers: int) -> Iterator[Fault]:
    with suppress(ValidationError):
        yield from config.parallel_faults(TrainConfig.model_validate(values), trainable, num_workers)


def length_and_reports(values: dict[str, Any]) -> tuple[int | None, int | None]:
    """(max_steps, eval_every) of a configuration; None for one that is not legal."""
    at_fault = {path for path, _ in _validate(values)}
    max_steps, eval_every = (
        None if (key,) in at_fault else values.get(key, default_of(TrainConfig, key)[1])
        for key in ("max_steps", "eval_every")
    )
    return max_steps, eval_every


def _refusals(values: dict[str, Any], params: dict[str, Any], name: str, known: set[KeyPath]) -> Iterator[str]:
    """What TrainConfig says against `name`, and against the whole if that was legal before."""
    tried = copy.deepcopy(values)
    for key, value in params.items():
        _try_set(tried, key, value)
    for path, message in _validate(tried):
        if dotted(path) == name or (not path and path not in known):
            yield message


def _whole_number(parameter: Parameter, where: KeyPath, message: str) -> tuple[KeyPath, str]:
    if isinstance(parameter, Float) and message.startswith("must be a whole number"):
        return ("type",), "the key is a whole number; use type: int"
    return where, message


def _bounds(parameter: Parameter) -> Iterator[tuple[KeyPath, Any]]:
    """Values whose legality stands for that of all, with the key of the definition each comes from."""
    if parameter.type == "categorical":
        yield from ((("choices", index), choice) for index, choice in enumerate(parameter.choices))
        return
    yield ("low",), parameter.low
    yield ("high",), parameter.high
    if isinstance(parameter, Float) and parameter.step is None and not parameter.is_constant:
        # No rounder than what will be sampled.
        yield ("type",), parameter.low + (parameter.high - parameter.low) / 2.7


def _context(space: SearchSpace, name: str, children: tuple[str, ...] = ()) -> dict[str, Any]:
    """Values of other parameters under which `name` is searched."""
    context: dict[str, Any] = {}
    for parent, allowed in (space.parameters[name].when or {}).items():
        values = allowed if isinstance(allowed, list) else [allowed]
        if values and parent in space.parameters and parent not in children:
            context |= _context(space, parent, (*children, name)) | {parent: values[0]}
    return context


def _try_set(values: dict[str, Any], name: str, value: Any) -> None:
    try:
        set_dotted(values, name, value)
    except ValueError:
        return


def _validate(values: dict[str, Any]) -> list[Fault]:
    try:
        TrainConfig.model_validate(values)
    except ValidationError as error:
        return faults(error, values)
    return []
