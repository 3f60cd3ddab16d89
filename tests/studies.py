"""Small real studies: what the tests of the engine share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.tiny import MODEL, write_texts
from tuner.decisions.observer import Observer
from tuner.execution.channel import Assignment
from tuner.record.record import TrialRecord
from tuner.study_file.spec import StudySpec, make_spec


def study_data(folder: Path, name: str = "tiny", **sections: Any) -> dict[str, Any]:
    """The plain data of a study of two-second trials; `sections` replace or extend its sections."""
    data: dict[str, Any] = {
        "study": name,
        "train": {
            "model": MODEL,
            "dataset": {"path": str(write_texts(folder / "texts.jsonl"))},
            "max_length": 64,
            "batch_size": 4,
            "max_steps": 9,
            "eval_every": 1,
            "eval_batches": 1,
            "precision": "fp32",
            "learning_rate": 1e-3,
        },
        "search_space": {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-1, "log": True}},
        "search": {"num_trials": 6, "seed": 0},
        "scheduler": {"type": "asha", "grace_period": 1, "reduction_factor": 3},
        "scaling": {"num_workers": 1, "gpus_per_worker": 0, "cpus_per_worker": 1},
        "mlflow": {"enabled": False},
    }
    for section, values in sections.items():
        old = data.get(section)
        extends = isinstance(old, dict) and isinstance(values, Mapping) and section != "search_space"
        data[section] = {**old, **values} if extends else values
    return data


def study_spec(folder: Path, name: str = "tiny", **sections: Any) -> StudySpec:
    """The specification of `study_data`."""
    return make_spec(study_data(folder, name, **sections))


def assignment(folder: Path, **changes: Any) -> Assignment:
    """A trial as a worker gets it, with its files in the folder: by itself it ends at step 100 and saves each one."""
    standard = Assignment(
        number=0,
        values={},
        decision_steps=None,
        max_t=100,
        reported_step=0,
        checkpoint_dir=str(folder / "checkpoints"),
        log_dir=str(folder / "logs"),
        checkpoint_every=1,
        keep_last=1,
        metric="loss",
        mode="min",
        keep_best_report=False,
    )
    return replace(standard, **changes)


class Recorder(Observer):
    """Keeps what an observer hears."""

    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []
        self.ended: list[TrialRecord] = []
        self.reports: list[tuple[int, int]] = []
        self.warnings: list[str] = []

    def trial_started(self, number: int, params: Mapping[str, Any], resumed_from_step: int) -> None:
        self.started.append((number, resumed_from_step))

    def reported(self, number: int, metrics: Mapping[str, float]) -> None:
        self.reports.append((number, int(metrics["step"])))

    def trial_ended(self, record: TrialRecord) -> None:
        self.ended.append(record)

    def warning(self, text: str) -> None:
        self.warnings.append(text)
