"""A Ray job has one log for everything: how its stdout is told from its stderr there, and from what Ray says.

A line of stdout begins with a mark; a mark alone says that the verb begins.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TextIO

from tuner.display import output

MARK = "\x1e"


class MarkedLines(io.TextIOBase):
    """Stdout whose lines begin with MARK."""

    encoding = "utf-8"

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rest = ""

    def write(self, piece: str) -> int:
        *lines, self._rest = (self._rest + piece).split("\n")
        self._stream.writelines(f"{MARK}{line}\n" for line in lines)
        return len(piece)

    def flush(self) -> None:
        self._stream.flush()

    def close_line(self) -> None:
        """Write what no line feed has ended."""
        if self._rest:
            self.write("\n")

    def fileno(self) -> int:
        return self._stream.fileno()


class JobLog:
    """Prints what comes of a job's log, nothing of it before the mark.

    Args:
        until: Called with each line of stderr; true ends the printing.

    Attributes:
        has_begun: Whether the mark has been seen.
        has_seen: Whether `until` has been true.
    """

    def __init__(self, until: Callable[[str], bool] = lambda line: False) -> None:
        self._until = until
        self._rest = ""
        self.has_begun = self.has_seen = False

    def take(self, piece: str) -> None:
        """What has come of the log."""
        *lines, self._rest = (self._rest + piece).split("\n")
        for line in lines:
            self._print(line)

    def _print(self, line: str) -> None:
        if not self.has_begun:
            self.has_begun = line == MARK
        elif line.startswith(MARK):
            output.raw(f"{line.removeprefix(MARK)}\n")
        elif not self.has_seen:
            output.note(line)
            self.has_seen = self._until(line)
