"""The journal read without Optuna, whose import takes longer than all else that a reading verb does."""

from __future__ import annotations

import datetime as dt
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

from tuner.errors import StudyDamagedError

Entry = Mapping[str, Any]


class TrialState(IntEnum):
    """Optuna's states of a trial, with its numbers."""

    RUNNING = 0
    COMPLETE = 1
    PRUNED = 2
    FAIL = 3
    WAITING = 4

    def is_finished(self) -> bool:
        """Whether the trial is over."""
        return self not in (TrialState.RUNNING, TrialState.WAITING)


@dataclass
class RecordedTrial:
    """One trial; the names are those of Optuna's FrozenTrial."""

    number: int
    state: TrialState
    params: dict[str, Any]
    user_attrs: dict[str, Any]
    datetime_start: dt.datetime | None
    datetime_complete: dt.datetime | None = None
    intermediate_values: dict[int, float] = field(default_factory=dict)


class JournalView:
    """What a journal says of a study; every look at it takes in what has been written since.

    Args:
        path: The journal.
        name: The study in it.

    Raises:
        KeyError: The journal holds no study of that name.
        StudyDamagedError: A line cannot be read.
    """

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._forget()
        self._catch_up()
        if not self._is_there:
            raise KeyError(name)

    @property
    def user_attrs(self) -> dict[str, Any]:
        """Attributes of the study."""
        self._catch_up()
        return self._attrs

    def get_trials(self, deepcopy: bool = False) -> list[RecordedTrial]:
        """All trials by number; not copies, so not to be changed."""
        self._catch_up()
        return self._trials

    def _forget(self) -> None:
        self._num_bytes = self._num_lines = 0
        self._is_there = False
        self._attrs: dict[str, Any] = {}
        self._trials: list[RecordedTrial] = []

    def _catch_up(self) -> None:
        try:
            if self._path.stat().st_size < self._num_bytes:
                self._forget()  # put back from a copy, or cut to its last whole line
        except OSError as error:
            raise unreadable(self._path, 1, error) from error
        with _without_collector():
            for entry in self._new_entries():
                try:
                    _OPERATIONS[entry["op_code"]](self, entry)
                except Exception as error:  # whatever comes of an entry that Optuna has not written
                    raise unreadable(self._path, self._num_lines, error) from error

    def _new_entries(self) -> Iterator[Entry]:
        with open(self._path, "rb") as file:
            file.seek(self._num_bytes)
            *lines, torn = file.read().split(b"\n")
        if entries := _parsed_together(lines):
            self._num_bytes += sum(map(len, lines)) + len(lines)
            for entry in entries:
                self._num_lines += 1
                yield entry
            return
        for index, line in enumerate(lines):
            if not is_entry(line):
                if index + 1 < len(lines) or torn:
                    raise unreadable(self._path, self._num_lines + 1, ValueError(line))
                return  # its writer was killed, or is not done
            self._num_bytes += len(line) + 1
            self._num_lines += 1
            yield json.loads(line)

    # -- entries ------------------------------------------------------------------------------------------------

    def _create_study(self, entry: Entry) -> None:
        self._is_there |= entry["study_name"] == self._name

    def _note_study(self, entry: Entry) -> None:
        self._attrs.update(entry["user_attr"])

    def _create_trial(self, entry: Entry) -> None:
        kinds = {name: _kind(text) for name, text in entry.get("distributions", {}).items()}
        self._trials.append(
            RecordedTrial(
                number=len(self._trials),
                state=TrialState(entry.get("state", TrialState.RUNNING)),
                params={name: _external(kinds[name], value) for name, value in entry.get("params", {}).items()},
                user_attrs=entry.get("user_attrs", {}),
                datetime_start=_time(entry.get("datetime_start")),
                datetime_complete=_time(entry.get("datetime_complete")),
                intermediate_values={int(step): v for step, v in entry.get("intermediate_values", {}).items()},
            )
        )

    def _set_state(self, entry: Entry) -> None:
        trial = self._trials[entry["trial_id"]]
        if not trial.state.is_finished():
            trial.state = TrialState(entry["state"])
            if trial.state.is_finished():
                trial.datetime_complete = _time(entry["datetime_complete"])

    def _report(self, entry: Entry) -> None:
        trial = self._trials[entry["trial_id"]]
        if not trial.state.is_finished():
            trial.intermediate_values[entry["step"]] = entry["intermediate_value"]

    def _note_trial(self, entry: Entry) -> None:
        trial = self._trials[entry["trial_id"]]
        if not trial.state.is_finished():
            trial.user_attrs.update(entry["user_attr"])

    def _skip(self, entry: Entry) -> None:
        """The sampler's own attributes, and what this project never writes."""


_OPERATIONS: dict[int, Callable[[JournalView, Entry], None]] = {
    0: JournalView._create_study,
    1: JournalView._skip,
    2: JournalView._note_study,
    3: JournalView._skip,
    4: JournalView._create_trial,
    5: JournalView._skip,
    6: JournalView._set_state,
    7: JournalView._report,
    8: JournalView._note_trial,
    9: JournalView._skip,
}


@lru_cache(maxsize=1024)
def _kind(text: str) -> Mapping[str, Any]:
    """A distribution, of which every trial has the same few."""
    kind: Mapping[str, Any] = json.loads(text)
    return kind


def _external(kind: Mapping[str, Any], value: Any) -> Any:
    """A parameter's value as users know it; the journal holds numbers alone."""
    if kind["name"] == "CategoricalDistribution":
        return kind["attributes"]["choices"][int(value)]
    return int(value) if kind["name"] == "IntDistribution" else float(value)


def _time(text: str | None) -> dt.datetime | None:
    return None if text is None else dt.datetime.fromisoformat(text)


def _parsed_together(lines: Sequence[bytes]) -> list[Entry] | None:
    """The entries of all lines, in a third of the time; None where one of the lines is damaged."""
    try:
        entries: list[Entry] = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return None
    is_sound = len(entries) == len(lines) and all(isinstance(entry, dict) and "op_code" in entry for entry in entries)
    return entries if is_sound else None


@contextmanager
def _without_collector() -> Iterator[None]:
    """A million new objects, none of them garbage, would be gone through again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def is_entry(line: bytes) -> bool:
    """Whether a line says which operation it is."""
    try:
        entry = json.loads(line)
    except ValueError:
        return False
    return isinstance(entry, dict) and "op_code" in entry


def unreadable(path: Path, line: int, error: Exception) -> StudyDamagedError:
    """The error that names the damaged line, to be raised."""
    return StudyDamagedError(
        f"{path}:{line}: the study's record cannot be read ({type(error).__name__})",
        "Put the file back from a copy; every line must be one JSON object as Optuna writes it.",
    )
