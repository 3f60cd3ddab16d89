"""Imports mlflow at two thirds of its cost, in the process that does nothing but write to it.

Of a second and a half of processor time, a quarter is numpy, pandas and pyarrow, without which MLflow works where they
are not installed (mlflow-skinny), and a fifth is garbage collection.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.metadata import entry_points

from tuner.processes import without_collections

MODULES = ("mlflow", "mlflow.store.tracking.sqlalchemy_store")
UNUSED = ("numpy", "pandas", "pyarrow")
# Entry points of MLflow itself, none of them for stores.
OWN_GROUPS = ("mlflow.app", "mlflow.deployments")


def preload(*, has_database: bool) -> None:
    """Import what a client of a database or of a server needs; it may still be that nothing of it can be imported."""
    # A plugin is imported along with MLflow, and may need them.
    unused = () if has_plugins() else tuple(name for name in UNUSED if name not in sys.modules)
    with without_collections(), _absent(unused):
        for name in MODULES if has_database else MODULES[:1]:
            try:
                import_module(name)
            except Exception:
                # A version that needs them after all, or none: the client imports it anew, and says why it cannot.
                _forget("mlflow")
                return


def has_plugins() -> bool:
    """Whether another package extends MLflow."""
    return any(group.startswith("mlflow.") and not group.startswith(OWN_GROUPS) for group in entry_points().groups)


@contextmanager
def _absent(names: tuple[str, ...]) -> Iterator[None]:
    """Importing one of these raises ImportError, as if it were not installed."""
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]
