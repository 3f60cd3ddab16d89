"""A study on a cluster of four nodes that loses one which trains; prints what became of it. Run as a process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

from tests.clusters import isolated_node
from tests.studies import Recorder, study_data, study_spec
from tuner.execution import search
from tuner.record.storage import JOURNAL
from tuner.record.study import Study

LOST_AT_STEP = 5
HEAD_MAX_STEPS = 200
MAX_STEPS = 400 if {"drain", "swap", "join"} & set(sys.argv) else 30
SILENT_STEPS = 1500
DRAIN_S = 5.0
PREEMPTION = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


class NodeRemover(Recorder):
    """Takes the node of a worker away once trial 0 has got somewhere."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self.lost = ""
        self.places: list[str] = []
        self.steps_then: dict[int, int] = {}
        self._cluster = cluster
        self._gone_at: float | None = None

    def reported(self, number: int, metrics: Mapping[str, float]) -> None:
        super().reported(number, metrics)
        if number == 0 and metrics["step"] == LOST_AT_STEP and not self.lost:
            self.places = worker_nodes()
            self.lost = self.places[0]
            self.steps_then = dict(self.reports)
            self._take(self.lost)

    def _take(self, node: str) -> None:
        [victim] = [each for each in self._cluster.worker_nodes if each.node_id == node]
        self._cluster.remove_node(victim, allow_graceful=False)


class NodeDrainer(NodeRemover):
    """Has the node of a worker announced as preempted, as a cloud does, and takes it away when its time is up."""

    def _take(self, node: str) -> None:
        self._gone_at = time.time() + DRAIN_S
        client = ray._raylet.GcsClient(address=self._cluster.address)
        is_accepted, reason = client.drain_node(node, PREEMPTION, "spot", int(self._gone_at * 1000))
        assert is_accepted, reason

    def tick(self, training_share: float) -> None:
        if self.lost and self._gone_at is not None and time.time() > self._gone_at + DRAIN_S:
            self._gone_at = None
            super()._take(self.lost)


class SilentDrainer(NodeDrainer):
    """The same once trial 0 trains: nothing is heard of it before its end."""

    def tick(self, training_share: float) -> None:
        nodes = worker_nodes() if not self.lost and self._has_begun() else []
        if nodes:
            self.lost = nodes[0]
            self._take(self.lost)
        super().tick(training_share)

    def _has_begun(self) -> bool:
        return (Path(sys.argv[1]) / "studies" / "tiny" / "logs" / "0.rank0.log").exists()


class NodeSwapper(NodeDrainer):
    """Adds a node once trial 0 has got somewhere, and has the first one taken away once a trial runs on the new one."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        self.sizes: list[tuple[int, int]] = []
        self.added = ""

    def reported(self, number: int, metrics: Mapping[str, float]) -> None:
        Recorder.reported(self, number, metrics)
        if number == 0 and metrics["step"] == LOST_AT_STEP and not self.added:
            self.added = self._cluster.add_node(num_cpus=1).node_id
        if number == 1 and metrics["step"] == LOST_AT_STEP and not self.lost:
            [self.lost] = set(worker_nodes()) - {self.added}
            self._take(self.lost)

    def resized(self, before: int, after: int) -> None:
        self.sizes.append((before, after))


class Breather(NodeRemover):
    """Takes one of the two nodes of trial 0 away, and adds another one while it goes on with the other."""

    def reported(self, number: int, metrics: Mapping[str, float]) -> None:
        super().reported(number, metrics)
        if number == 0 and metrics["step"] == MAX_STEPS - 1:
            self._cluster.add_node(num_cpus=1)


class NodeJoiner(NodeRemover):
    """Has a node join that keeps the studies' root to itself."""

    def __init__(self, cluster: Cluster, root: Path) -> None:
        super().__init__(cluster)
        self._root = root

    def _take(self, node: str) -> None:
        self._joined = isolated_node(self._root, self._cluster.address)

    def study_ended(self, study: Study) -> None:
        self._joined.terminate()
        self._joined.wait(30)


class Onlooker(NodeRemover):
    """Takes nothing away."""

    def _take(self, node: str) -> None:
        pass


def worker_nodes() -> list[str]:
    """Ids of the nodes that train."""
    return [
        actor["Address"]["NodeID"]
        for actor in actors().values()
        if "RayTrainWorker" in actor["ActorClassName"] and actor["State"] == "ALIVE"
    ]


def write_study(folder: Path, train: Mapping[str, Any] | None = None) -> Path:
    """A study of four short trials as a file; YAML reads JSON."""
    file = folder / "tiny.yaml"
    content = study_data(
        folder, train=train or {}, search={"num_trials": 4}, scheduler={"type": "none"}, scaling={"slots": 2}
    )
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def run_command(folder: Path) -> dict[str, Any]:
    """Have `tune run --address` run it on a cluster of three nodes that train."""
    cluster = start_cluster()
    command = [sys.executable, "-m", "tuner", "run", str(write_study(folder)), "--root", str(folder / "studies")]
    done = subprocess.run([*command, "--address", cluster.address], capture_output=True, text=True, check=False)
    ray.init(address=cluster.address, logging_level="ERROR")
    free_cpus = ray.available_resources().get("CPU")
    ray.shutdown()
    cluster.shutdown()
    states = [trial.state for trial in Study.open(folder / "studies", "tiny").trials()]
    return {"code": done.returncode, "text": done.stderr[-2000:], "states": states, "free_cpus": free_cpus}


def lose_head(folder: Path) -> dict[str, Any]:
    """Take the head node away from under `tune run --address`, and resume on another cluster."""
    cluster = start_cluster()
    arguments = ["run", str(write_study(folder, {"max_steps": HEAD_MAX_STEPS})), "--root", str(folder / "studies")]
    with open(folder / "run.log", "wb") as log:
        running = tune(*arguments, "--address", cluster.address, stdout=log, stderr=log)
    while running.poll() is None and not has_reported(folder):
        time.sleep(0.1)
    cluster.remove_node(cluster.head_node, allow_graceful=False)
    lost_at = time.monotonic()
    code = running.wait(timeout=150)
    took_s = time.monotonic() - lost_at
    cluster.shutdown()
    before = steps(folder)
    cluster = start_cluster()
    resuming = tune("resume", "tiny", "--root", str(folder / "studies"), "--address", cluster.address)
    resumed_code = resuming.wait()
    cluster.shutdown()
    study = Study.open(folder / "studies", "tiny")
    return {
        "code": code,
        "took_s": took_s,
        "text": (folder / "run.log").read_text(errors="replace"),
        "before": before,
        "resumed_code": resumed_code,
        "trials": [[trial.state, trial.step, list(trial.reports)] for trial in study.trials()],
    }


def has_reported(folder: Path) -> bool:
    """Whether a trial of the study has got somewhere."""
    return (folder / "studies" / "tiny" / JOURNAL).exists() and any(step >= LOST_AT_STEP for step in steps(folder))


def steps(folder: Path) -> list[int]:
    """How far the trials of the study are."""
    return [trial.step for trial in Study.open(folder / "studies", "tiny").trials()]


def logged_steps(study: Study, number: int) -> list[int]:
    """The steps at which a trial's loop reported, those it did twice twice."""
    log = study.log_path(number).read_text(encoding="utf-8")
    return [int(found) for found in re.findall(r"^step=(\d+) ", log, re.MULTILINE)]


def start_cluster(num_nodes: int = 3, num_cpus: int = 1) -> Cluster:
    """A head that trains nothing and nodes that do."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(num_nodes):
        cluster.add_node(num_cpus=num_cpus)
    return cluster


def tune(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """The command as a process."""
    return subprocess.Popen([sys.executable, "-m", "tuner", *arguments], **options)


def reproduce(folder: Path) -> str:
    """What is said of trial 0 when it has been run again without its study."""
    command = [sys.executable, "-m", "tuner", "reproduce", str(folder / "studies" / "tiny"), "0", "--run"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def run(
    folder: Path,
    kind: Callable[[Cluster], NodeRemover],
    num_nodes: int = 3,
    num_cpus: int = 1,
    train: Mapping[str, Any] | None = None,
    **scaling: Any,
) -> dict[str, Any]:
    """Run it."""
    cluster = start_cluster(num_nodes, num_cpus)
    remover = kind(cluster)
    spec = study_spec(
        folder,
        train={"max_steps": MAX_STEPS, **(train or {})},
        search={"num_trials": 4},
        scheduler={"type": "none"},
        scaling={"slots": 2, **scaling},
        failures={"max_failures": 0},
    )
    study = search.run(spec, source_text="", root=folder / "studies", observer=remover, address=cluster.address)
    cluster.shutdown()
    return {
        "lost": remover.lost,
        "warnings": remover.warnings,
        "steps_then": remover.steps_then,
        "logged": [logged_steps(study, trial.number) for trial in study.trials()],
        "trials": [[trial.state, trial.step, list(trial.reports), trial.attempts] for trial in study.trials()],
        "started": remover.started,
        "reasons": [trial.reason for trial in study.trials()],
        "workers": [trial.workers for trial in study.trials()],
        "places": remover.places,
        "sizes": getattr(remover, "sizes", []),
        "session": study.sessions()[-1],
    }


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if "command" in sys.argv:
        print(json.dumps(run_command(place)))
    elif "head" in sys.argv:
        print(json.dumps(lose_head(place)))
    elif "silent" in sys.argv:
        once = {"max_steps": SILENT_STEPS, "eval_every": SILENT_STEPS}
        found = run(place, SilentDrainer, num_nodes=2, train=once, slots=1)
        print(json.dumps({**found, "reproduced": reproduce(place)}))
    elif "swap" in sys.argv:
        print(json.dumps(run(place, NodeSwapper, num_nodes=1, slots="auto")))
    elif "join" in sys.argv:
        print(json.dumps(run(place, partial(NodeJoiner, root=place / "studies"), num_nodes=1, slots="auto")))
    elif "elastic" in sys.argv:
        scaling = {"num_workers": {"min": 1, "max": 2}, "slots": "auto"}
        print(json.dumps(run(place, Breather, num_nodes=2, **scaling)))
    elif "spread" in sys.argv:
        scaling = {"num_workers": 2, "slots": 1, "placement_strategy": "STRICT_SPREAD"}
        print(json.dumps(run(place, Onlooker, num_nodes=2, num_cpus=2, **scaling)))
    else:
        print(json.dumps(run(place, NodeDrainer if "drain" in sys.argv else NodeRemover)))
