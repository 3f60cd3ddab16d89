"""A model in shards on real ranks (gloo): its numbers are those of a whole one, warm or cold, saved by either.

Starting ranks takes seconds, so each group of ranks runs everything it is needed for and the tests look at the results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny import CPU, MODEL, run_ranks, tiny_config, train, weights_of, without_speed, write_texts
from trainables.checkpoint import save_checkpoint
from trainables.checkpoint_dir import step_dir
from trainables.config import TrainConfig
from trainables.errors import Diverged
from trainables.finetune import Report, Warm, Worker, finetune
from trainables.model import build_model
from trainables.parallel import Parallelism, transformer_layers
from trainables.saver import CheckpointSaver
from trainables.sharded import build_sharded, holds_all_of, tensor_files
from trainables.tokenizer import byte_level_tokenizer

pytestmark = pytest.mark.timeout(120)

KINDS: tuple[Parallelism, ...] = ("ddp", "fsdp")
HALFWAY, END = 3, 6
# Clipping multiplies by a norm, which ranks add up in another order than shards do; without it all is equal to the bit.
EXACT = {"max_grad_norm": 0.0}
SHORT = {"max_steps": 2, "eval_every": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "kept": {"fsdp": {"reshard_after_forward": False}},
    "reduced every pass": {"fsdp": {"reduce_every_pass": True}, "micro_batch_size": 1},
    "offloaded": {"fsdp": {"cpu_offload": True}, "micro_batch_size": 2},
    "some recomputed": {"gradient_checkpointing": "selective"},
}


def base_config(folder: Path) -> TrainConfig:
    return tiny_config(folder / "texts.jsonl", max_steps=END, eval_every=HALFWAY, weight_decay=0.1)


def dropout_config(folder: Path) -> TrainConfig:
    return base_config(folder).with_params({"model": MODEL | {"attention_dropout": 0.1}, "micro_batch_size": 3})


def resumed(config: TrainConfig, worker: Worker, folder: Path, parallel: Parallelism, name: str) -> dict[str, Any]:
    checkpoint = step_dir(folder / name, HALFWAY)
    reports = list(finetune(config, worker, cache_dir=folder / "cache", parallel=parallel, resume_from=checkpoint))
    return outcome(reports)


def outcome(reports: list[Report]) -> dict[str, Any]:
    return {"reports": without_speed(reports), "weights": weights_of(reports[-1])}


def _on_two(worker: Worker, folder: Path) -> dict[str, Any]:
    config, cache = base_config(folder), folder / "cache"
    saver = CheckpointSaver(worker)
    result: dict[str, Any] = {"built": {name: _built(model, worker, folder) for name, model in models(folder).items()}}
    for parallel in KINDS:
        result[parallel] = _saved_halfway(config.with_params(EXACT), worker, folder, parallel, saver)
    for saved, parallel in (("ddp", "fsdp"), ("fsdp", "ddp")):
        name = f"{saved} as {parallel}"
        result[name] = resumed(config.with_params(EXACT), worker, folder, parallel, saved)  # type: ignore[arg-type]
    saver.close()
    result["cold"] = outcome(train(dropout_config(folder), cache, worker=worker, parallel="fsdp"))
    for name, params in OPTIONS.items():
        result[name] = outcome(train(config.with_params(SHORT | params), cache, worker=worker, parallel="fsdp"))
    result["adapters"] = {kind: _with_adapters(config.with_params(EXACT), worker, folder, kind) for kind in KINDS}
    result["bf16"] = {kind: _in_bf16(config, worker, folder, kind) for kind in KINDS}
    result["warm"] = _warm(dropout_config(folder), worker, folder)
    return result


def models(folder: Path) -> dict[str, Any]:
    return {"inline": MODEL, "folder": str(folder / "model"), "other names": str(folder / "other")}


def _built(model: Any, worker: Worker, folder: Path) -> dict[str, Any]:
    config = base_config(folder).with_params({"model": model, "tokenizer": "byte-level"})
    built = build_sharded(config, byte_level_tokenizer(), worker)
    tensors = built.state_dict()
    parameters = dict(built.named_parameters(remove_duplicate=False))
    return {
        "weights": {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()},
        "numbers held": sum(tensor.to_local().numel() for tensor in built.parameters()),
        "tied": parameters["lm_head.weight"] is parameters["model.embed_tokens.weight"],
        "from files": holds_all_of(tensor_files(model), built) if isinstance(model, str) else False,
    }


def _saved_halfway(
    config: TrainConfig, worker: Worker, folder: Path, parallel: Parallelism, saver: CheckpointSaver
) -> dict[str, Any]:
    reports = []
    for report in finetune(config, worker, cache_dir=folder / "cache", parallel=parallel):
        reports.append(report)
        if report.step == HALFWAY:
            # Written while the loop goes on.
            saver.save(report.state, step_dir(folder / parallel, HALFWAY))
    saver.wait()
    return outcome(reports)


def _with_adapters(config: TrainConfig, worker: Worker, folder: Path, parallel: Parallelism) -> list[Any]:
    warm, cache = Warm(), folder / "cache"
    params = {"micro_batch_size": 2, "lora.alpha": 8}
    few, many = (config.with_params({**params, "lora.rank": rank}) for rank in (4, 8))
    trials = [train(each, cache, warm, worker, parallel) for each in (few, many, few)]
    save_checkpoint(trials[-1][-1].state, step_dir(folder / f"adapters of {parallel}", END), worker)
    return [without_speed(reports) for reports in trials]


def _in_bf16(config: TrainConfig, worker: Worker, folder: Path, parallel: Parallelism) -> dict[str, Any]:
    config = config.with_params({"precision": "bf16", "micro_batch_size": 2})
    trial = finetune(config, worker, cache_dir=folder / "cache", parallel=parallel)
    report = next(trial)
    tensors = [*report.state.model.parameters(), *(p.grad for p in report.state.model.parameters())]
    tensors += [value for values in report.state.optimizer.state.values() for value in values.values()]
    kept = {tensor.dtype for tensor in tensors if tensor is not None}
    trial.close()
    return {"eval_loss": report.metrics["eval_loss"], "kept": kept}


def _warm(config: TrainConfig, worker: Worker, folder: Path) -> dict[str, Any]:
    warm, cache = Warm(), folder / "cache"
    other = config.with_params({"learning_rate": 0.1, "gradient_checkpointing": "full", "seed": 5})
    trial = finetune(other, worker, cache_dir=cache, parallel="fsdp", warm=warm)
    model = next(trial).state.model
    trial.close()
    has_gradients = any(parameter.grad is not None for parameter in model.parameters())
    diverged_at = None
    try:
        train(config.with_params({"learning_rate": 1e30}), cache, warm, worker, "fsdp")
    except Diverged as error:
        diverged_at = error.step
    again = train(config, cache, warm, worker, "fsdp")
    return outcome(again) | {
        "is same model": again[-1].state.model is model,
        "has gradients": has_gradients,
        "diverged at": diverged_at,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp")
    write_texts(path / "texts.jsonl")
    model: Any = build_model(base_config(path), byte_level_tokenizer(), CPU.device)
    model.save_pretrained(path / "model", max_shard_size="50KB")
    # As a checkpoint of the model without its head names them: only transformers knows what they mean here.
    model.model.save_pretrained(path / "other")
    return path


@pytest.fixture(scope="module")
def on_two(folder: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(_on_two, 2, folder)
    return results


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[float]:
    return eval_losses(outcome(train(base_config(folder).with_params(SHORT), folder / "cache")))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["reports"] == other["reports"][-len(one["reports"]) :]
    assert all(torch.equal(weight, other["weights"][name]) for name, weight in one["weights"].items())


def eval_losses(outcome: dict[str, Any]) -> list[float]:
    return [metrics["eval_loss"] for metrics, _ in outcome["reports"]]


@pytest.mark.parametrize("name", ["inline", "folder", "other names"])
def test_shards_are_those_of_the_whole_model_to_the_bit(on_two: list[dict[str, Any]], folder: Path, name: str) -> None:
    whole = build_model(base_config(folder), byte_level_tokenizer(), CPU.device)
    for rank in (0, 1):
        built = on_two[rank]["built"][name]
        assert built["weights"].keys() == whole.state_dict().keys()
        assert all(torch.equal(tensor, built["weights"][key]) for key, tensor in whole.state_dict().items())
        assert built["tied"]
        assert built["from files"] == (name == "folder")
    held = [on_two[rank]["built"][name]["numbers held"] for rank in (0, 1)]
    assert sum(held) == sum(parameter.numel() for parameter in whole.parameters())
    assert max(held) < 1.02 * min(held)


def test_without_clipping_shards_train_as_whole_models_do_to_the_bit(on_two: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        weights = on_two[rank]["fsdp"]["weights"]
        assert all(torch.equal(weight, weights[name]) for name, weight in on_two[rank]["ddp"]["weights"].items())
        assert eval_losses(on_two[rank]["fsdp"]) == eval_losses(on_two[rank]["ddp"])


@pytest.mark.parametrize("name", ["ddp as fsdp", "fsdp as ddp"])
def test_saved_as_one_kind_resumed_as_the_other(on_two: list[dict[str, Any]], name: str) -> None:
    for rank in (0, 1):
        whole = on_two[rank]["ddp"]
        assert eval_losses(on_two[rank][name]) == eval_losses(whole)[1:]
        assert all(torch.equal(weight, whole["weights"][key]) for key, weight in on_two[rank][name]["weights"].items())


@pytest.mark.parametrize("name", OPTIONS)
def test_options_change_speed_and_memory_only(on_two: list[dict[str, Any]], alone: list[float], name: str) -> None:
    for rank in (0, 1):
        assert eval_losses(on_two[rank][name]) == pytest.approx(alone, rel=1e-5)


def test_bf16_keeps_weights_gradients_and_optimizer_in_float32(on_two: list[dict[str, Any]]) -> None:
    ddp, fsdp = (on_two[0]["bf16"][parallel] for parallel in KINDS)
    assert ddp["kept"] == fsdp["kept"] == {torch.float32}
    assert fsdp["eval_loss"] == pytest.approx(ddp["eval_loss"], rel=1e-2)


def test_a_warm_trial_in_shards_equals_a_cold_one_to_the_bit(on_two: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        warm = on_two[rank]["warm"]
        assert_same(warm, on_two[rank]["cold"])
        assert warm["is same model"]
        assert not warm["has gradients"]
    assert 2 <= on_two[0]["warm"]["diverged at"] == on_two[1]["warm"]["diverged at"] <= 4


@pytest.mark.parametrize(
    ("params", "worker", "parallel", "words"),
    [
        ({"fsdp.cpu_offload": False}, CPU, "ddp", "fsdp: is for fsdp, got ddp"),
        ({"fsdp.cpu_offload": True}, CPU, "fsdp", "fsdp.cpu_offload: needs at least 2 workers"),
        ({"optimizer": "adafactor"}, Worker(0, 2, CPU.device), "fsdp", "optimizer: adafactor cannot be divided"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_before_anything_is_loaded(
    folder: Path, params: dict[str, Any], worker: Worker, parallel: Parallelism, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        train(base_config(folder).with_params(params), folder / "cache", worker=worker, parallel=parallel)


@pytest.mark.parametrize(
    ("settings", "num_layers"),
    [
        ({"model_type": "llama", "num_hidden_layers": 3}, 3),
        ({"model_type": "gpt2", "n_layer": 3}, 3),
        # Experts are a longer list, inside each layer.
        ({"model_type": "qwen2_moe", "num_hidden_layers": 2, "num_experts": 4}, 2),
        # Layers of two classes.
        ({"model_type": "jamba", "num_hidden_layers": 4, "num_experts": 2}, 4),
    ],
)
def test_the_layers_of_a_model_are_found_from_the_model(settings: dict[str, Any], num_layers: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
    assert len(transformer_layers(model)) == num_layers


def test_adapters_beside_shards_are_those_beside_a_whole_model_whatever_ran_before(on_two: list[Any]) -> None:
    for result in on_two:
        few, many, again = result["adapters"]["fsdp"]
        assert [few, many, again] == result["adapters"]["ddp"]
        assert few == again != many
