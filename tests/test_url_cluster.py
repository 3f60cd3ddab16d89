"""A study on a cluster whose nodes share nothing but an S3 server: neither files nor credentials."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.clusters import can_isolate, isolated_node, seen_by, take_away, wait_for_nodes
from tests.conftest import Tune
from tests.object_store import s3_server
from tests.studies import study_data
from tests.test_interruptions import Tune as TuneProcess
from tuner.record.record import TrialRecord
from tuner.record.study import Study
from tuner.storage.bucket import Bucket
from tuner.storage.place import as_root
from tuner.storage.pull import pull

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(500)]

CREDENTIALS = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]
MAX_STEPS = 300


class Machines:
    """The driver's, and nodes that have a cache of their own and do not see the driver's; none has credentials."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.driver, self._cluster = folder, folder / "driver", cluster
        self.address = str(cluster.address)
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def add(self, name: str) -> None:
        unset = dict.fromkeys(CREDENTIALS, "")
        cache = str(self.folder / name)
        self.nodes[name] = isolated_node(self.driver, self.address, TUNE_CACHE_DIR=cache, HOME=cache, **unset)

    def file(self, *names: str, **sections: Any) -> Path:
        scaling = {"num_workers": 2, "placement_strategy": "STRICT_SPREAD"}
        data = study_data(self.folder, **{"scaling": scaling, "checkpoint": {"every": 5}, **sections}, secrets=names)
        path = self.folder / "tiny.yaml"
        path.write_text(json.dumps(data), encoding="utf-8")
        return path

    @property
    def log(self) -> str:
        """Of trial 0, as the driver has it."""
        return "".join(path.read_text(encoding="utf-8") for path in self.driver.rglob("0.rank0.log"))

    def logged_steps(self) -> list[int]:
        return [int(each) for each in re.findall(r"^step=(\d+) ", self.log, re.MULTILINE)]

    def left_on(self, name: str) -> list[str]:
        """Files of trials on a node, but for the empty one by which they take turns."""
        found = (path.relative_to(self.folder / name).as_posix() for path in (self.folder / name).rglob("*.*"))
        left = [path for path in found if "/checkpoints/" in path or "/logs/" in path]
        return [path for path in left if not path.endswith("/checkpoints/.begin")]


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    (tmp_path / "driver").mkdir()
    if not can_isolate(tmp_path / "driver"):
        pytest.skip("a node with a file system of its own takes the rights to mount one")
    for name in ("n1", "n2", "n3"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TUNE_CACHE_DIR", str(tmp_path / "driver"))
    with ExitStack() as stack:
        stack.enter_context(s3_server())
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        stack.callback(cluster.shutdown)
        found = Machines(tmp_path, cluster)
        stack.callback(lambda: [take_away(node) for node in found.nodes.values() if node.poll() is None])
        # Two that start at once take the same name for their sockets.
        for number, name in ((2, "n1"), (3, "n2")):
            found.add(name)
            wait_for_nodes(found.address, number)
        yield found


def test_a_study_outlives_a_node_and_is_exported_elsewhere_on_machines_that_share_a_url_alone(
    machines: Machines, tmp_path: Path, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://bucket/{tmp_path.name}/studies"
    where = ("--root", url, "--address", machines.address)
    refused = tune("run", machines.file(), *where, timeout_s=200)
    assert refused.returncode == 3, refused.stderr
    fault, remedy = refused.stderr.splitlines()[-2:]
    assert re.match(r"node \S+: s3://\S+ cannot be used: .*redentials", fault)
    assert remedy.startswith("Give credentials as the provider's own tools take them")
    assert Bucket(url).folders() == []

    limits = {"max_steps": MAX_STEPS, "eval_every": 5}
    asha = {"type": "asha", "grace_period": 5, "max_t": MAX_STEPS, "reduction_factor": 3}
    file = machines.file(*CREDENTIALS, train=limits, search={"num_trials": 5}, scheduler=asha)
    running = TuneProcess(tmp_path, "run", str(file), *where)
    watching = _watching(url, tmp_path, monkeypatch)
    running.wait_for(lambda: bool(_saved(url)) and len(machines.logged_steps()) > 1, timeout_s=200)
    before = watching()[0]
    machines.add("n3")
    take_away(machines.nodes["n1"])
    code = running.end(timeout_s=300)
    assert code == 0, running.text
    trials = watching()
    states = [trial.state for trial in trials]
    assert set(states) == {"COMPLETE", "PRUNED"}, states
    for trial in trials:
        last = MAX_STEPS if trial.state == "COMPLETE" else trial.step
        assert list(trial.reports) == list(range(5, last + 1, 5))
    assert before.reports.items() <= trials[0].reports.items()
    [step] = re.findall(r"trial 0 starts again", running.text)[:1] or [""]
    assert step, running.text
    assert "not counted" not in running.text

    # What was printed in the second before a kill is lost.
    steps = machines.logged_steps()
    assert steps[0] == 5
    assert steps.count(5) == 1, "it went on from the URL's checkpoint"
    assert len([step for step, next_step in pairwise(steps) if next_step <= step]) <= 1
    assert steps[-1] == MAX_STEPS
    assert Study.open(url, "tiny").log_path(0).read_text(encoding="utf-8") == machines.log
    names = set(Bucket(f"{url}/tiny").listing())
    assert {"logs/0.rank1.log", "logs/4.rank0.log"} <= names
    complete = {str(trial.number) for trial in trials if trial.state == "COMPLETE"}
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} <= complete
    whole = [name for name in names if name.endswith("manifest.json")]
    assert len(whole) == min(3, len(complete))

    written = [path.name for path in machines.driver.rglob("*") if path.is_file()]
    assert not [name for name in written if name.endswith(".distcp") or "prepared" in name]
    for name in ("n2", "n3"):
        assert seen_by(machines.nodes[name], machines.driver) == []
        assert machines.left_on(name) == []
        assert list((tmp_path / name).rglob("data/prepared/*/*")), "each tokenises for itself"

    there = {"TUNE_CACHE_DIR": str(tmp_path / "elsewhere")}
    best = json.loads(tune("best", "tiny", "--root", url, "--format", "json", **there).stdout)
    assert best["checkpoint"] == f"{url}/tiny/checkpoints/{best['number']}/step_{MAX_STEPS:08d}"
    exported = tune("export", "tiny", "--to", "model", "--root", url, **there)
    assert exported.returncode == 0, exported.stderr
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 0


def _watching(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[TrialRecord]]:
    monkeypatch.setenv("TUNE_CACHE_DIR", str(folder / "watching"))
    root = as_root(url)

    def trials() -> list[TrialRecord]:
        pull(root / "tiny")
        return Study.open(root, "tiny").trials() if (root / "tiny").exists() else []

    return trials


def _saved(url: str) -> list[str]:
    return [name for name in Bucket(f"{url}/tiny").listing() if re.match(r"checkpoints/0/.*manifest\.json", name)]
