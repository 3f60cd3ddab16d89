"""What a worker goes on from when a trial's newest checkpoint is damaged: a real loop, and no Ray."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.studies import study_spec
from tests.tiny import CPU
from trainables.checkpoint_dir import MANIFEST, complete_checkpoints, newest_complete, step_of
from trainables.finetune import Warm
from trainables.saver import CheckpointSaver
from tuner.channel import Assignment, Ended, Go, Reported, Stop
from tuner.worker import Service, run_trial

MAX_STEPS, LEFT_AT = 6, 4


class ScriptedLine:
    """The slot's side of the channel: passes every report until the one at which it stops the trial."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.heard: list[Any] = []
        self._stop_at = stop_at

    def send(self, message: Any) -> None:
        self.heard.append(message)

    def poll(self) -> Any | None:
        return self._command() if self._command() != Go(0) else None

    def receive(self) -> Any:
        return self._command()

    def _command(self) -> Any:
        return Stop(0, save=True) if self.steps and self.steps[-1] == self._stop_at else Go(0)

    @property
    def losses(self) -> dict[int, float]:
        return {report.step: report.metrics["eval_loss"] for report in self.heard if isinstance(report, Reported)}

    @property
    def steps(self) -> list[int]:
        return list(self.losses)


def assignment(folder: Path, name: str, reported_step: int = 0) -> Assignment:
    spec = study_spec(folder, train={"max_steps": MAX_STEPS})
    return Assignment(
        number=0,
        values=spec.train_values({"learning_rate": 1e-3}),
        decision_steps=None,
        max_t=MAX_STEPS,
        reported_step=reported_step,
        checkpoint_dir=str(folder / name),
        log_dir=str(folder / "logs"),
        checkpoint_every=1,
        keep_last=2,
        metric="eval_loss",
        mode="min",
        keep_best_report=False,
    )


def serve(task: Assignment, folder: Path, line: ScriptedLine) -> Ended:
    service = Service(("localhost", 0, b""), "ddp", str(folder / "data"))  # type: ignore[arg-type]
    saver = CheckpointSaver(CPU)
    try:
        return run_trial(task, service, CPU, line, Warm(), saver)  # type: ignore[arg-type]
    finally:
        saver.close()


def remove_shard(checkpoint: Path) -> None:
    next(checkpoint.glob("*.distcp")).unlink()


def cut_shard(checkpoint: Path) -> None:
    shard = next(checkpoint.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])


def remove_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


@pytest.mark.parametrize("damage", [remove_shard, cut_shard, remove_manifest])
def test_a_trial_goes_on_from_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    whole = ScriptedLine()
    serve(assignment(tmp_path, "whole"), tmp_path, whole)
    serve(assignment(tmp_path, "damaged"), tmp_path, ScriptedLine(stop_at=LEFT_AT))
    checkpoints = complete_checkpoints(tmp_path / "damaged")
    assert [step_of(path) for path in checkpoints] == [LEFT_AT - 1, LEFT_AT]
    damage(checkpoints[-1])
    line = ScriptedLine()
    ended = serve(assignment(tmp_path, "damaged", reported_step=LEFT_AT), tmp_path, line)
    assert ended.outcome == "completed"
    assert line.steps == list(range(LEFT_AT + 1, MAX_STEPS + 1)), "what the record has is not reported again"
    assert line.losses.items() <= whole.losses.items(), "bit for bit"
    newest = newest_complete(tmp_path / "damaged")
    assert newest is not None
    assert step_of(newest) == MAX_STEPS
