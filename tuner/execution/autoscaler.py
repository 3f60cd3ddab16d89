"""The cluster's autoscaler: whether there is one, and what it says of workers that find no place yet.

A placement group that waits is what an autoscaler brings nodes for. Of Ray's two autoscalers the newer one also says
which groups none of its nodes could ever hold; of the older one nobody can know.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply  # type: ignore[attr-defined]
from ray.experimental import internal_kv
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from tuner import text
from tuner.decisions.observer import Observer
from tuner.errors import ClusterError
from tuner.execution import cluster
from tuner.execution.nodes import ACCELERATOR
from tuner.planning.capacity import Capacity, gpus_per_worker, lack, shortfall
from tuner.study_file.spec import StudySpec

LOOK_S = 1.0
# How soon after its start a head has reported on its nodes.
REPORT_S = 10.0
# Between two words about the same wait: at first, and in the end.
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 15.0, 240.0
# The name that a cluster without an autoscaler makes up for the kind of each node.
NO_KIND = "node_"


class Waiting:
    """Says what is waited for and for how long: at once, then ever more rarely."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._since_s: float | None = None

    def note(self, missing: str) -> None:
        """To be called often; `missing` is empty when there is nothing to wait for."""
        now_s = self._clock()
        if not missing:
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = self._next_s = now_s
            self._pause_s = SHORTEST_PAUSE_S
        if now_s >= self._next_s:
            self._next_s, self._pause_s = now_s + self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
            self._say(f"waiting for {missing}; {text.duration(now_s - self._since_s)}")


def wait_for_room(spec: StudySpec, observer: Observer) -> Capacity:
    """The cluster, as soon as it holds one trial.

    Args:
        spec: The study.
        observer: Hears what is waited for.

    Raises:
        ClusterError: It never will: nobody brings nodes, or none of those that could come is large enough.
    """
    capacity = cluster.capacity()
    if not shortfall(spec, capacity):
        return capacity
    if not cluster.can_autoscale() or not is_there():
        raise _never(shortfall(spec, capacity))
    waiting = Waiting(observer.warning)
    with _asked_for(spec, capacity) as group:
        while missing := shortfall(spec, capacity):
            if is_refused(group):
                raise _never(f"{missing}, and no node that the autoscaler may add changes that")
            waiting.note(lack(spec, capacity))
            time.sleep(LOOK_S)
            capacity = cluster.capacity()
    return capacity


def is_there() -> bool:
    """Whether the cluster has an autoscaler that may bring nodes."""
    if any(node.instance_id for node in _status().cluster_resource_state.node_states):
        return True
    deadline = time.monotonic() + REPORT_S
    while (kinds := _kinds_of_nodes()) is None and time.monotonic() < deadline:
        time.sleep(LOOK_S)
    return any(not kind.startswith(NO_KIND) for kind in kinds or ())


def is_refused(group: PlacementGroup) -> bool:
    """Whether the autoscaler has said that it has no nodes for a group."""
    refused = _status().autoscaling_state.infeasible_gang_resource_requests
    return any(group.id.hex() in request.details for request in refused)


def _kinds_of_nodes() -> list[str] | None:
    """As the older autoscaler reports them, which every head has, if only to report; None before its first report."""
    report = json.loads(internal_kv._internal_kv_get(DEBUG_AUTOSCALING_STATUS) or "{}").get("autoscaler_report")
    return None if report is None else list(report.get("active_nodes") or {})


def _status() -> GetClusterStatusReply:
    client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)  # type: ignore[attr-defined]
    return GetClusterStatusReply.FromString(client.get_cluster_status(timeout_s=10))


@contextmanager
def _asked_for(spec: StudySpec, capacity: Capacity) -> Iterator[PlacementGroup]:
    """Have the autoscaler see the workers of one trial."""
    scaling, gpus = spec.scaling, gpus_per_worker(spec, capacity)
    worker = {"CPU": scaling.cpus_per_worker} | ({"GPU": gpus} if gpus else {})
    if scaling.accelerator_type is not None:
        worker[f"{ACCELERATOR}{scaling.accelerator_type}"] = 0.001
    group = placement_group([worker] * scaling.min_workers, scaling.placement_strategy)
    try:
        yield group
    finally:
        remove_placement_group(group)


def _never(missing: str) -> ClusterError:
    return ClusterError(missing, "Lower scaling.num_workers or the resources per worker.")
