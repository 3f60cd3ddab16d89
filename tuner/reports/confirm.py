"""`tune confirm`: the best trials again, to full length and with new seeds, beside the default one.

The runs are a study of their own in the folder `confirm` of the study: a fixed list of configurations without early
stopping, searched by the same engine. So an interrupted confirmation is resumed, and neither the study's counts nor
its sampler ever see the runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.errors import InputError
from tuner.record.study_dir import SPEC, read_spec
from tuner.reports.confirmation import FOLDER, SEED, Confirmation, read_confirmation, without_seed
from tuner.study_file.spec import StudySpec, make_spec

if TYPE_CHECKING:
    from tuner.decisions.observer import Observer
    from tuner.record.study import Study

MAX_SEED = 2**31


def confirm(
    study: Study, *, top: int, seeds: int, observer: Observer | None = None, address: str | None = None
) -> tuple[Confirmation, str]:
    """Run what is missing of a confirmation; what was run before is kept.

    Args:
        study: The study, read; it must not be running.
        top: How many of the best trials.
        seeds: Under how many new seeds each.
        observer: Hears of every event.
        address: A Ray cluster to join; None starts one on this machine.

    Returns:
        What was found, and how the runs ended: finished, interrupted or stopped.

    Raises:
        InputError: Nothing can be confirmed, or the training loop takes no seed.
    """
    if study.is_running:
        raise InputError(f"study {study.dir.name!r} is running", "Confirm it when it has ended, or: tune stop first.")
    is_new = not (study.dir / FOLDER / SPEC).exists()
    earlier = () if is_new else read_spec(study.dir / FOLDER).search.initial
    spec = confirm_spec(study, points(study, top, seeds, earlier))
    state = (_start if is_new else _go_on)(study, spec, observer, address)
    found = read_confirmation(study)
    assert found is not None, "it has just been written"
    return found, state


def _start(study: Study, spec: StudySpec, observer: Observer | None, address: str | None) -> str:
    from tuner.execution import search

    ended = search.run(spec, source_text=_source(spec), root=study.dir, observer=observer, address=address)
    return ended.state_at_rest()


def _go_on(study: Study, spec: StudySpec, observer: Observer | None, address: str | None) -> str:
    from tuner.record.study import Study as _Study

    opened = _Study.open(study.dir, FOLDER, writable=True)
    try:
        opened.replace_spec(spec)
        ended = [record for record in opened.trials() if record.state != "RUNNING"]
    finally:
        opened.close()
    if len(ended) == spec.search.num_trials:
        return "finished"
    from tuner.execution import search

    return search.resume(FOLDER, root=study.dir, observer=observer, address=address).state_at_rest()


def points(study: Study, top: int, seeds: int, earlier: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """The runs in their order: those of an earlier confirmation, then every configuration under each seed in turn.

    Raises:
        InputError: No trial has a value, or the training loop takes no seed.
    """
    leaders = study.best(top)
    if not leaders:
        raise InputError(f"no trial of study {study.dir.name!r} has a value yet", "Confirm it once trials have ended.")
    if study.spec.is_custom and SEED not in {**study.spec.train, **study.spec.search_space.parameters}:
        raise InputError(
            "confirm runs trials again under other seeds, and this training loop has no key `seed`",
            "Have your loop take config['seed'], and put seed: 0 under train of the next study.",
        )
    default = study.default_trial
    chosen = [*leaders, *([study.trial(default)] if default is not None else [])]
    configurations = list(
        {repr(sorted(without_seed(r.params).items())): without_seed(r.params) for r in chosen}.values()
    )
    taken = {study.spec.train.get(SEED, 0), *(record.params.get(SEED) for record in study.trials())}
    fresh = [seed for seed in range(1, seeds + len(taken) + 1) if seed not in taken][:seeds]
    wanted = [{**params, SEED: seed} for seed in fresh for params in configurations]
    return [*map(dict, earlier), *(point for point in wanted if point not in earlier)]


def confirm_spec(study: Study, initial: Sequence[Mapping[str, Any]]) -> StudySpec:
    """The study that runs these points and nothing else."""
    spec = study.spec
    data = spec.model_dump(mode="json")
    # A constant seed would be a default trial of the confirmation: it is searched alone, over all there are.
    data["train"] = {key: value for key, value in spec.train.items() if key != SEED}
    data["search_space"][SEED] = {"type": "int", "low": 1, "high": MAX_SEED}
    data["study"] = FOLDER
    data["search"] = {"sampler": "random", "num_trials": len(initial), "initial": list(initial)}
    data["scheduler"] = {"type": "none", "max_t": spec.max_t}
    data["checkpoint"]["keep_best_trials"] = 1
    data["mlflow"] = _mlflow(study)
    return make_spec(data)


def _mlflow(study: Study) -> dict[str, Any]:
    """The study's store, and an experiment beside its own."""
    from tuner.tracking.target import DATABASE_NAME, sqlite_uri

    asked = study.spec.mlflow
    uri = asked.tracking_uri
    if uri is None and not os.environ.get("MLFLOW_TRACKING_URI"):
        uri = sqlite_uri(study.dir.absolute().parent / DATABASE_NAME)
    name = f"{asked.experiment or study.spec.study}.{FOLDER}"
    return {"enabled": asked.enabled, "tracking_uri": uri, "experiment": name}


def _source(spec: StudySpec) -> str:
    from tuner.study_file.yaml_text import to_yaml

    return to_yaml(spec.model_dump(mode="json", exclude_none=True))
