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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.collective
from ray.train import Checkpoint
from ray.train.v2._internal.execution.train_fn_utils import DistributedTrainFnUtils, set_train_fn_utils

from trainables import places
from trainables.checkpoint_dir import (
    PARTIAL_SUFFIX,
    keep_last,
    newest_complete,
    step_dir,
    step_of,
    write_manifest,
)
from tuner.decisions.failures import cause_of
from tuner.execution.best_report import BestReport
from tuner.execution.channel import Assignment, Ended, Reported, Saved, Start, Stop, Warned, connect, hello
from tuner.execution.damage import clear_damage
from tuner.execution.recent_reports import RecentReports, unrecorded
from tuner.execution.trial_log import trial_log


class StopTrial(BaseException):
    """Unwinds a train function whose trial is over; not an Exception, so that the function does not swallow it."""


class Completed(StopTrial):
    """The trial has reached max_t."""


def serve(service: dict[str, Any]) -> None:
    """The `train_loop_per_worker` of a trainer that runs one trial of a plain train function."""
    rank = ray.train.get_context().get_world_rank()
    line = connect(service["address"]) if rank == 0 else None
    if line is not None:
        line.send(hello())
    command = ray.train.collective.broadcast_from_rank_zero(line.recv() if line is not None else None)
    if isinstance(command, Start):
        ended = _run(service["trainable"], command.assignment, line)
        if line is not None:
            line.send(ended)


def _run(trainable: str, assignment: Assignment, line: Connection[Any, Any] | None) -> Ended:
    os.environ.update(assignment.environment)
    reporting = Reporting(assignment, line)
    set_train_fn_utils(reporting)
    with trial_log(assignment, ray.train.get_context().get_world_rank()):
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
            if ray.train.get_context().get_world_size() > 1:
                # The other ranks may wait for this one: only the end of the whole group releases them.
                raise
            return Ended(assignment.number, "failed", cause=cause_of(error))


class Reporting(DistributedTrainFnUtils):
    """What `ray.train.report` and `ray.train.get_checkpoint` do while a trial runs."""

    def __init__(self, assignment: Assignment, line: Connection[Any, Any] | None) -> None:
        self._assignment = assignment
        self._line = line
        self._root = Path(assignment.checkpoint_dir)
        if line is not None and (warned := clear_damage(self._root, assignment.number)) is not None:
            line.send(warned)
        self.barrier()
        newest = newest_complete(self._root)
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
