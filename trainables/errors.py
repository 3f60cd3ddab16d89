"""What a training loop raises besides `ValueError` (a setting or data that cannot train)."""

from __future__ import annotations


class Diverged(Exception):
    """A loss or a gradient that is not finite: this trial can only be given up.

    Attributes:
        step: The first bad optimizer step, counted from 1.
    """

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step

    def __str__(self) -> str:
        return f"diverged at step {self.step}"


class CheckpointError(Exception):
    """A checkpoint could not be written or read; raised on every rank alike."""


class DamagedCheckpointError(CheckpointError):
    """What is read is not what was written; the checkpoint is of no use any more."""
