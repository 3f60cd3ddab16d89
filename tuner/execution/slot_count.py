"""Counts the slots anew as nodes join the cluster and leave it."""

from __future__ import annotations

import time

from tuner.decisions.controller import StudyController
from tuner.decisions.observer import Observer
from tuner.execution import cluster
from tuner.execution.autoscaler import Waiting
from tuner.execution.nodes import staying_nodes
from tuner.execution.shared_root import Newcomers
from tuner.planning.capacity import Capacity, lack, num_workers_at_once, slots
from tuner.planning.plan import Plan
from tuner.record.study import Study

COUNT_EVERY_S = 3.0


class SlotCount:
    """Keeps the number of trials at once at what the cluster holds, where `scaling.slots` is auto.

    Args:
        study: The study.
        plan: What it was started with: whether workers take GPUs stays as it was then.
        controller: Told of every change.
        observer: Told what is waited for when no trial fits any more.
        secrets_key: Where the cluster keeps the study's secrets; empty when there are none.
    """

    def __init__(
        self, study: Study, plan: Plan, controller: StudyController, observer: Observer, secrets_key: str = ""
    ) -> None:
        spec = study.spec
        scaling = spec.scaling.model_copy(update={"gpus_per_worker": plan.gpus_per_worker})
        self._spec = spec.model_copy(update={"scaling": scaling})
        self._gpus_per_worker = plan.gpus_per_worker or 0.0
        self._controller = controller
        self._follows = spec.scaling.slots == "auto" and cluster.can_autoscale()
        self._next_at = time.monotonic() + COUNT_EVERY_S
        self._waiting = Waiting(observer.warning)
        self._newcomers = Newcomers(study.dir, observer, secrets_key)

    def update(self) -> None:
        """To be called often; counts every few seconds."""
        if self._follows and time.monotonic() >= self._next_at:
            self._next_at = time.monotonic() + COUNT_EVERY_S
            self._count(cluster.capacity_of(self._newcomers.those_that_see(staying_nodes())))

    def _count(self, capacity: Capacity) -> None:
        count = slots(self._spec, capacity)
        self._waiting.note("" if count else lack(self._spec, capacity))
        # A study without a slot would be over; one slot waits.
        self._controller.resize(max(1, count), num_workers_at_once(self._spec, capacity) * self._gpus_per_worker)
