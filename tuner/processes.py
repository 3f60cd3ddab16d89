"""What a process shares with those it starts, and how long it puts their signals off."""

from __future__ import annotations

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
