"""What a kill or a failing disk left of a trial's checkpoints: which one it goes on from, and a word about it."""

from __future__ import annotations

from pathlib import Path

from trainables.checkpoint_dir import (
    clean,
    condemn,
    damaged_file,
    incomplete_checkpoints,
    newest_complete,
    restore,
    step_of,
)
from tuner.execution.channel import Warned


def clear_damage(root: Path, number: int) -> Warned | None:
    """Delete what is no checkpoint any more; nothing may be writing under `root`.

    Args:
        root: The folder of a trial's checkpoints.
        number: The trial.

    Returns:
        What the trial does instead of going on from a damaged one; None where there was none.
    """
    restore(root)
    while (newest := newest_complete(root)) is not None and damaged_file(newest) is not None:
        condemn(newest)
    # An older one is a deletion that a kill fell into.
    oldest = 0 if newest is None else step_of(newest)
    damaged = [path.name for path in incomplete_checkpoints(root) if step_of(path) > oldest]
    clean(root)
    if not damaged:
        return None
    instead = "starts over" if newest is None else f"goes on from {newest.name}"
    return Warned(number, f"trial {number}: checkpoint {', '.join(damaged)} is damaged; it {instead}")
