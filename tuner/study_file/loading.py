"""From the plain data of a study file to the checked parts of a StudySpec, with every fault at its line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainables.config import TrainConfig
from tuner.errors import Problem, SpecError
from tuner.study_file import rules, train_rules
from tuner.study_file.definitions import read_parameter
from tuner.study_file.schema import Findings, check, tidy
from tuner.study_file.search_space import SearchSpace
from tuner.study_file.sections import AVAILABLE, SECTIONS, Checkpoint, Objective, Scaling, Scheduler, Search, StudyFile
from tuner.study_file.wording import KeyPath, did_you_mean, dotted, kind_of
from tuner.study_file.yaml_nodes import MAX_PROBLEMS
from tuner.study_file.yaml_source import YamlSource

MAX_PARAMETERS = 200
# Where the keys of sections belong, for those written in a wrong place.
_ELSEWHERE = {
    **{key: name for name, model in SECTIONS.items() for key in model.model_fields},
    **dict.fromkeys(TrainConfig.model_fields, "train"),
    "seed": "train or search",
}
# What stands outside the sections.
_HEAD = ("study", "trainable", "env", "secrets")
_NOT_IN_TRAIN = {key: name for name in ("search", "scheduler", "scaling") for key in SECTIONS[name].model_fields}


def study_parts(source: YamlSource) -> dict[str, Any]:
    """Checks a study.

    Args:
        source: Its data and lines.

    Returns:
        The fields of a StudySpec, with the defaults that depend on other keys written out.

    Raises:
        SpecError: With all faults, in the order of the file.
    """
    loader = _Loader(source)
    parts: dict[str, Any] = {}
    with contextlib.suppress(_Enough):
        parts = loader.load()
    if loader.problems:
        raise SpecError(sorted(loader.problems, key=lambda problem: (problem.line is None, problem.line or 0)))
    return parts


class _Enough(Exception):
    """So many faults are known that looking for more helps nobody."""


class _Loader:
    def __init__(self, source: YamlSource) -> None:
        self.problems: list[Problem] = list(source.problems)
        self._source = source
        self._known = {(problem.key, problem.source) for problem in self.problems}
        self._findings = Findings(self.report, frozenset(_cleared(source)))
        self._custom = False

    def load(self) -> dict[str, Any]:
        self._all(rules.non_finite(self._source.data))
        data = tidy(StudyFile, self._without_removed(), (), self._findings, _ELSEWHERE)
        self._head(data)
        parts: dict[str, Any] = {name: self._section(name, model, data) for name, model in SECTIONS.items()}
        self._objective(parts["objective"])
        space, is_whole = self._space(data.get("search_space"))
        searched = self._searched(space)
        train = self._train(self._mapping(data, "train"))
        lengths = (None, None) if self._custom else self._lengths(train, searched, parts["scheduler"])
        if not self._custom and isinstance(parts["scaling"], Scaling):
            values = train_rules.whole_config(train, searched, max_t=None)
            kind, scaling = data.get("trainable", AVAILABLE[0]), parts["scaling"]
            for num_workers in (scaling.min_workers, scaling.max_workers):
                self._all(train_rules.parallel_faults(values, searched, kind, num_workers))
        if isinstance(parts["scaling"], Scaling):
            self._all(rules.scaling_faults(parts["scaling"]))
        self._all(rules.outside_faults(train, searched))
        if isinstance(parts["search"], Search) and isinstance(parts["scaling"], Scaling):
            self._all(rules.budget_faults(parts["search"], parts["scaling"]))
        if is_whole and isinstance(parts["search"], Search):
            parts["search"] = self._search(parts["search"], space)
        parts |= self._resolved(parts, *lengths)
        head: dict[str, Any] = {key: data[key] for key in _HEAD if key in data}
        return {**head, "train": train | self._unsaid(train, space), "search_space": space, **parts}

    def report(self, key: KeyPath, message: str) -> None:
        """Notes a fault, unless its key has one already."""
        written = next((name for name in self._findings.renamed if key[: len(name)] == name), ())
        place = (*self._findings.renamed[written], *key[len(written) :]) if written else key
        problem = replace(self._source.problem(place, message), key=dotted(key))
        if (problem.key, problem.source) in self._known:
            return
        self._known.add((problem.key, problem.source))
        self.problems.append(problem)
        if len(self.problems) >= MAX_PROBLEMS:
            raise _Enough

    def _all(self, found: Iterable[rules.Fault]) -> None:
        for key, message in found:
            self.report(key, message)

    def _without_removed(self) -> dict[str, Any]:
        """The data without the parameters that `--set search_space.NAME=null` takes out."""
        data, space = self._source.data, self._source.data.get("search_space")
        removed = [key[1] for key in self._findings.cleared if len(key) == 2 and key[0] == "search_space"]
        if not isinstance(space, dict) or not removed:
            return data
        for name in removed:
            key = ("search_space", name)
            if self._source.lines and key not in self._source.lines:
                self.report(key, f"no such parameter to remove{did_you_mean(name, set(space) - {name})}")
        return data | {"search_space": {name: value for name, value in space.items() if name not in removed}}

    def _head(self, data: dict[str, Any]) -> None:
        """Name and trainable; the sections stand in the sample as legal ones, since they are checked one by one."""
        sample = {"search_space": {}, "search": {"num_trials": 1}}
        check(StudyFile, sample | {key: data[key] for key in _HEAD if key in data}, (), self.report)
        trainable = data.get("trainable")
        self._custom = isinstance(trainable, str) and ":" in trainable
        if self._custom:
            data["trainable"], fault = rules.locate_file(str(trainable), Path(self._source.path).parent)
            self._all([(("trainable",), fault)] if fault else [])

    def _section(self, name: str, model: type[BaseModel], data: dict[str, Any]) -> BaseModel | None:
        return check(model, data.get(name, {}), (name,), self.report)

    def _mapping(self, data: dict[str, Any], name: str) -> dict[str, Any]:
        value = data.get(name)
        if value is not None and not isinstance(value, dict):
            self.report((name,), f"must be a mapping, got {kind_of(value)}")
        return value if isinstance(value, dict) else {}

    def _objective(self, objective: BaseModel | None) -> None:
        if not self._custom and isinstance(objective, Objective) and objective.metric not in rules.METRICS:
            known = did_you_mean(objective.metric, rules.METRICS) or f"; reported are {', '.join(rules.METRICS)}"
            self.report(("objective", "metric"), f"no such metric in the reports: {objective.metric}{known}")

    def _search(self, search: Search, space: SearchSpace) -> Search:
        """The search, its initial configurations with values of the right kind (1.0 for 1)."""
        num_problems = len(self.problems)
        self._all(rules.search_faults(search, space))
        if len(self.problems) > num_problems:
            return search
        return search.model_copy(update={"initial": tuple(map(space.canonical, search.initial))})

    def _space(self, data: Any) -> tuple[SearchSpace, bool]:
        """The parameters without a fault of their own, and whether they are all."""
        key = "search_space"
        data = self._mapping({key: data}, key)
        if not data:
            example = "learning_rate: {type: float, low: 1e-6, high: 1e-3, log: true}"
            self.report((key,), f"has no parameter to search; add at least one, such as {example}")
        if len(data) > MAX_PARAMETERS:
            self.report((key,), f"must have at most {MAX_PARAMETERS} parameters, got {len(data)}")
            return SearchSpace(parameters={}), False
        read = {name: read_parameter(name, value, (key, name), self._findings) for name, value in data.items()}
        space = SearchSpace(parameters={name: parameter for name, parameter in read.items() if parameter is not None})
        is_whole = bool(data) and len(space.parameters) == len(data)
        found = space.faults() if is_whole else {name: p.faults() for name, p in space.parameters.items() if p.faults()}
        for name, of_parameter in found.items():
            for where, message in of_parameter:
                self.report((key, name, *_steps(where)), message)
        sound = {name: parameter for name, parameter in space.parameters.items() if name not in found}
        return SearchSpace(parameters=sound), is_whole and not found

    def _train(self, train: dict[str, Any]) -> dict[str, Any]:
        """The constants as given, without those that the command line cleared."""
        if self._custom:
            return {name: value for name, value in train.items() if ("train", name) not in self._findings.cleared}
        return self._with_callbacks(tidy(TrainConfig, train, ("train",), self._findings, _NOT_IN_TRAIN))

    def _with_callbacks(self, train: dict[str, Any]) -> dict[str, Any]:
        """The constants with the files of callbacks found, which are for one trainable only."""
        places, key = train.get("callbacks"), ("train", "callbacks")
        if places is not None and self._source.data.get("trainable") != "huggingface":
            self.report(key, "only with trainable: huggingface; set that, or remove the callbacks")
        if not isinstance(places, list) or not all(isinstance(place, str) for place in places):
            return train
        located = [rules.locate_file(place, Path(self._source.path).parent) for place in places]
        self._all(((*key, index), fault) for index, (_, fault) in enumerate(located) if fault)
        return train | {"callbacks": [place for place, _ in located]}

    def _unsaid(self, train: dict[str, Any], space: SearchSpace) -> dict[str, Any]:
        """Defaults of train that were others once: written out, they stay what they are to a study that is resumed."""
        is_said = self._custom or "packing" in train or "packing" in space.parameters
        return {} if is_said else {"packing": TrainConfig.model_fields["packing"].default}

    def _lengths(self, train: dict[str, Any], space: SearchSpace, scheduler: Any) -> tuple[int | None, int | None]:
        """Checks the constants and what is searched; returns (max_steps, eval_every), None where not legal."""
        max_t = scheduler.max_t if isinstance(scheduler, Scheduler) else None
        values = train_rules.whole_config(train, space, max_t)
        self._all(train_rules.constant_faults(values, train, space))
        self._all(train_rules.range_faults(values, space))
        return train_rules.length_and_reports(values)

    def _searched(self, space: SearchSpace) -> SearchSpace:
        """The parameters whose key the trainable has."""
        problems = {name: "" if self._custom else train_rules.searched_fault(name) for name in space.parameters}
        self._all((("search_space", name), problem) for name, problem in problems.items() if problem)
        return SearchSpace(parameters={name: p for name, p in space.parameters.items() if not problems[name]})

    def _resolved(self, parts: dict[str, Any], max_steps: int | None, eval_every: int | None) -> dict[str, Any]:
        """The scheduler and checkpoint sections with their defaults from train written out."""
        scheduler, checkpoint = parts["scheduler"], parts["checkpoint"]
        if not isinstance(scheduler, Scheduler) or not isinstance(checkpoint, Checkpoint):
            return {}
        if not self._custom and (max_steps is None or eval_every is None):
            return {}
        self._all(rules.length_faults(scheduler, max_steps))
        max_t = scheduler.max_t or max_steps
        if max_t is None:
            return {}
        resolved: dict[str, Any] = {"max_t": max_t}
        if "grace_period" not in scheduler.model_fields_set:
            resolved["grace_period"] = min(eval_every or 1, max_t)
        scheduler = scheduler.model_copy(update=resolved)
        checkpoint = checkpoint.model_copy(update={"every": checkpoint.every or eval_every})
        self._all(rules.rung_faults(scheduler, checkpoint, max_t=max_t, max_steps=max_steps, eval_every=eval_every))
        return {"scheduler": scheduler, "checkpoint": checkpoint}


def _cleared(source: YamlSource) -> Iterator[KeyPath]:
    """Paths that the command line set to null."""
    return (path for path in source.overridden if _is_null(source.data, path))


def _is_null(value: Any, path: KeyPath) -> bool:
    for key in path:
        # A later item of the command line may have replaced what held the key.
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return value is None


def _steps(where: str) -> KeyPath:
    """`choices.2` as a path; the parent in `when.dataset.limit` is one key."""
    first, _, rest = where.partition(".")
    return tuple(part for part in (first, int(rest) if rest.isdecimal() else rest) if part != "")
