"""run() and resume(): open a study, start the slots, search until it has enough, and leave nothing behind."""

from __future__ import annotations

import shlex
import shutil
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainables.hub import check_access
from tuner.decisions.controller import StudyController
from tuner.decisions.observer import Observer
from tuner.errors import InputError
from tuner.execution import cluster
from tuner.execution.autoscaler import wait_for_room
from tuner.execution.head_watch import LostCluster
from tuner.execution.home import Home, marked
from tuner.execution.shared_root import check_shared
from tuner.execution.slot_count import SlotCount
from tuner.execution.tune_loop import run_tune
from tuner.execution.worker_group import SlotSettings, free_placement_group
from tuner.planning.plan import Plan, make_plan
from tuner.planning.space import check_room
from tuner.processes import handling_signals
from tuner.record.environment import note_environment
from tuner.record.session import refuse_spent
from tuner.record.study import Study
from tuner.record.study_dir import REPORT, refuse_existing
from tuner.storage.mirror import Mirror, mirrored
from tuner.storage.pull import pull, pulled
from tuner.study_file.extension import accept, extend_spec
from tuner.study_file.spec import StudySpec
from tuner.study_file.variables import kept_in_cluster, values_of
from tuner.tracking.overview import overview
from tuner.tracking.tracker import MlflowTracker

TRACKING_PATIENCE_S, ROOM_FOR_REPORT = 15.0, 50_000_000


def run(
    spec: StudySpec, *, source_text: str, root: Path, observer: Observer | None = None, address: str | None = None
) -> Study:
    """Run a new study to its end.

    Args:
        spec: What to search.
        source_text: The study file, kept verbatim.
        root: Where studies live.
        observer: Hears of every event.
        address: A Ray cluster to join; None starts one on this machine.

    Returns:
        The study; `study.status()["state"]` says how it ended.

    Raises:
        StudyExistsError: There is a study of that name.
        InputError: The hub does not give out the model, or a variable that the study names is not set.
        TrackingError: MLflow cannot be used as configured.
        ClusterError: The cluster cannot be reached, or can never hold one trial.
        StudyAbortedError: It was ended because it could not go well.
    """
    observer = observer or Observer()
    with mirrored(root / spec.study, observer.warning) as mirror:
        pull(root / spec.study)
        refuse_existing(spec.study, root)
        env, _ = _variables(spec)
        _check_access(spec)
        _tracker(spec, root / spec.study, observer).check()
        _import_ahead()
        lost = LostCluster(observer, root / spec.study)
        with handling_signals(_raise_interrupt), cluster.connected(address, env, lost.leave):
            plan = _plan(spec, observer)
            if check_shared(spec, root):
                check_room(spec, root, plan.slots or 1)
            study = Study.create(spec, source_text, root)
            return _search(study, plan, observer, lost.endings, mirror)


def resume(
    name: str,
    *,
    root: Path,
    overrides: Sequence[str] = (),
    changed: StudySpec | None = None,
    observer: Observer | None = None,
    address: str | None = None,
) -> Study:
    """Go on with a study: finished trials stay, those left running go on from their newest checkpoint.

    Args:
        name: Its name under `root`, or the path of its folder.
        root: Where studies live.
        overrides: `key=value` changes that extend it, as `tune run --set` takes them.
        changed: The study as its file states it now, in place of overrides.
        observer: Hears of every event.
        address: A Ray cluster to join; None starts one on this machine.

    Raises:
        StudyNotFoundError: There is no such study.
        StudyLockedError: Another process runs it.
        StudyDamagedError: Its record cannot be read.
        SpecError: An override is not legal, or would change the meaning of what has been recorded.
    """
    observer = observer or Observer()
    with mirrored(root / name, observer.warning) as mirror, _opened(root, name) as study:
        if changed is not None and changed != study.spec:
            study.replace_spec(accept(study.spec, changed))
        if overrides:
            study.replace_spec(extend_spec(study.spec, overrides))
        env, _ = _variables(study.spec)
        refuse_spent(study)
        _check_access(study.spec)
        _tracker(study.spec, study.dir, observer).check()
        _import_ahead()
        lost = LostCluster(observer, study.dir)
        with handling_signals(_raise_interrupt), cluster.connected(address, env, lost.leave):
            plan = _plan(study.spec, observer)
            check_shared(study.spec, study.dir.parent)
            return _search(study, plan, observer, lost.endings, mirror)


@contextmanager
def _opened(root: Path, name: str) -> Iterator[Study]:
    """A study to go on with; its workers fetch what running trials go on from."""
    with pulled(root / name):
        study = Study.open(root, name, writable=True)
    try:
        yield study
    finally:
        study.close()


def _variables(spec: StudySpec) -> tuple[dict[str, str], dict[str, str]]:
    return values_of(spec.env, "env"), values_of(spec.secrets, "secrets")


def _check_access(spec: StudySpec) -> None:
    if spec.is_custom:
        return
    try:
        check_access(value for key in ("model", "tokenizer") for value in spec.values_of(key))
    except ValueError as error:
        raise InputError(str(error)) from error


def _import_ahead() -> None:
    """Load what the search needs while the cluster starts: most of that time this process only waits."""

    def load() -> None:
        import optuna  # noqa: F401
        import ray.tune  # noqa: F401

    threading.Thread(target=load, daemon=True, name="import-ahead").start()


def _plan(spec: StudySpec, observer: Observer) -> Plan:
    plan = make_plan(spec, wait_for_room(spec, observer))
    if spec.search.max_gpu_hours is not None and not plan.num_gpus:
        raise InputError(
            "search.max_gpu_hours: the study uses no GPU here, so that nothing would be counted",
            "Limit its hours instead: --set search.max_gpu_hours=null --set search.max_hours=1",
        )
    return plan


def _search(study: Study, plan: Plan, observer: Observer, endings: ExitStack, mirror: Mirror) -> Study:
    from ray.experimental import internal_kv

    mirror.start()
    # Last of all, when everything is written.
    endings.callback(mirror.finish)

    assert plan.slots is not None, "a plan made with a cluster's capacity knows its slots"
    stop_key = f"tune:stop:{study.spec.study}:{uuid.uuid4().hex}"
    tracker = _tracker(study.spec, study.dir, observer, study)
    tracker.start_study(_tags(study, plan), study.trials())

    def stop_slots() -> None:
        internal_kv._internal_kv_put(stop_key.encode(), b"1")

    def free_slot(number: int) -> None:
        free_placement_group(stop_key, number)

    controller = StudyController(study, plan.slots, tracker, observer, stop_slots, free_slot, plan.num_gpus)
    note_environment(study.dir, slots=plan.slots)
    observer.study_started(study, plan)
    # Each of them is owed to somebody, also when the one before could not be done.
    endings.callback(study.close)
    endings.callback(observer.study_ended, study)
    endings.callback(tracker.close, TRACKING_PATIENCE_S)
    endings.callback(lambda: tracker.end_study(_summary(study), [study.dir / REPORT]))
    endings.callback(_write_report, study, observer)
    endings.callback(controller.close)
    home = endings.enter_context(marked(study.dir))
    # Workers of a cluster that was started here inherit them.
    secrets = _variables(study.spec)[1] if cluster.can_autoscale() else {}
    with _interruptible(controller), endings, kept_in_cluster(f"tune:secrets:{study.dir.resolve()}", secrets) as key:
        settings = replace(slot_settings(study.spec, home, plan, stop_key), secrets_key=key)
        run_tune(controller, settings, SlotCount(study, plan, controller, observer, key), mirror)
    if controller.failure is not None:
        raise controller.failure
    return study


def _write_report(study: Study, observer: Observer) -> None:
    """Write the page that the study's run in MLflow carries; who interrupts a study does not wait for it."""
    state = study.state_at_rest()
    # On a disk that is almost full the record needs what is left.
    if not study.spec.mlflow.enabled or state == "interrupted" or shutil.disk_usage(study.dir).free < ROOM_FOR_REPORT:
        return
    from tuner.reports.report import write_report

    try:
        write_report(study, state=state)
    except Exception as error:  # a view must not cost the study its end
        observer.warning(f"report.html is not written: {getattr(error, 'message', error)}")


def _summary(study: Study) -> dict[str, Any]:
    return study.status() | {"state": study.state_at_rest()} | overview(study)


def slot_settings(spec: StudySpec, home: Home, plan: Plan, stop_key: str) -> SlotSettings:
    """What each slot is told of the study; see SlotSettings."""
    return SlotSettings(
        trainable=spec.trainable,
        scaling=spec.scaling.model_copy(update={"gpus_per_worker": plan.gpus_per_worker or 0.0}),
        home=home,
        max_failures=spec.failures.max_failures,
        can_autoscale=cluster.can_autoscale(),
        stop_key=stop_key,
    )


def _tracker(spec: StudySpec, study_dir: Path, observer: Observer, study: Study | None = None) -> MlflowTracker:
    def note_run(number: int, run_id: str) -> None:
        if study is not None:
            study.note_mlflow_run(number, run_id)

    return MlflowTracker(spec, study_dir, on_run_id=note_run, on_warning=observer.warning)


def _tags(study: Study, plan: Plan) -> dict[str, str]:
    return {
        "world_size": str(plan.num_workers),
        "slots": str(plan.slots),
        "host": socket.gethostname(),
        "resume_count": str(len(study.sessions())),
        "command": shlex.join(sys.argv),
    }


@contextmanager
def _interruptible(controller: StudyController) -> Iterator[None]:
    """The first SIGINT or SIGTERM has the trials save and stop; a second one ends everything at once."""
    came: list[int] = []

    def interrupt(signum: int, frame: object) -> None:
        came.append(signum)
        if len(came) > 1:
            raise KeyboardInterrupt
        controller.stop("interrupted")

    with handling_signals(interrupt):
        yield


def _raise_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
