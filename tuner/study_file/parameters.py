"""One searched parameter: Float, Int or Categorical, its values, and the condition under which it is searched."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from tuner.study_file.wording import did_you_mean, yaml

# A float counts no further.
MAX_STEPS = 2.0**53

Scalar: TypeAlias = bool | int | float | str | None
Condition: TypeAlias = dict[str, Scalar | list[Scalar]]
Fault: TypeAlias = tuple[str, str]
"""The key of a definition that is at fault, and what is wrong with it."""

# Optuna keeps bounds as JSON numbers and 64-bit floats: larger whole numbers would change silently.
MAX_INT = 2**53


class _Definition(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)

    when: Condition | None = None
    """Search the parameter only if these other parameters have one of these values."""

    def is_active(self, params: Mapping[str, Any]) -> bool:
        """Whether the condition holds; `params` has the values of every active parameter it may depend on."""
        for name, allowed in (self.when or {}).items():
            values = allowed if isinstance(allowed, list) else [allowed]
            if name not in params or not any(same(params[name], value) for value in values):
                return False
        return True


class _Range(_Definition):
    def _outside(self, value: float, low: float, high: float) -> str:
        return "" if low <= value <= high else f"must be between {low!r} and {high!r}, got {value!r}"


class Float(_Range):
    """A real number from `low` to `high`, both included."""

    type: Literal["float"] = "float"
    """Kind of parameter: `float`, `int` or `categorical`."""
    low: float
    """Smallest value."""
    high: float
    """Largest value."""
    log: bool = False
    """Sample the logarithm uniformly."""
    step: float | None = None
    """Only low, low + step, low + 2 step, ... up to high; absent: any number (float), 1 (int)."""

    @property
    def size(self) -> int | None:
        if self.low == self.high:
            return 1
        return None if self.step is None else round((self.high - self.low) / self.step) + 1

    @property
    def is_constant(self) -> bool:
        """Whether there is a single value."""
        return self.size == 1

    def values(self) -> Iterator[float]:
        """Every value in order, as the decimal numbers that the file's decimal bounds make.

        Raises:
            ValueError: There is no end of them.
        """
        if self.size is None:
            raise ValueError("a float without step has no list of values")
        step = Decimal(repr(self.step or 0.0))
        return (float(Decimal(repr(self.low)) + index * step) for index in range(self.size))

    def problem(self, value: object) -> str:
        """Why `value` is not in the range; empty when it is."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return f"must be a number, got {value!r}"
        if outside := self._outside(value, self.low, self.high):
            return outside
        steps = (value - self.low) / self.step if self.step and self.low != self.high else 0.0
        if abs(steps - round(steps)) > 1e-8:
            near = float(Decimal(repr(self.low)) + round(steps) * Decimal(repr(self.step)))
            return f"must be {self.low!r} plus a multiple of {self.step!r}, got {value!r}; nearest is {near!r}"
        return ""

    def canonical(self, value: Any) -> float:
        """A legal `value` as `values()` has it: 0.1 + 0.2 on a step of 0.1 is 0.3."""
        if not self.step or self.low == self.high:
            return float(value)
        return float(Decimal(repr(self.low)) + round((value - self.low) / self.step) * Decimal(repr(self.step)))

    def faults(self) -> list[Fault]:
        """Rules between the keys of the definition that are broken."""
        return _range_faults(self.low, self.high, self.log, self.step, lowest_log="> 0")


class Int(_Range):
    """A whole number from `low` to `high`, both included."""

    type: Literal["int"] = "int"
    """Kind of parameter: `float`, `int` or `categorical`."""
    low: int = Field(ge=-MAX_INT, le=MAX_INT)
    """Smallest value."""
    high: int = Field(ge=-MAX_INT, le=MAX_INT)
    """Largest value."""
    log: bool = False
    """Sample the logarithm uniformly."""
    step: int | None = None
    """Only low, low + step, low + 2 step, ... up to high; absent: any number (float), 1 (int)."""

    @property
    def size(self) -> int:
        return (self.high - self.low) // (self.step or 1) + 1

    @property
    def is_constant(self) -> bool:
        """Whether there is a single value."""
        return self.size == 1

    def values(self) -> Iterator[int]:
        """Every value in order."""
        return iter(range(self.low, self.high + 1, self.step or 1))

    def problem(self, value: object) -> str:
        """Why `value` is not in the range; empty when it is."""
        if isinstance(value, bool) or not isinstance(value, int):
            return f"must be a whole number, got {value!r}"
        if outside := self._outside(value, self.low, self.high):
            return outside
        step = self.step or 1
        if (value - self.low) % step:
            near = self.low + round((value - self.low) / step) * step
            return f"must be {self.low} plus a multiple of {step}, got {value}; nearest is {near}"
        return ""

    def canonical(self, value: Any) -> int:
        """A legal `value` as `values()` has it."""
        return int(value)

    def faults(self) -> list[Fault]:
        """Rules between the keys of the definition that are broken."""
        return _range_faults(self.low, self.high, self.log, self.step, lowest_log=">= 1")


class Categorical(_Definition):
    """One of a list of values without order."""

    type: Literal["categorical"] = "categorical"
    """Kind of parameter: `float`, `int` or `categorical`."""
    choices: Annotated[tuple[Scalar, ...], Field(strict=False)]
    """The values: text, numbers, true, false or null."""

    @property
    def size(self) -> int:
        """Number of distinct values."""
        return len(self.choices)

    @property
    def is_constant(self) -> bool:
        """Whether there is a single value."""
        return self.size == 1

    def values(self) -> Iterator[Scalar]:
        """Every choice in order."""
        return iter(self.choices)

    def problem(self, value: object) -> str:
        """Why `value` is not a choice; empty when it is."""
        if any(same(value, choice) for choice in self.choices):
            return ""
        close = did_you_mean(value, [choice for choice in self.choices if isinstance(choice, str)])
        return f"must be one of {', '.join(map(yaml, self.choices))}; got {yaml(value)}{close}"

    def canonical(self, value: Any) -> Scalar:
        """A legal `value` as `values()` has it: the choice 1 for 1.0."""
        return next(choice for choice in self.choices if same(choice, value))

    def faults(self) -> list[Fault]:
        """Rules between the keys of the definition that are broken."""
        if not self.choices:
            return [("choices", "must not be empty; give at least one value, or remove the parameter")]
        seen: dict[Scalar, Scalar] = {}
        for index, choice in enumerate(self.choices):
            # Optuna finds a choice by Python's ==, for which 1, 1.0 and true are one.
            if choice in seen:
                twice = f"{yaml(choice)} is listed twice" if same(seen[choice], choice) else ""
                message = twice or f"{yaml(seen[choice])} and {yaml(choice)} count as equal"
                return [(f"choices.{index}", f"{message}; keep one of them")]
            seen[choice] = choice
        return []


Parameter: TypeAlias = Annotated[Float | Int | Categorical, Field(discriminator="type")]


def same(left: object, right: object) -> bool:
    """Equality for which true is not 1."""
    return isinstance(left, bool) == isinstance(right, bool) and left == right


def _range_faults(low: float, high: float, log: bool, step: float | None, lowest_log: str) -> list[Fault]:
    faults = []
    faults += [
        (key, f"must be a finite number, got {value!r}")
        for key, value in (("low", low), ("high", high))
        if not math.isfinite(value)
    ]
    if faults:
        return faults
    if low > high:
        faults.append(("low", f"must be <= high ({high!r}), got {low!r}; swap them"))
    if log and low <= 0:
        faults.append(("low", f"must be {lowest_log} when log is true, got {low!r}"))
    if step is None:
        return faults
    if log:
        faults.append(("step", "cannot be combined with log: true; remove one of the two"))
    elif not math.isfinite(step) or step <= 0:
        faults.append(("step", f"must be a finite number > 0, got {step!r}"))
    elif (high - low) / step > MAX_STEPS:
        faults.append(("step", f"makes more values between {low!r} and {high!r} than there are floats, got {step!r}"))
    elif low < high:
        faults += _step_faults(low, high, step)
    return faults


def _step_faults(low: float, high: float, step: float) -> list[Fault]:
    start, width, exact = Decimal(repr(low)), Decimal(repr(high)) - Decimal(repr(low)), Decimal(repr(step))
    whole = width // exact
    if whole * exact == width:
        return []
    kind = type(high)
    above = kind(start + (whole + 1) * exact)
    legal = repr(kind(start + whole * exact)) + f" or {above!r}" if whole else repr(above)
    return [("high", f"must be low plus a multiple of step ({step!r}), got {high!r}; nearest legal: {legal}")]
