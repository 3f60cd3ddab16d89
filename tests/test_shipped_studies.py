"""The studies in search_spaces/ for real: the quickstart as it is, the others on a tiny model and own data."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.conftest import REPOSITORY, Tune
from tests.tiny import CPU, MODEL, WORDS
from trainables.batches import split_batch
from trainables.checkpoint import load_checkpoint
from trainables.config import TrainConfig
from trainables.model import build_model
from trainables.optim import make_optimizer
from trainables.tokenizer import byte_level_tokenizer, load_tokenizer
from trainables.train_state import TrainState
from tuner.decisions.observer import Observer
from tuner.execution import search
from tuner.record.study import Study
from tuner.study_file.spec import load_spec

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]


def write_model(folder: Path) -> Path:
    """A folder as `save_pretrained` writes it, with a tokenizer."""
    tokenizer = byte_level_tokenizer()
    torch.manual_seed(0)
    settings = {key: value for key, value in MODEL.items() if key != "model_type"}
    Qwen2ForCausalLM(Qwen2Config(**settings, vocab_size=len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_instructions(path: Path, num: int = 200) -> Path:
    """Rows in the form of alpaca."""
    rows = [
        {
            "instruction": f"Say {WORDS[i % 13]} {i}.",
            "input": "" if i % 3 else WORDS[i % 7],
            "output": f"{WORDS[i % 13]} {i}",
        }
        for i in range(num)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def on_a_tiny_model(folder: Path, max_steps: int = 27, num_trials: int = 6) -> dict[str, object]:
    """What to set for a study to run anywhere in seconds."""
    return {
        "train.model": write_model(folder / "model"),
        "train.dataset.path": write_instructions(folder / "instructions.jsonl"),
        "train.dataset.split": "train",
        "train.dataset.eval_split": "null",
        "train.max_length": 128,
        "train.batch_size": 4,
        "train.max_steps": max_steps,
        "train.eval_every": 3,
        "checkpoint.every": 3,
        "scheduler.max_t": max_steps,
        "scheduler.grace_period": 3,
        "scheduler.reduction_factor": 3,
        "scaling.gpus_per_worker": 0,
        "search.num_trials": num_trials,
    }


def as_options(settings: dict[str, object]) -> list[str]:
    return [item for key, value in settings.items() for item in ("--set", f"{key}={value}")]


def test_the_3b_study_runs_on_a_tiny_model_and_own_data_with_nothing_but_set(tmp_path: Path, tune: Tune) -> None:
    options = as_options(on_a_tiny_model(tmp_path) | {"scaling.num_workers": 2})
    done = tune("run", REPOSITORY / "search_spaces" / "qwen_lr.yaml", *options, timeout_s=200)
    assert done.returncode == 0, done.stderr
    study = Study.open(tmp_path / "studies", "qwen_lr")
    states = Counter(trial.state for trial in study.trials())
    assert sum(states.values()) == 6
    assert states["COMPLETE"] >= 1
    assert states["PRUNED"] >= 1
    assert mlflow_states(study) == {"COMPLETE": "FINISHED", "PRUNED": "KILLED"}


def mlflow_states(study: Study) -> dict[str, str]:
    """The status that MLflow's runs have for each state of the study's trials, which must be one and the same."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{(study.dir.parent / 'mlflow.db').absolute()}")
    experiment = client.get_experiment_by_name("qwen_lr")
    assert experiment is not None
    runs = {run.info.run_id: run for run in client.search_runs([experiment.experiment_id])}
    parents = [run for run in runs.values() if "mlflow.parentRunId" not in run.data.tags]
    assert len(runs) == 7
    assert [parent.info.status for parent in parents] == ["FINISHED"]
    pairs = {(trial.state, runs[trial.mlflow_run_id or ""].info.status) for trial in study.trials()}
    assert len(pairs) == len(dict(pairs))
    return dict(pairs)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_the_8b_study_in_shards_runs_on_a_tiny_model_and_own_data_with_nothing_but_set(tmp_path: Path) -> None:
    file = REPOSITORY / "search_spaces" / "llama_fsdp.yaml"
    settings = on_a_tiny_model(tmp_path, max_steps=9, num_trials=4) | {
        "scaling.num_workers": 2,
        "train.micro_batch_size": 1,
        "mlflow.enabled": "false",
    }
    spec = load_spec(file, [f"{key}={value}" for key, value in settings.items()])
    study = search.run(spec, source_text=file.read_text(), root=tmp_path / "studies")
    trials = study.trials()
    assert len(trials) == 4
    assert {trial.state for trial in trials} <= {"COMPLETE", "PRUNED"}
    best = study.best()[0]
    assert best.state == "COMPLETE"
    state = initial_state(spec.train_config(best.params))
    load_checkpoint(state, Path(best.checkpoint or ""), CPU)
    assert (state.step, state.metrics["eval_loss"]) == (9, best.value)


def initial_state(config: TrainConfig) -> TrainState:
    model = build_model(config, load_tokenizer(config), CPU.device)
    return TrainState(model, make_optimizer(model, config))


def test_the_8b_study_plans_without_gpu_network_and_token(tmp_path: Path, tune: Tune) -> None:
    file = REPOSITORY / "search_spaces" / "llama_fsdp.yaml"
    done = tune("run", file, "--dry-run", HF_HUB_OFFLINE="0", HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN="")
    assert done.returncode == 0, done.stderr
    assert "16 with 1 CPU and 1 GPU each" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_8b_study_accumulates_over_two_passes() -> None:
    spec = load_spec(REPOSITORY / "search_spaces" / "llama_fsdp.yaml")
    config, num_workers = spec.train_config(spec.default_params()), spec.scaling.num_workers
    lengths = np.full(config.batch_size, config.max_length)
    [first, *others] = split_batch(np.arange(config.batch_size), lengths, num_workers, config.micro_batch_size or 0)
    assert len(others) == 15
    assert [len(group) for group in first] == [4, 4]


@pytest.mark.slow
def test_the_quickstart_takes_less_than_two_minutes_and_beats_the_default(tmp_path: Path, tune: Tune) -> None:
    done = tune("run", REPOSITORY / "search_spaces" / "quickstart.yaml", timeout_s=120)
    assert done.returncode == 0, done.stderr
    best = json.loads(tune("best", "quickstart", "--format", "json").stdout)
    assert {"number", "value", "params", "step", "checkpoint", "default_value"} <= set(best)
    assert best["value"] < best["default_value"]
    assert Path(best["checkpoint"]).is_dir()


@pytest.mark.usefixtures("ray_cluster")
def test_the_lora_study_searches_ranks_in_warm_slots_and_saves_adapters_alone(tmp_path: Path) -> None:
    few = {"search.num_trials": 3, "train.max_steps": 9, "scheduler.max_t": 9, "scaling.slots": 1}
    settings = on_a_tiny_model(tmp_path) | few | {"mlflow.enabled": "false"}
    file = REPOSITORY / "search_spaces" / "qwen_lora.yaml"
    spec = load_spec(file, [f"{key}={value}" for key, value in settings.items()])
    study = search.run(spec, source_text=file.read_text(), root=tmp_path / "studies", observer=Observer())
    ranks = {trial.params["lora.rank"] for trial in study.trials()}
    assert len(ranks) > 1
    saved = FileSystemReader(study.best()[0].checkpoint or "").read_metadata().state_dict_metadata
    assert {".lora_" in name for name in saved if name.startswith("model.")} == {True}


@pytest.mark.usefixtures("ray_cluster")
def test_a_loop_of_ones_own_is_searched_as_it_is(tmp_path: Path) -> None:
    file = REPOSITORY / "search_spaces" / "own_loop.yaml"
    spec = load_spec(file, ["search.num_trials=4", "mlflow.enabled=false"])
    study = search.run(spec, source_text=file.read_text(), root=tmp_path / "studies", observer=Observer())
    states = Counter(trial.state for trial in study.trials())
    assert states["COMPLETE"] + states["PRUNED"] == 4
    assert states["PRUNED"] >= 1
    best = study.best()[0]
    assert (best.step, [path.name for path in Path(best.checkpoint or "").glob("*.pt")]) == (216, ["state.pt"])
    assert (best.value or 1.0) < (study.default_value or 0.0)
