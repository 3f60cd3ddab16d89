"""A worker's end of the channel that notes when reports leave the loop and how long verdicts and checkpoints take."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.benchmarks import timeline
from trainables.finetune import Worker
from tuner.execution.channel import Address, Ended, Go, Reported, Saved, Start, Stop
from tuner.execution.line import Line


class TimedLine(Line):
    """Rank 0 notes; the others do as ever."""

    def __init__(self, address: Address, known: Worker) -> None:
        super().__init__(address, known)
        self._path = Path(os.environ[timeline.VARIABLE]) if known.rank == 0 else None
        self._trial = -1
        self._since = time.time()

    def send(self, message: Any) -> None:
        if isinstance(message, Reported) and self._path:
            loss = message.metrics["eval_loss"]
            timeline.note_report(
                self._path, message.number, message.step, message.busy_s, loss, is_default=message.number == 0
            )
        elif isinstance(message, Saved):
            self._note("save")
        elif isinstance(message, Ended):
            self._note("close")
        self._since = time.time()
        super().send(message)

    def receive(self) -> Any:
        command = super().receive()
        if isinstance(command, Start):
            self._note("idle")
            self._trial = command.assignment.number
        elif isinstance(command, (Go, Stop)):
            self._note("decision", stops=isinstance(command, Stop))
        self._since = time.time()
        return command

    def _note(self, kind: str, **values: Any) -> None:
        if self._path:
            timeline.note(self._path, kind, self._trial, s=time.time() - self._since, **values)
