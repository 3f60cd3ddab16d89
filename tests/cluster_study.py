"""A study on a cluster of four nodes that loses one which trains; prints what became of it. Run as a process."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray._private.state import actors
from ray.cluster_utils import Cluster

from tests.studies import Recorder, study_spec
from tuner import search

LOST_AT_STEP, MAX_STEPS = 5, 30


class NodeRemover(Recorder):
    """Takes the node of a worker away once trial 0 has got somewhere."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.lost = ""
        self._cluster = cluster

    def reported(self, number: int, metrics: Mapping[str, float]) -> None:
        super().reported(number, metrics)
        if number == 0 and metrics["step"] == LOST_AT_STEP and not self.lost:
            node = worker_nodes()[0]
            self.lost = node
            [victim] = [each for each in self._cluster.worker_nodes if each.node_id == node]
            self._cluster.remove_node(victim, allow_graceful=False)


def worker_nodes() -> list[str]:
    """Ids of the nodes that train."""
    return [
        actor["Address"]["NodeID"]
        for actor in actors().values()
        if "RayTrainWorker" in actor["ActorClassName"] and actor["State"] == "ALIVE"
    ]


def run(folder: Path) -> dict[str, Any]:
    """Run it."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(3):
        cluster.add_node(num_cpus=1)
    remover = NodeRemover(cluster)
    spec = study_spec(
        folder,
        train={"max_steps": MAX_STEPS},
        search={"num_trials": 4},
        scheduler={"type": "none"},
        scaling={"slots": 2},
    )
    study = search.run(spec, source_text="", root=folder / "studies", observer=remover, address=cluster.address)
    cluster.shutdown()
    return {
        "lost": remover.lost,
        "warnings": remover.warnings,
        "trials": [[trial.state, trial.step, list(trial.reports), trial.attempts] for trial in study.trials()],
        "started": remover.started,
    }


if __name__ == "__main__":
    print(json.dumps(run(Path(sys.argv[1]))))
