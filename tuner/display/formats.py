"""Results for machines: JSON and CSV with stable keys."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any


class Format(StrEnum):
    """What the reading verbs print."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class Shape(StrEnum):
    """What the verbs print that have no rows."""

    TABLE = "table"
    JSON = "json"


def to_json(data: Any) -> str:
    """Strict JSON: a number that is not finite becomes null."""
    return json.dumps(strict(data), indent=2, ensure_ascii=False, allow_nan=False, default=str)


def strict(data: Any) -> Any:
    """Plain data in which numbers that are not finite are null."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, Mapping):
        return {str(key): strict(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [strict(value) for value in data]
    return data


def to_csv(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """A header, then one line a row; a mapping inside a row becomes columns named outer.inner.

    Args:
        rows: Inner mappings may differ from row to row, as the parameters of a conditional space do.
        keys: The keys of a row in the order of the columns; there is a header even without rows.
    """
    text = io.StringIO()
    columns = [column for key in keys for column in _columns(rows, key)]
    writer = csv.DictWriter(text, columns, lineterminator="\n", restval="")
    writer.writeheader()
    writer.writerows(_flatten(row) for row in rows)
    return text.getvalue().rstrip("\n")


def _columns(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    mappings = [row[key] for row in rows if isinstance(row.get(key), Mapping)]
    return list(dict.fromkeys(f"{key}.{name}" for mapping in mappings for name in mapping)) or [key]


def _flatten(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{name}": _cell(inner) for name, inner in value.items()})
        elif value is not None:
            flat[key] = _cell(value)
    return flat


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list | tuple) else value
