"""Kills a process at each of its touches of the disk in turn: what a `kill -9` at that very moment leaves."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "sqlite3.connect"}


def killed_at_each_write(root: Path, step: Callable[[Path], None], every: int = 1) -> Iterator[Path]:
    """Runs `step` in folders of its own under `root`, killed before its first touch of the folder, its second, ...

    Args:
        root: Where the folders are made.
        step: What is killed; gets its folder, which exists.
        every: Leaves out all but each of so many moments.

    Yields:
        The folder after the kill, and at last the one of a run that came to its end.
    """
    for number in count(0, every):
        folder = root / f"moment-{number}"
        folder.mkdir()
        child = os.fork()
        if child == 0:
            _run(step, folder, number)
        _, status = os.waitpid(child, 0)
        yield folder
        if not os.WIFSIGNALED(status):
            assert status == 0, f"the step failed by itself: {status}"
            return


def _run(step: Callable[[Path], None], folder: Path, number: int) -> None:
    code, left = 1, number
    place = str(folder)

    def touch() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event in TOUCHES and place in str(arguments[0]):
            touch()

    try:
        _hear_statements(touch)
        sys.addaudithook(hear)
        step(folder)
        code = 0
    finally:
        os._exit(code)


def _hear_statements(touch: Callable[[], None]) -> None:
    from sqlalchemy import Engine, event

    event.listen(Engine, "before_cursor_execute", lambda *_: touch())
    event.listen(Engine, "commit", lambda *_: touch())
