"""Refuses a root that is not the same on every node: each trial reads and writes there, wherever it trains."""

from __future__ import annotations

from pathlib import Path

from tuner.doctor.facts import Asked
from tuner.doctor.meeting_place import REMEDY, meeting_place
from tuner.errors import ClusterError
from tuner.execution import cluster
from tuner.execution.nodes import staying_nodes
from tuner.planning.capacity import training_nodes
from tuner.study_file.spec import StudySpec


def check_shared(spec: StudySpec, root: Path) -> None:
    """Have every node that can train for a study read a file in its root.

    Raises:
        ClusterError: One of them does not see it, or something else in its place.
    """
    nodes = staying_nodes() if cluster.can_autoscale() else []
    if len(nodes) < 2:
        return
    from tuner.doctor.nodes import storage_faults

    trains = training_nodes(spec, cluster.capacity_of(nodes))
    node_ids = {str(node["NodeID"]) for node, can_train in zip(nodes, trains, strict=True) if can_train}
    with meeting_place(root) as (folder, secret, fault):
        if folder is None:
            raise ClusterError(f"{root} cannot be written: {fault}", "Choose another: --root DIR")
        faults = storage_faults(node_ids, Asked(str(folder), secret))
    if faults:
        name, fault = next(iter(faults.items()))
        raise ClusterError(f"{root} is not the same on every node, from {name}: {fault}", REMEDY)
