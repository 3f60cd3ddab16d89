"""Trials on nodes that share nothing but a URL: what each rank saves, what a node fetches, what is left behind."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ray.train import Checkpoint

from tests.studies import assignment, study_spec
from tests.test_damaged_checkpoint import LEFT_AT, MAX_STEPS, ScriptedLine, assigned, flip_a_bit
from tests.test_trainables_saver import assert_equal, loaded, make_state, values_of
from tests.tiny import CPU, run_ranks
from trainables.checkpoint_dir import MANIFEST, complete_checkpoints, is_complete, read_manifest, step_dir
from trainables.errors import CheckpointError
from trainables.finetune import Warm
from trainables.parallel import Worker
from trainables.saver import CheckpointSaver
from tuner.decisions.sampling import Proposal
from tuner.doctor.facts import Asked, storage_fault, study_fault, url_fault
from tuner.errors import StudyDamagedError
from tuner.execution.channel import Assignment, Ended, Endpoint, Go, Logged, Reported, Saved
from tuner.execution.home import Home, marked
from tuner.execution.line import Line
from tuner.execution.log_courier import Uploads
from tuner.execution.train_function import RemoteReporting
from tuner.execution.trial_log import trial_log
from tuner.execution.trial_place import NodeFolder, place_of
from tuner.execution.worker import Service, run_trial
from tuner.record.checkpoints import Checkpoints
from tuner.record.study import Study
from tuner.storage.bucket import Bucket
from tuner.storage.files import checkpoint_dirs
from tuner.storage.mirror import Mirror
from tuner.storage.place import as_root, url_of
from tuner.storage.pull import pull
from tuner.storage.trial import TrialAtUrl

Machine = Callable[[str], None]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """From now on this process is one of the machine of that name."""
    return lambda name: monkeypatch.setenv("TUNE_CACHE_DIR", str(tmp_path / name))


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a study; what S3 adds to it, `test_object_storage` and `test_url_cluster` have."""
    return f"file://{tmp_path}/bucket/studies/tiny"


def names_at(url: str) -> set[str]:
    return set(Bucket(url).listing())


# -- saving and fetching ----------------------------------------------------------------------------------------------


def _save_apart(worker: Worker, folder: Path) -> dict[str, Any]:
    """Three checkpoints; of another one the last rank cannot upload its part."""
    trial, node = TrialAtUrl(f"file://{folder}/trial"), folder / f"node{worker.rank}"
    saver, state, found = CheckpointSaver(worker), make_state(size=100), dict[str, Any]()
    for step in (1, 2, 3):
        saver.save(state, step_dir(node, step), keep_last=1, protected=[step_dir(node, 1)], publisher=trial)
    saver.wait()
    found["completed"] = [path.name for path in saver.poll()]
    if worker.rank == 1:
        trial.put = _refuse  # type: ignore[method-assign]
    saver.save(state, step_dir(node, 4), keep_last=1, publisher=trial)
    try:
        saver.wait()
    except CheckpointError as error:
        found["failure"] = str(error)
    saver.close()
    return found | {"here": sorted(path.name for path in node.iterdir()), "state": values_of(state)}


def _apart(worker: Worker, folder: Path) -> dict[str, Any]:
    """What two ranks do whose nodes share no folder: processes take long to start."""
    return {"saved": _save_apart(worker, folder), "reported": _report_apart(worker, folder)}


class _Reporting(RemoteReporting):
    """Where Ray's own collectives are not at hand."""

    def barrier(self) -> None:
        self._ranks.share(None)

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        return self._ranks.share(data)


def _report_apart(worker: Worker, folder: Path) -> dict[str, Any]:
    """A plain function brings a file of each rank, at two steps of three, and is called again on another node."""
    slot = _Slot() if worker.rank == 0 else None
    addresses: list[Any] = [slot and slot.endpoint.address]
    dist.broadcast_object_list(addresses, src=0)
    line, found = Line(addresses[0], worker), list[str]()
    home = Home(str(folder / "driver"), f"file://{folder}/functions/tiny", "not seen")
    task = assignment(folder, max_t=3, keep_last=1)
    for node in ("first", "second"):
        os.environ["TUNE_CACHE_DIR"] = str(folder / f"{node}{worker.rank}")
        with place_of(task, worker, line, home) as place, trial_log(place.assignment, worker.rank):
            assert isinstance(place, NodeFolder)
            reporting = _Reporting(place, worker, line)
            for step in (1, 2) if node == "first" else ():
                print(f"rank {worker.rank} at {step}")
                reporting.report({"step": step, "loss": 1.0}, _file_of(worker, folder, step))
            newest = reporting.get_checkpoint()
            assert newest is not None
            found.append(" ".join(sorted(path.name for path in Path(newest.path, "sub").iterdir())))
    if slot is not None:
        slot.endpoint.close()
    return {"found": found, "heard": [] if slot is None else slot.heard}


def _file_of(worker: Worker, folder: Path, step: int) -> Checkpoint:
    own = folder / f"own{worker.rank}"
    (own / "sub").mkdir(parents=True, exist_ok=True)
    (own / "sub" / f"rank{worker.rank}").write_text(f"{step}", encoding="utf-8")
    return Checkpoint.from_directory(str(own))


class _Slot:
    """Lets a trial go on at each report."""

    def __init__(self) -> None:
        self.endpoint, self.heard = Endpoint("127.0.0.1"), list[Any]()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            message = self.endpoint.receive(60)
            self.heard.append(message)
            if isinstance(message, Reported) and message.waits:
                self.endpoint.send(Go(0))


def _refuse(file: Path, name: str) -> None:
    raise OSError("no way to the store")


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("apart")
    return folder, run_ranks(_apart, 2, folder)


def test_a_plain_function_saves_the_files_of_all_its_ranks_and_finds_them_on_other_nodes(
    apart: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = apart
    assert [rank["reported"]["found"] for rank in results] == [["rank0 rank1", "rank0 rank1"]] * 2
    heard = results[0]["reported"]["heard"]
    saved = [(message.step, message.kept) for message in heard if isinstance(message, Saved)]
    assert saved == [(1, ("step_00000001",)), (2, ("step_00000002",))]
    assert "".join(message.text for message in heard if isinstance(message, Logged)) == "rank 0 at 1\nrank 0 at 2\n"
    bucket = Bucket(f"file://{folder}/functions/tiny")
    assert bucket.read("logs/0.rank1.log") == b"rank 1 at 1\nrank 1 at 2\n"
    assert bucket.read("checkpoints/0/step_00000002/sub/rank1") == b"2"
    assert not (folder / "driver").exists()


def test_ranks_that_share_no_folder_save_one_checkpoint_and_any_node_fetches_what_it_lacks(
    apart: tuple[Path, list[dict[str, Any]]],
) -> None:
    tmp_path, results = apart
    found = [rank["saved"] for rank in results]
    for rank in found:
        assert rank["completed"] == ["step_00000001", "step_00000002", "step_00000003"]
        assert rank["failure"].endswith("step_00000004: cannot be written: no way to the store")
        assert rank["here"] == ["step_00000001", "step_00000003"], "what the URL no longer has is deleted"
    url, name = f"file://{tmp_path}/trial", "step_00000003"
    trial = TrialAtUrl(url)
    assert {each.split("/")[0] for each in names_at(url)} == {"step_00000001", name, "step_00000004"}
    assert trial.clean() == ("step_00000001", name)
    assert {each.split("/")[0] for each in names_at(url)} == {"step_00000001", name}, "half of a checkpoint is none"
    for node, own, other in (("node0", 0, 1), ("node1", 1, 0)):
        here = tmp_path / node / name
        assert not is_complete(here)
        assert not (here / f"__{other}_0.distcp").exists()
        before = (here / f"__{own}_0.distcp").stat()
        assert trial.fetch(name, tmp_path / node)
        assert (here / f"__{own}_0.distcp").stat() == before, "it is not fetched again"
        assert_equal(loaded(here, size=100), found[0]["state"])
        assert complete_checkpoints(tmp_path / node) == [here]
    assert trial.fetch(name, tmp_path / "node2")
    assert (read_manifest(tmp_path / "node2" / name) or {})["step"] == found[0]["state"][".step"]


def test_what_a_node_has_of_another_checkpoint_of_that_name_gives_way(url: str, tmp_path: Path) -> None:
    trial = _saved(url, tmp_path / "a", step=1)
    path = tmp_path / "b" / "step_00000001"
    assert trial.fetch(path.name, path.parent)
    manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    (path / MANIFEST).write_text(json.dumps(manifest | {"step": 7}), encoding="utf-8")
    flip_a_bit(path / "__0_0.distcp", 0.5)
    assert trial.fetch(path.name, path.parent)
    assert (path / "__0_0.distcp").read_bytes() == (tmp_path / "a" / path.name / "__0_0.distcp").read_bytes()


def test_a_damaged_checkpoint_is_not_gone_on_from_and_nothing_is_written_outside(url: str, tmp_path: Path) -> None:
    trial, bucket = _saved(url, tmp_path / "a", step=1), Bucket(url)
    manifest = json.loads(bucket.read("step_00000001/manifest.json"))
    bucket.write("evil", b"x")
    for files in ({**manifest["files"], "none.distcp": 3}, {"../../evil": 1}):
        bucket.write("step_00000001/manifest.json", json.dumps(manifest | {"files": files}).encode())
        assert not trial.fetch("step_00000001", tmp_path / "b" / "0")
    assert not list((tmp_path / "b").rglob("evil"))
    trial.condemn("step_00000001")
    assert trial.clean() == ()
    assert names_at(url) == set()


def _saved(url: str, folder: Path, step: int) -> TrialAtUrl:
    trial, saver = TrialAtUrl(url), CheckpointSaver(CPU)
    saver.save(make_state(), step_dir(folder, step), publisher=trial)
    saver.wait()
    saver.close()
    return trial


# -- a trial ----------------------------------------------------------------------------------------------------------


class LoneLine(ScriptedLine):
    """Of a group of one."""

    def share(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    @property
    def saved(self) -> list[Saved]:
        return [message for message in self.heard if isinstance(message, Saved)]

    @property
    def logged(self) -> str:
        return "".join(message.text for message in self.heard if isinstance(message, Logged))


def serve(task: Assignment, folder: Path, line: LoneLine, home: Home) -> Ended:
    saver = CheckpointSaver(CPU)
    service = Service(("localhost", 0, b""), "ddp", str(folder / "data"), home)  # type: ignore[arg-type]
    try:
        return run_trial(task, service, CPU, line, Warm(), saver)  # type: ignore[arg-type]
    finally:
        saver.close()


def test_a_trial_goes_on_bit_for_bit_on_another_node_and_leaves_nothing_on_either(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    whole, begun, resumed = LoneLine(), LoneLine(stop_at=LEFT_AT), LoneLine()
    task = assigned(tmp_path, "nowhere", log_dir=str(tmp_path / "nowhere"), keep_last=1)
    serve(assigned(tmp_path, "whole"), tmp_path, whole, Home(str(tmp_path)))
    home = Home(str(tmp_path / "nowhere"), url, "mark")
    machine("one")
    assert serve(task, tmp_path, begun, home) == Ended(0, "stopped")
    assert begun.saved[-1].kept == (f"step_{LEFT_AT:08d}",)
    machine("two")
    assert serve(replace(task, reported_step=LEFT_AT), tmp_path, resumed, home) == Ended(0, "completed")
    assert begun.losses | resumed.losses == whole.losses
    assert resumed.steps == list(range(LEFT_AT + 1, MAX_STEPS + 1))
    assert f"left after step {LEFT_AT}" in begun.logged
    assert begun.logged.startswith("step=1 ")
    assert {name.split("/")[2] for name in names_at(url)} == {f"step_{MAX_STEPS:08d}"}
    assert not (tmp_path / "nowhere").exists()
    left = [path for name in ("one", "two") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert [path.name for path in left if path.name not in (".origin", ".begin")] == []


def test_workers_that_see_the_working_copy_save_there_and_fetch_what_others_have_saved(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    machine("driver")
    study_dir = as_root(url.rpartition("/")[0]) / "tiny"
    study_dir.mkdir()
    task = assigned(tmp_path, "", checkpoint_dir=str(study_dir / "checkpoints" / "0"), log_dir=str(study_dir / "logs"))
    with marked(study_dir) as home:
        machine("node")
        serve(task, tmp_path, begun := LoneLine(stop_at=LEFT_AT), replace(home, mark="not seen"))
        assert not (study_dir / "checkpoints").exists()
        machine("driver")
        away = step_dir(study_dir / "checkpoints" / "0", LEFT_AT)
        away.mkdir(parents=True)
        (away / ".away").touch()
        assert serve(replace(task, reported_step=LEFT_AT), tmp_path, line := LoneLine(), home) == Ended(0, "completed")
    assert begun.steps + line.steps == list(range(1, MAX_STEPS + 1))
    assert [saved.kept for saved in line.saved] == [()] * len(line.saved), "the driver uploads them"
    assert is_complete(step_dir(study_dir / "checkpoints" / "0", MAX_STEPS))


def test_what_a_killed_worker_left_on_a_node_goes_when_the_next_trial_begins(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    machine("one")
    left = as_root(url) / "checkpoints" / "5" / "step_00000003"
    left.mkdir(parents=True)
    serve(assigned(tmp_path, "none", max_t=1), tmp_path, LoneLine(), Home(str(tmp_path / "none"), url, "mark"))
    assert not left.parent.exists()


def test_the_log_of_another_rank_is_uploaded_and_gone_on_with(url: str, tmp_path: Path) -> None:
    for node, text in (("one", "a\n"), ("two", "b\n")):
        log, uploads = tmp_path / node / "0.rank1.log", Uploads(url)
        log.parent.mkdir()
        uploads.load(log)
        with open(log, "a", encoding="utf-8") as file:
            file.write(text)
        uploads(log)
    assert Bucket(url).read("0.rank1.log") == b"a\nb\n"


# -- the driver -------------------------------------------------------------------------------------------------------


def test_the_driver_knows_what_workers_keep_at_the_url_and_deletes_what_the_record_does_not(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    machine("driver")
    study = Study.create(study_spec(tmp_path), "study: tiny\n", as_root(url.rpartition("/")[0]))
    for _ in range(3):
        study.add_trial(Proposal({}, {}))
    mirror = Mirror(study.dir, print)
    mirror.start()
    checkpoints = Checkpoints(study)
    for number in range(3):
        checkpoints.begin(number)
        _saved(f"{url}/checkpoints/{number}", tmp_path / "node" / str(number), step=2)
    checkpoints.note_saved(0, [Saved(0, 2, "/elsewhere/step_00000002", ("step_00000002",))])
    checkpoints.note_saved(1, [Saved(1, 2, "/elsewhere/step_00000002", ("step_00000002",))])
    assert study.trial(0).checkpoint == f"{url}/checkpoints/0/step_00000002"
    checkpoints.settle(0, "PRUNED")
    checkpoints.settle(1, "COMPLETE")
    mirror.push()
    at = {"/".join(name.split("/")[:3]) for name in names_at(url) if name.startswith("checkpoints/")}
    # Of trial 2 nothing has been heard yet.
    assert at == {"checkpoints/1/step_00000002", "checkpoints/2/step_00000002"}
    study.finish(2, "FAILED", "lost")
    checkpoints.close()
    Checkpoints(study).close()
    study.close()
    mirror.finish()
    assert {name.split("/")[1] for name in names_at(url) if name.startswith("checkpoints/")} == {"1"}


def test_a_node_that_cannot_use_the_url_says_why_and_what_to_do(
    machine: Machine, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine("node")
    asked = Asked(str(tmp_path / "none"), "secret", url=url)
    assert storage_fault("n", asked).partition("\n")[0] == f"{url} is another one there"
    Bucket(url).write(".doctor-secret", b"secret")
    assert storage_fault("n", asked) == ""
    assert names_at(url) == {".doctor-secret"}
    assert study_fault(str(tmp_path / "none"), ".doctor-secret", "secret", url, "") == ""
    assert study_fault(str(tmp_path), "none", "secret", "", "") == f"it does not see {tmp_path}"
    assert url_fault("gs://bucket/x", "n", "").splitlines() == [
        "--root gs://bucket/x: gs:// needs a package that is not installed",
        "pip install 'tuner-llm[gcs]'",
    ]
    assert url_of(as_root(url)) == url


def test_what_a_trial_uploads_after_it_has_gone_back_to_an_older_checkpoint_is_left_alone(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    machine("driver")
    study = Study.create(study_spec(tmp_path), "study: tiny\n", as_root(url.rpartition("/")[0]))
    study.add_trial(Proposal({}, {}))
    mirror, checkpoints = Mirror(study.dir, print), Checkpoints(study)
    mirror.start()
    checkpoints.begin(0)
    trial = _saved(f"{url}/checkpoints/0", tmp_path / "node", step=20)
    checkpoints.note_saved(0, [Saved(0, 20, "/elsewhere/step_00000020", ("step_00000020",))])
    trial.condemn("step_00000020")
    assert trial.clean() == ()
    Bucket(url).write("checkpoints/0/step_00000005/__0_0.distcp", b"half of a checkpoint")
    mirror.push()
    assert "checkpoints/0/step_00000005/__0_0.distcp" in names_at(url)
    checkpoints.close()
    study.close()
    mirror.finish()


def test_the_driver_has_the_whole_log_of_another_rank_after_a_second_sitting(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    root = _root_of_a_study(machine, url, tmp_path)
    for sitting in (1, 2):
        pull(root / "tiny")
        mirror = Mirror(root / "tiny", print)
        mirror.start()
        Bucket(url).write("logs/0.rank1.log", b"a line\n" * sitting)
        mirror.finish()
    pull(root / "tiny")
    assert (root / "tiny" / "logs" / "0.rank1.log").read_bytes() == b"a line\n" * 2


def test_a_driver_that_was_killed_does_not_put_an_older_log_in_the_place_of_a_ranks(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    machine("driver")
    root = as_root(url.rpartition("/")[0])
    study = Study.create(study_spec(tmp_path), "study: tiny\n", root)
    study.add_trial(Proposal({}, {}))
    study.close()
    _mirror_once(root)
    for sitting in (1, 2):
        Bucket(url).write("logs/0.rank1.log", b"a line\n" * sitting)
        pull(root / "tiny")
        # It is killed before the mirror has what it has recorded.
        study = Study.open(root, "tiny", writable=True)
        study.add_trial(Proposal({}, {}))
        study.close()
    _mirror_once(root)
    assert Bucket(url).read("logs/0.rank1.log") == b"a line\n" * 2


def _root_of_a_study(machine: Machine, url: str, folder: Path) -> Path:
    machine("driver")
    root = as_root(url.rpartition("/")[0])
    Study.create(study_spec(folder), "study: tiny\n", root).close()
    return root


def _mirror_once(root: Path) -> None:
    mirror = Mirror(root / "tiny", print)
    mirror.start()
    mirror.finish()


def test_a_trial_that_its_workers_made_known_before_the_record_did_is_forgotten_elsewhere(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    root = _root_of_a_study(machine, url, tmp_path)
    _mirror_once(root)
    # The driver is killed, with its machine, before it has uploaded that there is a trial.
    _saved(f"{url}/checkpoints/0", tmp_path / "node", step=2)
    Bucket(url).write("logs/0.rank1.log", b"a line\n")
    machine("elsewhere")
    elsewhere = as_root(url.rpartition("/")[0])
    assert Study.open(url.rpartition("/")[0], "tiny").trials() == []
    assert (elsewhere / "tiny" / "logs" / "0.rank1.log").exists(), "who reads deletes nothing"
    pull(elsewhere / "tiny")
    Study.open(elsewhere, "tiny", writable=True).close()
    _mirror_once(elsewhere)
    assert not [name for name in names_at(url) if name.startswith(("checkpoints/", "logs/"))]


def test_a_log_of_rank_0_that_the_record_knows_nothing_of_shows_that_its_end_is_lost(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    root = _root_of_a_study(machine, url, tmp_path)
    _mirror_once(root)
    Bucket(url).write("logs/0.rank0.log", b"a line\n")
    machine("elsewhere")
    with pytest.raises(StudyDamagedError, match="its end is lost"):
        Study.open(url.rpartition("/")[0], "tiny")


def test_checkpoints_are_listed_while_some_are_being_deleted(tmp_path: Path) -> None:
    stays, ended = tmp_path / "checkpoints" / "1" / "step_00000002", threading.Event()
    stays.mkdir(parents=True)

    def come_and_go() -> None:
        while not ended.is_set():
            gone = tmp_path / "checkpoints" / ".0.deleted"
            gone.mkdir()
            gone.rmdir()

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(1000):
            assert checkpoint_dirs(tmp_path) == ["checkpoints/1/step_00000002"]
    finally:
        ended.set()
        thread.join()


def test_to_fetch_a_checkpoint_while_training_leaves_alone_what_other_ranks_are_writing(
    url: str, tmp_path: Path
) -> None:
    trial, node = _saved(url, tmp_path / "a", step=1), tmp_path / "b"
    part = node / "step_00000002.1.partial"
    part.mkdir(parents=True)
    assert trial.fetch("step_00000001", node)
    assert part.exists()


def test_what_a_killed_attempt_was_writing_is_no_part_of_the_next_ones_checkpoint(
    machine: Machine, url: str, tmp_path: Path
) -> None:
    machine("one")
    root = as_root(url) / "checkpoints" / "0"
    for left in ("step_00000001", "step_00000001.0.partial"):
        (root / left).mkdir(parents=True)
        (root / left / "stale").write_text("of another attempt", encoding="utf-8")
    home = Home(str(tmp_path / "none"), url, "mark")
    with place_of(assignment(tmp_path, max_t=3), CPU, LoneLine(), home) as place:
        assert place.resume_point() is None
        assert not list(root.rglob("stale"))


def test_training_does_not_wait_for_the_upload_of_another_ranks_log(machine: Machine, url: str, tmp_path: Path) -> None:
    machine("one")
    home = Home(str(tmp_path / "none"), url, "mark")
    second = replace(CPU, rank=1)
    with place_of(assignment(tmp_path, max_t=3), second, LoneLine(), home) as place:
        log = Path(place.assignment.log_dir, "0.rank1.log")
        log.write_text("printed\n", encoding="utf-8")
        place.ship_log()
        assert names_at(url) == set()
    assert Bucket(url).read("logs/0.rank1.log") == b"printed\n"


def test_an_upload_outlasts_a_store_that_is_away_for_a_while(url: str, tmp_path: Path) -> None:
    file, away = tmp_path / "file", tmp_path / "bucket"
    file.write_bytes(b"x")
    away.write_text("in the way", encoding="utf-8")
    back = threading.Timer(0.3, away.unlink)
    back.start()
    TrialAtUrl(url).put(file, "step_00000001/file")
    back.join()
    assert Bucket(url).read("step_00000001/file") == b"x"
