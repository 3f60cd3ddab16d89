"""An elastic number of workers: how many there is room for, decided whenever a slot starts them.

Ray Train's own elastic policy counts what its coordinator has set aside for a run, which it does for minutes after a
slot was killed, and resizes a group that trains without a checkpoint. Here what is free counts, and a group that trains
stays as it is until its slot has had the trial save.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray.train
from ray.train.v2._internal.constants import WORKER_GROUP_START_TIMEOUT_S_ENV_VAR
from ray.train.v2._internal.execution.scaling_policy import (
    FixedScalingPolicy,
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
)

from tuner.execution.nodes import free_nodes
from tuner.planning.capacity import Capacity, room
from tuner.study_file.sections import Scaling

LOOK_S = 0.5
# What has just been let go of, and a node that comes in another's place, show a moment later.
SETTLE_S = 3.0
# Two slots may have counted on the same room: the one that waits counts again.
PLACEMENT_PATIENCE_S = 30


def room_now(scaling: Scaling, held: Sequence[str] = ()) -> int:
    """How many workers a trial could have now, at most `max`.

    Args:
        scaling: What each of them takes; GPUs are a number.
        held: The node of each worker that it has: what they hold is free for it.
    """
    mine, gpus = Counter(held), float(scaling.gpus_per_worker)
    nodes = tuple(
        node._replace(cpus=node.cpus + mine[name] * scaling.cpus_per_worker, gpus=node.gpus + mine[name] * gpus)
        for name, node in free_nodes().items()
    )
    return min(room(scaling, Capacity(0, 0, nodes)), scaling.max_workers)


class ElasticCluster(FixedScalingPolicy):
    """As many workers as there is room for; asks the autoscaler for all of them."""

    def __init__(self, config: ray.train.ScalingConfig, scaling: Scaling) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self._scaling = scaling
        self._waits_since: float | None = None

    def after_controller_start(self, train_run_context: Any) -> None:
        """Has a group that finds no place counted anew."""
        os.environ[WORKER_GROUP_START_TIMEOUT_S_ENV_VAR] = str(PLACEMENT_PATIENCE_S)
        super().after_controller_start(train_run_context)

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """So many workers, or none yet."""
        self._maybe_send_resource_request()  # type: ignore[no-untyped-call]
        count, now = room_now(self._scaling), time.monotonic()
        self._waits_since = self._waits_since or now
        is_settled = count == self._scaling.max_workers or now - self._waits_since > SETTLE_S
        if count < self._scaling.min_workers or not is_settled:
            # The controller asks again at once.
            time.sleep(LOOK_S)
            return NoopDecision()
        self._waits_since = None
        return ResizeDecision(count, self.scaling_config._resources_per_worker_not_none)

    def _get_num_workers_for_resource_request(self) -> int:
        return self._scaling.max_workers
