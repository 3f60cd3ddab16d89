"""Studies under a URL, on a real S3-compatible server: each working copy stands for a machine of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3fs import S3FileSystem

from tests.conftest import Tune
from tests.object_store import s3_server
from tests.studies import study_data, study_spec
from tests.test_interruptions import Tune as TuneProcess
from trainables.checkpoint_dir import complete_checkpoints, is_complete, step_dir, write_manifest
from tuner.decisions.sampling import Proposal
from tuner.errors import InputError, StudyDamagedError, StudyLockedError
from tuner.execution.search import _opened
from tuner.record.checkpoints import Checkpoints
from tuner.record.record import TrialRecord
from tuner.record.study import Study
from tuner.storage import mirror as mirror_module
from tuner.storage import owner
from tuner.storage.bucket import Bucket
from tuner.storage.mirror import Mirror
from tuner.storage.place import as_root, shown, url_of
from tuner.storage.pull import fetch_all, pull, pull_all


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[str]:
    with s3_server() as address:
        yield address


Machine = Callable[[str], Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The root of a test's studies as a machine of that name has it."""

    def root_on(name: str) -> Path:
        monkeypatch.setenv("TUNE_CACHE_DIR", str(tmp_path / name))
        return as_root(f"s3://bucket/{tmp_path.name}/studies")

    return root_on


def new_study(root: Path, folder: Path) -> Study:
    study = Study.create(study_spec(folder), "study: tiny\n", root)
    study.add_trial(Proposal({}, {}, is_default=True))
    return study


def checkpoint(study: Study, number: int, step: int) -> Path:
    """A checkpoint of three files as a trial leaves it."""
    path = step_dir(study.dir / "checkpoints" / str(number), step)
    path.mkdir(parents=True)
    for name in ("a.distcp", "b.distcp", "train.json"):
        (path / name).write_text(f"{name} {step}" * 100, encoding="utf-8")
    write_manifest(path, step, {})
    study.note(number, checkpoint=path.relative_to(study.dir).as_posix())
    return path


def uploaded(study: Study, warn: Callable[[str], None] = print) -> None:
    """All of a sitting's uploads."""
    mirror = Mirror(study.dir, warn)
    mirror.start()
    study.close()
    mirror.finish()


# -- places -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("s3://b/x/", "s3://b/x"),
        (Path("s3://b/x"), "s3://b/x"),
        ("gs://b", "gs://b"),
        ("abfss://c@account.dfs.core.windows.net/x", "abfss://c@account.dfs.core.windows.net/x"),
        ("file:///Volumes/main/me", "file:///Volumes/main/me"),
        (Path("file:///Volumes/main/me"), "file:///Volumes/main/me"),
    ],
)
def test_a_root_that_is_a_url_has_a_folder_which_knows_it(machine: Machine, given: str | Path, url: str) -> None:
    machine("one")
    root = as_root(given)
    assert (url_of(root), url_of(root / "x" / "y"), shown(root / "x")) == (url, f"{url}/x/y", f"{url}/x")
    assert as_root(root) == root


@pytest.mark.parametrize("given", ["studies", "/mnt/studies", "../x", "C:/x"])
def test_every_other_root_is_the_folder_itself(given: str) -> None:
    assert as_root(given) == Path(given)
    assert url_of(Path(given)) is None


FAULTS = [
    ("s3://nosuch/x", {}, "does not exist", "Make the bucket"),
    ("gs://b/x", {}, "not installed", "pip install 'tuner-llm[gcs]'"),
    ("foo://b/x", {}, "unknown kind", "s3, s3a, gs"),
    ("s3://me:verysecret@b/x", {}, "password", "Leave it out"),
    ("s3://bucket/x", {"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "cannot be reached", "AWS_ENDPOINT_URL"),
    ("s3://bucket/x", {"AWS_ACCESS_KEY_ID": ""}, "redentials", "AWS_ACCESS_KEY_ID"),
]


@pytest.mark.parametrize(("url", "environment", "fault", "remedy"), FAULTS)
def test_a_url_that_cannot_be_used_is_one_line_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, url: str, environment: dict[str, str], fault: str, remedy: str
) -> None:
    if "AWS_ACCESS_KEY_ID" in environment:
        # boto keeps no session whose credentials it has found once.
        monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in {"TUNE_CACHE_DIR": str(tmp_path / "cache"), **environment}.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(InputError, match=fault) as raised:
            pull_all(as_root(url))
    finally:
        S3FileSystem.clear_instance_cache()
    assert remedy in raised.value.remedy
    assert "verysecret" not in str(raised.value)
    assert len(str(raised.value).splitlines()) == 2


def test_the_command_line_ends_with_2_before_anything_starts(tune: Tune, demo_file: Path, tmp_path: Path) -> None:
    said = tune("run", demo_file, "--root", "s3://nosuch/x", TUNE_CACHE_DIR=str(tmp_path / "cache"))
    assert said.returncode == 2
    assert "s3://nosuch/x/demo cannot be used" in said.stderr
    assert len(said.stderr.splitlines()) <= 3


# -- push and pull --------------------------------------------------------------------------------------------------


def test_another_machine_sees_the_study_and_fetches_a_checkpoint_when_it_needs_it(
    machine: Machine, tmp_path: Path
) -> None:
    study = new_study(machine("one"), tmp_path)
    study.report(0, 1, 2.5)
    study.write_log(0, "hello")
    (study.dir / "ray").mkdir()
    (study.dir / "ray" / "scratch").write_text("x", encoding="utf-8")
    saved = checkpoint(study, 0, 1)
    study.finish(0, "COMPLETE")
    trials = study.trials()
    uploaded(study)
    there = Bucket(url_of(study.dir) or "").listing()
    assert {name.split("/")[0] for name in there} == {
        "study.yaml",
        "spec.json",
        "optuna.journal",
        "logs",
        "checkpoints",
    }

    root = machine("two")
    pull(root / "tiny")
    seen = Study.open(root, "tiny")
    url = url_of(saved)
    assert [trial.reports for trial in seen.trials()] == [trial.reports for trial in trials]
    assert seen.trials()[0].checkpoint == url_of(seen.dir / saved.relative_to(study.dir))
    assert url is not None
    assert seen.log_path(0).read_text(encoding="utf-8") == "hello\n"
    assert complete_checkpoints(seen.dir / "checkpoints" / "0") == []
    fetch_all(seen.dir / "checkpoints" / "0")
    here = Path(seen.trials()[0].checkpoint or "")
    assert is_complete(here)
    assert (here / "a.distcp").read_bytes() == (saved / "a.distcp").read_bytes()
    assert Study.open(f"s3://bucket/{tmp_path.name}/studies", "tiny").trials() == seen.trials()


def test_what_is_deleted_here_is_deleted_there_and_a_checkpoint_that_was_never_fetched_stays(
    machine: Machine, tmp_path: Path
) -> None:
    study = new_study(machine("one"), tmp_path)
    first, second = checkpoint(study, 0, 1), study.add_trial(Proposal({}, {}))
    checkpoint(study, second, 1)
    (study.dir / "mlflow_pending.jsonl").write_text("{}", encoding="utf-8")
    uploaded(study)

    root = machine("two")
    pull(root / "tiny")
    there = Study.open(root, "tiny", writable=True)
    newer = checkpoint(there, 0, 2)
    for path in (there.dir / first.relative_to(study.dir), there.dir / "mlflow_pending.jsonl"):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    uploaded(there)
    names = Bucket(url_of(there.dir) or "").listing()
    found = {name.rpartition("/")[0] for name in names if name.startswith("checkpoints/")}
    assert found == {newer.relative_to(there.dir).as_posix(), "checkpoints/1/step_00000001"}
    assert "mlflow_pending.jsonl" not in names


def test_a_study_is_opened_to_go_on_without_a_checkpoint_and_its_workers_fetch_those_they_need(
    machine: Machine, tmp_path: Path
) -> None:
    study = new_study(machine("one"), tmp_path)
    study.add_trial(Proposal({}, {}))
    checkpoint(study, 0, 3)
    checkpoint(study, 1, 5)
    study.report(0, 3, 1.0)
    study.finish(0, "COMPLETE")
    uploaded(study)
    with _opened(machine("two"), "tiny") as there:
        folder = there.dir / "checkpoints"
        assert complete_checkpoints(folder / "1") == []
        fetch_all(folder / "1")
        assert complete_checkpoints(folder / "0") == []
        assert [path.name for path in complete_checkpoints(folder / "1")] == ["step_00000005"]
        Checkpoints(there).keep_best()
        assert there.trials()[0].checkpoint == url_of(folder / "0" / "step_00000003")


class _Cut(Bucket):
    """A machine that is killed at the n-th change of the URL."""

    left = 0

    def _change(self, method: Callable[..., Any], *args: Any) -> Any:
        if type(self).left == 0:
            raise KeyboardInterrupt
        type(self).left -= 1
        return method(*args)

    def write(self, name: str, data: bytes) -> None:
        self._change(super().write, name, data)

    def upload(self, file: Path, name: str) -> None:
        self._change(super().upload, file, name)

    def delete(self, name: str) -> None:
        self._change(super().delete, name)


def test_a_kill_at_any_upload_leaves_a_study_that_opens_with_a_whole_checkpoint(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine("one")
    study = new_study(root, tmp_path)
    first = checkpoint(study, 0, 1)
    study.report(0, 1, 2.0)
    uploaded(study)
    study = Study.open(root, "tiny", writable=True)
    study.report(0, 2, 1.0)
    study.write_log(study.add_trial(Proposal({}, {})), "begun")
    checkpoint(study, 0, 2)
    shutil.rmtree(first)
    monkeypatch.setattr(mirror_module, "Bucket", _Cut)
    for changes in range(40):
        _Cut.left = changes
        mirror = Mirror(study.dir, print)
        try:
            mirror.start()
        except KeyboardInterrupt:
            _Cut.left = 9
            mirror._owner.release()
        other = machine(f"other{changes}")
        pull(other / "tiny")
        seen = Study.open(other, "tiny")
        assert len(seen.trials()) in (1, 2)
        fetch_all(seen.dir / "checkpoints" / "0")
        whole = complete_checkpoints(seen.dir / "checkpoints" / "0")
        assert whole
        assert all(is_complete(path) for path in whole)
        machine("one")
        if mirror._thread is not None:
            _Cut.left = 99
            mirror.finish()
            break
    assert [path.name for path in whole] == ["step_00000002"]
    assert changes > 5
    study.close()


def test_a_new_study_that_was_killed_before_its_journal_was_there_is_none(machine: Machine, tmp_path: Path) -> None:
    root = machine("one")
    bucket = Bucket(url_of(root / "tiny") or "")
    bucket.write("study.yaml", b"study: tiny\n")
    bucket.write("spec.json", study_spec(tmp_path).model_dump_json().encode())
    pull(root / "tiny")
    uploaded(new_study(root, tmp_path))
    other = machine("two")
    pull(other / "tiny")
    assert len(Study.open(other, "tiny").trials()) == 1


def test_another_checkpoint_of_the_same_step_takes_the_place_of_the_first(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine("one")
    study = new_study(root, tmp_path)
    saved = checkpoint(study, 0, 1)
    uploaded(study)
    (root / "tiny" / ".mirror.json").unlink()
    sent: list[str] = []
    upload = Bucket.upload
    monkeypatch.setattr(Bucket, "upload", lambda *words: sent.append(words[2]) or upload(*words))
    uploaded(Study.open(root, "tiny", writable=True))
    assert [name for name in sent if "checkpoints" in name] == [], "it is there already"
    (saved / "train.json").write_text("other", encoding="utf-8")
    write_manifest(saved, 1, {})
    uploaded(Study.open(root, "tiny", writable=True))
    assert sent[-1].endswith("step_00000001/manifest.json")
    assert Bucket(url_of(saved) or "").read("train.json") == b"other"


def test_no_object_is_written_outside_of_the_working_copy(machine: Machine, tmp_path: Path) -> None:
    uploaded(new_study(machine("one"), tmp_path))
    url = f"s3://bucket/{tmp_path.name}/studies/tiny"
    Bucket(url).write("logs/../../../evil", b"x")
    Bucket(url).write("logs/0.rank0.log", b"x")
    root = machine("two")
    pull(root / "tiny")
    assert (root / "tiny" / "logs" / "0.rank0.log").exists()
    assert list(tmp_path.rglob("evil")) == []


def test_a_checkpoint_without_its_manifest_is_none(machine: Machine, tmp_path: Path) -> None:
    study = new_study(machine("one"), tmp_path)
    saved = checkpoint(study, 0, 1)
    uploaded(study)
    bucket = Bucket(url_of(study.dir) or "")
    bucket.delete(f"{saved.relative_to(study.dir).as_posix()}/manifest.json")
    root = machine("two")
    pull(root / "tiny")
    assert Study.open(root, "tiny").trials()[0].checkpoint is None


# -- which is newer ---------------------------------------------------------------------------------------------------


def goes_on(root: Path, value: float, *, is_uploaded: bool) -> Study:
    """A sitting on a machine that reports one more step."""
    pull(root / "tiny")
    study = Study.open(root, "tiny", writable=True)
    study.report(0, study.trial(0).step + 1, value)
    if is_uploaded:
        uploaded(study)
    study.close()
    return study


def test_an_older_working_copy_is_brought_up_to_date_and_a_newer_one_is_kept(machine: Machine, tmp_path: Path) -> None:
    one = machine("one")
    uploaded(new_study(one, tmp_path))
    goes_on(machine("two"), 2.0, is_uploaded=True)
    goes_on(machine("one"), 1.0, is_uploaded=False)
    with open(one / "tiny" / "optuna.journal", "ab") as journal:
        journal.write(b'{"torn')
    pull(one / "tiny")
    assert Study.open(one, "tiny").trials()[0].reports == {1: 2.0, 2: 1.0}
    goes_on(one, 0.5, is_uploaded=True)
    two = machine("two")
    pull(two / "tiny")
    assert Study.open(two, "tiny").trials()[0].reports == {1: 2.0, 2: 1.0, 3: 0.5}


def test_two_that_went_different_ways_are_refused(machine: Machine, tmp_path: Path) -> None:
    one = machine("one")
    uploaded(new_study(one, tmp_path))
    goes_on(one, 3.0, is_uploaded=False)
    goes_on(machine("two"), 2.0, is_uploaded=True)
    before = (one / "tiny" / "optuna.journal").read_bytes()
    with pytest.raises(StudyDamagedError, match="gone on elsewhere") as raised:
        pull(one / "tiny")
    assert f"mv {one / 'tiny'}" in raised.value.remedy
    assert (one / "tiny" / "optuna.journal").read_bytes() == before


def test_traces_of_an_older_state_give_way(machine: Machine, tmp_path: Path) -> None:
    """A machine that was killed after it had saved, and before it had recorded anything of it."""
    one = machine("one")
    study = new_study(one, tmp_path)
    stale = step_dir(study.dir / "checkpoints" / "0", 7)
    uploaded(study)
    stale.mkdir(parents=True)
    write_manifest(stale, 7, {})
    goes_on(machine("two"), 2.0, is_uploaded=True)
    machine("one")
    pull(one / "tiny")
    assert not stale.exists()


def test_what_runs_on_this_machine_is_newer_than_the_url(machine: Machine, tmp_path: Path) -> None:
    root = machine("one")
    uploaded(new_study(root, tmp_path))
    running = Study.open(root, "tiny", writable=True)
    goes_on_there = machine("two")
    goes_on(goes_on_there, 2.0, is_uploaded=True)
    machine("one")
    pull(root / "tiny")
    assert running.trials()[0].reports == {}
    running.close()


# -- one writer --------------------------------------------------------------------------------------------------------


def test_a_second_writer_is_refused_in_the_words_of_the_lock(machine: Machine, tmp_path: Path) -> None:
    study = new_study(machine("one"), tmp_path)
    mirror = Mirror(study.dir, print)
    mirror.start()
    root = machine("two")
    with pytest.raises(StudyLockedError, match=f"is being run by process {os.getpid()} on "):
        Mirror(root / "tiny", print)
    pull(root / "tiny")
    seen = Study.open(root, "tiny")
    assert seen.is_running
    seen.ask_to_stop()
    mirror._hear_stop()
    assert study.is_asked_to_stop
    study.close()
    mirror.finish()
    pull(root / "tiny")
    assert not seen.is_running
    Mirror(root / "tiny", print).finish()


@pytest.mark.parametrize("kind", ["dead process", "old beat"])
def test_a_dead_holder_is_taken_over_and_finds_so_itself(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(owner, "SETTLE_S", 0.0)
    study = new_study(machine("one"), tmp_path)
    first = Mirror(study.dir, print)
    bucket = Bucket(url_of(study.dir) or "")
    who = json.loads(bucket.read("study.lock"))
    if kind == "old beat":
        bucket.write("study.lock", json.dumps({**who, "space": "elsewhere", "beat": time.time() - 61}).encode())
    else:
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        bucket.write("study.lock", json.dumps({**who, "pid": ended.pid}).encode())
    second = Mirror(machine("two") / "tiny", print)
    assert first.taken is None
    first._owner.beat()
    assert "has been taken over by process" in str(first.taken)
    first.finish()
    second._owner.beat()
    assert second.taken is None
    second.finish()
    study.close()


def test_uploads_that_fail_are_told_once_and_made_good(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror_module, "EVERY_S", 0.05)
    study, warnings = new_study(machine("one"), tmp_path), list[str]()
    mirror = Mirror(study.dir, warnings.append)
    mirror.start()
    real = mirror._bucket
    mirror._bucket = Bucket("s3://nosuch/x")
    study.report(0, 1, 2.0)
    deadline = time.monotonic() + 20
    while not warnings and time.monotonic() < deadline:
        time.sleep(0.05)
    mirror._bucket = real
    study.close()
    mirror.finish()
    assert len(warnings) == 1
    assert "the study goes on" in warnings[0]
    root = machine("two")
    pull(root / "tiny")
    assert Study.open(root, "tiny").trials()[0].reports == {1: 2.0}


def test_what_could_not_be_uploaded_is_named_at_the_end(machine: Machine, tmp_path: Path) -> None:
    study, warnings = new_study(machine("one"), tmp_path), list[str]()
    mirror = Mirror(study.dir, warnings.append)
    mirror.start()
    study.report(0, 1, 2.0)
    study.close()
    mirror._bucket = Bucket("s3://nosuch/x")
    mirror.finish()
    assert "not all of the study is uploaded" in warnings[-1]
    assert f"tune resume tiny --root s3://bucket/{tmp_path.name}/studies" in warnings[-1]


# -- a real study ------------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_study_that_was_killed_goes_on_and_is_exported_on_other_machines(
    machine: Machine, tmp_path: Path, tune: Tune, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://bucket/{tmp_path.name}/studies"
    limits = {"max_steps": 300, "eval_every": 2}
    data = study_data(
        tmp_path, train=limits, search={"num_trials": 3}, scheduler={"type": "none"}, mlflow={"enabled": True}
    )
    (tmp_path / "tiny.yaml").write_text(json.dumps(data), encoding="utf-8")

    machine("first")
    first = TuneProcess(tmp_path, "run", "tiny.yaml", "--root", url)
    watching = machine("watching")

    def trials() -> list[TrialRecord]:
        pull(watching / "tiny")
        return Study.open(watching, "tiny").trials() if (watching / "tiny").exists() else []

    def saved_running(found: list[TrialRecord]) -> set[int]:
        running = [trial.number for trial in found if trial.state == "RUNNING"]
        return {number for number in running if any((watching / "tiny/checkpoints" / str(number)).glob("step_*"))}

    def is_under_way() -> bool:
        found = trials()
        return any(trial.state == "COMPLETE" for trial in found) and bool(saved_running(found))

    first.wait_for(is_under_way)
    os.kill(first.process.pid, signal.SIGKILL)
    first.end()
    before = trials()
    resumed = saved_running(before)
    assert first.wait_until_gone() == []

    second = tune("resume", "tiny", "--root", url, TUNE_CACHE_DIR=str(tmp_path / "second"), timeout_s=200)
    assert second.returncode == 0, second.stderr
    after = trials()
    assert [trial.state for trial in after] == ["COMPLETE"] * 3
    for old in before:
        assert after[old.number].params == old.params
        assert set(old.reports.items()) <= set(after[old.number].reports.items())
    assert all(list(trial.reports) == list(range(2, 301, 2)) for trial in after)
    assert resumed
    assert all(re.search(f"trial {number} goes on from step", second.stderr) for number in resumed), second.stderr

    there = {"TUNE_CACHE_DIR": str(tmp_path / "third")}
    status = json.loads(tune("status", "tiny", "--root", url, "--format", "json", **there).stdout)
    best = json.loads(tune("best", "tiny", "--root", url, "--format", "json", **there).stdout)
    assert status["best"].items() <= best.items()
    assert (status["state"], status["counts"]["COMPLETE"]) == ("finished", 3)
    assert best["checkpoint"].startswith(f"{url}/tiny/checkpoints/")
    exported = tune("export", "tiny", "--to", "model", "--root", url, TUNE_CACHE_DIR=str(tmp_path / "fourth"))
    assert exported.returncode == 0, exported.stderr
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 0
    names = Bucket(f"{url}/tiny").listing()
    assert not [name for name in names if name.split("/")[0] in ("ray", "data", "study.lock", "stop")]
    assert b"verysecret" not in b"".join(Bucket(f"{url}/tiny").read(name) for name in names)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_driver_whose_study_was_taken_over_ends_and_uploads_nothing_more(machine: Machine, tmp_path: Path) -> None:
    url = f"s3://bucket/{tmp_path.name}/studies"
    data = study_data(tmp_path, train={"max_steps": 4000}, search={"num_trials": 2}, scheduler={"type": "none"})
    (tmp_path / "tiny.yaml").write_text(json.dumps(data), encoding="utf-8")
    machine("first")
    driver, bucket = TuneProcess(tmp_path, "run", "tiny.yaml", "--root", url), Bucket(f"{url}/tiny")
    driver.wait_for(lambda: bucket.exists("logs/0.rank0.log"))
    who = json.loads(bucket.read("study.lock"))
    bucket.write("study.lock", json.dumps({**who, "token": "other", "host": "elsewhere", "pid": 7}).encode())
    assert driver.end(120) == 2, driver.text
    assert "has been taken over by process 7 on elsewhere" in driver.text
    assert "Traceback" not in driver.text
    assert driver.wait_until_gone() == []
    assert json.loads(bucket.read("study.lock"))["token"] == "other"
    there = bucket.listing()["optuna.journal"].size
    assert there <= (machine("first") / "tiny" / "optuna.journal").stat().st_size


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_study_is_listed_and_confirmed_from_one_machine_and_further_from_another(
    machine: Machine, tmp_path: Path, tune: Tune
) -> None:
    url = f"s3://bucket/{tmp_path.name}/studies"
    data = study_data(tmp_path, search={"num_trials": 2}, scheduler={"type": "none"})
    (tmp_path / "tiny.yaml").write_text(json.dumps(data), encoding="utf-8")

    def on(name: str, *words: str) -> Any:
        done = tune(*words, "--root", url, "--format", "json", TUNE_CACHE_DIR=str(tmp_path / name), timeout_s=200)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    machine("first")
    assert tune("run", "tiny.yaml", "--root", url, timeout_s=200).returncode == 0
    first = on("second", "confirm", "tiny", "--top", "1", "--seeds", "1")
    more = on("third", "confirm", "tiny", "--top", "1", "--seeds", "2")
    num_arms = len(first["arms"])
    assert [arm["values"] for arm in more["arms"]] != [arm["values"] for arm in first["arms"]]
    there = Study.open(f"{url}/tiny", "confirm")
    assert [trial.state for trial in there.trials()] == ["COMPLETE"] * 2 * num_arms
    assert [trial.attempts for trial in there.trials()] == [1] * 2 * num_arms, "what was run before is kept"
    [listed] = on("fourth", "list")
    assert (listed["study"], listed["state"], listed["counts"]["COMPLETE"]) == ("tiny", "finished", 2)
    assert on("fourth", "confirm", "tiny", "--top", "1", "--seeds", "2") == more
