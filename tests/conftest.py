"""What the tests share: the command line as a process, and what each machine can run."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tuner.record.study import Study

REPOSITORY = Path(__file__).parents[1]

# Before any test imports torch: several worker processes share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

Tune = Callable[..., "subprocess.CompletedProcess[str]"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked gpu where there is none."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def _frozen_heap() -> None:
    """What all libraries together hold makes each of the loops' own collections cost half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def tune(tmp_path: Path) -> Tune:
    """`tune("best", "name")` in an empty folder, as a process of its own."""

    def run(*arguments: str | Path, timeout_s: float = 60, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *_interpreter_options(environment), "-m", "tuner", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "100", **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run


def _interpreter_options(environment: dict[str, str]) -> list[str]:
    return environment.pop("interpreter", "").split()


DEMO = """\
study: demo
train:
  model: {model_type: qwen2, hidden_size: 64}
  dataset: {path: python-docstrings}
  learning_rate: 1.0e-3
  optimizer: adamw
  max_steps: 27
  eval_every: 3
search_space:
  learning_rate: {type: float, low: 1e-5, high: 1e-2, log: true}
  optimizer: {type: categorical, choices: [adamw, adafactor]}
  beta2: {type: float, low: 0.9, high: 0.999, when: {optimizer: adamw}}
search: {num_trials: 8}
scheduler: {type: asha, grace_period: 3, max_t: 27}
"""


@pytest.fixture
def demo_file(tmp_path: Path) -> Path:
    """A study file that plans and could run."""
    path = tmp_path / "demo.yaml"
    path.write_text(DEMO, encoding="utf-8")
    return path


@pytest.fixture
def demo_study(tmp_path: Path, demo_file: Path) -> Study:
    """A finished study under `studies/`: the default trial, a better one, a pruned one and one that diverged."""
    from tuner.decisions.sampling import Proposal, distribution
    from tuner.record.study import Study
    from tuner.study_file.spec import load_spec

    spec = load_spec(demo_file)
    study = Study.create(spec, DEMO, tmp_path / "studies")
    trials: list[tuple[dict[str, Any], dict[int, float], str, str | None]] = [
        (spec.default_params() or {}, {3: 5.0, 27: 4.0}, "COMPLETE", None),
        ({"learning_rate": 2.5e-3, "optimizer": "adafactor"}, {3: 4.5, 27: 3.0}, "COMPLETE", None),
        ({"learning_rate": 1.5e-5, "optimizer": "adafactor"}, {3: 6.5}, "PRUNED", None),
        ({"learning_rate": 1e-2, "optimizer": "adamw", "beta2": 0.95}, {}, "FAILED", "diverged at step 2"),
    ]
    spaces = {name: distribution(parameter) for name, parameter in spec.search_space.parameters.items()}
    for params, reports, state, reason in trials:
        distributions = {name: spaces[name] for name in params}
        number = study.add_trial(Proposal(params, distributions, is_default=params == spec.default_params()))
        for step, value in reports.items():
            study.report(number, step, value)
        study.finish(number, state, reason)
    session = {"started": 0.0, "ended": 95.0, "slots": 2, "training_share": 0.875, "elapsed_s": 95.0, "end": "finished"}
    study.note_study("session:0", session)
    study.close()
    return study


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray for all tests that need one; `run` and `resume` join it."""
    from tuner.execution import cluster

    with cluster.connected():
        yield
