"""The plots of a report as plain Plotly figures: data and layout.

What a screen cannot show is left out, and the figure's note says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner import text
from tuner.record.record import TrialRecord
from tuner.reports.lanes import assign_lanes
from tuner.reports.parallel import parallel
from tuner.reports.thinning import thinned
from tuner.reports.traces import (
    ACCENT,
    BAD,
    FAINT,
    GOOD,
    INK,
    MUTED,
    STATE_COLOURS,
    Figure,
    bar,
    cloud,
    ends,
    label,
    lines,
    points,
    short,
    upright,
    value_axis,
)
from tuner.reports.verdict import at_step
from tuner.study_file.parameters import Categorical, Parameter
from tuner.study_file.sections import sign_of

__all__ = [
    "curves", "history", "importances", "parallel", "progress", "slices", "spent", "survivors", "timeline",
]  # fmt: skip
SERIES = (ACCENT, "$warn", GOOD, BAD, MUTED, INK)
MAX_CURVES, MAX_POINTS, MAX_BARS = 120, 1500, 1500


def history(records: Sequence[TrialRecord], metric: str, mode: str) -> Figure:
    """Each trial's value by its number, and the best complete one so far."""
    sign = sign_of(mode)
    complete = [record for record in records if record.state == "COMPLETE" and record.value is not None]
    best: list[TrialRecord] = []
    for record in complete:
        if not best or sign * (record.value or 0.0) < sign * (best[-1].value or 0.0):
            best.append(record)
    shown, note = thinned(complete, MAX_POINTS, keep=best)
    pruned, _ = thinned([r for r in records if r.state == "PRUNED" and r.value is not None], MAX_POINTS)
    # Drawn as far as the last trial: the best one stays the best.
    steps = [(record.number, record.value) for record in best] + ([(len(records) - 1, best[-1].value)] if best else [])
    data = [
        points("pruned (value when stopped)", pruned, MUTED, symbol="x-thin", size=5),
        points("complete", shown, ACCENT),
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [number for number, _ in steps],
            "y": [value for _, value in steps],
            "line": {"color": INK, "shape": "hv", "width": 1.5},
            "hoverinfo": "skip",
        },
    ]
    values = [value for trace in data for value in trace["y"]]
    layout = {"xaxis": {"title": {"text": "trial"}}, "yaxis": value_axis(metric, values, mode)}
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
            data.append(lines(state.lower(), shown, STATE_COLOURS[state], opacity=0.55, width=1.0))
        if shown and state in ("PRUNED", "FAILED"):
            stops = [(record.number, record.step, record.reports[record.step]) for record in shown]
            data.append(ends(stops, STATE_COLOURS[state]))
    for record in marked:
        is_best = record.number in leaders[:1]
        name = f"trial {record.number}, {'best' if is_best else 'default'}"
        data.append(lines(name, [record], ACCENT if is_best else INK, width=2.5, dash="solid" if is_best else "dash"))
    shapes = [upright(step) for step in steps]
    labels = [label(step, str(step)) for step in steps]
    values = [value for trace in data for value in trace["y"] if value is not None]
    layout = {
        "xaxis": {"title": {"text": "optimizer steps"}},
        "yaxis": value_axis(metric, values, mode),
        "shapes": shapes,
        "annotations": labels,
        "margin": {"t": 26},
    }
    note = "Each line is a trial, a cross where one was stopped"
    note += "; dotted: the rungs." if steps else "."
    if left_out:
        note += f" {text.plural(left_out, 'trial')} of {len(reporting)} not drawn, taken out evenly."
    return Figure("curves", "Learning curves", data, layout, note, height=380)


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
        data.append(cloud(f"at step {first}", at, name, place, spread, MUTED, opacity=0.45, size=5))
    data.append(cloud("complete", [(r, r.value or 0.0) for r in complete], name, place, spread, ACCENT))
    if best is not None and name in best.params and best.value is not None:
        star: dict[str, Any] = {"symbol": "star", "size": 13, "line": {"color": INK, "width": 1}}
        data.append(cloud(f"best (trial {best.number})", [(best, best.value)], name, place, 0.0, GOOD, **star))
    values = [value for trace in data for value in trace["y"]]
    layout = {"xaxis": axis, "yaxis": value_axis(metric, values, mode), "showlegend": False}
    return Figure(f"slice-{name}", name, data, layout, height=260)


def _slice_axis(parameter: Parameter) -> tuple[Callable[[Any], float], dict[str, Any]]:
    if isinstance(parameter, Categorical):
        values = [str(value) for value in parameter.values()]
        ticks = {"tickvals": list(range(len(values))), "ticktext": [short(value) for value in values]}
        return lambda value: float(values.index(str(value))), ticks | {"range": [-0.5, len(values) - 0.5]}
    if not parameter.log:
        return float, {}
    decades = math.log10(parameter.high / parameter.low)
    return float, {"type": "log", "exponentformat": "e", "minexponent": 3} | ({"dtick": 1} if decades >= 2 else {})


def importances(found: Mapping[str, float]) -> Figure:
    """Bars, the most important parameter on top."""
    ordered = sorted(found.items(), key=lambda item: item[1])
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "x": [share for _, share in ordered],
            "y": [short(name) for name, _ in ordered],
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
        bar(name, count, colour) for name, count, colour in [*parts, ("not run: stopped early", saved, FAINT)] if count
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
            "name": short(name),
            "x": [point[which] for point in curve],
            "y": [point[2] for point in curve],
            "line": {"shape": "hv", "width": 2, "color": SERIES[index % len(SERIES)]},
        }
        for index, (name, curve) in enumerate(curves.items())
    ]
    words = {"trials": "ended trials", "steps": "optimizer steps of all trials"}[by]
    layout = {
        "xaxis": {"title": {"text": words}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": short(metric)}},
    }
    return Figure(f"progress-{by}", f"Best so far by {by}", data, layout)
