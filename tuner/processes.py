"""What a process shares with those it starts, their priority, how long it puts signals off, how it imports much."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def python_path() -> str:
    """PYTHONPATH with which a process finds this project and what this one finds, wherever it starts."""
    source = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join(dict.fromkeys(filter(None, [source, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])))


def set_niceness(pid: int, niceness: int) -> None:
    """Give a process this niceness among all others, as far as the system lets us; 19 is the lowest priority.

    Where Linux groups processes by session to schedule them (sched_autogroup), a process's own niceness counts
    within its session only; the session's is a number of its own.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness), encoding="ascii")


@contextmanager
def without_collections() -> Iterator[None]:
    """For imports: a fifth of their time goes into garbage collection, again and again, of what stays for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def handling_signals(
    handler: Callable[[int, Any], object], numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[None]:
    """The signals go to the handler; only in the main thread, as no other one gets any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in earlier.items():
            signal.signal(number, old)
