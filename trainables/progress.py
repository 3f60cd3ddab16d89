"""What takes long before the first step (reading, downloading, tokenising, loading), told to whoever listens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any

Listener = Callable[[str], None]

EVERY_S = 0.5
_listeners: list[Listener] = []
# Downloads come in several threads.
_lock = threading.Lock()


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Have `listener` told of every stage inside, in one line of text each time."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


class Stage:
    """Something that takes long; told when it begins.

    Args:
        what: Verb and object: `tokenises the training examples`.
        total: How many steps it has; None where nobody knows.
        unit: Of a step; `B` for bytes.
        clock: Seconds that only grow.
    """

    def __init__(
        self, what: str, total: float | None = None, unit: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._unit, self._clock = what, total, unit, clock
        self._began_s = self._told_s = clock()
        _tell(what)

    def reach(self, done: float) -> None:
        """So much is done; told at most every `EVERY_S`."""
        now_s = self._clock()
        if now_s - self._told_s >= EVERY_S:
            self._told_s = now_s
            _tell(self._line(done, now_s - self._began_s))

    def _line(self, done: float, elapsed_s: float) -> str:
        rate = done / elapsed_s
        if not self._total or not done:
            return f"{self._what}: {self._amount(done)}, {self._amount(rate)}/s"
        left_s = max(0.0, self._total - done) / rate
        return f"{self._what}: {done / self._total:.0%}, {self._amount(rate)}/s, about {left_s:.0f} s left"

    def _amount(self, count: float) -> str:
        return f"{count / 1e6:.1f} MB" if self._unit == "B" else f"{count:.0f}"


class Bar:
    """As much of a tqdm bar as the Hugging Face libraries use; draws nothing."""

    def __init__(
        self, iterable: Iterable[Any] = (), *, desc: str | None = None, total: float | None = None, initial: float = 0,
        unit: str = "", **options: Any,
    ) -> None:  # fmt: skip
        self._iterable = iterable
        self.n, self.total, self.unit = initial, total if total is not None else _length(iterable), unit
        self._stage = Stage(_stage_name((desc or "loads").strip(), unit), self.total, unit)

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            yield item
            self.update(1)

    def update(self, count: float | None = 1) -> None:
        """So much more is done."""
        self.n += count or 0
        self._stage.reach(self.n)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: None  # close, refresh, set_description, ...

    @classmethod
    def get_lock(cls) -> Any:
        """The lock that bars of several threads share."""
        return _lock

    @classmethod
    def set_lock(cls, lock: Any) -> None:
        """Bars that draw nothing need no other lock."""


@contextmanager
def bars_told(what: str) -> Iterator[None]:
    """Tell that `what` begins, and of the bars that transformers would draw inside."""
    from transformers.utils.logging import set_tqdm_hook

    Stage(what)
    earlier = set_tqdm_hook(lambda factory, args, options: Bar(*args, **options))
    try:
        yield
    finally:
        set_tqdm_hook(earlier)


def _stage_name(words: str, unit: str) -> str:
    # A bar of bytes is named after its file's address, cut off on the left.
    if unit == "B" and " " not in words:
        return f"downloads {words.rpartition('/')[2]}"
    return words[:1].lower() + words[1:]


def _length(iterable: Iterable[Any]) -> int | None:
    return len(iterable) if isinstance(iterable, Sized) else None


def _tell(line: str) -> None:
    with _lock:
        for listener in _listeners:
            listener(line)
