"""When the ranks of a trial look whether they are called, without ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tuner.execution.attention import ASK_EVERY_S, Attention
from tuner.execution.channel import Stop


class Clocked:
    """A line, and a clock that each step moves on."""

    def __init__(self, seconds: Sequence[float], command: Any = None) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.looked_at: list[int] = []
        self._command = command

    def look(self, next_step: int) -> tuple[Any, int]:
        return self._command, next_step

    def run(self) -> Attention:
        attention = Attention(self, lambda: self.now)
        for step, seconds in enumerate(self.seconds, start=1):
            self.now += seconds
            looked_before = attention._next_step
            attention.is_called(step)
            if attention._next_step != looked_before:
                self.looked_at.append(step)
        return attention


@pytest.mark.parametrize(
    ("step_s", "steps"),
    [(10.0, [1, 2, 3, 4, 5]), (0.3, [1, 2, 3, 4, 5]), (1 / 64, [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192])],
)
def test_the_ranks_look_about_twice_a_second_and_at_most_once_a_step(step_s: float, steps: list[int]) -> None:
    line = Clocked([step_s] * (5 if step_s > 0.1 else 200))
    line.run()
    assert line.looked_at == steps


def test_steps_that_get_slower_are_looked_at_more_often() -> None:
    line = Clocked([1 / 64] * 96 + [60.0] * 100)
    line.run()
    assert [step for step in line.looked_at if step > 96] == list(range(128, 197))


def test_a_command_is_kept_and_only_stop_leaves_the_trial() -> None:
    stop = Stop(0, save=True)
    assert Attention(Clocked([], stop)).is_called(1)
    assert not Attention(Clocked([])).is_called(1)
    assert Clocked([ASK_EVERY_S], stop).run().command == stop
