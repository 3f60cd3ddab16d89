"""What the plots of a report are made of: traces and axes as Plotly takes them, colours by the style sheet's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from tuner import text
from tuner.record.record import TrialRecord

ACCENT, MUTED, FAINT, BAD, GOOD, INK = "$accent", "$muted", "$faint", "$bad", "$good", "$ink"
STATE_COLOURS = {"COMPLETE": ACCENT, "PRUNED": MUTED, "FAILED": BAD, "RUNNING": GOOD}
GAP = [None]


@dataclass(frozen=True)
class Figure:
    """One plot.

    Attributes:
        name: Identifies it in the page.
        title: What it shows.
        data: Plotly traces.
        layout: Plotly layout.
        note: How to read it, and what was left out.
        height: Pixels.
    """

    name: str
    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    height: int = 340


def points(
    name: str, records: Sequence[TrialRecord], colour: str, *, symbol: str = "circle", size: int = 6
) -> dict[str, Any]:
    """A marker a trial, by its number."""
    marker = {"color": colour, "size": size, "symbol": symbol, "line": {"color": colour, "width": 1}}
    words = [hover(record, record.value) for record in records]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "opacity": 1.0 if len(records) < 300 else 0.5,
        "x": [record.number for record in records],
        "y": [record.value for record in records],
        "marker": marker,
        "text": words,
        "hoverinfo": "text",
    }


def lines(
    name: str, records: Sequence[TrialRecord], colour: str, *, width: float, opacity: float = 1.0, dash: str = "solid"
) -> dict[str, Any]:
    """The reports of trials as one trace, with a gap after each."""
    x: list[Any] = []
    y: list[Any] = []
    words: list[Any] = []
    for record in records:
        finite = {step: value for step, value in record.reports.items() if math.isfinite(value)}
        x += [*finite, None]
        y += [*finite.values(), None]
        words += [f"trial {record.number}, step {step}: {text.measured(value)}" for step, value in finite.items()] + GAP
    line = {"color": colour, "width": width, "dash": dash}
    mode = "lines+markers" if sum(len(record.reports) for record in records) <= 3 * len(records) else "lines"
    trace = {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "line": line, "opacity": opacity}
    return trace | {"text": words, "hoverinfo": "text", "marker": {"size": 4, "color": colour}}


def ends(ends: Iterable[tuple[int, int, float]], colour: str) -> dict[str, Any]:
    """A cross at the last (trial, step, value) of each."""
    finite = [end for end in ends if math.isfinite(end[2])]
    return {
        "type": "scatter",
        "mode": "markers",
        "showlegend": False,
        "x": [step for _, step, _ in finite],
        "y": [value for _, _, value in finite],
        "marker": {"symbol": "x", "size": 6, "color": colour},
        "text": [f"trial {number} stopped at step {step}: {text.measured(value)}" for number, step, value in finite],
        "hoverinfo": "text",
    }


def cloud(
    label: str,
    pairs: Sequence[tuple[TrialRecord, float]],
    name: str,
    place: Callable[[Any], float],
    spread: float,
    colour: str,
    *,
    opacity: float = 0.8,
    **marker: Any,
) -> dict[str, Any]:
    """(trial, value) against a parameter; `place` and `spread` say where on the axis."""
    finite = [(record, value) for record, value in pairs if math.isfinite(value)]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": label,
        # The golden ratio deals numbers out evenly.
        "x": [place(r.params[name]) + spread * (2 * (r.number * 0.618034 % 1) - 1) for r, _ in finite],
        "y": [value for _, value in finite],
        "marker": {"color": colour, "size": 6, **marker},
        "opacity": opacity,
        "text": [f"{label}<br>{hover(record, value)}" for record, value in finite],
        "hoverinfo": "text",
    }


def bar(name: str, count: int, colour: str) -> dict[str, Any]:
    """One part of a stacked bar."""
    words = f"{count:,}".replace(",", " ")
    bar = {"type": "bar", "orientation": "h", "name": name, "x": [count], "y": ["steps"], "marker": {"color": colour}}
    return bar | {"text": [words], "textposition": "inside", "insidetextanchor": "middle", "hoverinfo": "name+x"}


def value_axis(metric: str, values: Iterable[Any], mode: str) -> dict[str, Any]:
    """An axis that shows the good end whole; a few values far off at the other end do not flatten everything."""
    finite = sorted(value for value in values if value is not None and math.isfinite(value))
    axis: dict[str, Any] = {"title": {"text": short(metric)}}
    if len(finite) < 10:
        return axis
    low, high = finite[0], finite[-1]
    near_low, near_high = finite[len(finite) // 20], finite[-1 - len(finite) // 20]
    width = (near_high - near_low) or 1.0
    if mode == "min":
        high = min(high, near_high + width)
    else:
        low = max(low, near_low - width)
    margin = 0.04 * ((high - low) or 1.0)
    return axis | {"range": [low - margin, high + margin]}


def upright(x: float, dash: str = "dot") -> dict[str, Any]:
    """A line from bottom to top."""
    line = {"color": "$line", "width": 1, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line, "layer": "below"}


def label(x: float, words: str) -> dict[str, Any]:
    """Words on top of a plot."""
    return {
        "x": x,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "text": words,
        "showarrow": False,
        "font": {"size": 10},
    }


def hover(record: TrialRecord, value: float | None) -> str:
    """What hovering over a trial shows; Plotly reads tags in it, so what users wrote is escaped."""
    lines = [f"trial {record.number} {record.state}: {text.measured(value)}"]
    lines += [f"{escape(name)} = {escape(text.parameter(item))}" for name, item in record.params.items()]
    return "<br>".join(lines)


def short(words: str, width: int = 24) -> str:
    """Words that fit, as Plotly takes them."""
    return escape(text.shorten(words, width))
