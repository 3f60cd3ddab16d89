"""What a search prints while it runs: one plain line an event, or a live table on a terminal. All of it on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tuner import text
from tuner.decisions.observer import Observer
from tuner.display import tables
from tuner.display.board import Board, RunningTrial
from tuner.display.output import screen
from tuner.storage.place import shown

if TYPE_CHECKING:
    from tuner.errors import ClusterError
    from tuner.planning.plan import Plan
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study

_HEARTBEAT_S = 30.0
_REDRAW_S = 0.25
_PREPARING_S = 10.0


class Quiet(Observer):
    """Only what went wrong: the display of `--quiet`. Also the base of the others."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock

    def warning(self, text: str) -> None:
        self._say(f"warning: {text}", style="yellow")

    def cluster_lost(self, error: ClusterError) -> None:
        self._say(str(error))

    def _say(self, line: str, style: str = "") -> None:
        # In a log a line stays one line, whatever its length.
        self._console.print(Text(line, style=style), soft_wrap=not self._console.is_terminal)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the screen as other output needs it."""


class Lines(Quiet):
    """One line when a trial starts or ends, and a summary every half minute: for logs and pipes."""

    is_verbose = False  # whether every report is a line too
    _board: Board | None = None
    _summarised_s = _prepares_since_s = 0.0

    def study_started(self, study: Study, plan: Plan) -> None:
        self._board = Board(study, plan.num_trials, self._clock)
        self._summarised_s = self._prepares_since_s = self._clock()
        num_ended = sum(self._board.states.values())
        done = f", {num_ended} of them ended before" if num_ended else ""
        trials = text.plural(plan.num_trials, "trial")
        at_once = f", {plan.slots} at a time" if plan.slots else ""
        self._say(f"study {study.name}: {trials} of up to {plan.max_t} steps{at_once}{done}; {shown(study.dir)}")

    def trial_started(self, number: int, params: Mapping[str, Any], resumed_from_step: int) -> None:
        if self._board is not None:
            self._board.start(number, resumed_from_step)
        how = f"goes on from step {resumed_from_step}" if resumed_from_step else "starts"
        self._say_event(f"trial {number} {how}: {text.parameters(params)}")

    def started_earlier(self, number: int, age_s: float) -> None:
        """The trial has been running for that long already."""
        if self._board is not None:
            self._board.started_earlier(number, age_s)

    def preparing(self, number: int, text: str) -> None:
        if self._board is not None:
            self._board.prepare(number, text)

    def reported(self, number: int, metrics: Mapping[str, float]) -> None:
        if self._board is None:
            return
        self._board.report(number, metrics)
        if self.is_verbose:
            # A loop of the user's own may report text, too.
            shown = [f"{name} {text.parameter(value)}" for name, value in metrics.items() if name != "step"]
            self._say(f"trial {number} at step {int(metrics.get('step', 0))}: {', '.join(shown)}")

    def resized(self, before: int, after: int) -> None:
        self._say(f"{text.plural(before, 'slot')} -> {text.plural(after, 'slot')}")

    def trial_ended(self, record: TrialRecord) -> None:
        if self._board is None:
            return
        self._board.end(record)
        is_best = self._board.best is not None and self._board.best.number == record.number
        self._say_end(record, ", best so far" if is_best else "")

    def _say_end(self, record: TrialRecord, mark: str) -> None:
        assert self._board is not None
        self._say(f"{end_line(record, self._board)}{mark}", tables.STATE_STYLES.get(record.state, ""))

    def _say_event(self, line: str) -> None:
        self._say(line)

    def tick(self, training_share: float) -> None:
        if self._board is None:
            return
        self._board.training_share = training_share
        self._say_preparing(self._board)
        if self._clock() - self._summarised_s >= _HEARTBEAT_S:
            self._summarised_s = self._clock()
            self._say(self._board.summary())

    def _say_preparing(self, board: Board) -> None:
        # What is over in a moment is not worth a line in a log.
        busy = {number: trial for number, trial in board.running.items() if trial.preparing}
        if not busy:
            self._prepares_since_s = self._clock()
        elif self._clock() - self._prepares_since_s >= _PREPARING_S:
            self._prepares_since_s = self._clock()
            number, trial = min(busy.items())
            self._say(f"trial {number} {trial.preparing}")


class LiveTable(Lines):
    """The running trials in a table that is redrawn in place, ended ones as lines above it."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock)
        # Redrawn by events and ticks alone: a thread of its own would draw in the middle of a decision.
        self._live = Live(console=console, auto_refresh=False, transient=True, vertical_overflow="ellipsis")
        self._drawn_s = float("-inf")

    def study_started(self, study: Study, plan: Plan) -> None:
        super().study_started(study, plan)
        self._live.start()
        self._draw()

    def reported(self, number: int, metrics: Mapping[str, float]) -> None:
        super().reported(number, metrics)
        self._draw()

    def preparing(self, number: int, text: str) -> None:
        super().preparing(number, text)
        self._draw()

    def trial_ended(self, record: TrialRecord) -> None:
        super().trial_ended(record)
        self._draw()

    def tick(self, training_share: float) -> None:
        if self._board is not None:
            self._board.training_share = training_share
        self._draw()

    def study_ended(self, study: Study) -> None:
        self.close()

    def close(self) -> None:
        """Take the table off the screen."""
        self._live.stop()

    def _say(self, line: str, style: str = "") -> None:
        # Printing draws the table again below the line, as it was last drawn.
        self._update()
        super()._say(line, style)

    def _say_event(self, line: str) -> None:
        self._draw()

    def _draw(self) -> None:
        if self._clock() - self._drawn_s >= _REDRAW_S:
            self._update()

    def _update(self) -> None:
        if self._board is not None and self._live.is_started:
            self._drawn_s = self._clock()
            self._live.update(picture(self._board, self._drawn_s), refresh=True)


def end_line(record: TrialRecord, board: Board) -> str:
    """How a trial ended."""
    value = f"{board.objective.metric} {text.measured(record.value)}"
    what = record.reason if record.state == "FAILED" and record.reason else value
    return f"trial {record.number} {record.state} at step {record.step}: {what}"


def picture(board: Board, now_s: float) -> Group:
    """The running trials, and the summary under them."""
    loss = text.shorten(board.objective.metric, 16)
    # A loop of the user's own need not report one, and the record of a study does not keep it.
    rate = ["lr"] if any("learning_rate" in trial.metrics for trial in board.running.values()) else []
    numbers = ["step", loss, *rate, "time"]
    table = tables.new_table("trial", "state", *numbers, right={"trial", *numbers})
    for number, trial in sorted(board.running.items()):
        table.add_row(*_cells(board, number, trial, now_s, has_rate=bool(rate)))
    doing = [Text(f"trial {n} {trial.preparing}") for n, trial in sorted(board.running.items()) if trial.preparing]
    return Group(Text(), table, *([Text(), *doing] if doing else []), Text(), Text(board.summary()))


def _cells(board: Board, number: int, trial: RunningTrial, now_s: float, *, has_rate: bool) -> list[str]:
    metrics = trial.metrics
    rate = text.parameter(metrics["learning_rate"]) if "learning_rate" in metrics else text.MISSING
    return [
        str(number),
        "RUNNING" if len(metrics) > 1 else "STARTING",
        f"{int(metrics.get('step', 0))}/{board.max_t}",
        text.measured(metrics.get(board.objective.metric)),
        *([rate] if has_rate else []),
        text.duration(now_s - trial.started_s),
    ]


def progress(*, quiet: bool = False, verbose: bool = False) -> Quiet:
    """The display that fits: a live table on a terminal, lines elsewhere, only warnings when quiet."""
    console = screen(to_stderr=True)
    if quiet:
        return Quiet(console)
    display = LiveTable(console) if console.is_terminal and not console.is_dumb_terminal else Lines(console)
    display.is_verbose = verbose
    return display
