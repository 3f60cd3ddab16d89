"""Studies that are submitted to a cluster, with another cluster on the same host; secrets are found nowhere."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import TOKEN, Cluster, cluster, environment
from tests.conftest import REPOSITORY
from tuner.record.study import Study

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SECRET = "0xS3CRET-that-nobody-may-see"
LOOP = """\
import os
import time

import ray.train


def train(config):
    assert os.environ["JOB_HIDDEN"].startswith("0x"), "no secret"
    for step in range(1, 5):
        time.sleep(config["seconds"])
        metrics = {"step": step, "loss": config["x"] ** 2 + 1 / step, "seen": float(os.environ["JOB_VISIBLE"])}
        ray.train.report(metrics)
"""


class Place:
    """A folder with a loop and its studies, and a cluster that takes them."""

    def __init__(self, folder: Path, made: Cluster) -> None:
        self.folder, self.cluster, self.root = folder, made, folder / "there"
        self.variables = environment(folder / "home")
        (folder / "work").mkdir()
        (folder / "work" / "loop.py").write_text(LOOP, encoding="utf-8")
        (folder / "work" / "studies").mkdir()
        (folder / "work" / "studies" / "secret.txt").write_text("stays here", encoding="utf-8")

    def write(self, name: str, seconds: float = 0.0, num_trials: int = 2) -> str:
        study = {
            "study": name,
            "objective": {"metric": "loss", "mode": "min"},
            "trainable": "loop.py:train",
            "train": {"seconds": seconds, "x": 0.5},
            "search_space": {"x": {"type": "float", "low": -1.0, "high": 1.0}},
            "search": {"num_trials": num_trials},
            "scheduler": {"type": "none", "max_t": 4},
            "env": ["JOB_VISIBLE"],
            "secrets": ["JOB_HIDDEN"],
        }
        (self.folder / "work" / f"{name}.yaml").write_text(json.dumps(study), encoding="utf-8")
        return f"{name}.yaml"

    def tune(self, *words: str, address: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tuner", *words, "--address", address or self.cluster.dashboard],
            cwd=self.folder / "work",
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """As `tune`, without waiting for it."""
        return subprocess.Popen(
            [sys.executable, "-m", "tuner", *words, "--address", self.cluster.dashboard],
            cwd=self.folder / "work",
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def environment(self, **variables: str) -> dict[str, str]:
        known = {"PYTHONPATH": str(REPOSITORY), "JOB_VISIBLE": "7", "JOB_HIDDEN": SECRET}
        return {**os.environ, **self.variables, **known, **variables}

    def submit(self, file: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.tune("submit", file, "--root", str(self.root), *words)

    def status(self, study: str) -> dict[str, Any]:
        done = self.tune("status", study, "--format", "json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def jobs(self) -> str:
        request = urllib.request.Request(
            f"{self.cluster.dashboard}/api/jobs/", headers={"Authorization": f"Bearer {TOKEN}"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A cluster, and another one that was started later, so that Ray's own search would find that."""
    folder = tmp_path_factory.mktemp("submit")
    home = folder / "home"
    home.mkdir()
    with cluster(home) as made, cluster(home, has_dashboard=False) as other:
        found = Place(folder, made)
        yield found
        assert jobs_of(other, found.variables) == 1, "a study has gone to the wrong cluster"


def jobs_of(other: Cluster, variables: dict[str, str]) -> int:
    """How many drivers a cluster has seen, this one included."""
    code = "import ray, sys; ray.init(address=sys.argv[1]); print(len(ray._private.state.jobs()))"
    command = [sys.executable, "-c", code, other.address]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def test_a_study_runs_there_and_is_seen_from_here(place: Place) -> None:
    done = place.submit(place.write("first"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "tune-first\n"
    followed = place.tune("logs", "first")
    assert followed.returncode == 0, followed.stderr
    assert "first finished: 2 COMPLETE" in followed.stdout + followed.stderr
    status = place.status("first")
    assert (status["state"], status["counts"]["COMPLETE"]) == ("finished", 2)
    assert Study.open(place.root, "first").trial(1).state == "COMPLETE"
    assert place.tune("logs", "first", "1").returncode == 0
    sees_the_trials_from_here(place, Study.open(place.root, "first"))
    unknown = place.tune("status", "nothing")
    assert unknown.returncode == 2
    assert "Studies there: first." in unknown.stderr


def sees_the_trials_from_here(place: Place, study: Study) -> None:
    """What the reading verbs print of them there arrives as it is."""
    records = [record.to_json() for record in study.trials()]
    assert json.loads(place.tune("trials", "first", "--format", "json").stdout) == records
    table = place.tune("trials", "first", "--format", "csv").stdout
    assert [line.split(",")[0] for line in table.splitlines()] == ["number", "0", "1"]
    best = json.loads(place.tune("best", "first", "--top", "1", "--format", "json").stdout)
    assert [record["number"] for record in best] == [study.best_trial.number]
    assert json.loads(place.tune("show", "first", "1", "--format", "json").stdout)["params"] == records[1]["params"]
    exported = place.tune("export", "first", "--to", "model")
    assert exported.returncode == 2
    assert f"On a machine of the cluster: tune export first --root {place.root} --to model" in exported.stderr


def test_the_same_study_is_not_submitted_twice(place: Place) -> None:
    file = place.write("once")
    submitted = place.submit(file, "--idempotency-key", "k1")
    assert submitted.returncode == 0, submitted.stderr
    assert place.submit(file, "--idempotency-key", "k1").stdout == submitted.stdout
    place.tune("logs", "once")
    again = place.submit(file)
    assert again.returncode == 2
    assert "study 'once' was submitted already, as job tune-once\n" in again.stderr
    assert f"tune resume once --address {place.cluster.dashboard}   or start another: --name once-2" in again.stderr


def test_of_two_submissions_at_once_one_is_refused(place: Place) -> None:
    file = place.write("race")
    both = [place.start("submit", file, "--root", str(place.root)) for _ in range(2)]
    said = [process.communicate(timeout=200)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2], said
    assert any("as job tune-race" in text for text in said)


def test_a_study_is_stopped_and_goes_on_from_here(place: Place) -> None:
    done = place.submit(place.write("long", seconds=0.5, num_trials=50))
    assert done.returncode == 0, done.stdout + done.stderr
    twice = place.tune("resume", "long")
    assert twice.returncode == 2
    assert "runs there already, as job tune-long" in twice.stderr
    stopped = place.tune("stop", "long")
    assert stopped.returncode == 0, stopped.stderr
    assert place.status("long")["state"] == "stopped"
    ended = sum(place.status("long")["counts"].values())
    resumed = place.tune("resume", "long", "--set", f"search.num_trials={ended}")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "long finished" in resumed.stdout + resumed.stderr
    assert place.status("long")["counts"]["COMPLETE"] == ended


def test_what_cannot_start_says_so_here(place: Place) -> None:
    file = place.write("wide")
    wide = place.submit(file, "--set", "scaling.num_workers=64")
    assert wide.returncode == 3
    assert "requested 64 workers" in wide.stderr
    assert place.submit(file).returncode == 0


def test_a_study_runs_on_the_cluster_that_was_named(place: Place) -> None:
    file = place.write("here")
    ran = place.tune("run", file, "--root", str(place.root), address=place.cluster.address, RAY_ADDRESS="127.0.0.1:1")
    assert ran.returncode == 0, ran.stderr
    assert "here finished: 2 COMPLETE" in ran.stdout + ran.stderr


def test_ray_client_addresses_lead_to_the_same(place: Place) -> None:
    done = place.tune("run", place.write("client"), "--root", str(place.root), address=place.cluster.client)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "client finished: 2 COMPLETE" in done.stdout + done.stderr


@pytest.mark.parametrize("form", ["address", "dashboard", "client"])
@pytest.mark.parametrize("token", ["f" * 64, ""], ids=["wrong", "missing"])
def test_a_wrong_or_missing_token_is_one_line(place: Place, tmp_path: Path, form: str, token: str) -> None:
    variables = environment(tmp_path, token or "x")
    if not token:
        (tmp_path / ".ray" / "auth_token").unlink()
    done = place.tune("run", place.write("denied"), address=getattr(place.cluster, form), **variables)
    assert done.returncode == 3
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert "wants a token, and " in done.stderr
    assert ("wrong\n" if token else "none was found\n") in done.stderr
    assert "~/.ray/auth_token" in done.stderr


def test_the_secret_is_nowhere(place: Place) -> None:
    assert "JOB_HIDDEN" in place.jobs()
    assert SECRET not in place.jobs()
    places = [place.cluster.folder, place.root, place.folder]
    assert files_with("JOB_HIDDEN", place.cluster.folder)
    assert files_with(SECRET, *places) == []


def files_with(text: str, *folders: Path) -> list[str]:
    # -a: also in what is not text.
    found = subprocess.run(["grep", "-rlaF", text, *map(str, folders)], capture_output=True, text=True, check=False)
    assert found.returncode in {0, 1}, found.stderr
    return found.stdout.splitlines()
