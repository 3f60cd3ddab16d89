"""A study file's plan: on this machine or on a cluster, from assumptions or with a probe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.planning.forecast import Forecast, make_forecast
from tuner.planning.machine import this_machine
from tuner.study_file.spec import StudySpec

if TYPE_CHECKING:
    from tuner.decisions.observer import Observer
    from tuner.planning.capacity import Capacity
    from tuner.planning.pace import Pace


def plan(
    spec: StudySpec,
    *,
    address: str | None = None,
    with_probe: bool = False,
    price: float | None = None,
    observer: Observer | None = None,
    command_s: float = 0.0,
) -> Forecast:
    """What a study will take; starts nothing unless it is to be probed.

    Args:
        spec: The study.
        address: A Ray cluster to count and to probe on; None: this machine.
        with_probe: Whether to run a few steps and measure them.
        price: Of a GPU-hour.
        observer: Hears of warnings while it is probed.
        command_s: What the command took until now, which counts as part of the study's start.

    Raises:
        ClusterError: The cluster cannot be reached, or cannot hold a trial that is to be probed.
    """
    capacity, where = (this_machine(), "this machine") if address is None else _count(address)
    measured = _probe(spec, address, observer, command_s) if with_probe else None
    return make_forecast(spec, capacity, where, measured=measured, price=price)


def _count(address: str) -> tuple[Capacity, str]:
    from tuner.execution import cluster

    with cluster.connected(address):
        return cluster.capacity(), f"the cluster at {address}"


def _probe(spec: StudySpec, address: str | None, observer: Observer | None, command_s: float) -> Pace:
    from tuner.planning.probe import probe

    return probe(spec, address=address, observer=observer, command_s=command_s)
