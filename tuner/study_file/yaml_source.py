"""The study file: plain data that knows its lines, and values from the command line put over it."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.errors import Problem, SpecError
from tuner.study_file.wording import KeyPath, dotted, kind_of
from tuner.study_file.yaml_nodes import parse_yaml

SET = "--set"
# The pure-Python parser reads about 200 kB/s: this keeps the worst file under two seconds.
MAX_BYTES = 256 * 1024
_KEY_PART = re.compile(r"\"([^\"]+)\"|'([^']+)'|([^.\"']+)")


@dataclass(frozen=True)
class YamlSource:
    """A study as plain data that knows where each of its values was written.

    Attributes:
        path: The file name as the user gave it.
        text: The file verbatim.
        data: Plain dicts, lists, text, numbers, booleans and None.
        lines: 1-based line of each key and list item, by path.
        problems: Faults that left the rest readable: duplicate keys, unknown tags, bad overrides.
        overridden: Paths whose value came from the command line.
    """

    path: str
    text: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    overridden: frozenset[KeyPath] = frozenset()

    def problem(self, key: KeyPath, message: str) -> Problem:
        """Places a fault of `key`: at `--set`, at its own line, or at the line of the section that holds it."""
        prefixes = [key[:end] for end in range(len(key), 0, -1)]
        if any(prefix in self.overridden for prefix in prefixes):
            return Problem(dotted(key), message, None, SET)
        line = next((self.lines[prefix] for prefix in prefixes if prefix in self.lines), None)
        return Problem(dotted(key), message, line, self.path)


def read_yaml(path: str | Path) -> YamlSource:
    """Reads a study file.

    Args:
        path: The file; a pipe such as `/dev/stdin` works too.

    Returns:
        Its data and lines; faults that leave the rest readable are in `problems`.

    Raises:
        SpecError: The file cannot be read, is not YAML, is too large, or is not a mapping.
    """
    name = str(path)
    text = _read_text(Path(path), name)
    data, lines, problems = parse_yaml(text, name)
    if data is None:
        raise _fatal(name, "the file is empty; a study needs at least study, train, search_space and search")
    if not isinstance(data, dict):
        raise _fatal(name, f"must be a mapping with the keys of a study at top level, got {kind_of(data)}", 1)
    return YamlSource(name, text, data, lines, tuple(problems))


def from_data(data: Mapping[str, Any], path: str = "study") -> YamlSource:
    """A source without a file: `data` is plain and stays untouched; `path` stands in messages."""
    return YamlSource(path, "", copy.deepcopy(dict(data)))


def with_overrides(source: YamlSource, overrides: Sequence[str]) -> YamlSource:
    """A copy of `source` with `key=value` items applied in order.

    A key is dotted, a list index is a number, and a part that holds a dot itself may be quoted; a missing section is
    made. A value is YAML 1.2; `null` clears what the key held. Faults are in `problems`, with the source `--set`.

    Args:
        source: The study file.
        overrides: Items such as `train.max_steps=20`.
    """
    data = copy.deepcopy(source.data)
    overridden = set(source.overridden)
    problems = list(source.problems)
    for item in overrides:
        problem = _apply(data, item, overridden)
        problems += [problem] if isinstance(problem, Problem) else problem
    return replace(source, data=data, problems=tuple(problems), overridden=frozenset(overridden))


def _fatal(source: str, message: str, line: int | None = None) -> SpecError:
    return SpecError([Problem("", message, line, source)])


def _read_text(path: Path, name: str) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _fatal(name, f"no such file{_similar_file(path)}") from None
    except IsADirectoryError:
        raise _fatal(name, "is a directory; name the study file in it") from None
    except (OSError, ValueError) as error:
        raise _fatal(name, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_BYTES:
        raise _fatal(name, f"is larger than {MAX_BYTES // 1024} kB, which no study file is; is it the right file?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        message = f"byte 0x{raw[error.start]:02x} is not valid UTF-8; save the file as UTF-8"
        raise _fatal(name, message, line) from None


def _similar_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix in {".yaml", ".yml"}]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _apply(data: dict[str, Any], item: str, overridden: set[KeyPath]) -> Problem | list[Problem]:
    name, equals, text = item.partition("=")
    parts = [quoted or single or bare for quoted, single, bare in _KEY_PART.findall(name.strip())]
    if not equals or not parts:
        return Problem(name, "must be KEY=VALUE, as in --set train.max_steps=20", None, SET)
    value, problems = _parse_value(text, name.strip())
    try:
        overridden |= _assign(data, parts, value)
    except LookupError as error:
        problems.append(Problem(name.strip(), str(error.args[0]), None, SET))
    return problems


def _parse_value(text: str, name: str) -> tuple[Any, list[Problem]]:
    try:
        value, _, problems = parse_yaml(text, SET)
    except SpecError as error:
        value, problems = None, list(error.problems)
    keys = [f"{name}.{problem.key}" if problem.key else name for problem in problems]
    return value, [replace(problem, key=key, line=None) for problem, key in zip(problems, keys, strict=True)]


def _assign(data: dict[str, Any], parts: list[str], value: Any) -> set[KeyPath]:
    """Puts `value` in place; returns the paths that now come from the command line."""
    container: Any = data
    path: KeyPath = ()
    touched: set[KeyPath] = set()
    while True:
        key, rest = _next_key(container, parts, path)
        path = (*path, key)
        if not rest:
            container[key] = value
            return touched | {path}
        if isinstance(container, dict) and container.get(str(key)) is None:
            container[key] = {}
            touched.add(path)
        container, parts = container[key], rest


def _next_key(container: Any, parts: list[str], path: KeyPath) -> tuple[str | int, list[str]]:
    if isinstance(container, dict):
        # A searched key may hold dots itself (`dataset.limit`): the longest one that exists is meant.
        for end in range(len(parts), 1, -1):
            if ".".join(parts[:end]) in container:
                return ".".join(parts[:end]), parts[end:]
        return parts[0], parts[1:]
    if not isinstance(container, list):
        raise LookupError(f"{dotted(path)} is {kind_of(container)}, which has no keys; set {dotted(path)} itself")
    if not parts[0].isdecimal() or int(parts[0]) >= len(container):
        raise LookupError(f"{dotted(path)} is a list of {len(container)}: its items are numbered from 0")
    return int(parts[0]), parts[1:]
