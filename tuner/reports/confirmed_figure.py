"""The plot of a confirmation: every configuration's value under each seed, and the mean with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tuner import text
from tuner.reports.inference import CONFIDENCE
from tuner.reports.traces import ACCENT, MUTED, Figure, short

if TYPE_CHECKING:
    from tuner.reports.confirmation import Arm, Confirmation

# An arm is off the axis where it lies farther from the better ones than this many times their width.
FAR_WIDTHS = 1.0
_LEVEL = f"{CONFIDENCE:.0%}".replace("%", " %")


def confirmed(found: Confirmation, metric: str) -> Figure:
    """The axis is that of the arms near the best one; one far off, as the default often is, is told in words."""
    arms = [arm for arm in found.arms if arm.mean is not None]
    near = _near(arms)
    low, high = _span(near) if near else (0.0, 1.0)
    margin = 0.06 * ((high - low) or abs(high) or 1.0)
    names = [short(arm.name) for arm in found.arms]
    layout = {
        "xaxis": {"title": {"text": short(metric)}, "range": [low - margin, high + margin]},
        "yaxis": {"categoryorder": "array", "categoryarray": names[::-1], "range": [-0.5, len(names) - 0.5]},
        "annotations": [_beyond(arm, is_right=_span([arm])[0] > high) for arm in arms if arm not in near],
        "legend": {"y": -0.35},
    }
    return Figure("confirmed", "Confirmed with new seeds", _traces(near), layout, height=150 + 34 * len(names))


def _near(arms: Sequence[Arm]) -> list[Arm]:
    """Arms without those that would squeeze all the others, the farthest from the first one looked at first."""
    means = [arm.mean.mean if arm.mean else 0.0 for arm in arms]
    near = [arm for _, arm in sorted(zip(means, arms, strict=True), key=lambda pair: abs(pair[0] - means[0]))]
    while len(near) > 1:
        (low, high), (first, last) = _span(near[:-1]), _span(near[-1:])
        if max(first - high, low - last) <= FAR_WIDTHS * (high - low):
            break
        del near[-1]
    return near


def _span(arms: Sequence[Arm]) -> tuple[float, float]:
    """From the lowest value or end of an interval to the highest."""
    ends = [value for arm in arms for value in arm.values.values()]
    for mean in (arm.mean for arm in arms if arm.mean):
        half = mean.half_width or 0.0
        ends += [mean.mean - half, mean.mean + half]
    return min(ends), max(ends)


def _beyond(arm: Arm, *, is_right: bool) -> dict[str, Any]:
    assert arm.mean is not None
    half = "" if arm.mean.half_width is None else f" ± {text.number(arm.mean.half_width)}"
    words = f"{text.measured(arm.mean.mean)}{half}"
    place = {"x": 1, "xanchor": "right"} if is_right else {"x": 0, "xanchor": "left"}
    words = f"{words}, off the axis →" if is_right else f"← {words}, off the axis"
    return place | {"xref": "paper", "y": short(arm.name), "text": words, "showarrow": False}


def _traces(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    dots = [(short(arm.name), seed, value) for arm in arms for seed, value in arm.values.items()]
    means = [(short(arm.name), arm.mean) for arm in arms if arm.mean]
    return [
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
            "name": f"mean and {_LEVEL} interval",
            "x": [mean.mean for _, mean in means],
            "y": [name for name, _ in means],
            "error_x": {"type": "data", "array": [mean.half_width or 0.0 for _, mean in means], "color": ACCENT},
            "marker": {"color": ACCENT, "size": 10, "symbol": "diamond"},
            "hoverinfo": "x",
        },
    ]
