"""What `tune doctor` makes of facts, and the facts of this host under real faults. No Ray here."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.small_disk import small_disk
from tests.test_hub import environment, hub
from tuner.doctor import checks as doctor
from tuner.doctor.checks import Finding, Level
from tuner.doctor.examination import _command
from tuner.doctor.facts import Asked, HostFacts, Room, host_facts, mlflow_fault, rooms
from tuner.doctor.meeting_place import meeting_place
from tuner.doctor.network import Network

__all__ = ["hub"]

VERSIONS: dict[str, str | None] = {"python": "3.11.7", "ray": "2.60.0", "torch": "2.13.0", "mlflow": "3.17.0"}
A = HostFacts("a", now_s=100.0, versions=VERSIONS, asked_s=(99.9, 100.1))
B = replace(A, name="b")
GPUS = {"gpus": ("H100",) * 8, "driver": "570.1", "ray_gpus": 8.0}
WITH_GPUS = (replace(A, **GPUS), replace(B, **GPUS))
BIG = Room(10**12, 2 * 10**12)


def one(found: Finding | Iterator[Finding]) -> list[tuple[str, str]]:
    """(level, text) of each finding; a remedy wherever something is wrong."""
    findings = [found] if isinstance(found, Finding) else list(found)
    assert all(bool(finding.remedy) == (finding.level is not Level.OK) for finding in findings)
    return [(str(finding.level), finding.text) for finding in findings]


CASES: dict[str, tuple[Callable[..., Any], Sequence[Any], list[tuple[str, str]]]] = {
    "ours": (doctor.check_command, ("/v/bin/tune", True), [("ok", "`tune` is /v/bin/tune")]),
    "another": (doctor.check_command, ("/r/tune", False), [("warn", "`tune` is another program: /r/tune")]),
    "none": (doctor.check_command, (None, False), [("ok", "no `tune` on PATH; `python -m tuner` is this one")]),
    "no Ray": (doctor.check_instances, ([], None), [("ok", "no other Ray on this host")]),
    "the joined Ray": (doctor.check_instances, (["h:1"], "h:1"), [("ok", "no other Ray on this host")]),
    "the only Ray": (doctor.check_instances, (["h:1"], "auto"), [("ok", "no other Ray on this host")]),
    "another Ray": (doctor.check_instances, (["h:1"], None), [("warn", "1 other Ray on this host: h:1")]),
    "which Ray": (doctor.check_instances, (["h:1", "h:2"], "auto"), [("warn", "1 other Ray on this host: h:2")]),
    "read-only": (
        doctor.check_root,
        ("Read-only file system", "r"),
        [("fail", "r cannot be written: Read-only file system")],
    ),
    "silent": (doctor.check_nodes, ([A], ["b"]), [("fail", "no answer from b")]),
    "same versions": (
        doctor.check_versions,
        ([A, B],),
        [("ok", "python 3.11.7, ray 2.60.0, torch 2.13.0, mlflow 3.17.0")],
    ),
    "torch differs": (
        doctor.check_versions,
        ([A, replace(B, versions=VERSIONS | {"torch": "2.12.0"})],),
        [("fail", "torch differs: 2.13.0 on a; 2.12.0 on b")],
    ),
    "mlflow is missing": (
        doctor.check_versions,
        ([A, replace(B, versions=VERSIONS | {"mlflow": None})],),
        [("warn", "mlflow differs: 3.17.0 on a; none on b")],
    ),
    "no GPUs": (doctor.check_gpus, ([A, B], None), [("ok", "none: studies train on CPUs")]),
    "GPUs": (doctor.check_gpus, (WITH_GPUS, None), [("ok", "16 H100, driver 570.1")]),
    "GPUs without a driver": (
        doctor.check_gpus,
        ([replace(A, ray_gpus=2.0)], None),
        [("fail", "a: Ray hands out 2 GPUs, the driver knows none")],
    ),
    "GPUs that Ray has not": (
        doctor.check_gpus,
        ([replace(WITH_GPUS[0], ray_gpus=4.0)], None),
        [("warn", "a: the driver knows 8 GPUs, Ray hands out 4")],
    ),
    "drivers differ": (
        doctor.check_gpus,
        ([WITH_GPUS[0], replace(WITH_GPUS[1], driver="535.2")], None),
        [("warn", "drivers differ: 570.1 on a; 535.2 on b")],
    ),
    "torch without CUDA": (
        doctor.check_gpus,
        (WITH_GPUS, Network("gloo", 2, 1e9, gpu_fault="torch finds no GPU in 2 of 2 workers that hold one")),
        [("fail", "torch finds no GPU in 2 of 2 workers that hold one")],
    ),
    "a network": (
        doctor.check_network,
        (Network("nccl", 2, 4.5e10),),
        [("ok", "all-reduce of 2 workers by nccl: 45 GB/s")],
    ),
    "no network": (
        doctor.check_network,
        (Network("gloo", 2, fault="Connection refused"),),
        [("fail", "all-reduce of 2 workers by gloo failed: Connection refused")],
    ),
    "busy GPUs": (
        doctor.check_network,
        (Network("gloo", 2, 1e9, is_busy=True),),
        [("warn", "all-reduce of 2 workers by gloo: 1 GB/s; the GPUs are in use, NCCL was not tried")],
    ),
    "a shared root": (doctor.check_storage, ([A, B], [], "r"), [("ok", "r can be written, the same from all 2 nodes")]),
    "a local root": (
        doctor.check_storage,
        ([A, replace(B, storage_fault="it does not see it")], ["b"], "r"),
        [("fail", "r from b: it does not see it")],
    ),
    "a file that does not arrive": (
        doctor.check_storage,
        ([A, B], ["b"], "r"),
        [("fail", "r from b: what it writes there does not arrive here")],
    ),
    "room": (doctor.check_room, ("a", {"studies (r)": BIG}, 10**9), [("ok", "a: free for studies (r) 1 TB")]),
    "no room for checkpoints": (
        doctor.check_room,
        ("a", {"studies (r)": BIG}, 2 * 10**12),
        [("fail", "a: studies (r) has 1 TB free, the study's checkpoints need 2 TB")],
    ),
    "a full disk": (
        doctor.check_room,
        ("a", {"temporary files (/tmp)": Room(10**6, 10**11)}, None),
        [("fail", "a: temporary files (/tmp) has 1 MB free")],
    ),
    "nearly full": (
        doctor.check_room,
        ("a", {"temporary files (/tmp)": Room(10**10, 10**12)}, None),
        [("warn", "a: temporary files (/tmp) has 10 GB free of 1 TB")],
    ),
    "docker's shared memory": (
        doctor.check_room,
        ("a", {"shared memory (/dev/shm)": Room(64 * 10**6, 64 * 10**6)}, None),
        [("warn", "a: shared memory (/dev/shm) is 64 MB")],
    ),
    "MLflow": (doctor.check_mlflow, ("http://m", "", [A]), [("ok", "http://m can be used")]),
    "MLflow is off": (doctor.check_mlflow, ("", "", [A]), [("ok", "off (mlflow.enabled: false)")]),
    "no MLflow": (doctor.check_mlflow, ("http://m", "it is down", [A]), [("fail", "it is down")]),
    "MLflow from a worker": (
        doctor.check_mlflow,
        ("http://m", "", [A, replace(B, mlflow_fault="timed out")]),
        [("warn", "http://m does not answer from b: timed out")],
    ),
    "no token": (doctor.check_hub, ([A, B],), [("ok", "no token: public models only")]),
    "a token": (doctor.check_hub, ([replace(A, hub="me")],), [("ok", "reached as me")]),
    "a wrong token": (doctor.check_hub, ([A, replace(B, hub_fault="refused")],), [("fail", "refused on b")]),
    "no way to the hub": (
        doctor.check_hub,
        ([replace(A, hub_unreachable="ConnectError")],),
        [("warn", "not asked: ConnectError on a")],
    ),
    "clocks": (doctor.check_clocks, ([A, B],), [("ok", "within 1 s of each other")]),
    "a slow answer": (
        doctor.check_clocks,
        ([replace(A, asked_s=(95.0, 105.0))],),
        [("ok", "within 1 s of each other")],
    ),
    "a clock behind": (doctor.check_clocks, ([A, replace(B, now_s=90.0)],), [("warn", "b is 10 s behind this host")]),
    "a clock ahead": (doctor.check_clocks, ([replace(A, now_s=400.0)],), [("fail", "a is 5 min ahead of this host")]),
}


@pytest.mark.parametrize("case", CASES)
def test_facts_become_findings_with_a_remedy(case: str) -> None:
    check, facts, expected = CASES[case]
    assert one(check(*facts)) == expected


# -- real faults --------------------------------------------------------------------------------------------------


def another_tune(folder: Path) -> str:
    """A PATH on which another program called tune comes first."""
    folder.mkdir()
    script = folder / "tune"
    script.write_text("#!/bin/sh\necho torchtune\n", encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def refused_uri() -> str:
    """The address of a server that is not there."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"


def test_another_program_called_tune_that_comes_first_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", another_tune(tmp_path / "bin"))
    assert (_command().level, str(tmp_path / "bin" / "tune") in _command().text) == (Level.WARN, True)


def test_a_script_of_this_project_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", another_tune(tmp_path / "bin"))
    (tmp_path / "bin" / "tune").write_text("#!/usr/bin/python\nfrom tuner.cli import main\nmain()\n", encoding="utf-8")
    assert _command().level is Level.OK


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    # Of the kernel's own file systems none can be written, whoever one is.
    with meeting_place(Path("/sys/studies")) as (folder, _, fault):
        assert folder is None
    assert fault


def test_a_root_can_be_looked_at_without_a_trace(tmp_path: Path) -> None:
    root = tmp_path / "studies"
    with meeting_place(root) as (folder, secret, fault):
        assert folder is not None
        assert (fault, host_facts("n", Asked(str(folder), secret)).storage_fault) == ("", "")
        assert (folder / "n").exists()
        assert "other files" in host_facts("n", Asked(str(folder), "another")).storage_fault
        assert host_facts("n", Asked(str(tmp_path / "none"), secret)).storage_fault == "it does not see it"
    assert not root.exists()


def test_a_server_that_refuses_is_unreachable_and_one_that_answers_is_not(hub: str) -> None:
    assert "refused" in mlflow_fault(refused_uri())
    assert mlflow_fault(hub) == ""
    assert mlflow_fault("sqlite:///x.db") == ""


@pytest.mark.parametrize(
    ("token", "expected"),
    [("wrong", "does not accept the token in HF_TOKEN (HTTP 401)"), ("known", "gated")],
)
def test_a_token_is_tried_on_the_hub(hub: str, tmp_path: Path, token: str, expected: str) -> None:
    code = "from tuner.doctor.facts import _hub; print('|'.join(_hub(('meta-llama/x',))))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment(hub, tmp_path, token)},
        capture_output=True,
        text=True,
        check=True,
    )
    user, fault, unreachable = done.stdout.rstrip("\n").split("|")
    assert expected in fault
    assert (user, unreachable) == ("" if token == "wrong" else token, "")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system without room."""
    with small_disk(tmp_path / "full", "1m") as disk:
        disk.fill()
        yield disk.path


def test_a_full_disk_is_found(full_disk: Path) -> None:
    found = list(doctor.check_room("here", rooms(full_disk / "studies"), None))
    assert ("fail", f"here: studies ({full_disk}) has 0 B free") in one(iter(found))
