"""Parallel coordinates as SVG: Plotly's own need WebGL, which many remote desktops lack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner import text
from tuner.record.record import TrialRecord
from tuner.reports.thinning import thinned
from tuner.reports.traces import FAINT, GAP, Figure, hover, short, upright
from tuner.study_file.parameters import Categorical, Parameter
from tuner.study_file.sections import sign_of

SHADES = ("$shade0", "$shade1", "$shade2", "$shade3")
MAX_LINES = 240


def parallel(records: Sequence[TrialRecord], parameters: Mapping[str, Parameter], metric: str, mode: str) -> Figure:
    """A line a trial through its parameters to its value: the better a complete trial, the darker."""
    sign = sign_of(mode)
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
        "shapes": [upright(index, "solid") for index in range(len(axes))],
        "annotations": [*ticks, *(_head(index, axis.name) for index, axis in enumerate(axes))],
        "margin": {"t": 66, "r": 34},
        "legend": {"y": -0.02},
    }
    words = "Up is better on the last axis. A line at the bottom of an axis: the parameter was not searched there."
    return Figure("parallel", "Parallel coordinates", data, layout, f"{words} {note}".strip(), height=420)


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
        words += [hover(record, record.value)] * len(axes) + GAP
    line = {"color": colour, "width": width}
    trace = {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line, "opacity": 0.75}
    return trace | {"text": words, "hoverinfo": "text"}


def _head(x: float, words: str) -> dict[str, Any]:
    """Slanted, so that the names of neighbouring axes do not meet on a narrow screen."""
    place = {"x": x, "y": 1, "yref": "paper", "xanchor": "left", "yanchor": "bottom", "xshift": -4}
    return place | {"text": short(words, 16), "textangle": -28, "showarrow": False}


def _tick(x: float, y: float, label: str) -> dict[str, Any]:
    place = {"x": x, "y": y, "xanchor": "left", "xshift": 3, "showarrow": False, "font": {"size": 10}}
    return place | {"text": short(label, 12), "bgcolor": "$veil", "borderpad": 1}
