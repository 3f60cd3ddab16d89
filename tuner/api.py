"""The search as a Python program calls it: a file or a specification in, a study out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.commands import DEFAULT_ROOT
from tuner.display.live import progress
from tuner.storage.place import as_root
from tuner.study_file.spec import StudySpec, load_spec, override_spec
from tuner.study_file.yaml_text import to_yaml

if TYPE_CHECKING:
    from tuner.decisions.observer import Observer
    from tuner.record.study import Study


def run(
    study: str | Path | StudySpec,
    *,
    set: Mapping[str, Any] | None = None,
    name: str | None = None,
    root: str | Path = DEFAULT_ROOT,
    observer: Observer | None = None,
    address: str | None = None,
) -> Study:
    """Run a new study to its end; from a notebook and from other threads too.

    Args:
        study: A study file, or what `load_spec` makes of one.
        set: Values that replace those of the file, by dotted key: `{"search.num_trials": 20}`.
        name: Name of the study, instead of the file's.
        root: Where studies live: a folder, or a URL such as "s3://bucket/studies".
        observer: Hears of every event; without one only warnings are printed.
        address: A Ray cluster to join; None starts one on this machine, or uses the one this process is in.

    Returns:
        The study; `study.status()["state"]` says how it ended.

    Raises:
        TuneError: As `tune run` would refuse it; `.exit_code` is the command line's.
    """
    from tuner.execution import search

    overrides = [*_overrides(set or {}), *([] if name is None else _overrides({"study": name}))]
    if isinstance(study, StudySpec):
        spec = override_spec(study, overrides)
        source_text = to_yaml(spec.model_dump(mode="json", exclude_none=True))
    else:
        spec, source_text = load_spec(study, overrides), Path(study).read_text(encoding="utf-8")
    observer = observer or progress(quiet=True)
    return search.run(spec, source_text=source_text, root=as_root(root), observer=observer, address=address)


def resume(
    study: str | Path | Study,
    *,
    set: Mapping[str, Any] | None = None,
    root: str | Path = DEFAULT_ROOT,
    observer: Observer | None = None,
    address: str | None = None,
) -> Study:
    """Go on with a study, or extend it: `resume("quickstart", set={"search.num_trials": 40})`.

    Args:
        study: Its name under `root`, the path of its folder, or itself.
        set: Values that extend it, by dotted key.
        root: Where studies live: a folder, or a URL such as "s3://bucket/studies".
        observer: Hears of every event; without one only warnings are printed.
        address: A Ray cluster to join; None starts one on this machine, or uses the one this process is in.

    Raises:
        TuneError: As `tune resume` would refuse it.
    """
    from tuner.execution import search

    return search.resume(
        str(study if isinstance(study, str | Path) else study.dir.absolute()),
        root=as_root(root),
        overrides=_overrides(set or {}),
        observer=observer or progress(quiet=True),
        address=address,
    )


def _overrides(values: Mapping[str, Any]) -> list[str]:
    # JSON is YAML.
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]
