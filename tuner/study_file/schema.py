"""Plain data against a pydantic model: unknown keys, empty keys and broken rules as (path, message) faults."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tuner.study_file.wording import KeyPath, did_you_mean, kind_of, near
from tuner.study_file.yaml_nodes import number_hint

Model = TypeVar("Model", bound=BaseModel)
Report = Callable[[KeyPath, str], None]

_RULES = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "> {gt}",
    "greater_than_equal": ">= {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "less_than": "< {lt}",
    "less_than_equal": "<= {le}",
    "list_type": "a list",
    "model_attributes_type": "a mapping",
    "model_type": "a mapping",
    "none_required": "null",
    "string_type": "text",
    "tuple_type": "a list",
}
_WORDS = {"on": "true", "yes": "true", "off": "false", "no": "false"}


@dataclass
class Findings:
    """What is learned about a study while its data is read.

    Attributes:
        report: Hears of each fault.
        cleared: Paths that the command line set to null.
        renamed: Takes the path as written of each misspelt key, by the path it was meant to have.
    """

    report: Report
    cleared: frozenset[KeyPath] = frozenset()
    renamed: dict[KeyPath, KeyPath] = field(default_factory=dict)


def tidy(
    model: type[BaseModel], data: dict[str, Any], path: KeyPath, findings: Findings, elsewhere: Mapping[str, str]
) -> dict[str, Any]:
    """Takes out what the model could only misread, reporting it: unknown keys and keys without a value.

    Args:
        model: What `data` should be.
        data: The mapping as written.
        path: Where it stands in the study.
        findings: Takes what is found.
        elsewhere: Section of each key that belongs in another one.

    Returns:
        A copy with known keys only; a misspelt key stands under the name it was meant to have, so that its value is
        checked too.
    """
    tidied: dict[str, Any] = {}
    for key, value in data.items():
        name = key if key in model.model_fields else _meant(model, key, data, path, findings, elsewhere)
        if name is None:
            continue
        annotation = model.model_fields[name].annotation
        nested = _nested_model(annotation)
        if value is None and not allows(annotation, type(None)):
            if nested is not annotation and annotation != dict[str, Any]:
                if (*path, key) not in findings.cleared:
                    findings.report((*path, key), "has no value; give it one, or remove the key to use its default")
                continue
            value = {}
        if nested is not None and isinstance(value, dict):
            value = tidy(nested, value, (*path, name), findings, elsewhere)
        tidied[name] = value
    return tidied


def _meant(
    model: type[BaseModel],
    key: str,
    data: dict[str, Any],
    path: KeyPath,
    findings: Findings,
    elsewhere: Mapping[str, str],
) -> str | None:
    """Reports an unknown key; the one known key that it must have been meant for, if that is not given too."""
    known = list(model.model_fields)
    findings.report((*path, key), f"unknown field{unknown_remedy(key, known, elsewhere)}")
    close = [] if key in elsewhere else near(key, known)
    if len(close) != 1 or close[0] in data:
        return None
    findings.renamed[*path, close[0]] = (*path, key)
    return close[0]


def unknown_remedy(key: str, known: Sequence[str], elsewhere: Mapping[str, str]) -> str:
    """What to do about an unknown key: its section, the nearest names, or all names."""
    if key in elsewhere:
        return f"; it belongs in {elsewhere[key]}"
    return did_you_mean(key, known) or f"; known: {', '.join(known)}"


def check(model: type[Model], data: Any, path: KeyPath, report: Report) -> Model | None:
    """`data` as a `model`; None when it breaks a rule, which is reported."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        for where, message in faults(error, data):
            report((*path, *where), message)
    return None


def faults(error: ValidationError, data: Any) -> list[tuple[KeyPath, str]]:
    """One (path, message) for each value at fault, whatever number of rules of a union it breaks."""
    groups: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        groups.setdefault(_data_path(detail, data), []).append(detail)
    # Where a union allows a mapping, a fault inside one says more than that it is no number.
    outermost = [path for path in groups if not any(path == other[: len(path)] for other in groups if other != path)]
    return [(path, _message(groups[path])) for path in outermost]


def allows(annotation: Any, kind: type) -> bool:
    """Whether a field of this annotation may hold a `kind`."""
    if annotation is Any or annotation is kind or get_origin(annotation) is kind:
        return True
    if get_origin(annotation) in {Annotated, Union, types.UnionType}:
        return any(allows(option, kind) for option in get_args(annotation))
    return False


def field_at(model: type[BaseModel], key: str) -> str:
    """Why the dotted `key` is not a key of the model, as a message; empty when it is one."""
    owner, prefix, name, _ = _locate(model, key)
    if owner is None:
        return f"{prefix}{name} has no keys of its own"
    known = [f"{prefix}{known_name}" for known_name in owner.model_fields]
    return "" if name in owner.model_fields else f"unknown field{unknown_remedy(prefix + name, known, {})}"


def default_of(model: type[BaseModel], key: str) -> tuple[bool, Any]:
    """(whether the dotted `key` has a default, that default)."""
    owner, _, name, rest = _locate(model, key)
    info = owner.model_fields.get(name) if owner and not rest else None
    if info is None or info.is_required():
        return False, None
    return True, info.get_default(call_default_factory=True)


def _locate(model: type[BaseModel], key: str) -> tuple[type[BaseModel] | None, str, str, str]:
    """(owner, prefix, name, rest) of a dotted key: the deepest model on its way, and what is left of the key there.

    `rest` is not empty inside a free mapping (the hidden_size of `model.hidden_size`) and after an unknown name; the
    owner is None where a plain value is given keys.
    """
    prefix, owner, name, rest = "", model, "", key
    while True:
        name, _, rest = rest.partition(".")
        info = owner.model_fields.get(name)
        if not rest or info is None:
            return owner, prefix, name, rest
        nested = _nested_model(info.annotation)
        if nested is None:
            return (owner if _holds_dict(info.annotation) else None), prefix, name, rest
        owner, prefix = nested, f"{prefix}{name}."


def _holds_dict(annotation: Any) -> bool:
    return any(option is dict or get_origin(option) is dict for option in (annotation, *get_args(annotation)))


def _nested_model(annotation: Any) -> type[BaseModel] | None:
    for option in (annotation, *get_args(annotation)):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _data_path(detail: ErrorDetails, data: Any) -> KeyPath:
    """The part of pydantic's `loc` that is in the data, without the tags of unions, and a missing key."""
    path: list[int | str] = []
    for key in detail["loc"]:
        if _has(data, key):
            data = data[key]
            path.append(key)
    return (*path, detail["loc"][-1]) if detail["type"] == "missing" else tuple(path)


def _has(data: Any, key: int | str) -> bool:
    if isinstance(data, dict):
        return key in data
    return isinstance(data, list | tuple) and isinstance(key, int) and key < len(data)


def _message(details: Sequence[ErrorDetails]) -> str:
    first = details[0]
    for detail in details:
        if detail["type"] == "value_error":
            return str(detail["ctx"]["error"])
    if first["type"] == "missing":
        return "missing; it has no default, so give it a value"
    if first["type"] == "extra_forbidden":
        return "unknown field; remove it"
    if first["type"] == "string_too_short":
        return "must not be empty"
    # Of a union with a mapping, what the plain value would have to be.
    plain = [detail for detail in details if detail["type"] not in {"model_type", "model_attributes_type"}] or details
    rules = list(dict.fromkeys(filter(None, map(_rule, plain))))
    if not rules:
        return f"{first['msg'][:1].lower()}{first['msg'][1:]}, got {kind_of(first['input'])}"
    return f"must be {' or '.join(rules)}, got {kind_of(first['input'])}{_hint(rules, first['input'], details)}"


def _rule(detail: ErrorDetails) -> str:
    if detail["type"] == "literal_error":
        options = _options(detail)
        return options[0] if len(options) == 1 else f"one of {', '.join(options)}"
    return _RULES.get(detail["type"], "").format(**detail.get("ctx", {}))


def _options(detail: ErrorDetails) -> list[str]:
    text: str = detail["ctx"]["expected"]
    return [option.strip("'") for option in text.replace(" or ", ", ").split(", ")]


def _hint(rules: Sequence[str], value: object, details: Sequence[ErrorDetails]) -> str:
    if isinstance(value, str):
        hint = number_hint(value) if {"a number", "a whole number"} & set(rules) else ""
        if "true or false" in rules and value.lower() in _WORDS:
            hint = f"write {_WORDS[value.lower()]}"
        options = [name for detail in details if detail["type"] == "literal_error" for name in _options(detail)]
        return f"; {hint}" if hint else did_you_mean(value, options)
    if isinstance(value, float) and "a whole number" in rules:
        return f"; write {int(value)}" if value.is_integer() else ""
    if "text" in rules and isinstance(value, int | float):
        return f'; quote it: "{str(value).lower() if isinstance(value, bool) else value}"'
    return ""
