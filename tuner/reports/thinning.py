"""Fewer of many, evenly: what a plot or a table of a large study shows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

T = TypeVar("T")


def thinned(items: Sequence[T], most: int, keep: Collection[T] = ()) -> tuple[list[T], str]:
    """At most about `most` items in their order, those of `keep` among them, and a note when some were left out."""
    if len(items) <= most:
        return list(items), ""
    kept = {id(item) for item in keep}
    room = max(1, most - len(kept))
    places = {round(index * (len(items) - 1) / max(1, room - 1)) for index in range(room)}
    shown = [item for place, item in enumerate(items) if place in places or id(item) in kept]
    return shown, f"{len(shown)} of {len(items)} trials are drawn, taken out evenly."
