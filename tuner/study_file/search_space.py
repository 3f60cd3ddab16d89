"""The search space: parameters, the conditions between them, and the configurations they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from tuner.study_file.parameters import Categorical, Condition, Fault, Float, Int, Parameter, Scalar, same
from tuner.study_file.wording import did_you_mean, yaml

__all__ = ["Categorical", "Float", "Int", "Parameter", "Scalar", "SearchSpace"]


# Cases that counting may go through; conditions of real studies make a few dozen.
_MAX_CASES = 20_000


class SearchSpace(BaseModel):
    """The parameters of a study by name, dotted for nested keys (`dataset.limit`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    parameters: dict[str, Parameter]
    """Each searched key and what it may be."""

    def order(self) -> tuple[str, ...]:
        """Names such that every parameter comes after those its condition names; otherwise as written.

        Raises:
            ValueError: Conditions form a cycle.
        """
        placed: dict[str, None] = {}
        waiting = list(self.parameters)
        while waiting:
            ready = [
                name for name in waiting if all(p in placed or p not in self.parameters for p in self.parents(name))
            ]
            if not ready:
                raise ValueError(f"conditions form a cycle: {', '.join(waiting)}")
            placed |= dict.fromkeys(ready[:1])
            waiting.remove(ready[0])
        return tuple(placed)

    @property
    def constants(self) -> dict[str, Scalar]:
        """Parameters with a single value, and that value."""
        return {name: next(p.values()) for name, p in self.parameters.items() if p.is_constant}

    @property
    def is_constant(self) -> bool:
        """Whether there is nothing to choose."""
        return all(parameter.is_constant for parameter in self.parameters.values())

    def parents(self, name: str) -> tuple[str, ...]:
        """Names that the condition of `name` depends on."""
        return tuple(self.parameters[name].when or ())

    def is_active(self, name: str, params: Mapping[str, Any]) -> bool:
        """Whether `name` is searched, given the values of the active parameters before it in `order()`."""
        return self.parameters[name].is_active(params)

    def active(self, params: Mapping[str, Any]) -> tuple[str, ...]:
        """Names that are searched given the values in `params`, parents before their children.

        Args:
            params: Values by name; those of inactive parameters do not count.
        """
        seen: dict[str, Any] = {}
        names = []
        for name in self.order():
            if self.parameters[name].is_active(seen):
                names.append(name)
                if name in params:
                    seen[name] = params[name]
        return tuple(names)

    def contains(self, params: Mapping[str, Any]) -> list[str]:
        """What keeps `params` from being a configuration of this space; empty when it is one."""
        return [f"{name}: {message}" if name else message for name, message in self.faults_of(params)]

    def faults_of(self, params: Mapping[str, Any]) -> list[Fault]:
        """As `contains`, with the name of the parameter apart from the message."""
        active = self.active(params)
        faults: list[Fault] = []
        for name, value in params.items():
            if name not in self.parameters:
                close = did_you_mean(name, self.parameters)
                faults.append((name, f"is not in search_space{close or '; remove it, or add it there'}"))
            elif name not in active:
                faults.append((name, f"is searched only when {_condition(self.parameters[name].when)}; remove it"))
            elif problem := self.parameters[name].problem(value):
                faults.append((name, problem))
        missing = [name for name in active if name not in params]
        return faults + [(name, "is missing; give it a value") for name in missing]

    def canonical(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """A configuration of this space with its values as the parameters have them: 1.0 for 1 in a Float."""
        return {name: self.parameters[name].canonical(value) for name, value in params.items()}

    def faults(self) -> dict[str, list[Fault]]:
        """Broken rules by parameter: of its definition, and of its condition."""
        found = {name: parameter.faults() for name, parameter in self.parameters.items()}
        for name in self.parameters:
            found[name] += self._condition_faults(name)
        for name, chain in _cycles(self).items():
            found[name].append(("when", f"conditions form a cycle: {' -> '.join(chain)}; remove one of them"))
        return {name: faults for name, faults in found.items() if faults}

    def grid(self) -> Iterator[dict[str, Any]]:
        """Every configuration, the last parameter varying fastest.

        Raises:
            ValueError: A parameter has no list of values.
        """
        if endless := self.endless():
            raise ValueError(f"{', '.join(endless)}: a float without step has no list of values; give it a step")
        return self._expand(self.order(), {})

    def endless(self) -> list[str]:
        """Names of parameters with no end of values."""
        return [name for name, parameter in self.parameters.items() if parameter.size is None]

    def num_configurations(self) -> int | None:
        """Number of distinct configurations; None when there is no end of them, or conditions tie too many together."""
        groups = _groups(self)
        if any(_num_cases(self, group) > _MAX_CASES for group in groups):
            return None
        counts = [_count(self, group, {}) for group in groups]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def _expand(self, names: tuple[str, ...], params: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not names:
            yield dict(params)
            return
        parameter = self.parameters[names[0]]
        if not parameter.is_active(params):
            yield from self._expand(names[1:], params)
            return
        for value in parameter.values():
            yield from self._expand(names[1:], {**params, names[0]: value})

    def _condition_faults(self, name: str) -> list[Fault]:
        faults: list[Fault] = []
        for parent, allowed in (self.parameters[name].when or {}).items():
            key = f"when.{parent}"
            if parent not in self.parameters:
                close = did_you_mean(parent, set(self.parameters) - {name})
                remedy = (
                    close or "; a condition names another searched parameter: remove the condition or search that too"
                )
                faults.append((key, f"{parent} is not in search_space{remedy}"))
                continue
            values = allowed if isinstance(allowed, list) else [allowed]
            if not values:
                faults.append((key, f"lists no value, so {name} would never be searched; list at least one"))
            for value in values:
                if problem := self.parameters[parent].problem(value):
                    faults.append((key, f"{parent} never has this value: {problem}"))
        return faults


def _groups(space: SearchSpace) -> list[tuple[str, ...]]:
    """Parameters that conditions tie together, each group in order; groups do not affect each other."""
    order = space.order()
    groups: list[set[str]] = []
    for name in order:
        tied = {name, *space.parents(name)}
        touching = [group for group in groups if group & tied]
        groups = [group for group in groups if group not in touching] + [tied.union(*touching)]
    return [tuple(name for name in order if name in group) for group in groups]


def _num_cases(space: SearchSpace, names: tuple[str, ...]) -> int:
    return math.prod(len(_mentioned(space, name)) + 1 for name in names)


class _OtherValue:
    """Stands for all values of a parameter that no condition mentions."""


def _count(space: SearchSpace, names: tuple[str, ...], params: dict[str, Any]) -> int | None:
    """Configurations of `names` given `params`, by recursion over the values that conditions tell apart."""
    if not names:
        return 1
    name, rest = names[0], names[1:]
    parameter = space.parameters[name]
    if not parameter.is_active(params):
        return _count(space, rest, params)
    if parameter.size is None:
        return None
    mentioned = _mentioned(space, name)
    others = parameter.size - len(mentioned)
    cases = [(value, 1) for value in mentioned] + ([(_OtherValue(), others)] if others else [])
    total = 0
    for value, times in cases:
        count = _count(space, rest, {**params, name: value})
        if count is None:
            return None
        total += times * count
    return total


def _mentioned(space: SearchSpace, name: str) -> list[Any]:
    values: list[Any] = []
    for parameter in space.parameters.values():
        allowed = (parameter.when or {}).get(name, [])
        for value in allowed if isinstance(allowed, list) else [allowed]:
            if not any(same(value, seen) for seen in values):
                values.append(value)
    return values


def _cycles(space: SearchSpace) -> dict[str, tuple[str, ...]]:
    """One parameter of each cycle of conditions, and the cycle from it back to it."""
    found: dict[str, tuple[str, ...]] = {}
    for name in space.parameters:
        chain = _path_back(space, name)
        if chain and not any(set(chain) == set(seen) for seen in found.values()):
            found[name] = chain
    return found


def _path_back(space: SearchSpace, start: str) -> tuple[str, ...]:
    stack: list[tuple[str, ...]] = [(start,)]
    seen: set[str] = set()
    while stack:
        chain = stack.pop()
        for parent in space.parents(chain[-1]):
            if parent == start:
                return (*chain, parent)
            if parent in space.parameters and parent not in seen:
                seen.add(parent)
                stack.append((*chain, parent))
    return ()


def _condition(when: Condition | None) -> str:
    parts = []
    for name, allowed in (when or {}).items():
        values = allowed if isinstance(allowed, list) else [allowed]
        parts.append(f"{name} is {' or '.join(map(yaml, values))}")
    return " and ".join(parts)
