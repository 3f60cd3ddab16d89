"""What a plain Ray Train function may report: the worker's end and the slot's, without Ray."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ray.train import Checkpoint

from tests.studies import assignment
from trainables.checkpoint_dir import step_dir, write_manifest
from tuner.execution.channel import Assignment, Go, Reported, Saved, Stop, Warned
from tuner.execution.train_function import Completed, Reporting, StopTrial

TIMEOUT_S = 10.0


class Ranks:
    """What the ranks of a trial, threads here, meet through."""

    def __init__(self, num: int) -> None:
        self._here = threading.Barrier(num, timeout=TIMEOUT_S)
        self._said: Any = None

    def meet(self) -> None:
        self._here.wait()

    def hear(self, said: Any, *, is_first: bool) -> Any:
        if is_first:
            self._said = said
        self.meet()
        heard = self._said
        self.meet()
        return heard


class RankReporting(Reporting):
    """`ray.train.report` of one rank, where Ray's own collectives are not at hand."""

    def __init__(self, assignment: Assignment, line: Connection[Any, Any] | None, ranks: Ranks) -> None:
        self._ranks, self._is_first = ranks, line is not None
        super().__init__(assignment, line)

    def barrier(self) -> None:
        self._ranks.meet()

    def broadcast_from_rank_zero(self, data: Any) -> Any:
        return self._ranks.hear(data, is_first=self._is_first)


class Slot:
    """The other end of the line: answers each report that waits, the last time with what it is told to."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.line, self._line = Pipe()
        self.heard: list[Any] = []
        self._stop_at = stop_at
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (message := self._line.recv()) is not None:
            self.heard.append(message)
            if isinstance(message, Reported) and message.waits:
                self._line.send(Stop(0, save=False) if message.step == self._stop_at else Go(0))

    def close(self) -> None:
        self.line.send(None)
        self._thread.join(TIMEOUT_S)

    @property
    def steps(self) -> list[int]:
        return [message.step for message in self.heard if isinstance(message, Reported)]

    @property
    def warnings(self) -> list[str]:
        return [message.text for message in self.heard if isinstance(message, Warned)]


def play(assignment: Assignment, function: Callable[[Reporting], None]) -> tuple[Slot, str]:
    """Run a function of one rank; what the slot hears, and how the function ends."""
    slot, ended = Slot(), "hangs"

    def run() -> None:
        nonlocal ended
        try:
            function(RankReporting(assignment, slot.line, Ranks(1)))
            ended = "returned"
        except Completed:
            ended = "completed"
        except StopTrial:
            ended = "stopped"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if ended != "hangs":
        slot.close()
    return slot, ended


def reports(*steps: int) -> Callable[[Reporting], None]:
    def function(reporting: Reporting) -> None:
        for step in steps:
            reporting.report({"step": step, "loss": 1.0 / (step + 1)})

    return function


@pytest.mark.parametrize(
    ("steps", "heard", "num_warnings"),
    [
        ((1, 2, 3), [1, 2, 3], 0),
        ((0, 1, 2), [1, 2], 1),
        ((1, 1, 2, 2, 3), [1, 2, 3], 1),
        ((2, 1, 3), [2, 3], 1),
    ],
)
def test_a_step_that_does_not_grow_is_passed_over_with_one_warning(
    tmp_path: Path, steps: tuple[int, ...], heard: list[int], num_warnings: int
) -> None:
    slot, ended = play(assignment(tmp_path), reports(*steps))
    assert (ended, slot.steps, len(slot.warnings)) == ("returned", heard, num_warnings)


def test_a_function_that_starts_over_passes_what_it_had_reported_without_a_word(tmp_path: Path) -> None:
    slot, ended = play(assignment(tmp_path, reported_step=3), reports(1, 2, 3, 4, 5))
    assert (ended, slot.steps, slot.warnings) == ("returned", [4, 5], [])


def test_a_function_is_over_at_max_t_even_when_that_is_no_news(tmp_path: Path) -> None:
    slot, ended = play(assignment(tmp_path, reported_step=6, max_t=6), reports(*range(1, 9)))
    assert (ended, slot.steps) == ("completed", [])


def test_a_report_without_a_step_is_news_at_every_attempt(tmp_path: Path) -> None:
    slot, _ = play(assignment(tmp_path, reported_step=3), lambda reporting: reporting.report({"loss": 1.0}))
    assert slot.steps == [4]


def test_a_stop_reaches_a_function_that_has_nothing_new_to_say(tmp_path: Path) -> None:
    def function(reporting: Reporting) -> None:
        slot_line.send(Stop(0, save=True))
        reporting.report({"step": 1, "loss": 1.0})

    line, slot_line = Pipe()
    reporting = RankReporting(assignment(tmp_path, reported_step=3), line, Ranks(1))
    with pytest.raises(StopTrial):
        function(reporting)


@pytest.mark.parametrize("brings", [{0}, {1}, {0, 1}])
def test_the_ranks_that_have_a_checkpoint_make_it_and_the_others_know_of_it(tmp_path: Path, brings: set[int]) -> None:
    slot, ranks, task = Slot(), Ranks(2), assignment(tmp_path, max_t=3)
    known: dict[int, list[str]] = {}

    def run(rank: int) -> None:
        reporting = RankReporting(task, slot.line if rank == 0 else None, ranks)
        with contextlib.suppress(Completed):
            for step in (1, 2, 3):
                checkpoint = folder_of(tmp_path, rank) if rank in brings and step != 2 else None
                reporting.report({"step": step, "loss": 1.0}, checkpoint)
        newest = reporting.get_checkpoint()
        known[rank] = [] if newest is None else sorted(path.name for path in Path(newest.path).glob("rank*"))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
    slot.close()
    assert known[0] == known[1] == [f"rank{rank}" for rank in sorted(brings)]
    assert [message.step for message in slot.heard if isinstance(message, Saved)] == [1, 3]
    assert slot.steps == [1, 2, 3]


def folder_of(folder: Path, rank: int) -> Checkpoint:
    own = folder / f"of rank {rank}"
    own.mkdir(exist_ok=True)
    (own / f"rank{rank}").touch()
    return Checkpoint.from_directory(str(own))


@pytest.mark.parametrize(("max_t", "is_complete"), [(4, False), (3, True), (2, True)])
def test_a_function_that_was_left_at_max_t_is_not_called_again(tmp_path: Path, max_t: int, is_complete: bool) -> None:
    task = assignment(tmp_path, max_t=max_t)
    checkpoint = step_dir(Path(task.checkpoint_dir), 3)
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, 3, {})
    line, _ = Pipe()
    assert RankReporting(task, line, Ranks(1)).is_complete == is_complete


def test_numbers_of_numpy_and_torch_are_plain_numbers_to_the_study(tmp_path: Path) -> None:
    def function(reporting: Reporting) -> None:
        metrics = {"step": np.int64(1), "loss": np.float32(0.5), "other": torch.tensor([2.0]), "grid": np.zeros(2)}
        reporting.report(metrics, folder_of(tmp_path, 0))

    slot, ended = play(assignment(tmp_path), function)
    assert ended == "returned"
    [metrics] = [message.metrics for message in slot.heard if isinstance(message, Reported)]
    assert [(type(metrics[key]), metrics[key]) for key in ("step", "loss", "other")] == [
        (int, 1),
        (float, 0.5),
        (float, 2.0),
    ]
