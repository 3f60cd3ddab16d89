"""One trial again, outside its study: the file, the command, and whether the losses are the same.

A trial of the built-in loop is one fine-tune without Ray, from a file with the keys of `train`. A trial of another
loop (the user's own, or transformers' Trainer) is a study with a single configuration.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.study_file.yaml_text import to_yaml

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study

METRICS = "metrics.jsonl"
# What `python -m trainables` runs, and how it is told.
FINE_TUNES: dict[str, tuple[str, ...]] = {"ddp": (), "fsdp": ("--parallel", "fsdp")}


@dataclass(frozen=True)
class Reproduction:
    """What it takes to run a trial again.

    Attributes:
        folder: Where its file, its metrics and its study lie.
        file: The file to train from.
        text: What the file holds.
        arguments: The command line, without what starts it.
        num_workers: Processes that torchrun starts; None for a study, which needs no torchrun.
        num_threads: Threads of a worker: sums on a CPU are rounded alike only with as many.
    """

    folder: Path
    file: Path
    text: str
    arguments: tuple[str, ...]
    num_workers: int | None
    num_threads: int

    def write(self) -> None:
        """Write the file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file.write_text(self.text, encoding="utf-8")

    @property
    def command(self) -> str:
        """To be typed into a shell."""
        starter = ["tune"] if self.num_workers is None else ["torchrun", *self._torchrun]
        return f"OMP_NUM_THREADS={self.num_threads} {shlex.join([*starter, *self.arguments])}"

    def run(self) -> int:
        """Run the command with this interpreter's packages; returns its exit code."""
        (self.folder / METRICS).unlink(missing_ok=True)
        starter = ["tuner"] if self.num_workers is None else ["torch.distributed.run", *self._torchrun]
        environment = os.environ | {"OMP_NUM_THREADS": str(self.num_threads)}
        return subprocess.run(
            [sys.executable, "-m", *starter, *self.arguments], env=environment, check=False
        ).returncode

    @property
    def _torchrun(self) -> list[str]:
        return ["--standalone", "--nproc-per-node", str(self.num_workers)]


def reproduction(study: Study, record: TrialRecord, folder: Path) -> Reproduction:
    """How to run a trial again.

    Args:
        study: Its study.
        record: The trial.
        folder: Where to keep what it takes.
    """
    return (_as_fine_tune if study.spec.trainable in FINE_TUNES else _as_study)(study, record, folder)


def _as_fine_tune(study: Study, record: TrialRecord, folder: Path) -> Reproduction:
    spec, file = study.spec, folder / "train.yaml"
    config = spec.train_config(record.params)
    end = _end(study, record)
    until = ["--until", str(end)] if end < config.max_steps else []
    kind = ["--parallel", spec.trainable] if spec.trainable == "fsdp" else []
    arguments = ["-m", "trainables", str(file), *kind, "--cache-dir", str(study.dir / "data"), *until]
    return Reproduction(
        folder=folder,
        file=file,
        text=_heading(study, record) + to_yaml(config.model_dump(mode="json")),
        arguments=(*arguments, *FINE_TUNES[spec.trainable], "--metrics", str(folder / METRICS)),
        num_workers=record.workers[-1] if record.workers else spec.scaling.max_workers,
        num_threads=_num_threads(study),
    )


def _as_study(study: Study, record: TrialRecord, folder: Path) -> Reproduction:
    file = folder / "study.yaml"
    return Reproduction(
        folder=folder,
        file=file,
        text=_heading(study, record) + to_yaml(_single_trial(study, record)),
        arguments=("run", str(file), "--root", str(folder)),
        num_workers=None,
        num_threads=_num_threads(study),
    )


def _single_trial(study: Study, record: TrialRecord) -> dict[str, Any]:
    """The study with one configuration: that of the trial."""
    data = study.spec.model_dump(mode="json", exclude_none=True)
    data["study"] = _name(study, record)
    data["train"] = study.spec.train_values(record.params)
    data["search_space"] = {name: {"type": "categorical", "choices": [v]} for name, v in record.params.items()}
    data["search"] = {"num_trials": 1, "seed": study.spec.search.seed}
    data["scheduler"] = {"type": "none", "max_t": _end(study, record)}
    return data


def _end(study: Study, record: TrialRecord) -> int:
    # One that was stopped early is only compared as far as it got.
    return record.step if record.state == "PRUNED" and record.step else study.spec.max_t


def _name(study: Study, record: TrialRecord) -> str:
    return f"{study.spec.study[:80]}-trial-{record.number}"


def _heading(study: Study, record: TrialRecord) -> str:
    return f"# Trial {record.number} of study {study.spec.study}: {record.state} at step {record.step}.\n"


def _num_threads(study: Study) -> int:
    # What Ray gives a worker, unless the environment says otherwise.
    return int(os.environ.get("OMP_NUM_THREADS") or max(1, int(study.spec.scaling.cpus_per_worker)))


# -- afterwards ----------------------------------------------------------------------------------------------------


def repeated_reports(study: Study, record: TrialRecord, made: Reproduction) -> dict[int, float]:
    """The objective at each step of the repetition."""
    if made.num_workers is None:
        return type(study).open(made.folder, _name(study, record)).trial(0).reports
    lines = (made.folder / METRICS).read_text(encoding="utf-8").splitlines()
    metric = study.spec.objective.metric
    return {int(report["step"]): float(report[metric]) for report in map(json.loads, lines)}


def comparison(recorded: Mapping[int, float], repeated: Mapping[int, float], metric: str) -> str:
    """One line: how many reports are the same, and the largest difference."""
    common = sorted(recorded.keys() & repeated.keys())
    if not common:
        return "no report in common with the record"
    apart = [step for step in common if recorded[step] != repeated[step] and not _are_nan(recorded, repeated, step)]
    if not apart:
        return f"{metric} equals the record bit for bit at all {len(common)} reports"
    worst = max(apart, key=lambda step: abs(recorded[step] - repeated[step]))
    amount = abs(recorded[worst] - repeated[worst])
    return f"{metric} differs at {len(apart)} of {len(common)} reports, most by {amount:.3g} at step {worst}"


def _are_nan(recorded: Mapping[int, float], repeated: Mapping[int, float], step: int) -> bool:
    return math.isnan(recorded[step]) and math.isnan(repeated[step])
