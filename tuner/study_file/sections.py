"""The sections of a study file besides `train` and `search_space`: what each key means and its default."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from tuner.study_file.wording import did_you_mean

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Immutable, strict (the text "1e-5" is not a number), and without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


AVAILABLE = ("ddp", "fsdp", "huggingface")
# Other things that stand beside the studies in their root.
_RESERVED = frozenset({"mlflow.db", "mlruns", "mlartifacts"})
_CUSTOM = re.compile(r"([^:\0]+\.py|[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):[A-Za-z_]\w*")


def _check_study(name: str) -> str:
    if name in _RESERVED or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
        rule = "must be a folder name of at most 100 letters, digits, '_', '-' and '.', starting with a letter or digit"
        raise ValueError(f"{rule}, and not {', '.join(sorted(_RESERVED))}; got {name!r}; try {_safe_name(name)}")
    return name


def _safe_name(name: str) -> str:
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip("._-")[:100]
    return f"{safe}_study" if safe in _RESERVED else safe or "my_study"


def _check_trainable(name: str) -> str:
    if name in AVAILABLE or _CUSTOM.fullmatch(name):
        return name
    forms = "package.module:function or file.py:function"
    raise ValueError(
        f"must be {', '.join(AVAILABLE)}, or your own as {forms}; got {name!r}{did_you_mean(name, AVAILABLE)}"
    )


def _check_variable(name: str) -> str:
    # What was written may be the secret itself, so it is not repeated.
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("must be the name of an environment variable, never its value; such as HF_TOKEN")
    return name


def _check_gpus(gpus: float) -> float:
    # Ray's rule.
    if gpus > 1 and not gpus.is_integer():
        raise ValueError(f"must be a whole number above 1, got {gpus}; a worker has whole GPUs, or a share of one")
    return gpus


Variables = Annotated[tuple[Annotated[str, AfterValidator(_check_variable)], ...], Field(strict=False)]


class Objective(Section):
    """What is optimised."""

    metric: Annotated[str, Field(min_length=1)] = "eval_loss"
    """Metric of the reports that trials are compared by."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller or larger is better."""
    scope: Literal["last", "best"] = "last"
    """A trial's value is that of its last report, or of its best one (then that report's checkpoint is kept)."""

    @property
    def sign(self) -> float:
        """See `sign_of`."""
        return sign_of(self.mode)


def sign_of(mode: str) -> float:
    """What makes an objective one to be minimised: 1, or -1 where more is better."""
    return 1.0 if mode == "min" else -1.0


class Search(Section):
    """How configurations are proposed, and when the study ends."""

    sampler: Literal["tpe", "gp", "cmaes", "qmc", "random", "grid"] = "tpe"
    """Optuna's sampler."""
    num_trials: Count
    """Trials in all, the default trial and the initial ones included."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Same seed, same proposals."""
    max_hours: Positive | None = None
    """Start no trial after this many hours of running, and end those that run."""
    max_gpu_hours: Positive | None = None
    """As max_hours, but GPU-hours: of all GPUs that the slots hold, for as long as the study runs. The trials are ended
    half a minute early, so that saving them stays within the limit. Not for a study without GPUs."""
    target: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """End the study as soon as a trial's value is this good."""
    storage: Annotated[str, Field(min_length=1)] | None = None
    """Database URL of the Optuna storage; absent: a file in the study's folder."""
    initial: Annotated[tuple[dict[str, Any], ...], Field(strict=False)] = ()
    """Configurations to try first, each with a value for every searched key."""


class Scheduler(Section):
    """How poor trials are stopped early. The unit is optimizer steps."""

    type: Literal["asha", "hyperband", "median", "none"] = "asha"
    """Asynchronous successive halving, Hyperband, the median rule, or no early stopping."""
    grace_period: Count = 1
    """No trial is stopped before this step; the first rung. Absent from a study file: train.eval_every."""
    max_t: Count | None = None
    """Steps of a trial that is never stopped. Absent from a study file: train.max_steps."""
    reduction_factor: Annotated[int, Field(ge=2)] = 3
    """One trial in this many goes on from a rung; each rung is this many times the one before."""
    brackets: Count = 1
    """Number of brackets of ASHA, each starting one rung later."""
    min_samples: Count = 3
    """Median rule: number of other trials that must have reached a step before one is stopped there."""


class Workers(Section):
    """An elastic number of workers: as many as the cluster has room for, between two numbers."""

    min: Count
    """With fewer workers than this no trial starts."""
    max: Count
    """More workers than this no trial gets."""


class Scaling(Section):
    """The size of a trial, and how many run at once."""

    num_workers: Count | Workers = 1
    """Workers (ranks) of a trial; as `{min: 4, max: 8}` it is elastic: as many of them as the cluster has room for."""
    gpus_per_worker: Annotated[float, Field(ge=0), AfterValidator(_check_gpus)] | Literal["auto"] = "auto"
    """GPUs a worker takes; auto: 1 where the cluster has GPUs, else 0. With a share of one, 0.5, trials of one worker
    share GPUs."""
    cpus_per_worker: Positive = 1
    """CPU cores a worker takes."""
    accelerator_type: Annotated[str, Field(min_length=1)] | None = None
    """Only nodes with these GPUs, as Ray names them: `H100`, `A100`, ...; absent: any."""
    placement_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    """Workers of a trial on few nodes (PACK) or on many (SPREAD) where that can be; all on one (STRICT_PACK) or each on
    its own (STRICT_SPREAD) where it must be."""
    slots: Count | Literal["auto"] = "auto"
    """Trials at once; auto: as many as the cluster holds."""

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers follows the cluster."""
        return isinstance(self.num_workers, Workers)

    @property
    def min_workers(self) -> int:
        """The fewest that a trial runs on."""
        return self.num_workers.min if isinstance(self.num_workers, Workers) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The most that a trial runs on."""
        return self.num_workers.max if isinstance(self.num_workers, Workers) else self.num_workers


class Checkpoint(Section):
    """When trials are saved and what is kept."""

    every: Count | None = None
    """Steps between checkpoints. Absent from a study file: train.eval_every."""
    keep_last: Count = 1
    """Checkpoints to keep of each running trial."""
    keep_best_trials: Count = 3
    """Number of finished trials that keep their checkpoint."""


class Failures(Section):
    """What happens when a worker is lost or a trial raises."""

    max_failures: Annotated[int, Field(ge=0)] = 2
    """Times that a trial is started again from its newest checkpoint."""


class Mlflow(Section):
    """Where trials are shown."""

    enabled: bool = True
    """Whether to log to MLflow at all."""
    tracking_uri: Annotated[str, Field(min_length=1)] | None = None
    """MLflow server or database; absent: mlflow.db beside the study's folder."""
    experiment: Annotated[str, Field(min_length=1)] | None = None
    """MLflow experiment; absent: the study's name."""


class StudyFile(Section):
    """A study file: its sections, with search_space as written."""

    study: Annotated[str, AfterValidator(_check_study)]
    """Name of the study and of its folder."""
    trainable: Annotated[str, AfterValidator(_check_trainable)] = "ddp"
    """The training loop: ddp (every worker holds the model), fsdp (each holds a part of it), huggingface (as ddp, under
    transformers.Trainer), or your own as `package.module:function` or `file.py:function`."""
    objective: Objective = Objective()
    """What is optimised."""
    train: dict[str, Any] = Field(default_factory=dict)
    """Constants of the training loop as given; together with its defaults they are the default trial."""
    search_space: Any
    """One entry a parameter; they override train."""
    search: Search
    """How configurations are proposed, and when the study ends."""
    scheduler: Scheduler = Scheduler()
    """How poor trials are stopped early."""
    scaling: Scaling = Scaling()
    """The size of a trial, and how many run at once."""
    checkpoint: Checkpoint = Checkpoint()
    """When trials are saved and what is kept."""
    failures: Failures = Failures()
    """What happens when a worker is lost or a trial raises."""
    mlflow: Mlflow = Mlflow()
    """Where trials are shown."""
    env: Variables = ()
    """Names of environment variables that go along to a cluster, with the values they have where it is started."""
    secrets: Variables = ()
    """The same for values that nobody may see: they are never printed, stored or logged."""

    @property
    def is_custom(self) -> bool:
        """Whether the training loop is the user's own."""
        return ":" in self.trainable


SECTIONS: dict[str, type[Section]] = {
    "objective": Objective,
    "search": Search,
    "scheduler": Scheduler,
    "scaling": Scaling,
    "checkpoint": Checkpoint,
    "failures": Failures,
    "mlflow": Mlflow,
}
