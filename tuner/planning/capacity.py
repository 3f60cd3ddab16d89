"""What a cluster has, and how many trials of a study it holds at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tuner.study_file.sections import Scaling
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

    A worker must fit on one node; the workers of a trial may spread over several, or have to. Where their number is
    elastic, each trial counts with the most; one with fewer is there when there is room for no other.
    """
    scaling = _settled(spec, capacity)
    most = spec.search.num_trials if scaling.slots == "auto" else min(scaling.slots, spec.search.num_trials)
    return min(most, _fitting_trials(scaling, capacity) or int(room(scaling, capacity) >= scaling.min_workers))


def num_workers_at_once(spec: StudySpec, capacity: Capacity) -> int:
    """Workers of all trials that run at once."""
    at_once = slots(spec, capacity) * spec.scaling.max_workers
    return min(at_once, room(_settled(spec, capacity), capacity)) if spec.scaling.is_elastic else at_once


def room(scaling: Scaling, capacity: Capacity) -> int:
    """How many workers of one trial find a place, whose GPUs are a number by now."""
    counts: Sequence[int] = _workers(scaling, capacity)
    if scaling.placement_strategy == "STRICT_PACK":
        return max(counts, default=0)
    if scaling.placement_strategy == "STRICT_SPREAD":
        return sum(count > 0 for count in counts)
    return sum(counts)


def shortfall(spec: StudySpec, capacity: Capacity) -> str:
    """One sentence, requested against available; empty when the study fits."""
    if slots(spec, capacity):
        return ""
    scaling = _settled(spec, capacity)
    workers = f"{'at least ' if scaling.is_elastic else ''}{amount(scaling.min_workers, 'worker')}"
    nodes = "; ".join(map(_node_words, _nodes(capacity)[:8]))
    more = f"; ... {len(capacity.nodes)} nodes in all" if len(capacity.nodes) > 8 else ""
    found = f"room for {room(scaling, capacity)} of {amount(scaling.min_workers, 'worker')}"
    return f"requested {workers} with {_each(scaling)}; available {nodes or 'no node'}{more}: {found}"


def lack(spec: StudySpec, capacity: Capacity) -> str:
    """What a trial waits for that does not fit yet, and what there is, in a few words."""
    scaling = _settled(spec, capacity)
    workers = amount(scaling.min_workers, "worker")
    there = f"{amount(capacity.cpus, 'CPU')} and {amount(capacity.gpus, 'GPU')}"
    return f"{workers} with {_each(scaling)}: the cluster has {there}, room for {room(scaling, capacity)}"


def _each(scaling: Scaling) -> str:
    gpu = f"{scaling.accelerator_type or ''} GPU".strip()
    gpus = 0.0 if scaling.gpus_per_worker == "auto" else scaling.gpus_per_worker
    where = {"STRICT_PACK": ", all on one node", "STRICT_SPREAD": ", each on a node of its own"}
    each = f"{amount(scaling.cpus_per_worker, 'CPU')} and {amount(gpus, gpu)} each"
    return each + where.get(scaling.placement_strategy, "")


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
    return [count > 0 for count in _workers(_settled(spec, capacity), capacity)]


def amount(value: float, noun: str) -> str:
    """`2 GPUs`."""
    return f"{value:g} {noun}{'' if value == 1 else 's'}"


def _settled(spec: StudySpec, capacity: Capacity) -> Scaling:
    return spec.scaling.model_copy(update={"gpus_per_worker": gpus_per_worker(spec, capacity)})


def _fitting_trials(scaling: Scaling, capacity: Capacity) -> int:
    counts, size = _workers(scaling, capacity), scaling.max_workers
    if scaling.placement_strategy == "STRICT_PACK":
        return sum(count // size for count in counts)
    trials = sum(counts) // size
    if scaling.placement_strategy == "STRICT_SPREAD":
        # Each trial has at most one worker on a node.
        while sum(min(count, trials) for count in counts) < trials * size:
            trials -= 1
    return trials


def _workers(scaling: Scaling, capacity: Capacity) -> list[int]:
    return [_workers_on(node, scaling) for node in _nodes(capacity)]


def _nodes(capacity: Capacity) -> tuple[Node, ...]:
    return capacity.nodes or (Node(capacity.cpus, capacity.gpus),)


def _workers_on(node: Node, scaling: Scaling) -> int:
    if scaling.accelerator_type is not None and node.accelerator not in (None, scaling.accelerator_type):
        return 0
    gpus = 0.0 if scaling.gpus_per_worker == "auto" else scaling.gpus_per_worker
    fits = [_times(node.cpus, scaling.cpus_per_worker)]
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
