"""Every error a user can meet, each with what to do next.

The tree mirrors the exit codes of the command line: bad input (2), a cluster that cannot do what is asked (3), and
a study that cannot go on (1). Code inside the project raises `AssertionError` for its own mistakes, never these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class TuneError(Exception):
    """Base of all errors shown to users.

    Attributes:
        message: What is wrong: the place, the value and the rule.
        remedy: What to type or change next; empty when the message says it already.
        exit_code: Exit code of the command line.
    """

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n{self.remedy}" if self.remedy else self.message


class InputError(TuneError):
    """Something the user wrote is wrong; nothing was started."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One fault in a study file.

    Attributes:
        key: Dotted path of the key, `search_space.learning_rate.low`; empty for the file as a whole.
        message: The rule, the value and the remedy.
        line: 1-based line in the file; None for a value that came from `--set`.
        source: The file name, or `--set` for a value from the command line.
    """

    key: str
    message: str
    line: int | None
    source: str

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}"
        return f"{place}: {self.key}: {self.message}" if self.key else f"{place}: {self.message}"


class SpecError(InputError):
    """A study file with one or more faults; all of them are listed at once."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = f"{len(self.problems)} error{'s' if len(self.problems) != 1 else ''}"
        super().__init__("\n".join(map(str, self.problems)), f"{count}; nothing was started.")


class StudyNotFoundError(InputError):
    """No study of that name under the root."""


class StudyExistsError(InputError):
    """A study of that name exists already."""


class StudyLockedError(InputError):
    """Another live process writes to the study."""


class StudyDamagedError(TuneError):
    """A state file of the study cannot be read and must not be overwritten."""


class StudyAbortedError(TuneError):
    """The study was ended because going on would only have burnt the cluster's time."""


class TrackingError(InputError):
    """The MLflow store cannot be used as configured."""


class StorageError(InputError):
    """The URL under which studies live cannot be used."""


class ClusterError(TuneError):
    """The cluster cannot run the study as asked."""

    exit_code = 3
