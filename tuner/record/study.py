"""A study on disk: its folder, its record of trials, and what both say about it.

The Optuna study in persistent storage is the record of what was proposed, reported, pruned and finished; together
with the checkpoints beside it it is all that a study is. Reading is safe at any time; writing takes the lock.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import StudyAbortedError, StudyExistsError, TuneError
from tuner.record.lock import StudyLock, holder
from tuner.record.record import TrialRecord, ranked
from tuner.record.storage import (
    UNRECORDED,
    Record,
    create_journal,
    create_study,
    load_study,
    open_record,
    refuse_recorded,
)
from tuner.record.storage import record as record_in_database
from tuner.record.study_dir import (
    LOCK,
    SOURCE,
    SPEC,
    STOP,
    cannot_be_written,
    find_study,
    forget_unrecorded,
    read_spec,
    refuse_existing,
    refuse_lost_trials,
    replace_spec,
    traces_of_trials,
    write_spec,
)
from tuner.storage.files import is_away
from tuner.storage.owner import runs_elsewhere, stop_elsewhere
from tuner.storage.place import as_root, url_of
from tuner.storage.pull import pull
from tuner.study_file.spec import StudySpec

if TYPE_CHECKING:
    import optuna
    import pandas as pd
    from optuna.trial import FrozenTrial

    from tuner.decisions.sampling import Proposal


class Study:
    """One study: `create` a new one, `open` it to read, `open(..., writable=True)` to go on with it."""

    def __init__(self, spec: StudySpec, directory: Path, record: Record, lock: StudyLock | None) -> None:
        self.spec = spec
        self.dir = directory
        self._record = record
        self._lock = lock
        self._ended: dict[int, tuple[Any, TrialRecord]] = {}
        self._ids: dict[int, int] = {}

    @cached_property
    def optuna_study(self) -> optuna.Study:
        """Optuna's own study, for its plots and `optuna-dashboard`; a read-only study loads it at the first use."""
        import optuna

        if isinstance(self._record, optuna.Study):
            return self._record
        return load_study(self.dir, self.spec, writable=False)

    # -- opening ------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, spec: StudySpec, source_text: str, root: Path) -> Study:
        """Make the folder and an empty record.

        Raises:
            StudyExistsError: A study of that name is there already.
            StudyAbortedError: It cannot be written, on a full disk say; nothing is left of it then.
        """
        directory = root / spec.study
        refuse_existing(spec.study, root)
        refuse_recorded(spec)
        # Everything is made aside and renamed, so that a kill cannot leave half a study under its name.
        draft = root / f".{spec.study}.{os.getpid()}.new"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            _write_draft(draft, spec, source_text)
            draft.rename(directory)
        except (OSError, StudyAbortedError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            refuse_existing(spec.study, root)
            raise cannot_be_written(directory, error, f"Mend the cause, then start again under {root}.") from error
        try:
            return cls.open(root, spec.study, writable=True)
        except StudyExistsError:
            # Somebody else's study got the name in the database meanwhile.
            shutil.rmtree(directory)
            raise

    @classmethod
    def open(cls, root: str | Path, name: str, *, writable: bool = False) -> Study:
        """Open an existing study, by its name under `root`, a folder or a URL, or by the path of its folder.

        Raises:
            StudyNotFoundError: There is none.
            StudyDamagedError: A state file cannot be read.
            StudyLockedError: `writable` and another process holds it.
        """
        place = as_root(root)
        if not writable:
            pull(place / name)
        directory = find_study(place, name)
        spec = read_spec(directory)
        lock = StudyLock(directory / LOCK) if writable else None
        try:
            # Looked at before the record is read: a trial that starts meanwhile is in the record first.
            traces = traces_of_trials(directory)
            if writable and (directory / UNRECORDED).exists():
                record_in_database(spec, directory)
            study = cls(spec, directory, open_record(directory, spec, writable=writable), lock)
            num_recorded = len(study._record.get_trials(deepcopy=False))
            refuse_lost_trials(spec, directory, traces, num_recorded)
            if writable:
                forget_unrecorded(directory, num_recorded)
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        if writable:
            (directory / STOP).unlink(missing_ok=True)
        return study

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            (self.dir / STOP).unlink(missing_ok=True)
            self._lock.release()

    def replace_spec(self, spec: StudySpec) -> None:
        """Go on under a changed specification (an extended study), durably.

        Raises:
            StudyAbortedError: It cannot be written; the old one is still there.
        """
        replace_spec(self.dir, spec)
        self.spec = spec

    @property
    def name(self) -> str:
        """What its folder is called now."""
        return self.dir.resolve().name

    # -- reading ------------------------------------------------------------------------------------------------

    def trials(self) -> list[TrialRecord]:
        """All trials in order of their numbers; checkpoints as absolute paths in the folder's present place."""
        notes = self._notes
        return [self._trial_record(trial, notes) for trial in self._record.get_trials(deepcopy=False)]

    def trial(self, number: int) -> TrialRecord:
        """One trial by its number."""
        return self._trial_record(self._recorded(number), self._notes)

    def _recorded(self, number: int) -> Any:
        return self._record.get_trials(deepcopy=False)[number] if self._lock is None else self._frozen(number)

    def frozen_trials(self) -> list[FrozenTrial]:
        """Optuna's own trials; not copies, so not to be changed."""
        return self.optuna_study.get_trials(deepcopy=False)

    def best(self, top: int = 1) -> list[TrialRecord]:
        """The best trials, best first; only COMPLETE ones compete unless there is none."""
        return ranked(self.trials(), self.spec.objective)[:top]

    @property
    def best_trial(self) -> TrialRecord:
        """The best trial.

        Raises:
            TuneError: No trial has a value yet.
        """
        leaders = self.best()
        if not leaders:
            name = self.dir.name
            raise TuneError(f"no trial of study {name!r} has a value yet", f"See how it stands: tune status {name}")
        return leaders[0]

    def trials_dataframe(self) -> pd.DataFrame:
        """One row a trial, with the columns of `tune trials --format csv`."""
        from tuner.record.frames import trials_dataframe

        return trials_dataframe(self)

    @property
    def default_value(self) -> float | None:
        """The value of the default trial, the baseline; None when it was not run or failed."""
        return None if self.default_trial is None else self.trial(self.default_trial).value

    @property
    def default_trial(self) -> int | None:
        """Number of the default trial; None when the study has none."""
        trials = self._record.get_trials(deepcopy=False)
        return next((trial.number for trial in trials if trial.user_attrs.get("is_default")), None)

    @property
    def sampler_attrs(self) -> dict[str, Any]:
        """What the sampler keeps with the study."""
        return dict(self._storage.get_study_system_attrs(self.optuna_study._study_id))

    def log_path(self, number: int, rank: int = 0) -> Path:
        """Where a trial's log lies."""
        return self.dir / "logs" / f"{number}.rank{rank}.log"

    @property
    def is_running(self) -> bool:
        """Whether a live process holds the study."""
        return holder(self.dir / LOCK) is not None or runs_elsewhere(self.dir)

    def status(self) -> dict[str, Any]:
        """{study, state, counts, best, slots, elapsed_s, training_share} as `tune status --format json` shows it."""
        trials = self.trials()
        counts = Counter(trial.state for trial in trials)
        sessions = self.sessions()
        best = ranked(trials, self.spec.objective)[:1]
        return {
            "study": self.name,
            "state": self._state(),
            "counts": {state: counts.get(state, 0) for state in ("RUNNING", "COMPLETE", "PRUNED", "FAILED")},
            "best": best[0].to_json() if best else None,
            "slots": sessions[-1]["slots"] if sessions else None,
            "elapsed_s": round(self._elapsed_s(sessions), 3),
            "training_share": sessions[-1]["training_share"] if sessions else None,
        }

    def sessions(self) -> list[dict[str, Any]]:
        """Each time the study was run or resumed: {started, ended, slots, training_share, elapsed_s, end}."""
        notes = self._notes
        keys = sorted((key for key in notes if key.startswith("session:")), key=lambda key: int(key.split(":")[1]))
        return [notes[key] for key in keys]

    def _state(self) -> str:
        return "running" if self.is_running else self.state_at_rest()

    def state_at_rest(self) -> str:
        """How the last session ended: finished, stopped or interrupted (also when it was killed)."""
        sessions = self.sessions()
        ended = sessions[-1].get("end") if sessions else None
        return ended or "interrupted"

    def _elapsed_s(self, sessions: list[dict[str, Any]]) -> float:
        elapsed = sum(session["elapsed_s"] for session in sessions)
        if sessions and self.is_running:
            elapsed = elapsed - sessions[-1]["elapsed_s"] + time.time() - sessions[-1]["started"]
        return float(elapsed)

    def _trial_record(self, trial: Any, notes: Mapping[str, Any]) -> TrialRecord:
        seen, record = self._ended.get(trial.number, (None, None))
        if record is None or seen is not trial:
            record = TrialRecord.from_optuna(trial, self.spec.objective)
        if trial.state.is_finished() and self._lock is None:
            # Nothing but what is added below can change any more; who writes a study hardly asks for one again.
            self._ended[trial.number] = (trial, record)
        checkpoint = None if record.checkpoint is None else self.dir.absolute() / record.checkpoint
        return replace(
            record,
            checkpoint=None if checkpoint is None else _place_of(checkpoint),
            mlflow_run_id=notes.get(f"mlflow_run_id:{trial.number}"),
        )

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether another process wants the one that runs the study to end it."""
        return (self.dir / STOP).exists()

    def ask_to_stop(self) -> None:
        """Have the process that runs the study end it, resumable."""
        stop_elsewhere(self.dir)
        (self.dir / STOP).touch()

    # -- writing ------------------------------------------------------------------------------------------------

    def add_trial(self, proposal: Proposal) -> int:
        """Add a RUNNING trial in one write, so that a kill leaves either the whole proposal or none of it.

        Returns:
            The new trial's number.
        """
        from optuna.trial import TrialState, create_trial

        trial = create_trial(
            state=TrialState.RUNNING,
            params=proposal.params,
            distributions=proposal.distributions,
            system_attrs=proposal.trial_attrs,
            user_attrs={"is_default": True} if proposal.is_default else {},
        )
        trial.datetime_start = dt.datetime.now()
        study_id = self.optuna_study._study_id
        trial_id = self._storage.create_new_trial(study_id, template_trial=trial)
        # All trials share them; what a journal has read back from its file are copies for this one alone.
        self._storage.get_trial(trial_id).distributions = proposal.distributions
        for key, value in proposal.study_attrs.items():
            self._storage.set_study_system_attr(study_id, key, value)
        return self._storage.get_trial_number_from_id(trial_id)

    def report(self, number: int, step: int, value: float) -> None:
        """Record the objective at a step."""
        self._storage.set_trial_intermediate_value(self._frozen(number)._trial_id, step, value)

    def note(self, number: int, **notes: Any) -> None:
        """Record attributes of a running trial: checkpoint, reason, attempts."""
        trial_id = self._frozen(number)._trial_id
        for key, value in notes.items():
            self._storage.set_trial_user_attr(trial_id, key, value)

    def note_mlflow_run(self, number: int, run_id: str) -> None:
        """Record a trial's run in MLflow, which may become known only after the trial has ended."""
        if self._notes.get(f"mlflow_run_id:{number}") != run_id:
            self.note_study(f"mlflow_run_id:{number}", run_id)

    def note_study(self, key: str, value: Any) -> None:
        """Record an attribute of the study."""
        self.optuna_study.set_user_attr(key, value)

    def write_log(self, number: int, text: str) -> None:
        """Append to a trial's log what the study has to say."""
        self._append_log(number, text.rstrip() + "\n")

    def take_log(self, number: int, text: str) -> None:
        """Append to a trial's log what its workers have printed elsewhere; on a full disk it is lost, not the study."""
        with contextlib.suppress(OSError):
            self._append_log(number, text)

    def _append_log(self, number: int, text: str) -> None:
        path = self.log_path(number)
        path.parent.mkdir(exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)

    def finish(self, number: int, state: str, reason: str | None = None) -> TrialRecord:
        """End a trial as COMPLETE, PRUNED or FAILED, and return its record."""
        from optuna.trial import TrialState

        if reason is not None:
            self.note(number, reason=reason)
        record = self.trial(number)
        end = {"COMPLETE": TrialState.COMPLETE, "PRUNED": TrialState.PRUNED, "FAILED": TrialState.FAIL}[state]
        # A pruned trial keeps its value too, which is what Optuna's own `tell` stores for one.
        values = None if end is TrialState.FAIL or record.value is None else [record.value]
        self._storage.set_trial_state_values(self._frozen(number)._trial_id, end, values)
        return self.trial(number)

    @property
    def _storage(self) -> optuna.storages.BaseStorage:
        return self.optuna_study._storage

    def _frozen(self, number: int) -> FrozenTrial:
        # Asked for several times a report: a list of thousands of trials for each would cost more than the rest.
        if number not in self._ids:
            study_id = self.optuna_study._study_id
            self._ids[number] = self._storage.get_trial_id_from_study_id_trial_number(study_id, number)
        return self._storage.get_trial(self._ids[number])

    @property
    def _notes(self) -> Mapping[str, Any]:
        """Attributes of the study; not a copy where it is written, as there is one for each trial."""
        if self._lock is None:
            return self._record.user_attrs
        return self._storage.get_study_user_attrs(self.optuna_study._study_id)


def _place_of(checkpoint: Path) -> str | None:
    """Where a checkpoint lies: its folder, or its URL where only that has it; None when it is gone."""
    if is_away(checkpoint):
        return url_of(checkpoint)
    return str(checkpoint) if checkpoint.exists() else None


def _write_draft(draft: Path, spec: StudySpec, source_text: str) -> None:
    draft.mkdir(parents=True)
    (draft / SOURCE).write_text(source_text, encoding="utf-8")
    write_spec(draft / SPEC, spec)
    if spec.search.storage is None:
        create_study(spec, create_journal(draft))
    else:
        (draft / UNRECORDED).write_text(uuid.uuid4().hex, encoding="utf-8")
