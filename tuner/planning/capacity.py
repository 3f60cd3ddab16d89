"""What a cluster has, and how many trials of a study it holds at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tuner.study_file.spec import StudySpec

# Ray counts resources in ten-thousandths; sums of fractions such as 0.1 must not miss by a rounding error.
_UNITS = 10_000


class Node(NamedTuple):
    """What one node has.

    Attributes:
        cpus: CPU cores.
        gpus: GPUs.
        accelerator: What Ray calls them, `H100`; empty where there are none, None where nobody knows.
    """

    cpus: float
    gpus: float
    accelerator: str | None = None


@dataclass(frozen=True)
class Capacity:
    """What a cluster has.

    Attributes:
        cpus: CPU cores in all.
        gpus: GPUs in all.
        nodes: Each node; empty when the totals are those of a single node.
    """

    cpus: float
    gpus: float
    nodes: tuple[Node, ...] = ()


def slots(spec: StudySpec, capacity: Capacity) -> int:
    """Trials that run at once: as many as the cluster holds, the study allows, and there are; 0: not even one fits.

    A worker must fit on one node; the workers of a trial may spread over several, or have to.
    """
    most = spec.search.num_trials if spec.scaling.slots == "auto" else min(spec.scaling.slots, spec.search.num_trials)
    return min(most, _fitting_trials(spec, capacity))


def shortfall(spec: StudySpec, capacity: Capacity) -> str:
    """One sentence, requested against available; empty when the study fits."""
    if slots(spec, capacity):
        return ""
    scaling, gpus = spec.scaling, gpus_per_worker(spec, capacity)
    gpu = f"{scaling.accelerator_type or ''} GPU".strip()
    per_worker = f"{amount(scaling.cpus_per_worker, 'CPU')} and {amount(gpus or 0, gpu)} each"
    where = {"STRICT_PACK": ", all on one node", "STRICT_SPREAD": ", each on a node of its own"}
    requested = f"{amount(scaling.num_workers, 'worker')} with {per_worker}{where.get(scaling.placement_strategy, '')}"
    nodes = "; ".join(map(_node_words, _nodes(capacity)[:8]))
    more = f"; ... {len(capacity.nodes)} nodes in all" if len(capacity.nodes) > 8 else ""
    room = f"room for {_room_for_one(spec, capacity)} of {amount(scaling.num_workers, 'worker')}"
    return f"requested {requested}; available {nodes or 'no node'}{more}: {room}"


def gpus_per_worker(spec: StudySpec, capacity: Capacity | None) -> float | None:
    """GPUs a worker takes; `auto` is 1 where the cluster has GPUs, else 0, and None while that is not known."""
    asked = spec.scaling.gpus_per_worker
    if asked != "auto":
        return asked
    if spec.scaling.accelerator_type is not None:
        return 1.0
    return None if capacity is None else float(capacity.gpus > 0)


def training_nodes(spec: StudySpec, capacity: Capacity) -> list[bool]:
    """Of each node of the cluster, whether it can hold a worker."""
    return [count > 0 for count in _workers(spec, capacity)]


def amount(value: float, noun: str) -> str:
    """`2 GPUs`."""
    return f"{value:g} {noun}{'' if value == 1 else 's'}"


def _fitting_trials(spec: StudySpec, capacity: Capacity) -> int:
    counts, size = _workers(spec, capacity), spec.scaling.num_workers
    if spec.scaling.placement_strategy == "STRICT_PACK":
        return sum(count // size for count in counts)
    trials = sum(counts) // size
    if spec.scaling.placement_strategy == "STRICT_SPREAD":
        # Each trial has at most one worker on a node.
        while sum(min(count, trials) for count in counts) < trials * size:
            trials -= 1
    return trials


def _room_for_one(spec: StudySpec, capacity: Capacity) -> int:
    """How many workers of the first trial find a place."""
    counts: Sequence[int] = _workers(spec, capacity)
    if spec.scaling.placement_strategy == "STRICT_PACK":
        return max(counts, default=0)
    if spec.scaling.placement_strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in counts)
    return sum(counts)


def _workers(spec: StudySpec, capacity: Capacity) -> list[int]:
    gpus = gpus_per_worker(spec, capacity) or 0.0
    return [_workers_on(node, spec, gpus) for node in _nodes(capacity)]


def _nodes(capacity: Capacity) -> tuple[Node, ...]:
    return capacity.nodes or (Node(capacity.cpus, capacity.gpus),)


def _workers_on(node: Node, spec: StudySpec, gpus: float) -> int:
    if spec.scaling.accelerator_type is not None and node.accelerator not in (None, spec.scaling.accelerator_type):
        return 0
    fits = [_times(node.cpus, spec.scaling.cpus_per_worker)]
    if 0 < gpus < 1:
        # Workers share a GPU, but none spans two of them.
        fits.append(math.floor(node.gpus) * _times(1, gpus))
    elif gpus:
        fits.append(_times(node.gpus, gpus))
    return min(fits)


def _times(available: float, needed: float) -> int:
    return round(available * _UNITS) // max(1, round(needed * _UNITS))


def _node_words(node: Node) -> str:
    return f"{amount(node.cpus, 'CPU')} and {amount(node.gpus, f'{node.accelerator or str()} GPU'.strip())}"
