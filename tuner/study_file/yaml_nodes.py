"""YAML 1.2 text to plain data with a line for every key, and all faults instead of the first.

The node tree of ruamel.yaml is read directly rather than through its constructor, which converts more than YAML 1.2
does: `012`, `1_000`, `2024-01-01` and `on` stay the text that was written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.resolver import VersionedResolver
from ruamel.yaml.tag import Tag

from tuner.errors import Problem, SpecError
from tuner.study_file.wording import KeyPath, dotted, shorten

# Aliases of aliases grow exponentially; no study comes near this.
MAX_NODES = 100_000
# Nobody reads more, and finding near words for tens of thousands of keys takes minutes.
MAX_PROBLEMS = 100

_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_BOOLS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULLS = frozenset({"", "~", "null", "Null", "NULL"})


def parse_yaml(text: str, source: str) -> tuple[Any, dict[KeyPath, int], list[Problem]]:
    """Reads one YAML document.

    Args:
        text: The document.
        source: What messages call it.

    Returns:
        (plain data, 1-based line of each key and list item, faults that leave the rest readable).

    Raises:
        SpecError: The text is not YAML, or its aliases make the data endless.
    """
    root = _compose(text, source)
    if root is None:
        return None, {}, []
    builder = _Builder(source)
    data = builder.value(root, ())
    return data, builder.lines, builder.problems


def number_hint(text: str) -> str:
    """How to write the number that `text` looks like; empty when it looks like none."""
    if _INT.fullmatch(text) or _FLOAT.fullmatch(text):
        return f"remove the quotes: {text}"
    bare = text.replace("_", "").replace(",", "").lstrip("0") or "0"
    bare = f"0{bare}" if bare.startswith(".") else bare
    return f"write {bare}" if _INT.fullmatch(bare) or _FLOAT.fullmatch(bare) else ""


def _fatal(source: str, message: str, line: int | None = None, key: str = "") -> SpecError:
    return SpecError([Problem(key, message, line, source)])


class _CoreResolver(VersionedResolver):
    """Tags of plain scalars by the YAML 1.2 core schema, whatever a %YAML line says; `012` stays text."""

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        if kind is ScalarNode and implicit[0]:
            return Tag(suffix=_TAG + _plain_type(value))
        return super().resolve(kind, value, (False, False))


def _plain_type(value: str) -> str:
    if value in _NULLS:
        return "null"
    if value in _BOOLS:
        return "bool"
    if _INT.fullmatch(value):
        return "int"
    return "float" if _FLOAT.fullmatch(value) else "str"


def _compose(text: str, name: str) -> Node | None:
    yaml = YAML(typ="safe", pure=True)
    yaml.Resolver = _CoreResolver
    try:
        root: Node | None = yaml.compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _fatal(name, _syntax_message(error), mark.line + 1 if mark else None) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        code = error.character if isinstance(error.character, int) else ord(error.character)
        raise _fatal(name, f"character U+{code:04X} is not allowed in YAML; remove it", line) from None
    except RecursionError:
        raise _fatal(name, "is nested too deeply; no study file is") from None
    except (YAMLError, ValueError) as error:
        raise _fatal(name, f"not valid YAML: {' '.join(str(error).split())}") from None
    return root


def _syntax_message(error: MarkedYAMLError) -> str:
    problem = " ".join(str(error.problem or error.context).split())
    if "'\\t'" in problem:
        return "not valid YAML: a tab; indent with spaces"
    if "another document" in problem:
        return "holds a second YAML document; a study file has one: remove the '---'"
    if "mapping values are not allowed" in problem:
        return f"not valid YAML: {problem}; check the indentation, and quote a value that contains ': '"
    if error.context_mark and error.problem_mark and error.context_mark.line != error.problem_mark.line:
        return f"not valid YAML: {problem} ({error.context}, which began on line {error.context_mark.line + 1})"
    return f"not valid YAML: {problem}"


class _Builder:
    """Turns a node tree into plain data, noting lines and faults on the way."""

    def __init__(self, source: str) -> None:
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._source = source
        self._open: set[int] = set()
        self._seen: set[tuple[int, str]] = set()
        self._num_nodes = 0

    def value(self, node: Node, path: KeyPath) -> Any:
        """The plain value of `node`.

        Raises:
            SpecError: Aliases make the data endless or far larger than its text.
        """
        self._num_nodes += 1
        if id(node) in self._open or self._num_nodes > MAX_NODES:
            why = "refers to itself" if id(node) in self._open else f"expands to more than {MAX_NODES} values"
            raise _fatal(self._source, f"an alias {why}; write the values out", _line(node), dotted(path))
        if isinstance(node, ScalarNode):
            return self._scalar(node, path)
        if str(node.tag) not in {_TAG + "map", _TAG + "seq"}:
            self._fault(path, node, f"unknown tag {_short(node)}; remove it")
        self._open.add(id(node))
        value = self._mapping(node, path) if isinstance(node, MappingNode) else self._sequence(node.value, path)
        self._open.discard(id(node))
        return value

    def _mapping(self, node: MappingNode, path: KeyPath) -> dict[str, Any]:
        data = {}
        for key, (key_node, value_node) in self._entries(node, path).items():
            self.lines[*path, key] = _line(key_node)
            data[key] = self.value(value_node, (*path, key))
        return data

    def _sequence(self, nodes: Sequence[Node], path: KeyPath) -> list[Any]:
        items = []
        for index, item in enumerate(nodes):
            self.lines[*path, index] = _line(item)
            items.append(self.value(item, (*path, index)))
        return items

    def _entries(self, node: MappingNode, path: KeyPath) -> dict[str, tuple[Node, Node]]:
        """Keys in order; a key given here wins over a merged one, an earlier merge over a later one."""
        merged: dict[str, tuple[Node, Node]] = {}
        own: dict[str, tuple[Node, Node]] = {}
        merges: list[Node] = []
        for key_node, value_node in node.value:
            key = self._key(key_node, path)
            if key is None:
                continue
            if key in own:
                self._duplicate((*path, key), own[key][0], key_node)
            own[key] = (key_node, value_node)
            if _is_merge(key_node):
                merges = value_node.value if isinstance(value_node, SequenceNode) else [value_node]
        for merge in merges:
            for key, entry in self._merge_entries(merge, path).items():
                merged.setdefault(key, entry)
        return merged | {key: entry for key, entry in own.items() if not _is_merge(entry[0])}

    def _merge_entries(self, node: Node, path: KeyPath) -> dict[str, tuple[Node, Node]]:
        if not isinstance(node, MappingNode):
            self._fault(path, node, "<< must name a mapping or a list of mappings")
            return {}
        if id(node) in self._open:
            raise _fatal(self._source, "an alias refers to itself; write the values out", _line(node), dotted(path))
        self._open.add(id(node))
        entries = self._entries(node, path)
        self._open.discard(id(node))
        return entries

    def _key(self, node: Node, path: KeyPath) -> str | None:
        if not isinstance(node, ScalarNode):
            self._fault(path, node, "a key must be text, not a list or a mapping")
            return None
        if str(node.tag) != _TAG + "str":
            self._fault((*path, node.value), node, f'a key must be text; quote it: "{node.value}"')
        return str(node.value)

    def _scalar(self, node: ScalarNode, path: KeyPath) -> Any:
        text = str(node.value)
        convert = _SCALARS.get(str(node.tag).removeprefix(_TAG))
        try:
            if convert is None:
                raise ValueError(f"unknown tag {_short(node)}; remove it")
            text.encode()
            return convert(text)
        except UnicodeEncodeError:
            self._fault(path, node, "holds half a surrogate pair, which is not a character")
        except (ValueError, KeyError) as error:
            known = convert is None
            self._fault(path, node, str(error) if known else f"cannot be read as {_short(node)}: {shorten(text)!r}")
        return ""

    def _duplicate(self, path: KeyPath, first: Node, second: Node) -> None:
        lines = (_line(first), _line(second))
        place = f"on lines {lines[0]} and {lines[1]}" if lines[0] != lines[1] else f"on line {lines[0]}"
        remedy = "give one list: <<: [*a, *b]" if path[-1] == "<<" else "keep one of them"
        self._fault(path, second, f"the key is given twice, {place}; {remedy}")

    def _fault(self, path: KeyPath, node: Node, message: str) -> None:
        # A mapping reached through several aliases is one fault, not several.
        if (id(node), message) in self._seen:
            return
        self._seen.add((id(node), message))
        self.problems.append(Problem(dotted(path), message, _line(node), self._source))
        if len(self.problems) >= MAX_PROBLEMS:
            raise SpecError(self.problems)


def _parse_int(text: str) -> int:
    return int(text, 0) if text[:2] in {"0o", "0x"} else int(text)


def _parse_float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": _parse_int,
    "float": _parse_float,
    "bool": _BOOLS.__getitem__,
    "null": lambda text: None,
}


def _line(node: Node) -> int:
    return int(node.start_mark.line) + 1


def _short(node: Node) -> str:
    return str(node.tag).replace(_TAG, "!!")


def _is_merge(node: Node) -> bool:
    return isinstance(node, ScalarNode) and node.value == "<<" and node.style is None
