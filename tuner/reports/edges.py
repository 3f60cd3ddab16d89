"""Whether an optimum lies on the edge of a parameter's range, and which range to try next."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.study_file.parameters import Categorical, Float, Int, Parameter

# A point this near to an end of a continuous range, as a share of it, lies on the edge; its companions may be farther.
EDGE_SHARE, COMPANION_SHARE = 0.05, 0.1
# How far beyond the edge to look, as shares of the old range: less where more is not legal.
REACHES = (0.5, 0.25, 0.1)

IsLegal = Callable[[str, Any], bool]


@dataclass(frozen=True)
class Edge:
    """A parameter whose best value lies on an end of its range.

    Attributes:
        name: The parameter.
        value: Its value in the best trial.
        side: "lower" or "upper".
        position: Where the value lies in the range, 0 to 1, on the range's own scale.
        companions: How many of the best trials lie there too, the best one included, and how many were looked at.
        low: Lower bound to try next.
        high: Upper bound to try next.
    """

    name: str
    value: float
    side: str
    position: float
    companions: tuple[int, int]
    low: float
    high: float


def find_edges(
    parameters: Mapping[str, Parameter], leaders: Sequence[Mapping[str, Any]], is_legal: IsLegal
) -> list[Edge]:
    """Edges that the best trial and at least half of the leaders lie on, two at least, and beyond which more is legal.

    Args:
        parameters: The search space.
        leaders: Parameters of the best trials, the best first.
        is_legal: Whether the training loop takes a value for a parameter.
    """
    found = [_edge(name, parameter, leaders, is_legal) for name, parameter in parameters.items()]
    return [edge for edge in found if edge is not None]


def position(parameter: Float | Int, value: float) -> float:
    """Where a value lies in its range, 0 to 1, on the scale that it is sampled on."""
    low, high = _scaled(parameter, parameter.low), _scaled(parameter, parameter.high)
    return (_scaled(parameter, value) - low) / (high - low)


def _edge(name: str, parameter: Parameter, leaders: Sequence[Mapping[str, Any]], is_legal: IsLegal) -> Edge | None:
    if isinstance(parameter, Categorical) or parameter.is_constant or name not in (leaders or [{}])[0]:
        return None
    places = [position(parameter, params[name]) for params in leaders if name in params]
    best = places[0]
    is_upper = best >= 0.5
    distances = [1 - place if is_upper else place for place in places]
    zone, companion_zone = _zones(parameter)
    near = sum(distance <= companion_zone for distance in distances)
    # One trial there may be chance; a conditional parameter has few leaders.
    if distances[0] > zone or near < max(2, len(places) / 2):
        return None
    for reach in REACHES:
        low, high = next_range(parameter, reach if is_upper else -reach)
        beyond = high if is_upper else low
        if beyond != (parameter.high if is_upper else parameter.low) and is_legal(name, beyond):
            side = "upper" if is_upper else "lower"
            return Edge(name, leaders[0][name], side, best, (near, len(places)), low, high)
    return None


def next_range(parameter: Float | Int, shift: float) -> tuple[float, float]:
    """The half of the range at its edge and as much beyond it as `shift` says, a share of the range with its sign."""
    start, end = (0.5, 1.0 + shift) if shift > 0 else (shift, 0.5)
    return _at(parameter, start), _at(parameter, end)


def _zones(parameter: Float | Int) -> tuple[float, float]:
    """Distances from an end, as shares of the range, within which the best and its companions count as on it."""
    if parameter.size is not None and parameter.size <= 1 / COMPANION_SHARE:
        return 1e-9, 1e-9  # of few values only the last one is on the edge
    return EDGE_SHARE, COMPANION_SHARE


def _scaled(parameter: Float | Int, value: float) -> float:
    return math.log(value) if parameter.log else float(value)


def _at(parameter: Float | Int, place: float) -> float:
    """The round number nearest to a place in the range, which may be outside 0 to 1."""
    low, high = _scaled(parameter, parameter.low), _scaled(parameter, parameter.high)
    value = low + place * (high - low)
    value = _round(math.exp(value) if parameter.log else value, high - low if not parameter.log else None)
    if parameter.step:
        steps = round((value - parameter.low) / parameter.step)
        value = _round(parameter.low + steps * parameter.step, parameter.step)
    if isinstance(parameter, Int):
        return max(1, round(value)) if parameter.log else round(value)
    return value


def _round(value: float, width: float | None) -> float:
    """To two digits of the value (a logarithmic scale), or of the range's width."""
    if value == 0:
        return 0.0
    digits = 1 - math.floor(math.log10(abs(value if width is None else width)))
    return float(f"{round(value, digits):.12g}")
