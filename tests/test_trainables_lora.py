"""Low-rank adapters: they alone train and are saved, and a warm model takes and gives them up without a trace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import CPU, run_ranks, tiny_config, train, weights_of, without_speed, write_texts
from trainables.checkpoint import save_checkpoint
from trainables.checkpoint_dir import read_manifest
from trainables.config import TrainConfig
from trainables.errors import CheckpointError
from trainables.finetune import Warm, Worker, finetune
from trainables.model import build_model
from trainables.parallel import Parallelism
from trainables.tokenizer import byte_level_tokenizer

CHECKPOINT = "step_00000003"
KINDS: tuple[Parallelism, ...] = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lora")
    write_texts(path / "texts.jsonl")
    return path


@pytest.fixture(scope="module")
def config(folder: Path) -> TrainConfig:
    lora = {"rank": 8, "alpha": 16, "dropout": 0.1}
    return tiny_config(folder / "texts.jsonl", learning_rate=1e-2, lora=lora)


def test_adapters_learn_beside_weights_that_stay_as_they_are(config: TrainConfig, folder: Path) -> None:
    warm = Warm()
    train(config.with_params({"lora": None}), folder, warm)
    reports = train(config.with_params({"max_steps": 12}), folder, warm)
    assert reports[-1].metrics["eval_loss"] < reports[0].history[0]["train_loss"] - 0.3
    base = build_model(config, byte_level_tokenizer(), CPU.device).state_dict()
    after = {name.replace(".base_layer", ""): weight for name, weight in weights_of(reports[-1]).items()}
    assert all(torch.equal(after[name], weight) for name, weight in base.items())
    assert {name.split(".")[-3] for name in after.keys() - base.keys()} == {"lora_A", "lora_B"}


def test_new_adapters_change_no_output_and_depend_on_no_seed(config: TrainConfig, folder: Path) -> None:
    still = {"learning_rate": 1e-30, "max_steps": 1}
    plain = train(config.with_params({"lora": None, **still}), folder)[0].metrics["eval_loss"]
    both = [train(config.with_params({"seed": seed, **still}), folder)[0] for seed in (0, 1)]
    assert [report.metrics["eval_loss"] for report in both] == [plain, plain]
    one, other = map(weights_of, both)
    assert all(torch.equal(one[name], other[name]) for name in one if "lora_A" in name)


def _train_alone(worker: Worker, folder: Path) -> Any:
    config = TrainConfig.model_validate_json((folder / "config.json").read_text())
    return without_speed(list(finetune(config, worker, cache_dir=folder)))


def test_a_warm_trial_equals_one_in_a_fresh_process_whatever_ran_before(config: TrainConfig, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    build_model(config, byte_level_tokenizer(), CPU.device).save_pretrained(saved)  # type: ignore[operator]
    byte_level_tokenizer().save_pretrained(saved)
    config = config.with_params({"model": str(saved), "precision": "bf16"})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    [fresh] = run_ranks(_train_alone, 1, tmp_path)
    warm = Warm()
    fewer = config.with_params({"lora.rank": 4, "lora.alpha": 3.0, "lora.target_modules": "q_proj, v_proj"})
    first = train(fewer, tmp_path, warm)
    shutil.rmtree(saved)
    assert without_speed(train(fewer, tmp_path, warm)) == without_speed(first)
    assert without_speed(train(config, tmp_path, warm)) == fresh
    assert without_speed(train(fewer, tmp_path, warm)) == without_speed(first)


def test_a_warm_model_takes_the_same_adapters_twice_after_all_its_weights_were_trained(
    config: TrainConfig, folder: Path
) -> None:
    warm, full = Warm(), config.with_params({"lora": None})
    orders = (full, config, config, full)
    reports = [without_speed(train(one.with_params({"max_steps": 2}), folder, warm)) for one in orders]
    assert reports[2:] == reports[1::-1]


def test_adapters_alone_are_saved_and_a_resumed_trial_goes_on_bit_for_bit(
    config: TrainConfig, folder: Path, tmp_path: Path
) -> None:
    config = config.with_params({"gradient_checkpointing": "full", "precision": "bf16"})
    in_one_go = []
    for report in finetune(config, CPU, cache_dir=folder):
        in_one_go.append(report)
        if report.step == 3:
            save_checkpoint(report.state, tmp_path / CHECKPOINT, CPU)
    torch.manual_seed(123)
    resumed = list(finetune(config, CPU, cache_dir=folder, resume_from=tmp_path / CHECKPOINT))
    assert without_speed(resumed) == without_speed(in_one_go[1:])
    one, other = weights_of(in_one_go[-1]), weights_of(resumed[-1])
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert saved_tensors(tmp_path / CHECKPOINT) == {name for name in one if ".lora_" in name}
    with pytest.raises(CheckpointError, match="cannot be read"):
        list(finetune(config.with_params({"lora.rank": 4}), CPU, cache_dir=folder, resume_from=tmp_path / CHECKPOINT))


def saved_tensors(checkpoint: Path) -> set[str]:
    """Names of the model's tensors in a checkpoint."""
    from torch.distributed.checkpoint import FileSystemReader

    assert read_manifest(checkpoint) is not None
    names = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {name.removeprefix("model.") for name in names if name.startswith("model.")}


def test_frozen_layers_take_half_the_room_and_no_loss_changes(
    config: TrainConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config.with_params({"precision": "bf16", "lora.target_modules": "q_proj,down_proj"})
    halved = train(config, folder)
    dtypes = {name.rpartition(".")[0]: weight.dtype for name, weight in weights_of(halved[-1]).items()}
    assert {dtype for name, dtype in dtypes.items() if name.endswith("base_layer")} == {torch.bfloat16}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith("base_layer")} == {torch.float32}
    monkeypatch.setattr("trainables.warm.halve_frozen_layers", lambda model: None)
    assert without_speed(train(config, folder)) == without_speed(halved)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("q_proj,vproj", "no layer 'vproj' that can have an adapter; there are: down_proj, gate_proj, k_proj"),
        (["lm_head"], "no layer 'lm_head'"),
        (["embed_tokens"], "no layer 'embed_tokens'"),
    ],
)
def test_a_layer_that_cannot_have_an_adapter_is_named(
    config: TrainConfig, folder: Path, target: Any, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        train(config.with_params({"lora.target_modules": target}), folder)


def test_layers_of_other_kinds_than_linear_take_adapters(config: TrainConfig, folder: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2}
    reports = train(config.with_params({"model": gpt2, "lora.target_modules": "c_attn"}), folder)
    assert reports[-1].metrics["eval_loss"] < reports[0].metrics["eval_loss"]


def _compiled(worker: Worker, folder: Path) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    config = tiny_config(folder / "texts.jsonl", max_steps=4, eval_every=2, micro_batch_size=3, lora={"rank": 4})
    result: dict[str, Any] = {}
    for parallel in KINDS:
        warm, plain = Warm(), train(config, folder / "cache", worker=worker, parallel=parallel)
        compiled = config.with_params({"compile": True})
        first = train(compiled, folder / "cache", warm, worker, parallel)
        graphs = counters["stats"]["unique_graphs"]
        again = train(compiled, folder / "cache", warm, worker, parallel)
        losses = [[report.metrics["eval_loss"] for report in reports] for reports in (plain, first, again)]
        result[parallel] = (*losses, graphs, counters["stats"]["unique_graphs"])
    return result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_beside_compiled_layers_learn_the_same_and_a_further_trial_compiles_nothing(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl")
    for result in run_ranks(_compiled, 2, tmp_path, timeout_s=600):
        for plain, first, again, num_graphs, num_graphs_after in (result[parallel] for parallel in KINDS):
            assert first == pytest.approx(plain, rel=1e-6)
            assert again == first
            assert num_graphs_after == num_graphs > 0
