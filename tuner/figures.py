"""The plots of a report as plain Plotly figures: data and layout, colours by name so that a page can set its theme.

Drawn as SVG throughout: WebGL, which Plotly's own parallel coordinates need, is missing on many remote desktops. What
a screen cannot show is left out, and the figure's note says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from tuner import text
from tuner.lanes import assign_lanes
from tuner.parameters import Categorical, Parameter
from tuner.record import TrialRecord
from tuner.thinning import thinned
from tuner.verdicts import at_step

if TYPE_CHECKING:
    from tuner.confirmation import Confirmation

ACCENT, MUTED, FAINT, BAD, GOOD, INK = "$accent", "$muted", "$faint", "$bad", "$good", "$ink"
STATE_COLOURS = {"COMPLETE": ACCENT, "PRUNED": MUTED, "FAILED": BAD, "RUNNING": GOOD}
SERIES = (ACCENT, "$warn", GOOD, BAD, MUTED, INK)
SHADES = ("$shade0", "$shade1", "$shade2", "$shade3")
MAX_CURVES, MAX_POINTS, MAX_LINES, MAX_BARS = 120, 1500, 240, 1500
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


def history(records: Sequence[TrialRecord], metric: str, mode: str) -> Figure:
    """Each trial's value by its number, and the best complete one so far."""
    sign = 1.0 if mode == "min" else -1.0
    complete = [record for record in records if record.state == "COMPLETE" and record.value is not None]
    best: list[TrialRecord] = []
    for record in complete:
        if not best or sign * (record.value or 0.0) < sign * (best[-1].value or 0.0):
            best.append(record)
    shown, note = thinned(complete, MAX_POINTS, keep=best)
    pruned, _ = thinned([r for r in records if r.state == "PRUNED" and r.value is not None], MAX_POINTS)
    # Drawn as far as the last trial: the best one stays the best.
    ends = [(record.number, record.value) for record in best] + ([(len(records) - 1, best[-1].value)] if best else [])
    data = [
        _points("pruned (value when stopped)", pruned, MUTED, symbol="x-thin", size=5, metric=metric),
        _points("complete", shown, ACCENT, metric=metric),
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [number for number, _ in ends],
            "y": [value for _, value in ends],
            "line": {"color": INK, "shape": "hv", "width": 1.5},
            "hoverinfo": "skip",
        },
    ]
    values = [value for trace in data for value in trace["y"]]
    layout = {"xaxis": {"title": {"text": "trial"}}, "yaxis": _value_axis(metric, values, mode)}
    return Figure("history", "Optimization history", data, layout, note, height=380)


def curves(
    records: Sequence[TrialRecord], metric: str, mode: str, steps: Sequence[int], leaders: Sequence[int], default: Any
) -> Figure:
    """The reports of each trial, the rungs, and where trials were stopped."""
    reporting = [record for record in records if any(map(math.isfinite, record.reports.values()))]
    marked = [record for record in reporting if record.number in (*leaders[:1], default)]
    groups = {
        state: [record for record in reporting if record.state == state and record not in marked]
        for state in ("PRUNED", "FAILED", "RUNNING", "COMPLETE")
    }
    data, left_out = [], 0
    for state, group in groups.items():
        shown, _ = thinned(group, MAX_CURVES // 2, keep=[record for record in group if record.number in leaders])
        left_out += len(group) - len(shown)
        if shown:
            data.append(_lines(state.lower(), shown, STATE_COLOURS[state], opacity=0.55, width=1.0))
        if shown and state in ("PRUNED", "FAILED"):
            ends = [(record.number, record.step, record.reports[record.step]) for record in shown]
            data.append(_ends(ends, STATE_COLOURS[state]))
    for record in marked:
        is_best = record.number in leaders[:1]
        name = f"trial {record.number}, {'best' if is_best else 'default'}"
        data.append(_lines(name, [record], ACCENT if is_best else INK, width=2.5, dash="solid" if is_best else "dash"))
    shapes = [_upright(step) for step in steps]
    labels = [_label(step, str(step)) for step in steps]
    values = [value for trace in data for value in trace["y"] if value is not None]
    layout = {
        "xaxis": {"title": {"text": "optimizer steps"}},
        "yaxis": _value_axis(metric, values, mode),
        "shapes": shapes,
        "annotations": labels,
        "margin": {"t": 26},
    }
    note = "Each line is a trial, a cross where one was stopped"
    note += "; dotted: the rungs." if steps else "."
    if left_out:
        note += f" {text.plural(left_out, 'trial')} of {len(reporting)} not drawn, taken out evenly."
    return Figure("curves", "Learning curves", data, layout, note, height=380)


def parallel(records: Sequence[TrialRecord], parameters: Mapping[str, Parameter], metric: str, mode: str) -> Figure:
    """A line a trial through its parameters to its value: the better a complete trial, the darker."""
    sign = 1.0 if mode == "min" else -1.0
    complete = sorted(
        (r for r in records if r.state == "COMPLETE" and r.value is not None), key=lambda r: sign * (r.value or 0.0)
    )
    pruned, _ = thinned([record for record in records if record.state == "PRUNED"], MAX_LINES // 2)
    shown, note = thinned(complete, MAX_LINES, keep=complete[: MAX_LINES // 4])
    axes = [_parameter_axis(name, parameter) for name, parameter in parameters.items()]
    axes.append(_measured_axis(metric, [record.value or 0.0 for record in complete], mode))
    data = [_paths("pruned", pruned, axes[:-1], FAINT, 1.0)]
    size = math.ceil(len(shown) / len(SHADES)) or 1
    names = ("best quarter", "second quarter", "third quarter", "last quarter")
    for index in reversed(range(len(SHADES))):
        part = shown[index * size : (index + 1) * size]
        if part:
            data.append(_paths(names[index], part, axes, SHADES[index], 2.0 if index == 0 else 1.2))
    ticks = [_tick(index, at, label) for index, axis in enumerate(axes) for at, label in axis.ticks]
    layout: dict[str, Any] = {
        "xaxis": {"visible": False, "range": [-0.1, len(axes) - 0.4]},
        "yaxis": {"visible": False, "range": [-0.16, 1.06]},
        "shapes": [_upright(index, "solid") for index in range(len(axes))],
        "annotations": [*ticks, *(_head(index, axis.name) for index, axis in enumerate(axes))],
        "margin": {"t": 66},
        "legend": {"y": -0.02},
    }
    words = "Up is better on the last axis. A line at the bottom of an axis: the parameter was not searched there."
    return Figure("parallel", "Parallel coordinates", data, layout, f"{words} {note}".strip(), height=420)


def slices(
    records: Sequence[TrialRecord],
    parameters: Mapping[str, Parameter],
    metric: str,
    mode: str,
    first: int | None,
    best: TrialRecord | None,
) -> list[Figure]:
    """One plot a parameter: its values against the loss at full length, and at the first rung, where all compare."""
    return [
        _slice(records, name, parameter, metric, mode, first, best)
        for name, parameter in parameters.items()
        if not parameter.is_constant
    ]


def _slice(
    records: Sequence[TrialRecord],
    name: str,
    parameter: Parameter,
    metric: str,
    mode: str,
    first: int | None,
    best: TrialRecord | None,
) -> Figure:
    having = [record for record in records if name in record.params]
    complete, _ = thinned([r for r in having if r.state == "COMPLETE" and r.value is not None], MAX_POINTS // 2)
    early, _ = thinned([r for r in having if first and at_step(r, first) is not None], MAX_POINTS // 2)
    place, axis = _slice_axis(parameter)
    # The trials that stand on one value are spread a little, the same way in every report.
    spread = 0.0 if not isinstance(parameter, Categorical) else 0.25
    data = []
    if first:
        at = [(r, at_step(r, first) or 0.0) for r in early]
        data.append(_cloud(f"at step {first}", at, name, place, spread, MUTED, opacity=0.45, size=5))
    data.append(_cloud("complete", [(r, r.value or 0.0) for r in complete], name, place, spread, ACCENT))
    if best is not None and name in best.params and best.value is not None:
        star: dict[str, Any] = {"symbol": "star", "size": 13, "line": {"color": INK, "width": 1}}
        data.append(_cloud(f"best (trial {best.number})", [(best, best.value)], name, place, 0.0, GOOD, **star))
    values = [value for trace in data for value in trace["y"]]
    layout = {"xaxis": axis, "yaxis": _value_axis(metric, values, mode), "showlegend": False}
    return Figure(f"slice-{name}", name, data, layout, height=260)


def importances(found: Mapping[str, float]) -> Figure:
    """Bars, the most important parameter on top."""
    ordered = sorted(found.items(), key=lambda item: item[1])
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [share for _, share in ordered],
            "y": [_short(name) for name, _ in ordered],
            "text": [text.percent(share) for _, share in ordered],
            "textposition": "auto",
            "marker": {"color": ACCENT},
            "hoverinfo": "skip",
        }
    ]
    layout = {"xaxis": {"visible": False}, "yaxis": {"automargin": True}, "showlegend": False}
    note = "Optuna's PED-ANOVA over the complete trials: which parameters set the better ones apart."
    return Figure("importance", "Importance", data, layout, note, height=90 + 34 * len(ordered))


def timeline(records: Sequence[TrialRecord], now: str) -> Figure:
    """When each trial ran, in as few lanes as there were trials at once."""
    started = sorted((record for record in records if record.started), key=lambda record: record.started or "")
    shown = started[-MAX_BARS:]
    lanes = assign_lanes([(record.started or "", record.ended or now) for record in shown])
    data = []
    for state, colour in STATE_COLOURS.items():
        bars = [(record, lane) for record, lane in zip(shown, lanes, strict=True) if record.state == state]
        if bars:
            x = [time and time[:23] for record, _ in bars for time in (record.started, record.ended or now, None)]
            y = [lane for _, number in bars for lane in (number + 1, number + 1, None)]
            words = [f"trial {record.number} {state}" for record, _ in bars for _ in range(3)]
            line = {"color": colour, "width": 9}
            data.append({"type": "scatter", "mode": "lines", "name": state.lower(), "x": x, "y": y, "line": line}
                        | {"text": words, "hoverinfo": "text+x"})  # fmt: skip
    count = max(lanes, default=0) + 1
    layout = {
        "xaxis": {"type": "date", "title": {"text": "time (UTC)"}},
        "yaxis": {"title": {"text": "slot"}, "range": [count + 0.6, 0.4], "dtick": max(1, count // 8)},
    }
    height = 160 + 22 * min(count, 16)
    layout["legend"] = {"y": -70 / (height - 90)}  # below the date
    note = "The record does not name slots: trials are laid in the first lane that was free."
    if len(shown) < len(started):
        note += f" The newest {len(shown)} of {len(started)} trials."
    return Figure("timeline", "Timeline of slots", data, layout, note, height)


def spent(steps: Mapping[str, int], saved: int) -> Figure:
    """Steps by what became of their trial, and those that early stopping did not run."""
    parts = [(f"{state.lower()}", steps.get(state, 0), STATE_COLOURS[state]) for state in STATE_COLOURS]
    data = [
        _bar(name, count, colour) for name, count, colour in [*parts, ("not run: stopped early", saved, FAINT)] if count
    ]
    layout = {"barmode": "stack", "yaxis": {"visible": False}, "legend": {"y": -0.25, "traceorder": "normal"}}
    return Figure("spent", "Where the optimizer steps went", data, layout, height=190)


def survivors(found: Mapping[int, int], expected: Mapping[int, int]) -> Figure:
    """How many trials reached each rung, beside the plan's expectation."""
    ticks = [f"step {step}" for step in found]
    data = [
        {"type": "bar", "name": name, "x": ticks, "y": [counts.get(step, 0) for step in found]}
        | {
            "marker": {"color": colour},
            "text": [str(counts.get(step, 0)) for step in found],
            "textposition": "auto",
            "textangle": 0,
        }
        for name, counts, colour in (("reached", found, ACCENT), ("planned", expected, FAINT))
    ]
    layout = {"barmode": "group", "yaxis": {"title": {"text": "trials"}}}
    return Figure("survivors", "Trials that reached each rung", data, layout, height=260)


def confirmed(found: Confirmation, metric: str) -> Figure:
    """Each configuration's value under every seed, and the mean with its interval."""
    names = [_short(arm.name) for arm in found.arms]
    dots = [
        (name, seed, value) for name, arm in zip(names, found.arms, strict=True) for seed, value in arm.values.items()
    ]
    means = [(name, arm.mean) for name, arm in zip(names, found.arms, strict=True) if arm.mean]
    data = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "one seed",
            "x": [value for _, _, value in dots],
            "y": [name for name, _, _ in dots],
            "text": [f"seed {seed}: {text.measured(value)}" for _, seed, value in dots],
            "hoverinfo": "text",
            "marker": {"color": MUTED, "size": 7},
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "mean and 95 % interval",
            "x": [mean.mean for _, mean in means],
            "y": [name for name, _ in means],
            "error_x": {"type": "data", "array": [mean.half_width or 0.0 for _, mean in means], "color": ACCENT},
            "marker": {"color": ACCENT, "size": 10, "symbol": "diamond"},
            "hoverinfo": "x",
        },
    ]
    axis = {"categoryorder": "array", "categoryarray": names[::-1]}
    layout = {"xaxis": {"title": {"text": _short(metric)}}, "yaxis": axis, "legend": {"y": -0.35}}
    return Figure("confirmed", "Confirmed with new seeds", data, layout, height=150 + 34 * len(names))


def progress(curves: Mapping[str, Sequence[tuple[int, int, float]]], metric: str, by: str) -> Figure:
    """The best value so far of several studies.

    Args:
        curves: (trials, optimizer steps, value) of each study.
        metric: What the value is.
        by: "trials" or "steps": what the budget is counted in.
    """
    which = ("trials", "steps").index(by)
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": _short(name),
            "x": [point[which] for point in curve],
            "y": [point[2] for point in curve],
            "line": {"shape": "hv", "width": 2, "color": SERIES[index % len(SERIES)]},
        }
        for index, (name, curve) in enumerate(curves.items())
    ]
    words = {"trials": "ended trials", "steps": "optimizer steps of all trials"}[by]
    layout = {
        "xaxis": {"title": {"text": words}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": _short(metric)}},
    }
    return Figure(f"progress-{by}", f"Best so far by {by}", data, layout)


# -- traces -----------------------------------------------------------------------------------------------------


def _points(
    name: str, records: Sequence[TrialRecord], colour: str, *, metric: str, symbol: str = "circle", size: int = 6
) -> dict[str, Any]:
    marker = {"color": colour, "size": size, "symbol": symbol, "line": {"color": colour, "width": 1}}
    words = [_words(record, record.value) for record in records]
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


def _lines(
    name: str, records: Sequence[TrialRecord], colour: str, *, width: float, opacity: float = 1.0, dash: str = "solid"
) -> dict[str, Any]:
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


def _ends(ends: Iterable[tuple[int, int, float]], colour: str) -> dict[str, Any]:
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


def _cloud(
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
        "text": [f"{label}<br>{_words(record, value)}" for record, value in finite],
        "hoverinfo": "text",
    }


@dataclass(frozen=True)
class _Axis:
    name: str
    place: Callable[[TrialRecord], float | None]
    ticks: list[tuple[float, str]]


def _parameter_axis(name: str, parameter: Parameter) -> _Axis:
    if isinstance(parameter, Categorical) or parameter.is_constant:
        values = list(parameter.values())
        places = {str(value): (i + 0.5) / len(values) for i, value in enumerate(values)}
        ticks = [(place, label) for label, place in places.items()][:12]
        return _Axis(name, lambda r: places.get(str(r.params[name])) if name in r.params else None, ticks)
    low, high, log = parameter.low, parameter.high, parameter.log
    start, end = (math.log(low), math.log(high)) if log else (low, high)

    def place(record: TrialRecord) -> float | None:
        if name not in record.params:
            return None
        value = record.params[name]
        return ((math.log(value) if log else value) - start) / (end - start)

    return _Axis(name, place, [(0.0, text.number(low)), (1.0, text.number(high))])


def _measured_axis(metric: str, values: Sequence[float], mode: str) -> _Axis:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    width = (high - low) or 1.0

    def place(record: TrialRecord) -> float | None:
        if record.value is None:
            return None
        share = (record.value - low) / width
        return 1 - share if mode == "min" else share

    bottom, top = (high, low) if mode == "min" else (low, high)
    return _Axis(metric, place, [(0.0, text.measured(bottom)), (1.0, text.measured(top))])


def _paths(
    name: str, records: Sequence[TrialRecord], axes: Sequence[_Axis], colour: str, width: float
) -> dict[str, Any]:
    x: list[Any] = []
    y: list[Any] = []
    words: list[Any] = []
    for record in records:
        places = [axis.place(record) for axis in axes]
        x += [*range(len(axes)), None]
        y += [-0.1 if place is None else place for place in places] + GAP
        words += [_words(record, record.value)] * len(axes) + GAP
    line = {"color": colour, "width": width}
    trace = {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line, "opacity": 0.75}
    return trace | {"text": words, "hoverinfo": "text"}


def _bar(name: str, count: int, colour: str) -> dict[str, Any]:
    words = f"{count:,}".replace(",", " ")
    bar = {"type": "bar", "orientation": "h", "name": name, "x": [count], "y": ["steps"], "marker": {"color": colour}}
    return bar | {"text": [words], "textposition": "inside", "insidetextanchor": "middle", "hoverinfo": "name+x"}


# -- axes -------------------------------------------------------------------------------------------------------


def _value_axis(metric: str, values: Iterable[Any], mode: str) -> dict[str, Any]:
    """An axis that shows the good end whole; a few values far off at the other end do not flatten everything."""
    finite = sorted(value for value in values if value is not None and math.isfinite(value))
    axis: dict[str, Any] = {"title": {"text": _short(metric)}}
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


def _slice_axis(parameter: Parameter) -> tuple[Callable[[Any], float], dict[str, Any]]:
    if isinstance(parameter, Categorical):
        values = [str(value) for value in parameter.values()]
        ticks = {"tickvals": list(range(len(values))), "ticktext": [_short(value) for value in values]}
        return lambda value: float(values.index(str(value))), ticks | {"range": [-0.5, len(values) - 0.5]}
    if not parameter.log:
        return float, {}
    decades = math.log10(parameter.high / parameter.low)
    return float, {"type": "log", "exponentformat": "e", "minexponent": 3} | ({"dtick": 1} if decades >= 2 else {})


def _upright(x: float, dash: str = "dot") -> dict[str, Any]:
    line = {"color": "$line", "width": 1, "dash": dash}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line, "layer": "below"}


def _label(x: float, words: str) -> dict[str, Any]:
    return {
        "x": x,
        "y": 1,
        "yref": "paper",
        "yanchor": "bottom",
        "text": words,
        "showarrow": False,
        "font": {"size": 10},
    }


def _head(x: float, words: str) -> dict[str, Any]:
    """Slanted, so that the names of neighbouring axes do not meet on a narrow screen."""
    place = {"x": x, "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom", "xshift": -4}
    return place | {"text": _short(words, 16), "textangle": -28, "showarrow": False}


def _tick(x: float, y: float, label: str) -> dict[str, Any]:
    place = {"x": x, "y": y, "xanchor": "left", "xshift": 3, "showarrow": False, "font": {"size": 10}}
    return place | {"text": _short(label, 12), "bgcolor": "$veil", "borderpad": 1}


def _words(record: TrialRecord, value: float | None) -> str:
    """What hovering over a trial shows; Plotly reads tags in it, so what users wrote is escaped."""
    lines = [f"trial {record.number} {record.state}: {text.measured(value)}"]
    lines += [f"{escape(name)} = {escape(text.parameter(item))}" for name, item in record.params.items()]
    return "<br>".join(lines)


def _short(words: str, width: int = 24) -> str:
    return escape(text.shorten(words, width))
