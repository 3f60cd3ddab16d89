"""An exported model as a version in MLflow's model registry, logged in its trial's run."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import InputError, TuneError
from tuner.tracking.client import open_client
from tuner.tracking.target import Target, check_target, resolve_target

if TYPE_CHECKING:
    from tuner.record.record import TrialRecord
    from tuner.record.study import Study


def check(study: Study, record: TrialRecord) -> None:
    """See that there is a run and a store to register a trial's model in, before hours of writing.

    Raises:
        InputError: There is none.
    """
    if not study.spec.mlflow.enabled or record.mlflow_run_id is None:
        raise InputError(
            f"--register: trial {record.number} of study {study.spec.study!r} has no run in MLflow",
            "Export without --register.",
        )
    check_target(_target(study))


def register(study: Study, record: TrialRecord, folder: Path, name: str) -> int:
    """Log a folder as a model in a trial's run, and make it the newest version of a registered model.

    Args:
        study: The study.
        record: The trial.
        folder: Model and tokenizer as `export` wrote them.
        name: The registered model, which is made if there is none.

    Returns:
        The version; `mlflow.transformers.load_model("models:/NAME/VERSION")` and `mlflow.pyfunc` load it.

    Raises:
        TuneError: MLflow refuses; the folder is there all the same.
    """
    target = _target(study)
    try:
        return _log(target, record.mlflow_run_id or "", folder, name)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TuneError(
            f"{target.shown}: cannot register {name!r}: {reason}", f"The model is in {folder} all the same."
        ) from error


def _log(target: Target, run_id: str, folder: Path, name: str) -> int:
    client = open_client(target)
    import mlflow.transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    mlflow.set_tracking_uri(target.uri)
    # Its artifacts belong where the study's are, not in the default experiment.
    mlflow.set_experiment(experiment_id=client.get_run(run_id).info.experiment_id)
    logged = mlflow.transformers.log_model(
        {
            "model": AutoModelForCausalLM.from_pretrained(folder, dtype="auto"),
            "tokenizer": AutoTokenizer.from_pretrained(folder),
        },
        name="model",
        task="text-generation",
        registered_model_name=name,
        run_id=run_id,
        # Else MLflow loads the model once more to find them.
        pip_requirements=[f"{package}=={version(package).partition('+')[0]}" for package in ("torch", "transformers")],
    )
    return int(logged.registered_model_version)


def _target(study: Study) -> Target:
    return resolve_target(study.spec, study.dir.absolute().parent)
