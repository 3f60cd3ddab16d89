"""Anyone's plain Ray Train function as a trial: it keeps calling `ray.train.report`, and the study listens.

The function runs unchanged in a TorchTrainer of its own. Its reports go straight to the slot instead of through the
controller's polling, its checkpoints into the trial's folder, and a verdict to stop unwinds it from `report`, so that
its workers end by themselves and free what they hold.
"""

from __future__ import annotations

import inspect
import os
import shutil
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.train import Checkpoint
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils, set_train_fn_utils

from trainables import places
from trainables.checkpoint_dir import (
    PARTIAL_SUFFIX,
    is_complete,
    keep_last,
    newest_complete,
    step_dir,
    step_of,
    write_manifest,
)
from trainables.parallel import Worker
from trainables.publishing import publish
from tuner.decisions.failures import cause_of
from tuner.execution.best_report import BestReport
from tuner.execution.channel import Assignment, Ended, Reported, Saved, Start, Stop, Warned, Wire, hello
from tuner.execution.damage import clear_damage
from tuner.execution.line import Line, this_worker
from tuner.execution.recent_reports import RecentReports, unrecorded
from tuner.execution.trial_log import trial_log
from tuner.execution.trial_place import NodeFolder, StudyFolder, place_of
from tuner.storage.pull import fetch_all


class StopTrial(BaseException):
    """Unwinds a train function whose trial is over; not an Exception, so that the function does not swallow it."""


class Completed(StopTrial):
    """The trial has reached max_t."""


def serve(service: dict[str, Any]) -> None:
    """The `train_loop_per_worker` of a trainer that runs one trial of a plain train function."""
    worker = this_worker()
    line = Line(service["address"], worker)
    line.send(hello())
    command = line.receive()
    if isinstance(command, Start):
        with place_of(command.assignment, worker, line, service["home"]) as place:
            ended = _run(service["trainable"], place, worker, line)
        line.send(ended)


def _run(trainable: str, place: StudyFolder, worker: Worker, line: Line) -> Ended:
    assignment = place.assignment
    os.environ.update(assignment.environment)
    with trial_log(assignment, worker.rank):
        if isinstance(place, NodeFolder):
            reporting: Reporting = RemoteReporting(place, worker, line)
        else:
            reporting = Reporting(assignment, line.connection)
        set_train_fn_utils(reporting)
        try:
            if not reporting.is_complete:
                call(load_function(trainable), assignment.values)
            return Ended(assignment.number, "completed")
        except Completed:
            return Ended(assignment.number, "completed")
        except StopTrial:
            return Ended(assignment.number, "stopped")
        except Exception as error:
            traceback.print_exc()
            if worker.world_size > 1:
                # The other ranks may wait for this one: only the end of the whole group releases them.
                raise
            return Ended(assignment.number, "failed", cause=cause_of(error))


class Reporting(DistributedTrainFnUtils):
    """What `ray.train.report` and `ray.train.get_checkpoint` do while a trial runs."""

    def __init__(self, assignment: Assignment, line: Wire | None) -> None:
        self._assignment = assignment
        self._line = line
        self._root = Path(assignment.checkpoint_dir)
        newest = self._resume_point()
        self._checkpoint = None if newest is None else Checkpoint(newest)
        self._best = BestReport(assignment)
        if newest is not None and line is not None:
            for report in unrecorded(newest, assignment.number, assignment.reported_step):
                self._best.improves(report.step, report.metrics)
                line.send(report)
        self._recent = RecentReports()
        self._busy_since = time.time()
        self._sent_step = max(assignment.reported_step, 0 if newest is None else step_of(newest))
        self._last_step = 0
        self._is_growing = True
        self.is_complete = newest is not None and step_of(newest) >= assignment.max_t

    def _resume_point(self) -> Path | None:
        if self._line is not None:
            # Those that another machine has saved.
            fetch_all(self._root)
            if (warned := clear_damage(self._root, self._assignment.number)) is not None:
                self._line.send(warned)
        self.barrier()
        return newest_complete(self._root)

    def get_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint of this trial."""
        return self._checkpoint

    def report(self, metrics: dict[str, Any], checkpoint: Checkpoint | None = None, *_: Any, **__: Any) -> None:
        """Keep the checkpoint, tell the slot, and unwind when the trial is over."""
        busy_s = time.time() - self._busy_since
        metrics = {name: _plain(value) for name, value in metrics.items()}
        # A report without a step still reaches the study, which says what is missing.
        step = int(metrics.get("step", self._sent_step + 1))
        is_last = step >= self._assignment.max_t
        report = Reported(self._assignment.number, step, metrics, (), busy_s, not is_last, is_last)
        self._recent.add(report)
        if checkpoint is not None:
            self._bring(checkpoint, step)
        # Every rank comes here, with files or without: which of them save is the function's own affair.
        self.barrier()
        is_kept = self._commit(step, metrics)
        is_kept, command = self.broadcast_from_rank_zero((is_kept, self._deliver(report)))
        if is_kept:
            self._checkpoint = Checkpoint(step_dir(self._root, step))
        if is_last:
            raise Completed
        if isinstance(command, Stop):
            raise StopTrial
        self._busy_since = time.time()

    def _deliver(self, report: Reported) -> Any:
        """Tell the slot what it does not know yet, and wait for its verdict on that alone."""
        is_news, self._sent_step = report.step > self._sent_step, max(self._sent_step, report.step)
        is_growing, self._last_step = report.step > self._last_step, report.step
        if self._line is None:
            return None
        if is_news:
            self._line.send(report)
            return self._line.recv() if report.waits else None
        if not is_growing:
            self._warn_once(report)
        return self._line.recv() if self._line.poll(0) else None

    def _warn_once(self, report: Reported) -> None:
        if self._line is not None and self._is_growing:
            text = f"trial {report.number}: a report at step {report.step} does not count: `step` starts at 1 and grows"
            self._line.send(Warned(report.number, text))
        self._is_growing = False

    def _bring(self, checkpoint: Checkpoint, step: int) -> None:
        # Each rank brings its own files; together they are the checkpoint.
        with checkpoint.as_directory() as folder:
            shutil.copytree(folder, _partial(step_dir(self._root, step)), dirs_exist_ok=True)

    def _commit(self, step: int, metrics: dict[str, Any]) -> bool:
        """Make a checkpoint of what the ranks have brought; whether there was anything, as rank 0 sees it."""
        path = step_dir(self._root, step)
        partial = _partial(path)
        if self._line is None or not partial.exists():
            return False
        write_manifest(partial, step, metrics, self._recent.notes())
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        self._best.improves(step, metrics)
        keep_last(self._root, self._assignment.keep_last, protected=self._best.checkpoints)
        self._line.send(Saved(self._assignment.number, step, str(path)))
        return True


class RemoteReporting(Reporting):
    """The same where ranks do not see the study's folder: each brings its files to its node, and from there to the URL.

    Args:
        place: Of the trial on this node.
        worker: This rank.
        line: Between the ranks, and to the slot.
    """

    def __init__(self, place: NodeFolder, worker: Worker, line: Line) -> None:
        self._place, self._worker, self._ranks = place, worker, line
        super().__init__(place.assignment, line.connection)

    def get_checkpoint(self) -> Checkpoint | None:
        """The newest complete checkpoint of this trial, with what other nodes have of it."""
        if self._checkpoint is not None and not is_complete(Path(self._checkpoint.path)):
            self._place.publisher.fetch(Path(self._checkpoint.path).name, self._root)
        return self._checkpoint

    def _resume_point(self) -> Path | None:
        return self._place.resume_point()

    def _deliver(self, report: Any) -> Any:
        self._place.ship_log()
        return super()._deliver(report)

    def _bring(self, checkpoint: Checkpoint, step: int) -> None:
        with checkpoint.as_directory() as folder:
            shutil.copytree(folder, self._part(step), dirs_exist_ok=True)

    def _commit(self, step: int, metrics: dict[str, Any]) -> bool:
        part, path = self._part(step), step_dir(self._root, step)
        if not any(self._ranks.gather(part.exists())):
            return False
        part.mkdir(exist_ok=True)
        self._best.improves(step, metrics)
        publish(
            self._place.publisher,
            part,
            path,
            {"step": step, "metrics": metrics, "notes": self._recent.notes()},
            self._worker,
            self._ranks.group,
            keep=self._assignment.keep_last,
            protected=self._best.checkpoints,
        )
        if self._line is not None:
            self._line.send(Saved(self._assignment.number, step, str(path), self._place.kept))
        return True

    def _part(self, step: int) -> Path:
        path = step_dir(self._root, step)
        return path.with_name(f"{path.name}.{self._worker.rank}{PARTIAL_SUFFIX}")


def _plain(value: Any) -> Any:
    """A number as Python knows it, where NumPy or torch report one."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return value


def _partial(path: Path) -> Path:
    return path.with_name(path.name + PARTIAL_SUFFIX)


def load_function(place: str) -> Callable[..., Any]:
    """The function at `path/to/file.py:name` or `package.module:name`.

    Raises:
        ValueError: There is no such module or function.
    """
    try:
        function = places.load(place)
    except ValueError as error:
        raise ValueError(f"trainable: {error}") from error
    if not callable(function):
        raise ValueError(f"trainable: {place} is not a function")
    return function  # type: ignore[no-any-return]


def call(function: Callable[..., Any], config: dict[str, Any]) -> None:
    """Call a train function with its config, or without when it takes none, as Ray Train does."""
    if inspect.signature(function).parameters:
        function(config)
    else:
        function()
