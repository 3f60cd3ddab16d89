"""How numbers, durations and parameters read in tables and progress lines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MISSING = "-"


def number(value: float | None) -> str:
    """Four significant digits of a hyperparameter: 0.052, 3.142e-05, 12; `-` for None."""
    if value is None:
        return MISSING
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def measured(value: float | None) -> str:
    """A metric with four decimals, so that a column of them lines up; scientific where that would hide it."""
    if value is None:
        return MISSING
    return f"{value:.4f}" if value == 0 or 1e-2 <= abs(value) < 1e5 else f"{value:.4e}"


def duration(seconds: float | None) -> str:
    """The two largest units: 42 s, 3 min 12 s, 2 h 5 min, 3 d 4 h."""
    if seconds is None or not math.isfinite(seconds):
        return MISSING
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest_s, "s")]
    while len(parts) > 1 and parts[0][0] == 0:
        del parts[0]
    return " ".join(f"{count} {unit}" for i, (count, unit) in enumerate(parts[:2]) if count or i == 0)


def percent(share: float | None, decimals: int = 0) -> str:
    """0.873 as 87 %."""
    return MISSING if share is None else f"{100 * share:.{decimals}f} %"


def shorten(text: str, width: int) -> str:
    """Cut in the middle, since names of models and files differ at both ends."""
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def parameter(value: Any, width: int = 32) -> str:
    """A parameter's value in a table; the whole of it is in the JSON and CSV forms."""
    if isinstance(value, float):
        return number(value)
    text = value if isinstance(value, str) else repr(value)
    return shorten(" ".join(text.split()), width)


def parameters(params: Mapping[str, Any], room: int = 65) -> str:
    """All parameters on one line, none longer than `room`: learning_rate=3.1e-05 optimizer=adamw."""
    shown = {name: parameter(value, min(32, max(4, room - 8))) for name, value in params.items()}
    return " ".join(f"{shorten(name, max(6, min(32, room - 1 - len(v))))}={v}" for name, v in shown.items())


def plural(count: int, noun: str) -> str:
    """1 trial, 2 trials."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def enumeration(words: Iterable[str]) -> str:
    """a, b and c."""
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in ascending order, runs of them in short: 0 to 2, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)


def num_bytes(count: int) -> str:
    """812 B, 1.2 MB, 3.4 GB."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.3g} {units[0]}"


_BARS = "▁▂▃▄▅▆▇█"


def curve(values: Sequence[float], width: int = 48) -> str:
    """Values as bars of one line, evenly thinned out to `width`; `!` where one is not finite."""
    shown = values if len(values) <= width else [values[i * (len(values) - 1) // (width - 1)] for i in range(width)]
    finite = [value for value in shown if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] if math.isfinite(value) else "!" for value in shown)


def counts(states: Mapping[str, int]) -> str:
    """12 COMPLETE, 50 PRUNED: the states that occur."""
    return ", ".join(f"{count} {state}" for state, count in states.items() if count) or "no trials"
