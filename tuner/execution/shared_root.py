"""Refuses a root that is not the same on every node: each trial reads and writes there, wherever it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from tuner.decisions.observer import Observer
from tuner.doctor.facts import Asked
from tuner.doctor.meeting_place import REMEDY, meeting_place
from tuner.errors import ClusterError
from tuner.execution import cluster
from tuner.execution.nodes import staying_nodes
from tuner.planning.capacity import training_nodes
from tuner.record.study_dir import SPEC
from tuner.storage.place import CACHE_VARIABLE, url_of
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
        raise ClusterError(f"{root} is not the same on every node, from {name}: {fault}", _remedy(root))


def _remedy(root: Path) -> str:
    url = url_of(root)
    if url is None:
        return REMEDY
    place = f"Put them on a file system that all nodes share, at the same path: {CACHE_VARIABLE}=DIR"
    return f"It is the working copy of {url}: trials write there. {place}; or use one node."


class Newcomers:
    """Asks nodes that join a running study whether they see its folder, and waits for no answer.

    Args:
        study_dir: Of the study.
        observer: Warned of each node that does not.
    """

    def __init__(self, study_dir: Path, observer: Observer) -> None:
        self._file = study_dir.resolve() / SPEC
        self._text = self._file.read_text(encoding="utf-8")
        self._observer = observer
        # Those that were there at the start have been asked before.
        self._sees = {str(node["NodeID"]): True for node in staying_nodes()}
        self._pending: dict[str, Any] = {}

    def those_that_see(self, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Of these nodes the ones that are known to see it by now."""
        for node in nodes:
            if node["NodeID"] not in self._sees:
                self._ask(node)
        return [node for node in nodes if self._sees.get(node["NodeID"])]

    def _ask(self, node: dict[str, Any]) -> None:
        from tuner.doctor.nodes import asked_to_read

        name = node["NodeID"]
        if name not in self._pending:
            self._pending[name] = asked_to_read(node, str(self._file), self._text)
        if not ray.wait([self._pending[name]], timeout=0)[0]:
            return
        try:
            self._sees[name] = bool(ray.get(self._pending.pop(name)))
        except RayError:
            return
        if not self._sees[name]:
            lack = f"{node['NodeManagerAddress']} has joined the cluster and does not see {self._file.parent}"
            self._observer.warning(f"{lack}: it is not counted, and a trial that Ray puts there fails")
