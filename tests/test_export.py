"""A trial's model as others load it: offline, in a clean process, with the loss that was reported."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow.transformers
import pytest
from mlflow import MlflowClient

from tests.conftest import REPOSITORY, Tune
from tests.tiny import CPU, limited_file_size, write_texts
from trainables.checkpoint import save_checkpoint
from trainables.checkpoint_dir import step_dir
from trainables.export import export as write_folder
from trainables.finetune import finetune
from trainables.model import build_model
from trainables.tokenizer import byte_level_tokenizer
from tuner.decisions.sampling import Proposal, distribution
from tuner.errors import InputError, TuneError
from tuner.record.export import export
from tuner.record.study import Study
from tuner.study_file.spec import make_spec

pytestmark = pytest.mark.timeout(120)

TEXT = "Ae\u0301 \u00e9\u00a0x\n\t12 \U0001f916\x00\x7f  "
MODEL = {
    "model_type": "qwen2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export")
    write_texts(folder / "texts.jsonl")
    return folder


@pytest.fixture(scope="module")
def whole(root: Path) -> Study:
    """A study of three trials: complete, better, and pruned; the fourth is running."""
    study = make_study(root, "whole", {"model": MODEL}, rates=[1e-3, 1e-2])
    for state in ("PRUNED", None):
        number = study.add_trial(proposal(study, 1e-4))
        study.report(number, 3, 9.0)
        if state is not None:
            study.finish(number, state)
    return study


@pytest.fixture(scope="module")
def adapters(root: Path) -> Study:
    """A study of one trial with adapters over a model in a folder."""
    base = root / "base"
    tokenizer = byte_level_tokenizer()
    spec = make_spec(study_data(root, "base", {"model": MODEL | {"model_type": "llama"}}))
    build_model(spec.train_config(), tokenizer, CPU.device).save_pretrained(base)  # type: ignore[operator]
    tokenizer.save_pretrained(base)
    return make_study(root, "adapters", {"model": str(base), "lora": {"rank": 4}}, rates=[1e-2])


def study_data(root: Path, name: str, train: dict[str, Any]) -> dict[str, Any]:
    constants = {"max_length": 64, "max_steps": 6, "eval_every": 3, "precision": "fp32", "batch_size": 8}
    return {
        "study": name,
        "train": {"dataset": {"path": str(root / "texts.jsonl")}, **constants, **train},
        "search_space": {"learning_rate": {"type": "float", "low": 1e-5, "high": 1e-1, "log": True}},
        "search": {"num_trials": 4},
    }


def proposal(study: Study, rate: float) -> Proposal:
    spaces = study.spec.search_space.parameters
    return Proposal({"learning_rate": rate}, {"learning_rate": distribution(spaces["learning_rate"])})


def make_study(root: Path, name: str, train: dict[str, Any], rates: list[float]) -> Study:
    """A study as a search leaves it, each trial trained and saved."""
    study = Study.create(make_spec(study_data(root, name, train)), "", root / "studies")
    for rate in rates:
        number = study.add_trial(proposal(study, rate))
        config = study.spec.train_config(study.trial(number).params)
        for report in finetune(config, CPU, cache_dir=root):
            study.report(number, report.step, report.metrics["eval_loss"])
        place = step_dir(study.dir / "checkpoints" / str(number), report.step)
        save_checkpoint(report.state, place, CPU)
        study.note(number, checkpoint=place.relative_to(study.dir).as_posix())
        study.finish(number, "COMPLETE")
    return study


# What anybody's program would do, and our own evaluation on the same examples.
CLEAN_PROCESS = """
import json, sys
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from trainables.config import TrainConfig
from trainables.data import prepare
from trainables.finetune import make_eval_batch
from trainables.cross_entropy import full_cross_entropy
from trainables.parallel import Worker
import torch

def measured(place, base=None):
    model = AutoModelForCausalLM.from_pretrained(base or place)
    declared = str(model.dtype)
    if base:
        from peft import PeftModel
        model = PeftModel.from_pretrained(model, place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    start = tokenizer("x", return_tensors="pt")
    output = model.generate(**start, max_new_tokens=2, do_sample=False)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    worker = Worker(0, 1, torch.device("cpu"))
    batch = make_eval_batch(data, config, worker, 8)
    with torch.no_grad():
        losses = [
            full_cross_entropy(model.float()(input_ids=part.tokens_BT).logits.flatten(0, 1), part.targets_BT.flatten())
            for part in batch.micro_batches
        ]
    return {
        "dtype": declared, "tied": tied, "ids": tokenizer(text)["input_ids"], "generated": output.shape[1],
        "end": [tokenizer.eos_token_id, model.generation_config.eos_token_id, tokenizer.pad_token_id],
        "loss": float(sum(losses)) / batch.num_targets,
    }

assert not any(name.startswith("tuner") for name in sys.modules)
order = json.load(sys.stdin)
text, results = order["text"], {}
for name, (settings, *folders) in order["folders"].items():
    config = TrainConfig.model_validate(settings)
    data = prepare(config, "eval", Path(order["cache"]), None)
    results[name] = measured(*folders)
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def loaded(whole: Study, adapters: Study, root: Path) -> dict[str, dict[str, Any]]:
    """What a clean process finds in the folder of each export, by its name."""
    places = {name: root / "models" / name for name in ("exact", "rounded", "merged", "alone")}
    assert export(whole, places["exact"]).number == 1
    export(whole, places["rounded"], 1, dtype="bfloat16")
    export(adapters, places["merged"])
    export(adapters, places["alone"], merge=False)
    settings = {name: study.spec.train_config().model_dump() for name, study in (("w", whole), ("a", adapters))}
    folders = {name: [settings["w" if name in ("exact", "rounded") else "a"], str(places[name])] for name in places}
    folders["alone"].append(str(root / "base"))
    done = subprocess.run(
        [sys.executable, "-c", CLEAN_PROCESS],
        input=json.dumps({"text": TEXT, "cache": str(root), "folders": folders}),
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True, text=True, timeout=90, check=False, cwd=root.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", ["exact", "rounded", "merged", "alone"])
def test_a_clean_process_loads_model_and_tokenizer(loaded: dict[str, dict[str, Any]], name: str) -> None:
    found = loaded[name]
    assert found["dtype"] == ("torch.bfloat16" if name == "rounded" else "torch.float32")
    assert found["tied"]
    assert found["generated"] > 1
    assert found["end"] == [257, 257, 258]
    assert found["ids"] == byte_level_tokenizer()(TEXT)["input_ids"]


def test_an_exported_model_has_the_reported_loss(
    loaded: dict[str, dict[str, Any]], whole: Study, adapters: Study, root: Path
) -> None:
    best, best_adapters = whole.best()[0].value, adapters.best()[0].value
    assert loaded["exact"]["loss"] == pytest.approx(best, rel=1e-6)
    assert loaded["rounded"]["loss"] == pytest.approx(best, rel=1e-2)
    assert loaded["merged"]["loss"] == pytest.approx(best_adapters, rel=1e-5)
    assert loaded["alone"]["loss"] == pytest.approx(best_adapters, rel=1e-5)
    assert not (root / "models" / "merged" / "adapter_config.json").exists()
    assert not (root / "models" / "alone" / "model.safetensors").exists()
    origin = json.loads((root / "models" / "exact" / "trial.json").read_text())
    assert (origin["study"], origin["number"], origin["value"]) == ("whole", 1, best)


def test_a_model_is_exported_where_its_attention_kernel_is_not(whole: Study, tmp_path: Path) -> None:
    config = whole.spec.train_config().with_params({"attention": "flash_attention_2", "precision": "bf16"})
    write_folder(config, Path(whole.trial(1).checkpoint or ""), tmp_path)
    assert (tmp_path / "model.safetensors").exists()


def test_sampling_values_that_a_model_brings_are_kept(adapters: Study, root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "base", tmp_path / "base")
    brought = {"temperature": 0.6, "top_p": 0.9}
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(brought))
    (tmp_path / "model").mkdir()
    config = adapters.spec.train_config().with_params({"model": str(tmp_path / "base")})
    write_folder(config, Path(adapters.trial(0).checkpoint or ""), tmp_path / "model")
    saved = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert brought.items() <= saved.items()
    assert saved["do_sample"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"trial": 4}, "--trial 4: study 'whole' has 4 trials, numbered from 0"),
        ({"trial": 2}, "trial 2 of study 'whole' is PRUNED and has no checkpoint"),
        ({"trial": 3}, "trial 3 of study 'whole' is not finished"),
        ({"register": "best"}, "trial 1 of study 'whole' has no run in MLflow"),
        ({"register": "best", "merge": False}, "--register needs a whole model"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_a_remedy(
    whole: Study, tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words) as caught:
        export(whole, tmp_path / "model", **options)
    assert caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty_is_left_alone(whole: Study, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for taken in (tmp_path, tmp_path / "notes.txt"):
        with pytest.raises(InputError, match="is there already and not an empty folder"):
            export(whole, taken)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_full_disk_and_a_damaged_checkpoint_leave_nothing_behind(whole: Study, tmp_path: Path) -> None:
    with limited_file_size(1000), pytest.raises(TuneError, match="model cannot be written: ") as full:
        export(whole, tmp_path / "model")
    checkpoint = Path(whole.trial(0).checkpoint or "")
    (checkpoint / "__0_0.distcp").write_bytes(b"short")
    with pytest.raises(TuneError, match=r"trial 0: .*step_00000006: not a complete checkpoint") as damaged:
        export(whole, tmp_path / "model", 0)
    assert (full.value.exit_code, damaged.value.exit_code) == (1, 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_verb_prints_the_folder_and_registers_the_model_in_its_trials_run(
    whole: Study, tune: Tune, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = f"sqlite:///{whole.dir.parent / 'mlflow.db'}"
    client = MlflowClient(store)
    experiment = client.create_experiment("whole", artifact_location=str(tmp_path / "artifacts"))
    run = client.create_run(experiment)
    client.set_terminated(run.info.run_id)
    ended = client.get_run(run.info.run_id).info.end_time
    whole.note_mlflow_run(1, run.info.run_id)
    done = tune("export", "whole", "--root", whole.dir.parent, "--to", "out", "--register", "best", timeout_s=100)
    assert (done.returncode, done.stdout) == (0, "out\n"), done.stderr
    [version] = client.search_model_versions("name='best'")
    assert (version.version, version.run_id) == (1, run.info.run_id)
    assert client.get_run(run.info.run_id).info.end_time == ended
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    loaded = mlflow.transformers.load_model("models:/best/1", return_type="components")
    assert loaded["tokenizer"](TEXT)["input_ids"] == byte_level_tokenizer()(TEXT)["input_ids"]
    assert list((tmp_path / "artifacts").rglob("model.safetensors"))
