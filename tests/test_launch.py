"""Launch files: what is in them, what shellcheck, the schema of KubeRay and a cluster of two nodes make of them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from tests.clusters import free_port
from tests.conftest import REPOSITORY, Tune
from tests.studies import study_data
from tuner.cli import app
from tuner.errors import InputError, TuneError
from tuner.execution import search
from tuner.record.study import Study
from tuner.study_file.spec import override_spec

SCHEMA = REPOSITORY.parent / "shared" / "schemas" / "rayjob-v1.openapi.json"
SIZE = ("--nodes", "2", "--gpus", "8")
OPTIONS = {
    "nodes": (),
    "slurm": ("--partition", "gpu", "--account", "lab", "--option=--qos=high"),
    "kubernetes": ("--image", "me/tune:1", "--claim", "studies"),
    "databricks": ("--root", "/Volumes/main/me/studies", "--scope", "me"),
}


@pytest.fixture
def study_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A study of 16 workers with a GPU each, in the current folder; YAML reads JSON."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCH_VISIBLE", "seen")
    monkeypatch.setenv("LAUNCH_HIDDEN", "0xSECRET")
    scaling = {"num_workers": 16, "gpus_per_worker": 1}
    return write(tmp_path, "wide", scaling=scaling, env=["LAUNCH_VISIBLE"], secrets=["LAUNCH_HIDDEN"])


def write(folder: Path, name: str, **sections: Any) -> Path:
    (folder / f"{name}.yaml").write_text(json.dumps(study_data(folder, name, **sections)), encoding="utf-8")
    return Path(f"{name}.yaml")


def launch(target: str, file: Path, *options: str) -> None:
    app(["launch", target, str(file), *SIZE, *OPTIONS[target], *options], prog_name="tune", standalone_mode=False)


def launched(capsys: pytest.CaptureFixture[str], target: str, file: Path, *options: str) -> str:
    launch(target, file, *options)
    said = capsys.readouterr()
    assert "1 trial at a time on 2 nodes, 6 in all" in said.err
    assert "0xSECRET" not in said.out + said.err
    return said.out


def read(text: str) -> list[Any]:
    return list(YAML(typ="safe", pure=True).load_all(text))


def check_script(script: str) -> None:
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, "-"], input=script, capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize("target", ["nodes", "slurm"])
def test_a_script_is_what_shellcheck_wants(capsys: pytest.CaptureFixture[str], study_file: Path, target: str) -> None:
    script = launched(capsys, target, study_file, "--set", "search.seed=1", "--setup", "ulimit -n 65535")
    check_script(script)
    assert "python -m tuner run wide.yaml --resume --root studies --set search.seed=1 --address" in script
    assert ': "${LAUNCH_HIDDEN:?' in script
    assert ': "${LAUNCH_VISIBLE:?' in script
    assert script.index("ulimit -n") < script.index("python -m")
    assert "--num-cpus 64 --num-gpus 8" in script


def test_a_batch_script_has_its_options_and_queues_again(capsys: pytest.CaptureFixture[str], study_file: Path) -> None:
    script = launched(capsys, "slurm", study_file)
    options = {line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")}
    assert {"--nodes=2", "--gpus-per-node=8", "--partition=gpu", "--account=lab", "--qos=high", "--requeue"} <= options
    assert "symmetric-run --address" in script
    assert "--min-nodes 2" in script
    assert "python -m tuner stop wide --root studies" in script


def test_a_manifest_is_what_kuberay_wants(capsys: pytest.CaptureFixture[str], study_file: Path) -> None:
    config, job = read(launched(capsys, "kubernetes", study_file))
    if not SCHEMA.exists():
        pytest.skip(f"no schema of KubeRay's RayJob at {SCHEMA}")
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    assert [error.message for error in Draft202012Validator(closed(schema)).iter_errors(job)] == []
    assert read(config["data"]["wide.yaml"])[0]["study"] == "wide"


def closed(schema: Any) -> Any:
    """The schema as the API server applies it: what it does not know is an error."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    known = {name: closed(value) for name, value in schema.items()}
    is_open = "properties" not in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    return known if is_open else {**known, "additionalProperties": False}


def test_a_manifest_names_its_secrets_and_holds_its_variables(
    capsys: pytest.CaptureFixture[str], study_file: Path
) -> None:
    _, job = read(launched(capsys, "kubernetes", study_file, "--secret", "mine"))
    [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    [container] = workers["template"]["spec"]["containers"]
    assert container["env"] == [
        {"name": "LAUNCH_VISIBLE", "value": "seen"},
        {"name": "LAUNCH_HIDDEN", "valueFrom": {"secretKeyRef": {"name": "mine", "key": "LAUNCH_HIDDEN"}}},
    ]
    assert workers["replicas"] == 2
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "run /etc/tune/wide.yaml --resume --root /studies --address auto" in job["spec"]["entrypoint"]
    assert job["spec"]["backoffLimit"] > 0


def test_a_workload_has_the_keys_of_ai_runtime(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, study_file: Path
) -> None:
    [workload] = read(launched(capsys, "databricks", study_file, "--max-retries", "5"))
    command = workload.pop("command")
    version = workload["environment"].pop("dependencies")
    assert workload == {
        "experiment_name": "wide",
        "environment": {"version": "4"},
        "compute": {"num_accelerators": 16, "accelerator_type": "GPU_8xH100"},
        "code_source": {"type": "snapshot", "snapshot": {"root_path": str(tmp_path)}},
        "env_variables": {"NCCL_SOCKET_IFNAME": "eth0", "LAUNCH_VISIBLE": "seen"},
        "secrets": {"LAUNCH_HIDDEN": "me/LAUNCH_HIDDEN"},
        "max_retries": 5,
        "timeout_minutes": 1440,
    }
    assert version[0].startswith("tuner-llm==")
    check_script(f"#!/bin/bash\n{command}")
    assert command.index('cd "$CODE_SOURCE_PATH"') < command.index("--root /Volumes/main/me/studies")


@pytest.mark.parametrize(
    ("target", "options", "complaint", "remedy"),
    [
        ("slurm", ("--nodes", "1"), "room for 8 of 16 workers", "Ask for --nodes 2"),
        ("nodes", ("--gpus", "0"), "0 GPUs", "Ask for larger nodes"),
        ("kubernetes", ("--root", "studies"), "must be the path of a volume", "--root /studies"),
        ("databricks", ("--root", "studies"), "must be on a volume", "--root /Volumes/"),
        ("databricks", ("--scope", ""), "no scope for the secrets LAUNCH_HIDDEN", "--scope NAME"),
        ("databricks", ("--accelerator", "GPU_1xH100"), "has 1 GPUs a node, not 8", "--gpus 1"),
        ("nodes", ("--set", "scaling.num_worker=1"), "did you mean num_workers?", "nothing was started"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str],
    study_file: Path,
    target: str,
    options: tuple[str, ...],
    complaint: str,
    remedy: str,
) -> None:
    with pytest.raises(TuneError) as raised:
        launch(target, study_file, *options)
    assert raised.value.exit_code in {2, 3}
    assert complaint in raised.value.message
    assert remedy in raised.value.remedy
    assert capsys.readouterr().out == ""


def test_a_variable_that_is_not_set_is_named(study_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAUNCH_VISIBLE")
    with pytest.raises(InputError, match="LAUNCH_VISIBLE: named in env of the study, and not set here"):
        launch("kubernetes", study_file)


def test_a_study_whose_file_has_changed_its_meaning_does_not_go_on(demo_study: Study) -> None:
    changed = override_spec(demo_study.spec, ["scheduler.reduction_factor=2", "search.num_trials=9"])
    with pytest.raises(InputError, match=r"scheduler\.reduction_factor: 3 -> 2") as raised:
        search.resume("demo", root=demo_study.dir.parent, changed=changed)
    assert "num_trials: 8 -> 9" not in raised.value.message
    assert Study.open(demo_study.dir.parent, "demo").spec == demo_study.spec


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_nodes_run_a_study_from_their_script_and_go_on_with_it(tmp_path: Path, tune: Tune) -> None:
    # Ray's sockets have paths of at most 107 characters.
    scratch, port = Path(f"/tmp/launch-{os.getpid()}"), free_port()
    file = write(tmp_path, "pair", search={"num_trials": 2}, scaling={"num_workers": 2})
    for num_trials in (2, 3):
        done = tune(
            *("launch", "nodes", file, "--nodes", "2", "--gpus", "0", "--cpus", "1"),
            *("--set", f"search.num_trials={num_trials}", "--to", "start.sh"),
        )
        assert done.returncode == 0, done.stderr
        with started(tmp_path, scratch, port, 1) as one, started(tmp_path, scratch, port, 0) as zero:
            assert zero.wait(180) == 0, (tmp_path / "node0.log").read_text()
            assert one.wait(60) == 0, (tmp_path / "node1.log").read_text()
        status = json.loads(tune("status", "pair", "--format", "json").stdout)
        assert status["state"] == "finished"
        assert sum(status["counts"].values()) == num_trials
    shutil.rmtree(scratch, ignore_errors=True)


ISOLATED = ("unshare", "--pid", "--fork", "--mount-proc")


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*ISOLATED, "true"], check=False).returncode != 0,
    reason="symmetric-run ends every Ray that it sees: needs a PID namespace of its own",
)
def test_a_batch_script_runs_its_study_where_srun_starts_one_process(tmp_path: Path, tune: Tune) -> None:
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text('#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n', encoding="utf-8")
    srun.chmod(0o755)
    file = write(tmp_path, "batch", search={"num_trials": 2})
    size = ("--nodes", "1", "--gpus", "0", "--cpus", "1")
    assert tune("launch", "slurm", file, *size, "--to", "study.sbatch").returncode == 0
    paths = [str(srun.parent), str(Path(sys.executable).parent), os.environ["PATH"]]
    done = subprocess.run(
        [*ISOLATED, "bash", "study.sbatch"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(tune("status", "batch", "--format", "json").stdout)["state"] == "finished"


@contextmanager
def started(folder: Path, scratch: Path, port: int, rank: int) -> Iterator[subprocess.Popen[bytes]]:
    """The script on one node."""
    environment = {"NODE_RANK": str(rank), "HEAD": "127.0.0.1", "RAY_PORT": str(port), "PYTHONPATH": str(REPOSITORY)}
    # A node that outlives its head has nobody to say goodbye to.
    environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"] = "1"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with open(folder / f"node{rank}.log", "wb") as log:
        process = subprocess.Popen(
            ["bash", "start.sh", "--temp-dir", str(scratch), *(["--include-dashboard", "false"] if rank == 0 else [])],
            cwd=folder,
            env={**os.environ, **environment, "PATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
