"""What the measurements share: the workload, the machine, the order of the runs, and the one line of JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

QUIET_LOAD = 1.0
# Exit code where a measurement is for a GPU and there is none.
NO_GPU = 3

MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "tie_word_embeddings": True,
}
DEFAULT_RATE, LOW_RATE, HIGH_RATE = 1e-3, 1e-5, 1e-1


@dataclass(frozen=True)
class Workload:
    """One search, the same for whoever runs it.

    Attributes:
        folder: Where everything it writes goes.
        batch_size: Examples per optimizer step, over all workers.
        num_trials: The default trial among them.
        slots: Trials at once.
        workers: Ranks of a trial.
        unit: First rung and the steps between reports; a full trial has 9 of these.
        save_every: Reports between checkpoints.
        stops_early: Whether ASHA stops trials.
        mlflow: Whether trials are tracked.
    """

    folder: str
    batch_size: int
    num_trials: int
    slots: int = 1
    workers: int = 1
    unit: int = 3
    save_every: int = 1
    stops_early: bool = True
    mlflow: bool = True

    @property
    def max_steps(self) -> int:
        return 9 * self.unit

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint is due at this report."""
        return step == self.max_steps or step % (self.unit * self.save_every) == 0

    @property
    def timeline(self) -> Path:
        return Path(self.folder, "timeline.jsonl")

    def train(self) -> dict[str, Any]:
        """The `train` section of the study."""
        return {
            "model": MODEL,
            "tokenizer": "byte-level",
            "dataset": {"path": "python-docstrings", "limit": 1024},
            "max_length": 128,
            "max_steps": self.max_steps,
            "eval_every": self.unit,
            "eval_batches": 1,
            "batch_size": self.batch_size,
            "learning_rate": DEFAULT_RATE,
            "precision": "fp32",
        }

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Workload:
        return cls(**json.loads(text))


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "is_quiet": os.getloadavg()[0] < QUIET_LOAD,
        "python": platform.python_version(),
        **{name: version_of(name) for name in ("ray", "torch", "optuna")},
    }


def version_of(library: str) -> str | None:
    """What is installed; not every measurement needs all."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def no_gpu(device: str) -> str:
    """Why nothing can be measured on this device; empty where it can."""
    # What measures no training does not wait for torch.
    import torch

    is_missing = device == "cuda" and not torch.cuda.is_available()
    return "there is no GPU here; `--device cpu` runs the same code without one" if is_missing else ""


def wait_for(device: str) -> None:
    """Until all that was asked of a GPU is done."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def in_turn(names: Sequence[str], pairs: int, run: Callable[[str], None]) -> None:
    """Run each `pairs` times, in the order A B, B A, A B, ...: a drift of the machine hits all alike."""
    for pair in range(pairs):
        for name in names if pair % 2 == 0 else reversed(names):
            print(f"{time.strftime('%H:%M:%S')} pair {pair + 1}/{pairs}: {name}", file=sys.stderr, flush=True)
            run(name)


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of every number that all runs have."""
    shared = set.intersection(*(set(run) for run in runs)) if runs else set()
    keys = [key for key in (runs[0] if runs else ()) if key in shared]
    return {
        key: significant(median(run[key] for run in runs))
        for key in keys
        if all(isinstance(run[key], (int, float)) for run in runs)
    }


def ratio(above: Mapping[str, Any], below: Mapping[str, Any], key: str) -> float | None:
    """Of two medians; None when either is missing."""
    return significant(above[key] / below[key]) if above.get(key) is not None and below.get(key) else None


def significant(value: float) -> float:
    return float(f"{value:.4g}")


def print_result(benchmark: str, faults: Sequence[str], *, machine: Mapping[str, Any], **figures: Any) -> None:
    """The one line; figures with faults, or from a machine that was not quiet, do not count."""
    busy = [] if machine["is_quiet"] else [f"the machine was busy before: load {machine['load_before']}"]
    found = [*busy, *faults]
    print(json.dumps({"benchmark": benchmark, "counts": not found, "faults": found, "machine": machine, **figures}))
