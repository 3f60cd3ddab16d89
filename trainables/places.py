"""Python objects named in a file: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load(place: str) -> Any:
    """The object at a place.

    Raises:
        ValueError: There is no such file or no such name in it.
        ImportError: The module cannot be imported.
    """
    where, _, name = place.rpartition(":")
    module = _module_from_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    if not hasattr(module, name):
        raise ValueError(f"{where} has no {name!r}")
    return getattr(module, name)


def _module_from_file(path: Path) -> ModuleType:
    # What lies beside the file can be imported, as when Python runs it.
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
