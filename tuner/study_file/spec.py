"""StudySpec: a study as its file states it, checked as a whole and immutable."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer

from trainables.config import TrainConfig, set_dotted
from tuner.study_file.loading import study_parts
from tuner.study_file.parameters import Categorical
from tuner.study_file.rules import constant
from tuner.study_file.schema import default_of
from tuner.study_file.search_space import SearchSpace
from tuner.study_file.sections import Checkpoint, Failures, Mlflow, Objective, Scaling, Scheduler, Search, StudyFile
from tuner.study_file.yaml_source import YamlSource, from_data, read_yaml, with_overrides

__all__ = [
    "Checkpoint",
    "Failures",
    "Mlflow",
    "Objective",
    "Scaling",
    "Scheduler",
    "Search",
    "StudySpec",
    "load_spec",
    "make_spec",
    "override_spec",
]


def _as_space(value: Any) -> Any:
    return value if isinstance(value, SearchSpace) else {"parameters": value}


class StudySpec(StudyFile):
    """One study. `load_spec` makes it from a file and checks its keys against each other."""

    search_space: Annotated[
        SearchSpace,
        BeforeValidator(_as_space),
        # In files the parameters stand directly under search_space.
        PlainSerializer(lambda space: space.model_dump(mode="json")["parameters"], return_type=dict[str, Any]),
    ]
    """The parameters; they override train."""

    @property
    def max_t(self) -> int:
        """Optimizer steps of a trial that is never stopped."""
        if self.scheduler.max_t is not None:
            return self.scheduler.max_t
        return int(constant(self.train, "max_steps")[1] or default_of(TrainConfig, "max_steps")[1])

    def train_values(self, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The keys of `train` with `params` put in, nested where dotted; for any trainable.

        Args:
            params: Values of searched keys; those it lacks keep their constant, if any.
        """
        values = copy.deepcopy(self.train)
        if not self.is_custom and self.scheduler.max_t is not None:
            values.setdefault("max_steps", self.scheduler.max_t)
        for name, value in (params or {}).items():
            set_dotted(values, name, value)
        return values

    def train_config(self, params: Mapping[str, Any] | None = None) -> TrainConfig:
        """One fine-tune of a built-in trainable.

        Raises:
            ValueError: `params` is not legal.
        """
        assert not self.is_custom, "a trainable of the user's own takes train_values()"
        return TrainConfig.model_validate(self.train_values(params))

    def default_params(self) -> dict[str, Any] | None:
        """The default trial: each searched key's constant in `train`, else the default of TrainConfig.

        Returns:
            Values of the active parameters; None when one of them has neither, or only one that is not searched.
        """
        params: dict[str, Any] = {}
        for name in self.search_space.order():
            parameter = self.search_space.parameters[name]
            if not parameter.is_active(params):
                continue
            found, value = self._default(name)
            if parameter.is_constant:
                value = next(parameter.values())
            elif not found or parameter.problem(value):
                return None
            params[name] = parameter.canonical(value)
        return params

    def values_of(self, key: str) -> list[Any]:
        """All values that a key of `train` has in some trial, where they are a constant or choices."""
        found, value = constant(self.train, key)
        parameter = self.search_space.parameters.get(key)
        choices = parameter.choices if isinstance(parameter, Categorical) else ()
        return [*([value] if found else []), *choices]

    def warnings(self) -> list[str]:
        """What is legal but probably not meant, one sentence each."""
        found = (self._few_configurations(), self._no_rungs(), self._many_initial())
        candidates = (*found, self._blind_sampler(), self._open_secrets())
        return [text for text in candidates if text]

    def _default(self, name: str) -> tuple[bool, Any]:
        found, value = constant(self.train, name)
        return (found, value) if found or self.is_custom else default_of(TrainConfig, name)

    def _few_configurations(self) -> str:
        count = self.search_space.num_configurations()
        if count is None or count >= self.search.num_trials:
            return ""
        only = "1 configuration" if count == 1 else f"{count} distinct configurations"
        asked = f"search.num_trials is {self.search.num_trials}"
        return f"search_space has only {only} and {asked}: the study ends after {count}"

    def _no_rungs(self) -> str:
        scheduler = self.scheduler
        if scheduler.type in {"none", "median"} or scheduler.grace_period < self.max_t:
            return ""
        remedy = "lower scheduler.grace_period (and train.eval_every), or set scheduler.type: none"
        return (
            f"scheduler {scheduler.type} has no rung before max_t ({self.max_t}): no trial is stopped early; {remedy}"
        )

    def _many_initial(self) -> str:
        given, asked = len(self.search.initial), self.search.num_trials
        return f"search.initial has {given} configurations, of which num_trials ({asked}) run" if given > asked else ""

    def _blind_sampler(self) -> str:
        if self.search.sampler != "cmaes":
            return ""
        parameters = self.search_space.parameters.items()
        blind = [name for name, parameter in parameters if parameter.type == "categorical" or parameter.when]
        return f"sampler cmaes draws {', '.join(blind)} at random; tpe models all parameters" if blind else ""

    def _open_secrets(self) -> str:
        telling = [name for name in self.env if re.search("TOKEN|SECRET|PASSWORD|API_?KEY", name, re.IGNORECASE)]
        words = ", ".join(telling)
        return f"env has {words}: what is there can be read in Ray's dashboard; move it to secrets" if telling else ""


def load_spec(path: str | Path, overrides: Sequence[str] = ()) -> StudySpec:
    """Reads and checks a study file.

    Args:
        path: The file.
        overrides: `key=value` items that replace what the file says, `train.max_steps=20`.

    Returns:
        The study, with the defaults that depend on other keys (max_t, grace_period, checkpoint.every) written out.

    Raises:
        SpecError: All faults, each with its line.
    """
    return _spec(with_overrides(read_yaml(path), overrides))


def make_spec(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> StudySpec:
    """As `load_spec`, from the plain data of a study file.

    Raises:
        SpecError: All faults.
    """
    return _spec(with_overrides(from_data(data), overrides))


def override_spec(spec: StudySpec, overrides: Sequence[str]) -> StudySpec:
    """A copy with `key=value` items set, checked like a file.

    Raises:
        SpecError: All faults.
    """
    return make_spec(spec.model_dump(mode="json"), overrides) if overrides else spec


def _spec(source: YamlSource) -> StudySpec:
    return StudySpec(**study_parts(source))
