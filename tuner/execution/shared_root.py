"""Refuses a root that nodes cannot use: each trial reads and writes there, wherever it trains."""

from __future__ import annotations

import os
import uuid
from contextlib import AbstractContextManager
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
from tuner.storage.place import url_of
from tuner.study_file.spec import StudySpec
from tuner.study_file.variables import kept_in_cluster, values_of


def check_shared(spec: StudySpec, root: Path) -> bool:
    """Have every node that can train for a study read a file in its root, or at the root's URL.

    Returns:
        Whether all of them see the root itself.

    Raises:
        ClusterError: One of them can do neither, or sees something else in its place.
    """
    nodes = staying_nodes() if cluster.can_autoscale() else []
    if len(nodes) < 2:
        return True
    from tuner.doctor.nodes import storage_faults

    trains = training_nodes(spec, cluster.capacity_of(nodes))
    node_ids = {str(node["NodeID"]) for node, can_train in zip(nodes, trains, strict=True) if can_train}
    url = url_of(root) or ""
    with meeting_place(root) as (folder, secret, fault), secrets_for_check(spec, url) as key:
        if folder is None:
            raise ClusterError(f"{root} cannot be written: {fault}", "Choose another: --root DIR")
        faults = storage_faults(node_ids, Asked(str(folder), secret, url=url, secrets_key=key))
        # Each has left a file, and so has the driver.
        is_seen = len(os.listdir(folder)) > len(node_ids)
    if faults:
        name, fault = next(iter(faults.items()))
        if url:
            message, _, remedy = fault.partition("\n")
            raise ClusterError(f"node {name}: {message}", remedy)
        raise ClusterError(f"{root} is not the same on every node, from {name}: {fault}", REMEDY)
    return is_seen


def secrets_for_check(spec: StudySpec | None, url: str) -> AbstractContextManager[str]:
    """The key under which nodes find a study's secrets: among them may be what opens the URL; a folder needs none."""
    values = values_of(spec.secrets, "secrets") if spec is not None and url else {}
    return kept_in_cluster(f"tune:check:{uuid.uuid4().hex}", values)


class Newcomers:
    """Asks nodes that join a running study whether they see its folder or its URL, and waits for no answer.

    Args:
        study_dir: Of the study.
        observer: Warned of each node that does not.
        secrets_key: Where the cluster keeps the study's secrets; empty when there are none.
    """

    def __init__(self, study_dir: Path, observer: Observer, secrets_key: str = "") -> None:
        folder = study_dir.resolve()
        text = (folder / SPEC).read_text(encoding="utf-8")
        self._study = (str(folder), SPEC, text, url_of(study_dir) or "", secrets_key)
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
        from tuner.doctor.nodes import asked_for_study

        name = node["NodeID"]
        if name not in self._pending:
            self._pending[name] = asked_for_study(node, *self._study)
        if not ray.wait([self._pending[name]], timeout=0)[0]:
            return
        try:
            fault = str(ray.get(self._pending.pop(name)))
        except RayError:
            return
        self._sees[name] = not fault
        if fault:
            lack = f"node {node['NodeManagerAddress']} has joined the cluster: {fault.partition(chr(10))[0]}"
            self._observer.warning(f"{lack}; it is not counted, and a trial that Ray puts there fails")
