"""What a worker goes on from when a trial's newest checkpoint is damaged: a real loop, and no Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.studies import assignment, study_spec
from tests.tiny import CPU
from trainables.checkpoint_dir import (
    MANIFEST,
    complete_checkpoints,
    newest_complete,
    step_dir,
    step_of,
    write_manifest,
)
from trainables.finetune import Warm
from trainables.saver import CheckpointSaver
from tuner.execution.channel import Assignment, Ended, Go, Reported, Stop, Warned
from tuner.execution.damage import clear_damage
from tuner.execution.worker import Service, run_trial

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
    def warnings(self) -> list[str]:
        return [message.text for message in self.heard if isinstance(message, Warned)]

    @property
    def losses(self) -> dict[int, float]:
        return {report.step: report.metrics["eval_loss"] for report in self.heard if isinstance(report, Reported)}

    @property
    def steps(self) -> list[int]:
        return list(self.losses)


def assigned(folder: Path, name: str, **changes: Any) -> Assignment:
    values = study_spec(folder, train={"max_steps": MAX_STEPS}).train_values({"learning_rate": 1e-3})
    settings = {"max_t": MAX_STEPS, "keep_last": 2, "metric": "eval_loss", "checkpoint_dir": str(folder / name)}
    return assignment(folder, values=values, **settings | changes)


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


def flip_a_bit(file: Path, share: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * share)] ^= 4
    file.write_bytes(content)


def rot_shard(checkpoint: Path) -> None:
    """One bit of a weight: torch reads it without a word."""
    flip_a_bit(next(checkpoint.glob("*.distcp")), 0.5)


def rot_metadata(checkpoint: Path) -> None:
    flip_a_bit(checkpoint / ".metadata", 0.3)


def zero_shard(checkpoint: Path) -> None:
    """What a power cut leaves of a file whose length had reached the disk before its content."""
    shard = next(checkpoint.glob("*.distcp"))
    shard.write_bytes(bytes(shard.stat().st_size))


DAMAGES = [remove_shard, cut_shard, remove_manifest, rot_shard, rot_metadata, zero_shard]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_trial_goes_on_from_the_checkpoint_before_a_damaged_one(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    whole = ScriptedLine()
    serve(assigned(tmp_path, "whole"), tmp_path, whole)
    serve(assigned(tmp_path, "damaged"), tmp_path, ScriptedLine(stop_at=LEFT_AT))
    checkpoints = complete_checkpoints(tmp_path / "damaged")
    assert [step_of(path) for path in checkpoints] == [LEFT_AT - 1, LEFT_AT]
    damage(checkpoints[-1])
    line = ScriptedLine()
    ended = serve(assigned(tmp_path, "damaged", reported_step=LEFT_AT), tmp_path, line)
    assert ended.outcome == "completed"
    assert line.steps == list(range(LEFT_AT + 1, MAX_STEPS + 1)), "what the record has is not reported again"
    assert line.losses.items() <= whole.losses.items(), "bit for bit"
    assert line.warnings == [
        f"trial 0: checkpoint step_{LEFT_AT:08d} is damaged; it goes on from step_{LEFT_AT - 1:08d}"
    ]
    newest = newest_complete(tmp_path / "damaged")
    assert newest is not None
    assert step_of(newest) == MAX_STEPS


@pytest.mark.parametrize("reported_step", [LEFT_AT, LEFT_AT - 1])
def test_a_trial_that_was_left_at_max_t_is_complete_and_trains_no_further(tmp_path: Path, reported_step: int) -> None:
    task = replace(assigned(tmp_path, "left"), max_t=LEFT_AT)
    assert serve(task, tmp_path, ScriptedLine(stop_at=LEFT_AT)).outcome == "stopped"
    line = ScriptedLine()
    ended = serve(replace(task, reported_step=reported_step), tmp_path, line)
    assert ended.outcome == "completed"
    assert line.steps == list(range(reported_step + 1, LEFT_AT + 1)), "what its checkpoint carries"
    assert [step_of(path) for path in complete_checkpoints(tmp_path / "left")][-1] == LEFT_AT


def test_a_trial_starts_over_when_no_checkpoint_is_whole(tmp_path: Path) -> None:
    whole = ScriptedLine()
    serve(assigned(tmp_path, "whole"), tmp_path, whole)
    serve(assigned(tmp_path, "damaged"), tmp_path, ScriptedLine(stop_at=LEFT_AT))
    for checkpoint in complete_checkpoints(tmp_path / "damaged"):
        rot_shard(checkpoint)
    line = ScriptedLine()
    ended = serve(assigned(tmp_path, "damaged"), tmp_path, line)
    assert ended.outcome == "completed"
    assert line.losses == whole.losses
    assert [text.partition("; ")[2] for text in line.warnings] == [
        f"it goes on from step_{LEFT_AT - 1:08d}",
        "it starts over",
    ]


def test_files_of_a_users_own_checkpoint_are_compared_with_what_was_written(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint = step_dir(tmp_path, step)
        (checkpoint / "sub").mkdir(parents=True)
        (checkpoint / "sub" / "weights.bin").write_bytes(bytes(1000))
        write_manifest(checkpoint, step, {})
    for step in (2, 3):
        flip_a_bit(step_dir(tmp_path, step) / "sub" / "weights.bin", 0.5)
    warned = clear_damage(tmp_path, 7)
    assert warned is not None
    assert warned.text == "trial 7: checkpoint step_00000002, step_00000003 is damaged; it goes on from step_00000001"
    assert clear_damage(tmp_path, 7) is None
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
