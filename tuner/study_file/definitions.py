"""One entry of `search_space` as written to a Parameter: the mistakes that people make there, each with its remedy."""

from __future__ import annotations

from typing import Any

from tuner.study_file.parameters import Categorical, Float, Int, Parameter
from tuner.study_file.schema import Findings, Report, check, tidy
from tuner.study_file.wording import KeyPath, did_you_mean, kind_of, near, shorten, yaml

MAX_CHOICES = 1000

_WHEN = "write when: {optimizer: adamw} or when: {optimizer: [adamw, sgd]}"
_CONDITIONAL = (
    "make the range a parameter of its own with a condition, as in "
    "beta2: {type: float, low: 0.9, high: 0.999, when: {optimizer: adamw}}"
)
_TYPES: dict[str, type[Float] | type[Int] | type[Categorical]] = {
    "float": Float,
    "int": Int,
    "categorical": Categorical,
}
_OTHER_TYPES = {
    "bool": "write type: categorical with choices: [true, false]",
    "choice": "write type: categorical",
    "double": "write type: float",
    "integer": "write type: int",
    "log_uniform": "write type: float with log: true",
    "log_uniform_values": "write type: float with log: true",
    "loguniform": "write type: float with log: true",
    "quniform": "write type: float with a step",
    "randint": "write type: int",
    "uniform": "write type: float",
}


def read_parameter(name: str, data: Any, path: KeyPath, findings: Findings) -> Parameter | None:
    """Reads the definition of one parameter.

    Args:
        name: The searched key.
        data: Its definition as written.
        path: Where it stands in the study.
        findings: Takes what is found.

    Returns:
        The parameter; None when its definition breaks a rule by itself.
    """
    report = findings.report
    if not isinstance(data, dict):
        report(path, _not_a_mapping(name, data))
        return None
    if data and all(isinstance(value, dict) for value in data.values()) and not set(data) & {"type", "when"}:
        nested = next(iter(data))
        report(path, f"holds mappings; write a nested key with a dot: {name}.{nested}: {shorten(_flow(data[nested]))}")
        return None
    data = dict(data)
    model = _model(data, path, report)
    if model is None:
        return None
    data = tidy(model, data, path, findings, {})
    _check_condition(data.get("when"), (*path, "when"), report)
    if model is Categorical:
        choices, here = data.get("choices"), (*path, "choices")
        if isinstance(choices, list) and len(choices) > MAX_CHOICES:
            report(
                here, f"must be at most {MAX_CHOICES} values, got {len(choices)}; a number can be type: float or int"
            )
            return None
        _check_choices(choices, here, report)
    return check(model, data, path, report)


def _not_a_mapping(name: str, data: Any) -> str:
    if data is None:
        return f"has no definition; write {name}: {{type: float, low: 0.0, high: 1.0}}, or remove it"
    if isinstance(data, list):
        return f"must be a mapping, got a list; write {name}: {{type: categorical, choices: {shorten(_flow(data))}}}"
    return f"must be a mapping, got {kind_of(data)}; a constant belongs in train: write {name} there"


def _model(data: dict[str, Any], path: KeyPath, report: Report) -> type[Float] | type[Int] | type[Categorical] | None:
    kind = data.get("type")
    if kind is None:
        close = [key for key in data if near(key, ["type"])]
        if close:
            report((*path, close[0]), "unknown field; did you mean type?")
            kind = data.pop(close[0])
        else:
            report((*path, "type"), f"missing; write type: {_likely_type(data)}")
            return None
    if isinstance(kind, str) and kind in _TYPES:
        return _TYPES[kind]
    remedy = f"; {_OTHER_TYPES[kind]}" if isinstance(kind, str) and kind in _OTHER_TYPES else did_you_mean(kind, _TYPES)
    report((*path, "type"), f"must be one of {', '.join(_TYPES)}, got {kind_of(kind)}{remedy}")
    return None


def _likely_type(data: dict[str, Any]) -> str:
    if "choices" in data or "values" in data:
        return "categorical"
    bounds = [data.get("low"), data.get("high")]
    return "int" if all(isinstance(bound, int) for bound in bounds) else "float"


def _check_choices(choices: Any, path: KeyPath, report: Report) -> None:
    if not isinstance(choices, list):
        return
    for index, choice in enumerate(choices):
        here = (*path, index)
        if isinstance(choice, dict):
            report(here, f"a choice cannot hold a range or a mapping: {_CONDITIONAL}")
        elif isinstance(choice, list):
            report(here, "a choice must be text, a number, true, false or null, got a list; give each list a name")


def _check_condition(when: Any, path: KeyPath, report: Report) -> None:
    if when is None:
        return
    if not isinstance(when, dict):
        report(path, f"must be a mapping from another parameter to its value, got {kind_of(when)}; {_WHEN}")
        return
    for parent, allowed in when.items():
        for value in allowed if isinstance(allowed, list) else [allowed]:
            if isinstance(value, dict | list):
                report((*path, parent), f"must be a value or a list of values, got {kind_of(allowed)}; {_WHEN}")


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(_flow, value)) + "]" if isinstance(value, list) else yaml(value)
