"""The checkpoint of a trial as a Hugging Face folder.

Only reads the study, which may run meanwhile, and needs no Ray.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from trainables.errors import CheckpointError
from tuner.commands import command
from tuner.errors import InputError, TuneError
from tuner.record import registry
from tuner.storage.pull import fetch_all

if TYPE_CHECKING:
    from trainables.export import Dtype
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study

ORIGIN = "trial.json"


def export(
    study: Study,
    folder: Path,
    trial: int | None = None,
    *,
    dtype: Dtype = "float32",
    merge: bool = True,
    register: str | None = None,
) -> TrialRecord:
    """Write a trial's model, tokenizer and generation config, and `trial.json`, which says where they are from.

    Args:
        study: The study.
        folder: Where to; made, and must be empty if it is there.
        trial: Number of a complete trial; None: the best one.
        dtype: Of the weights; float32 is what was trained.
        merge: Make adapters part of the weights.
        register: Also a new version of this model in MLflow's registry, logged in the trial's run.

    Returns:
        The trial.

    Raises:
        InputError: There is no such trial, it has no checkpoint, or the folder is taken.
        TuneError: The checkpoint cannot be read, the folder cannot be written, or MLflow refuses the model.
    """
    _refuse_taken(folder)
    record = choose(study, trial)
    if register is not None:
        if not merge:
            raise InputError("--register needs a whole model", "Leave out --no-merge.")
        registry.check(study, record)
    fetch_all(study.dir / "checkpoints" / str(record.number))
    record = study.trial(record.number)
    _write_folder(study, record, folder, dtype, merge)
    if register is not None:
        registry.register(study, record, folder, register)
    return record


def _write_folder(study: Study, record: TrialRecord, folder: Path, dtype: Dtype, merge: bool) -> None:
    # Written aside and renamed: what has the final name is whole.
    draft = folder.absolute().with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        draft.mkdir(parents=True)
        _write(study, record, draft, dtype, merge)
        draft.rename(folder)
    except CheckpointError as error:
        remedy = "A running study may have deleted it for a better one; export again."
        raise TuneError(f"trial {record.number}: {error}", remedy) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise TuneError(f"{folder} cannot be written: {reason}", "Mend the cause, then export again.") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def choose(study: Study, trial: int | None) -> TrialRecord:
    """The trial to export: the one of that number, or the best.

    Raises:
        InputError: There is none with a checkpoint that can be exported.
        TuneError: No trial has a value yet.
    """
    name, trials = study.spec.study, study.trials()
    if study.spec.is_custom:
        raise InputError(
            f"study {name!r}: the files in its checkpoints are those of {study.spec.trainable}, not a model known here",
            f"See where the best one is: {command('best', study.dir)}",
        )
    remedy = f"See which have one: {command('trials', study.dir)} --format json"
    if trial is None:
        leaders = study.best()
        if not leaders:
            raise TuneError(f"no trial of study {name!r} has a value yet", f"See: {command('status', study.dir)}")
        record = leaders[0]
    elif trial < len(trials):
        record = trials[trial]
    else:
        raise InputError(f"--trial {trial}: study {name!r} has {len(trials)} trials, numbered from 0", remedy)
    if record.state == "RUNNING":
        raise InputError(f"trial {record.number} of study {name!r} is not finished", "Wait for its end.")
    if record.checkpoint is None:
        raise InputError(f"trial {record.number} of study {name!r} is {record.state} and has no checkpoint", remedy)
    return record


def _refuse_taken(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise InputError(f"--to {folder}: is there already and not an empty folder", "Name another, or remove it.")


def _write(study: Study, record: TrialRecord, draft: Path, dtype: Dtype, merge: bool) -> None:
    from trainables.export import export

    try:
        export(study.spec.train_config(record.params), Path(record.checkpoint or ""), draft, dtype=dtype, merge=merge)
    except ValueError as error:
        raise InputError(f"trial {record.number}: {error}") from error
    origin = {"study": study.spec.study, "metric": study.spec.objective.metric, **record.to_json()}
    (draft / ORIGIN).write_text(json.dumps(origin, indent=1), encoding="utf-8")
