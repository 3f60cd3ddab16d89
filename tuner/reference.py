"""The README's tables of keys, made from the models and the docstrings under their fields.

python -m tuner.reference            writes them into README.md
python -m tuner.reference --check    exits 1 where they are not current
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainables.config import TrainConfig
from tuner.study_file.parameters import Categorical, Float, Int
from tuner.study_file.sections import StudyFile

Schema = Mapping[str, Any]
KINDS: tuple[type[BaseModel], ...] = (Float, Int, Categorical)
_TYPES = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "object": "mapping",
    "array": "list",
}
_BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
# How a docstring says that loading a file fills a default in.
_FILLED_IN = re.compile(r"\s*Absent from a study file: ([\w.]+)\.")


def updated(readme: str) -> str:
    """The README with current tables, each under its heading."""
    for heading, lines in tables().items():
        readme = _replace_table(readme, heading, lines)
    return readme


def tables() -> dict[str, list[str]]:
    """Lines of each table, by the heading that it follows."""
    header = ["key", "value", "default", "meaning"]
    return {
        "### Searched parameters": _table(["key", "types", "default", "meaning"], _parameter_rows()),
        "### Keys of a study": _table(header, _rows(StudyFile.model_json_schema())),
        "### Keys of `train` for the built-in loop": _table(header, _rows(TrainConfig.model_json_schema())),
    }


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in [header]] + [
        f"|{'---|' * len(header)}",
        *(f"| {' | '.join(cells)} |" for cells in rows),
    ]


def _rows(schema: Schema, definitions: Schema | None = None, prefix: str = "") -> Iterator[list[str]]:
    """A row a key; those of a section follow each other, under dotted names."""
    definitions = schema.get("$defs", {}) if definitions is None else definitions
    for name, field in schema["properties"].items():
        key, section = prefix + name, _section(field, definitions)
        is_required = name in schema.get("required", ())
        if section is None or "anyOf" in field:
            yield [f"`{key}`", _value(field), _default(field, is_required), _meaning(field)]
        if section is not None:
            yield from _rows(section, definitions, f"{key}.")


def _parameter_rows() -> Iterator[list[str]]:
    fields = {kind: kind.model_json_schema() for kind in KINDS}
    order = ["type", "low", "high", "log", "step", "choices", "when"]
    assert set(order) == {name for schema in fields.values() for name in schema["properties"]}
    for name in order:
        having = {kind: schema for kind, schema in fields.items() if name in schema["properties"]}
        field = next(schema["properties"][name] for schema in having.values())
        types = "all" if len(having) == len(KINDS) else ", ".join(kind.__name__.lower() for kind in having)
        is_required = name == "type" or any(name in schema.get("required", ()) for schema in having.values())
        yield [f"`{name}`", types, _default(field, is_required), _meaning(field)]


def _section(field: Schema, definitions: Schema) -> Schema | None:
    """The section that a key holds, if it holds one."""
    references = [part["$ref"] for part in [field, *field.get("anyOf", ())] if "$ref" in part]
    return definitions[references[0].rpartition("/")[2]] if references else None


def _value(field: Schema) -> str:
    parts = [part for part in field.get("anyOf", [field]) if part.get("type") != "null"]
    return " \\| ".join(_kind(part) for part in parts)


def _kind(part: Schema) -> str:
    choices = part.get("enum") or ([part["const"]] if "const" in part else [])
    if choices:
        return " \\| ".join(f"`{choice}`" for choice in choices)
    bounds = [f"{sign} {_number(part[name])}" for name, sign in _BOUNDS.items() if name in part]
    kind = _TYPES[part.get("type", "object")]
    return f"{kind} {', '.join(bounds)}" if bounds else kind


def _default(field: Schema, is_required: bool) -> str:
    filled_in = _FILLED_IN.search(field.get("description", ""))
    if is_required:
        return "required"
    if filled_in:
        return f"`{filled_in[1]}`"
    default = field.get("default", {})
    if default is None or isinstance(default, bool):
        return {None: "none", True: "true", False: "false"}[default]
    if isinstance(default, int | float):
        return _number(default)
    return f"`{default}`" if default else "empty"


def _meaning(field: Schema) -> str:
    words = " ".join(_FILLED_IN.sub("", field["description"]).split())
    return words.replace("|", "\\|")


def _number(value: float) -> str:
    power = int(value).bit_length() - 1
    return f"2^{power}" if power > 20 and value == 2**power else f"{value:g}"


def _replace_table(text: str, heading: str, lines: Sequence[str]) -> str:
    before, found, after = text.partition(f"{heading}\n")
    assert found, f"the README has no heading {heading!r}"
    start = after.index("\n|") + 1
    end = start + re.search(r"\n(?!\|)", after[start:]).start()  # type: ignore[union-attr]
    return before + found + after[:start] + "\n".join(lines) + after[end:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tuner.reference", description=__doc__.splitlines()[0])
    parser.add_argument("readme", nargs="?", type=Path, default=Path("README.md"))
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a table is not current")
    options = parser.parse_args(arguments)
    old = options.readme.read_text(encoding="utf-8")
    new = updated(old)
    if options.check:
        return int(new != old)
    options.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
