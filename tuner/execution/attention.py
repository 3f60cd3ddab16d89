"""Between two reports: whether the slot wants the trial to be left, at a step that all ranks agree on.

Rank 0 alone hears the slot. To ask it after every step would have the ranks wait for each other there; so each time it
also says after which step it will be asked next, about half a second later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from tuner.execution.channel import Stop

ASK_EVERY_S = 0.5


class Shared(Protocol):
    """What rank 0 hears and says, passed on to all ranks."""

    def look(self, next_step: int) -> tuple[Any | None, int]:
        """A command that has come unasked, and the step that rank 0 has named."""


class Attention:
    """Asked after each step of one trial.

    Args:
        line: To the slot.
        clock: Seconds that only grow.

    Attributes:
        command: What was heard last.
    """

    def __init__(self, line: Shared, clock: Callable[[], float] = time.monotonic) -> None:
        self.command: Any | None = None
        self._line, self._clock = line, clock
        self._next_step, self._gap = 0, 1
        self._asked: tuple[int, float] | None = None

    def is_called(self, step: int) -> bool:
        """Whether the trial is to be left after this step; the same on every rank, which come here alike."""
        if step < self._next_step:
            return False
        self.command, self._next_step = self._line.look(step + self._steps_until_next(step))
        return isinstance(self.command, Stop)

    def _steps_until_next(self, step: int) -> int:
        now_s = self._clock()
        if self._asked is not None:
            since, asked_s = self._asked
            per_step_s = (now_s - asked_s) / (step - since)
            # Steps that get slower are noticed in time.
            self._gap = max(1, min(2 * self._gap, int(ASK_EVERY_S / max(per_step_s, 1e-6))))
        self._asked = step, now_s
        return self._gap
