"""What runs in each Ray Train worker of a slot: serve one trial after another for as long as the slot lives.

The process, its process group, its device context, the tokenised data and the pristine weights outlive a trial; a
trial begins when rank 0 hears `Start` and ends when its loop is closed. Every rank hears what rank 0 hears.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainables.checkpoint_dir import step_dir, step_of
from trainables.config import TrainConfig
from trainables.errors import CheckpointError, DamagedCheckpointError, Diverged
from trainables.finetune import Report, Warm, Worker, finetune
from trainables.progress import heard_by
from trainables.saver import CheckpointSaver
from tuner.decisions.failures import cause_of
from tuner.execution.attention import Attention
from tuner.execution.best_report import BestReport
from tuner.execution.channel import (
    Address,
    Assignment,
    Ended,
    Go,
    Preparing,
    Quit,
    Reported,
    Saved,
    Start,
    Stop,
    Warned,
    hello,
)
from tuner.execution.home import Home
from tuner.execution.line import Line, this_worker
from tuner.execution.recent_reports import RecentReports, unrecorded
from tuner.execution.trial_log import trial_log
from tuner.execution.trial_place import StudyFolder, place_of

Loop = Callable[..., Iterator[Report]]


def _huggingface(*arguments: Any, **options: Any) -> Iterator[Report]:
    # The Trainer takes a second or two to import.
    from trainables.huggingface import huggingface

    return huggingface(*arguments, **options)


LOOPS: dict[str, Loop] = {
    "ddp": partial(finetune, parallel="ddp"),
    "fsdp": partial(finetune, parallel="fsdp"),
    "huggingface": _huggingface,
}


@dataclass(frozen=True)
class Service:
    """What `serve_trials` needs to know, the same for every trial of the slot."""

    address: Address
    trainable: str
    cache_dir: str
    home: Home | None = None


def serve(service: dict[str, Any]) -> None:
    """The `train_loop_per_worker` of a slot's TorchTrainer; returns when the slot says `Quit`."""
    home: Home = service["home"]
    known = Service(service["address"], service["trainable"], str(home.here / "data"), home)
    worker = this_worker()
    line = Line(known.address, worker)
    line.send(hello())
    serve_trials(known, worker, line)


def serve_trials(service: Service, worker: Worker, line: Line) -> None:
    """Run what the slot asks for, trial after trial, in this process; returns when it says `Quit`. Needs no Ray."""
    warm, saver = Warm(), CheckpointSaver(worker)
    while not isinstance(command := line.receive(), Quit):
        if isinstance(command, Start):
            line.send(run_trial(command.assignment, service, worker, line, warm, saver))
    saver.close()


def run_trial(
    assignment: Assignment, service: Service, worker: Worker, line: Line, warm: Warm, saver: CheckpointSaver
) -> Ended:
    """Run one trial until it completes, is stopped, or fails."""
    with (
        place_of(assignment, worker, line, service.home) as place,
        trial_log(place.assignment, worker.rank),
        heard_by(lambda text: line.send(Preparing(assignment.number, text))),
    ):
        try:
            completed = _Trial(place, service, worker, line, saver).run(warm)
            return Ended(assignment.number, "completed" if completed else "stopped")
        except Diverged as error:
            saver.abandon()
            return Ended(assignment.number, "diverged", error.step)
        except Exception as error:
            traceback.print_exc()
            if not may_stay(error, worker, line):
                raise
            if isinstance(error, CheckpointError):
                # Only the last one of a trial; what is full or broken would fail every other trial as well.
                return Ended(assignment.number, "unsaved", cause=cause_of(error))
            # Another attempt goes on from it.
            with suppress(CheckpointError):
                saver.wait()
            return Ended(assignment.number, "failed", cause=cause_of(error))


def may_stay(error: Exception, worker: Worker, line: Line) -> bool:
    """Whether the group can take the next trial after this error of the loop.

    A rank that fails alone leaves the others waiting in a collective, and only a new group helps. But what is wrong
    with settings or data is wrong on every rank alike, before any collective.
    """
    return worker.world_size == 1 or (isinstance(error, ValueError) and line.is_every_rank_here())


class _Trial:
    """One trial in one worker: hands reports to the slot, obeys its commands, keeps checkpoints."""

    def __init__(
        self, place: StudyFolder, service: Service, worker: Worker, line: Line, saver: CheckpointSaver
    ) -> None:
        self._place = place
        self._assignment = assignment = place.assignment
        self._service = service
        self._worker = worker
        self._line = line
        self._saver = saver
        self._attention = Attention(line)
        self._root = Path(assignment.checkpoint_dir)
        self._best = BestReport(assignment)
        self._recent = RecentReports()
        self._is_unsaved = False
        self._sent_step = assignment.reported_step
        self._save_s = 0.0

    def run(self, warm: Warm) -> bool:
        """Returns whether the loop reached its last step."""
        while True:
            resume_from = self._resume_point()
            if resume_from is not None and step_of(resume_from) >= self._assignment.max_t:
                # It was interrupted after its last step, which need not be the loop's.
                return True
            try:
                return self._train(resume_from, warm)
            except DamagedCheckpointError:
                # Every rank meets it alike, before its first step.
                if resume_from is not None:
                    self._place.condemn(resume_from)

    def _train(self, resume_from: Path | None, warm: Warm) -> bool:
        loop = LOOPS[self._service.trainable](
            TrainConfig.model_validate(self._assignment.values),
            self._worker,
            cache_dir=Path(self._service.cache_dir),
            resume_from=resume_from,
            warm=warm,
            is_wanted=self._attention.is_called,
        )
        with closing(loop):  # type: ignore[type-var]
            for report in loop:
                self._announce_saved()
                command = self._deliver(report) if report.is_due else self._attention.command
                if isinstance(command, Stop):
                    self._leave(report, save=command.save)
                    return False
                if self._is_due(report):
                    self._save(report)
                if self._is_over(report):
                    break
        self._finish_saving()
        return True

    def _resume_point(self) -> Path | None:
        newest = self._place.resume_point()
        if newest is not None:
            self._sent_step = max(self._sent_step, step_of(newest))
            self._catch_up(newest)
        return newest

    def _catch_up(self, checkpoint: Path) -> None:
        for report in unrecorded(checkpoint, self._assignment.number, self._assignment.reported_step):
            self._best.improves(report.step, report.metrics)
            self._line.send(report)
        self._line.send(self._saved(checkpoint))

    def _saved(self, checkpoint: Path) -> Saved:
        return Saved(self._assignment.number, step_of(checkpoint), str(checkpoint), self._place.kept)

    def _deliver(self, report: Report) -> Go | Stop | None:
        print(" ".join(f"{name}={value:.6g}" for name, value in report.metrics.items()))
        number, steps = self._assignment.number, self._assignment.decision_steps
        if report.step <= self._sent_step:
            return self._line.poll()
        is_last = self._is_over(report)
        waits = not is_last and (steps is None or report.step in steps)
        busy_s = report.train_s + report.eval_s
        sent = Reported(
            number,
            report.step,
            report.metrics,
            report.history,
            busy_s,
            waits,
            is_last,
            eval_s=report.eval_s,
            save_s=self._save_s,
            peak_bytes=_peak_bytes(self._worker),
        )
        self._save_s = 0.0
        self._recent.add(sent)
        if waits:
            # A trial that is stopped now has nobody left to tell.
            self._place.ship_log()
        self._line.send(sent)
        return self._line.receive() if waits else self._line.poll()

    def _is_over(self, report: Report) -> bool:
        return report.is_last or report.step >= self._assignment.max_t

    def _is_due(self, report: Report) -> bool:
        improves = self._best.improves(report.step, report.metrics)
        if improves or self._is_over(report):
            return True
        return report.step % self._assignment.checkpoint_every == 0 and not self._is_uploading(report.step)

    def _is_uploading(self, step: int) -> bool:
        """Whether the checkpoint before is still on its way to the URL: training does not wait for it."""
        if self._place.publisher is None or not self._line.share(self._saver.is_busy):
            return False
        print(f"not saved at step {step}: the checkpoint before is still being uploaded")
        return True

    def _save(self, report: Report) -> None:
        began = time.perf_counter()
        self._wait_for_saved()
        self._saver.save(
            report.state,
            step_dir(self._root, report.step),
            self._recent.notes(),
            keep_last=self._assignment.keep_last,
            protected=self._best.checkpoints,
            publisher=self._place.publisher,
        )
        self._save_s += time.perf_counter() - began

    def _leave(self, report: Report, *, save: bool) -> None:
        print(f"left after step {report.step}")
        if save:
            self._save(report)
            self._finish_saving()
        else:
            # The driver may be deleting its folder already.
            self._saver.abandon()

    def _finish_saving(self) -> None:
        self._saver.wait()
        self._announce_saved()

    def _wait_for_saved(self) -> None:
        # A full disk must not end a trial that could go on without this checkpoint.
        try:
            self._saver.wait()
        except CheckpointError as error:
            number = self._assignment.number
            if not self._is_unsaved:
                self._line.send(Warned(number, f"trial {number} goes on without a checkpoint: {error}"))
            self._is_unsaved = True

    def _announce_saved(self) -> None:
        for path in self._saver.poll():
            self._line.send(self._saved(path))


def _peak_bytes(worker: Worker) -> int:
    return torch.cuda.max_memory_allocated(worker.device) if worker.device.type == "cuda" else 0
