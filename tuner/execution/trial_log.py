"""What a trial's workers print, kept one file a rank."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from tuner.execution.channel import Assignment


def log_path(assignment: Assignment, rank: int) -> Path:
    """The log of one rank."""
    return Path(assignment.log_dir, f"{assignment.number}.rank{rank}.log")


@contextmanager
def trial_log(assignment: Assignment, rank: int) -> Iterator[None]:
    """Everything printed inside goes to the trial's log of this rank."""
    path = log_path(assignment, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = _LossyLog(path)
    try:
        with redirect_stdout(log), redirect_stderr(log):
            yield
    finally:
        log.close()


class _LossyLog(io.TextIOBase):
    """On a full disk a line is lost, not a trial."""

    def __init__(self, path: Path) -> None:
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError):
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            if self._file is not None:
                self._file.write(text.encode())
        return len(text)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
