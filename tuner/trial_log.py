"""What a trial's workers print, kept one file a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from tuner.channel import Assignment


@contextmanager
def trial_log(assignment: Assignment, rank: int) -> Iterator[None]:
    """Everything printed inside goes to the trial's log of this rank."""
    path = Path(assignment.log_dir, f"{assignment.number}.rank{rank}.log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8", buffering=1) as log, redirect_stdout(log), redirect_stderr(log):
        yield
