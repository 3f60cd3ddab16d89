"""Intervals laid into as few lanes as possible, none over another."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any


def assign_lanes(intervals: Sequence[tuple[Any, Any]]) -> list[int]:
    """The lane of each interval, from 0.

    Args:
        intervals: (start, end) of each, in order of their starts.
    """
    free: list[int] = []
    busy: list[tuple[Any, int]] = []
    lanes = []
    for start, end in intervals:
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes
