"""One self-contained HTML page: nothing in it is fetched, and whatever users wrote is text."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tuner.display.formats import strict
from tuner.errors import InputError
from tuner.reports.traces import Figure

_HERE = Path(__file__).parent
# The browser itself sees to it that no request leaves.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'"
)


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        shown: Its text.
        key: What it is sorted by; None: its text.
        style: Classes of the style sheet.
    """

    shown: str
    key: Any = None
    style: str = ""

    def html(self) -> str:
        """The cell as an element."""
        key = "" if self.key is None else f' data-key="{escape(str(self.key))}"'
        return f'<td class="{self.style}"{key}>{escape(self.shown)}</td>'


def page(title: str, body: Iterable[str], figures: Sequence[Figure]) -> str:
    """The whole page.

    Args:
        title: Shown by the browser.
        body: The sections, as HTML.
        figures: Everything that `plot` names in them.
    """
    plots = {figure.name: {"data": figure.data, "layout": figure.layout, "height": figure.height} for figure in figures}
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{(_HERE / 'page.css').read_text(encoding='utf-8')}</style></head>",
        "<body><main>",
        *body,
        f"</main><script>{_plotly()}</script><script>const FIGURES = {script_json(plots)};",
        f"{(_HERE / 'page.js').read_text(encoding='utf-8')}</script></body></html>",
    ]
    return "\n".join(parts)


def write(html: str, path: Path) -> Path:
    """Write a page whole, in the place of an older one.

    Raises:
        InputError: It cannot be written there.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(html, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}", "Choose another place: --to FILE") from error
    return path


def script_json(data: Any) -> str:
    """JSON that cannot end the script it stands in."""
    plain = json.dumps(strict(data), separators=(",", ":"), default=str)
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def section(title: str, *content: str, note: str = "") -> str:
    """A card with a title."""
    return f"<section><h2>{escape(title)}</h2>{_note(note)}{''.join(content)}</section>"


def text(words: str) -> str:
    """Words as HTML shows them."""
    return escape(words)


def sub(words: str) -> str:
    """A line under a title."""
    return f'<p class="sub">{escape(words)}</p>'


def verdicts(items: Iterable[tuple[str, str, str, str]]) -> str:
    """Statements, each (tone, figure, what the figure is, text)."""
    rows = (
        f'<li class="{_tone(tone)}"><b>{escape(figure)}<small>{escape(unit)}</small></b>{escape(words)}</li>'
        for tone, figure, unit, words in items
    )
    return f'<ul class="verdicts">{"".join(rows)}</ul>'


def two(left: Figure, right: Figure) -> str:
    """Two plots side by side where there is room."""
    return f'<div class="two">{plot(left)}{plot(right)}</div>'


def plot(figure: Figure) -> str:
    """A card with one plot."""
    return section(figure.title, place(figure), note=figure.note)


def place(figure: Figure) -> str:
    """Where a plot is drawn."""
    marks = f'role="img" aria-label="{escape(figure.title)}"'
    return f'<div class="plot" id="plot-{escape(figure.name)}" {marks} style="min-height:{figure.height}px"></div>'


def grid(figures: Iterable[Figure]) -> str:
    """Small plots side by side, as many as fit."""
    cells = (f"<div><h3>{escape(figure.title)}</h3>{_note(figure.note)}{place(figure)}</div>" for figure in figures)
    return f'<div class="grid">{"".join(cells)}</div>'


def tiles(facts: Mapping[str, str]) -> str:
    """Figures with what they are below."""
    cells = (
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in facts.items()
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def facts(pairs: Mapping[str, Any]) -> str:
    """Names and what they are."""
    rows = (f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in pairs.items())
    return f"<dl>{''.join(rows)}</dl>"


def table(columns: Sequence[str], rows: Iterable[Sequence[Cell]], *, numbers: Iterable[str] = ()) -> str:
    """A table that scrolls sideways where it is too wide, and sorts by a click on a column's head."""
    right = set(numbers)
    head = "".join(f'<th class="{"number" if name in right else ""}">{escape(name)}</th>' for name in columns)
    body = "".join(f"<tr>{''.join(cell.html() for cell in row)}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _note(words: str) -> str:
    return f'<p class="note">{escape(words)}</p>' if words else ""


def _plotly() -> str:
    # Only here: the other verbs do not pay for it.
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs()).replace("</script", "<\\/script")


def _tone(tone: str) -> str:
    return {"good": "good", "warn": "warn"}.get(tone, "note-tone")
