"""Hyperparameter search for LLM fine-tuning: Optuna decides, Ray executes, MLflow shows.

from tuner import Study, load_spec, resume, run
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.api import resume, run
    from tuner.record.study import Study
    from tuner.study_file.spec import StudySpec, load_spec

__version__ = "0.1.0"
__all__ = ["Study", "StudySpec", "load_spec", "resume", "run"]

# Loaded when first asked for: whoever imports one module of the package must not pay for all.
_HOMES = {
    "Study": "tuner.record.study",
    "StudySpec": "tuner.study_file.spec",
    "load_spec": "tuner.study_file.spec",
    "resume": "tuner.api",
    "run": "tuner.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tuner' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
