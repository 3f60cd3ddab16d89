"""`tune doctor` on a real cluster of three nodes, one of which keeps a folder to itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private.services import find_gcs_addresses
from ray.cluster_utils import Cluster

from tests.clusters import can_isolate, isolated_node, wait_for_nodes
from tests.conftest import REPOSITORY, Tune
from tests.studies import study_data
from tests.test_doctor import another_tune, full_disk, refused_uri
from tests.test_hub import environment, hub

__all__ = ["full_disk", "hub"]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder; what is in its `local` is seen by all nodes but the third."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "local").mkdir()
    return folder


@pytest.fixture(scope="module")
def address(place: Path) -> Iterator[str]:
    """A head, a node like it, and one that sees another file system at `local`."""
    if not can_isolate(place / "local"):
        pytest.skip("a node with a file system of its own takes the rights to mount one")
    os.environ["PYTHONPATH"] = str(REPOSITORY)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    third = isolated_node(place / "local", cluster.address, TUNE_CACHE_DIR=str(place / "cache"))
    try:
        wait_for_nodes(cluster.address, 3)
        yield cluster.address
    finally:
        third.terminate()
        third.wait(30)
        cluster.shutdown()


def ask(folder: Path, *arguments: str | Path, **variables: str) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """Exit code, and (level, text) of what was found by each check."""
    done = subprocess.run(
        [sys.executable, "-m", "tuner", "doctor", *map(str, arguments), "--format", "json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **variables},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout, done.stderr
    found: dict[str, list[tuple[str, str]]] = {}
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    for row in rows:
        assert (row["remedy"] is None) == (row["level"] == "ok")
        found.setdefault(row["check"], []).append((row["level"], row["text"]))
    return done.returncode, found


def test_a_cluster_that_is_well(address: str, place: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps(study_data(tmp_path, mlflow={"enabled": True})), encoding="utf-8")
    code, found = ask(tmp_path, file, "--address", address, "--root", place / "studies")
    assert code == 0, found
    [(level, text)] = found["network"]
    assert (level, text.partition(":")[0]) == ("ok", "all-reduce of 3 workers by gloo")
    assert float(text.split()[-2]) > 0
    assert [level for level, _ in found["storage"]] == ["ok"]
    assert found["storage"][0][1].endswith("the same from all 3 nodes")
    assert found["nodes"][0][1].startswith("3 nodes: ")
    assert found["study"] == [("ok", "tiny fits, 3 trials at a time")]
    for check in ("versions", "GPUs", "clocks", "MLflow"):
        assert [level for level, _ in found[check]] == ["ok"], found[check]
    assert not (place / "studies").exists()


def test_a_root_on_node_local_storage_names_the_node(address: str, place: Path, tmp_path: Path) -> None:
    code, found = ask(tmp_path, "--address", address, "--root", place / "local")
    [(level, text)] = found["storage"]
    assert (code, level) == (3, "fail")
    assert text.endswith("it does not see it")
    assert list((place / "local").iterdir()) == []


def test_a_study_whose_folder_is_not_the_same_on_every_node_is_refused(
    address: str, place: Path, tmp_path: Path, tune: Tune
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(json.dumps(study_data(tmp_path)), encoding="utf-8")
    done = tune("run", file, "--address", address, "--root", place / "local", timeout_s=200)
    assert done.returncode == 3
    fault, remedy = done.stderr.splitlines()
    assert fault.startswith(f"{place / 'local'} is not the same on every node, from ")
    assert fault.endswith(": it does not see it")
    assert remedy == "Choose a --root on a file system that all nodes share, at the same path."
    assert list((place / "local").iterdir()) == []


@pytest.mark.parametrize(("where", "level"), [("shared", "ok"), ("local", "fail")])
def test_nodes_that_do_not_see_the_working_copy_of_a_url_have_to_reach_the_url(
    address: str, place: Path, tmp_path: Path, where: str, level: str
) -> None:
    url = f"file://{place / where}/bucket"
    code, found = ask(tmp_path, "--address", address, "--root", url, TUNE_CACHE_DIR=str(place / "local"))
    [of_nodes] = [each for each in found["storage"] if "working copy" not in each[1]]
    assert (code, of_nodes[0]) == (0 if level == "ok" else 3, level), found
    assert of_nodes[1].endswith("the same from all 3 nodes" if level == "ok" else f"{url} is another one there")
    assert not list(place.rglob(".doctor-*"))
    for path in (place / "local").iterdir():
        shutil.rmtree(path)


def test_faults_of_this_machine_are_all_found_at_once(address: str, full_disk: Path, hub: str, tmp_path: Path) -> None:
    assert address in find_gcs_addresses()
    code, found = ask(
        tmp_path,
        "--root",
        full_disk,
        PATH=another_tune(tmp_path / "bin"),
        MLFLOW_TRACKING_URI=refused_uri(),
        GLOO_SOCKET_IFNAME="nosuch0",
        **environment(hub, tmp_path, "wrong"),
    )
    assert code == 3
    assert [text for _, text in found["command"]] == [f"`tune` is another program: {tmp_path}/bin/tune"]
    assert found["Ray instances"][0][0] == "warn"
    assert address in found["Ray instances"][0][1]
    expected = {"network": "nosuch0", "disk": "0 B free", "MLflow": "refused", "hub": "HF_TOKEN", "storage": "No space"}
    for check, words in expected.items():
        [text] = [text for level, text in found[check] if level == "fail"]
        assert words in text, found


def test_a_cluster_that_cannot_be_reached_fails_in_a_line(tmp_path: Path) -> None:
    code, found = ask(tmp_path, "--address", "127.0.0.1:1")
    assert code == 3
    [(level, text)] = found["Ray"]
    assert level == "fail"
    assert text.startswith("Ray at 127.0.0.1:1 cannot be reached: ")
