"""Raw examples: rows of a hub dataset, of a local file, or of the built-in docstrings."""

from __future__ import annotations

import ast
import csv
import json
import re
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainables.config import DatasetConfig

Row = Mapping[str, Any]

PYTHON_DOCSTRINGS = "python-docstrings"
_MIN_DOCSTRING_CHARS = 40
# UTF-8, with or without the mark that Excel puts in front.
_ENCODING = "utf-8-sig"
_SLICE = re.compile(r"(?P<name>[^\[\]+]+?)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


def load_rows(dataset: DatasetConfig, split: str) -> Sequence[Row]:
    """Reads one split.

    Args:
        dataset: Where the rows are.
        split: A split's name with an optional slice, `train[:80%]`; several are joined by `+`.

    Returns:
        The rows, in the order of the source.

    Raises:
        ValueError: The dataset, the split or the slice does not exist, or a file cannot be parsed.
    """
    if dataset.path == PYTHON_DOCSTRINGS:
        return _slice_rows(list(_python_docstrings()), split, dataset.path)
    reader = _READERS.get(Path(dataset.path).suffix.lower())
    if reader is None:
        return _hub_rows(dataset, split)
    if not Path(dataset.path).is_file():
        raise ValueError(f"dataset.path: no such file: {dataset.path}")
    try:
        rows = reader(Path(dataset.path))
    except (OSError, ValueError) as error:
        raise ValueError(f"dataset.path: {dataset.path} cannot be read: {error}") from error
    return _slice_rows(rows, split, dataset.path)


def source_identity(dataset: DatasetConfig) -> list[Any]:
    """What the rows depend on besides the dataset's settings: a local file's state, or Python's version."""
    path = Path(dataset.path)
    if dataset.path == PYTHON_DOCSTRINGS:
        return [sys.version]
    if path.suffix.lower() in _READERS and path.is_file():
        status = path.stat()
        return [str(path.resolve()), status.st_size, status.st_mtime_ns]
    return []


def _hub_rows(dataset: DatasetConfig, split: str) -> Sequence[Row]:
    import datasets

    try:
        rows: Sequence[Row] = datasets.load_dataset(dataset.path, dataset.name, split=split)
    except Exception as error:  # the library raises its own errors, OSError, ValueError and those of its HTTP client
        raise ValueError(f"dataset {dataset.path!r}, split {split!r}, cannot be loaded: {error}") from error
    return rows


def _slice_rows(rows: list[Row], split: str, path: str) -> list[Row]:
    chosen: list[Row] = []
    for part in split.split("+"):
        match = _SLICE.fullmatch(part.strip())
        if match is None or match["name"] != "train":
            raise ValueError(f"split {split!r}: {path} has one split, train, as in train, train[:8000], train[10%:]")
        start, stop = _position(match["start"], len(rows)), _position(match["stop"], len(rows))
        chosen.extend(rows[start:stop])
    return chosen


def _position(text: str | None, num_rows: int) -> int | None:
    if text is None or not text.endswith("%"):
        return None if text is None else int(text)
    return round(num_rows * int(text[:-1]) / 100)


def _read_jsonl(path: Path) -> list[Row]:
    rows = []
    with path.open(encoding=_ENCODING) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                rows.append(_checked_row(_parse_json(line, number), f"line {number}"))
    return rows


def _parse_json(line: str, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from error


def _read_json(path: Path) -> list[Row]:
    data = json.loads(path.read_text(encoding=_ENCODING))
    if isinstance(data, dict) and isinstance(data.get("data"), list):
        data = data["data"]
    if not isinstance(data, list):
        raise ValueError("expected a list of rows")
    return [_checked_row(row, f"row {index}") for index, row in enumerate(data)]


def _checked_row(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{place}: expected a mapping of columns, got {type(row).__name__}")
    return row


def _read_csv(path: Path) -> list[Row]:
    with path.open(encoding=_ENCODING, newline="") as lines:
        return list(csv.DictReader(lines, strict=True))


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow.parquet

    return list(pyarrow.parquet.read_table(path).to_pylist())


def _read_text(path: Path) -> list[Row]:
    return [{"text": line} for line in path.read_text(encoding=_ENCODING).split("\n") if line.strip()]


_READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".txt": _read_text,
}


def _python_docstrings() -> Iterator[Row]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.glob("*.py")):
        yield from ({"text": text} for text in _docstrings(path.read_bytes()))


def _docstrings(source: bytes) -> Iterator[str]:
    blocks: deque[ast.AST] = deque([ast.parse(source)])
    while blocks:
        node = blocks.popleft()
        # Only statements: expressions are most of a tree and hold no docstring.
        for field in _BLOCKS:
            blocks.extend(getattr(node, field, ()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            if len(text) >= _MIN_DOCSTRING_CHARS:
                yield text


_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
