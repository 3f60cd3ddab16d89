"""The tables people read: trials, leaderboards, studies, and lists of facts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table
from rich.text import Text

from tuner import text

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord

STATE_STYLES = {
    "COMPLETE": "green",
    "PRUNED": "yellow",
    "FAILED": "red",
    "RUNNING": "cyan",
    "finished": "green",
    "running": "cyan",
    "interrupted": "yellow",
    "stopped": "yellow",
    "damaged": "red",
}
LEVEL_STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
_CELL_PADDING, _NAME_CHARS = 3, 28
# Laying out cells takes rich 1 ms a row: beyond this many, rows are plain lines.
_MAX_FOLDED_ROWS = 1000


def state(name: str) -> Text:
    """A state in its colour."""
    return Text(name, style=STATE_STYLES.get(name, ""))


def new_table(*columns: str, right: Iterable[str] = ()) -> Table:
    """An empty table in the one style; `right` names the columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False, header_style="bold")
    for name in columns:
        is_number = name in right
        # What may fold gives way first on a narrow screen: parameters and notes, never a state or a number.
        stays_whole = is_number or name == "state"
        table.add_column(Text(name), justify="right" if is_number else "left", no_wrap=stays_whole, overflow="fold")
    return table


def facts(pairs: Mapping[str, Any]) -> Table:
    """Names on the left, what they are on the right."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(Text(text.shorten(name, _NAME_CHARS)), value if isinstance(value, Text) else Text(str(value)))
    return table


def trials(records: Sequence[TrialRecord], *, metric: str, width: int, default: int | None = None) -> Table | str:
    """One row a trial, in the order given; a very long table has neither colours nor folded cells.

    Args:
        records: The trials.
        metric: Name of the objective, the header of the value's column.
        width: Columns of the screen; parameters get a column each where that fits, and share one otherwise.
        default: Number of the default trial, which is marked.
    """
    header = text.shorten(metric, 16)
    names = list(dict.fromkeys(name for record in records for name in record.params))
    notes = [_note(record, default) for record in records]
    common = [_common_cells(record) for record in records]
    wide = [
        [*_parameter_cells(record, names), *([note] if any(notes) else [])]
        for record, note in zip(records, notes, strict=True)
    ]
    columns = [*names, *(["note"] if any(notes) else [])]
    rows = [["trial", "state", header, "step", *columns], *(a + b for a, b in zip(common, wide, strict=True))]
    if len(records) > _MAX_FOLDED_ROWS:
        return _plain(rows)
    if _width(rows) > width:
        columns = ["parameters"]
        # A number that is folded in its middle reads as another one.
        room = width - _width([row[:4] for row in rows]) - _CELL_PADDING
        wide = [[_stacked(record, note, room)] for record, note in zip(records, notes, strict=True)]
    table = new_table(
        "trial", "state", header, "step", *columns, right={"trial", header, "step", *_numeric(records, names)}
    )
    for record, (number, _, *rest), cells in zip(records, common, wide, strict=True):
        table.add_row(number, state(record.state), *map(Text, rest), *map(Text, cells))
    return table


def _plain(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, cells)) + _CELL_PADDING for cells in zip(*rows, strict=True)]
    return "\n".join("".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _common_cells(record: TrialRecord) -> list[str]:
    return [str(record.number), record.state, text.measured(record.value), str(record.step)]


def _parameter_cells(record: TrialRecord, names: Sequence[str]) -> list[str]:
    return [text.parameter(record.params[name]) if name in record.params else text.MISSING for name in names]


def _note(record: TrialRecord, default: int | None) -> str:
    return record.reason or ("default" if record.number == default else "")


def _stacked(record: TrialRecord, note: str, room: int) -> str:
    return "\n".join(filter(None, [text.parameters(record.params, room), note]))


def _numeric(records: Sequence[TrialRecord], names: Sequence[str]) -> list[str]:
    def is_number(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    return [name for name in names if all(is_number(record.params.get(name, 0)) for record in records)]


def _width(rows: Sequence[Sequence[str]]) -> int:
    """Columns that a table of these rows takes when no cell is folded."""
    return sum(max(map(len, cells)) + _CELL_PADDING for cells in zip(*rows, strict=True)) - _CELL_PADDING
