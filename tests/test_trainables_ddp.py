"""The loop on real ranks (gloo): equal to one process, never hanging, resumable on any number.

Starting ranks takes seconds, so each group of ranks runs everything it is needed for and the tests look at the results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.tiny import (
    CPU,
    MODEL,
    limited_file_size,
    run_ranks,
    tiny_config,
    train,
    weights_of,
    without_speed,
    write_texts,
)
from trainables.batches import IGNORED
from trainables.checkpoint import load_checkpoint, save_checkpoint
from trainables.checkpoint_dir import is_complete, read_manifest
from trainables.config import TrainConfig
from trainables.data import prepare
from trainables.errors import CheckpointError, Diverged
from trainables.finetune import Report, Warm, Worker, evaluate, finetune, make_eval_batch
from trainables.model import build_model
from trainables.parallel import Parallelism
from trainables.tokenizer import byte_level_tokenizer

pytestmark = pytest.mark.timeout(120)

KINDS: tuple[Parallelism, ...] = ("ddp", "fsdp")
CHECKPOINT = "ddp/step_00000010"
SHARDED_CHECKPOINT = "fsdp/step_00000010"


def base_config(folder: Path) -> TrainConfig:
    return tiny_config(
        folder / "texts.jsonl", max_steps=20, eval_every=5, dataset={"path": str(folder / "texts.jsonl")}
    )


def dropout_config(folder: Path) -> TrainConfig:
    return base_config(folder).with_params({"model": MODEL | {"attention_dropout": 0.1}, "micro_batch_size": 3})


def first_step(
    config: TrainConfig, worker: Worker, folder: Path, warm: Warm, parallel: Parallelism = "ddp"
) -> dict[str, Any]:
    config = config.with_params({"eval_every": 1})
    trial = finetune(config, worker, cache_dir=folder / "cache", parallel=parallel, warm=warm)
    report = next(trial)
    metrics = {name: report.metrics[name] for name in ("train_loss", "eval_loss", "grad_norm", "tokens")}
    weights = weights_of(report)
    trial.close()
    return {"metrics": metrics, "weights": weights}


STEPS: dict[str, dict[str, Any]] = {
    "whole": {},
    "accumulated": {"micro_batch_size": 1},
    "odd batch": {"batch_size": 5, "micro_batch_size": 2},
    "one example": {"batch_size": 1},
    "recomputed": {"gradient_checkpointing": "full", "micro_batch_size": 2},
    "some recomputed": {"gradient_checkpointing": "selective", "micro_batch_size": 2},
    "adapters": {"lora.rank": 4},
}


def steps_of(parallel: Parallelism) -> list[str]:
    return [name for name, params in STEPS.items() if parallel == "ddp" or "lora" not in str(params)]


def _on_two(worker: Worker, folder: Path) -> dict[str, Any]:
    cache, warm = folder / "cache", Warm()
    config = base_config(folder)
    result: dict[str, Any] = {}
    for parallel in KINDS:
        of_kind = Warm()
        for name in steps_of(parallel):
            step = first_step(config.with_params(STEPS[name]), worker, folder, of_kind, parallel)
            result[f"{parallel} {name}"] = step
        result[f"{parallel} in one go"] = _in_one_go(dropout_config(folder), worker, folder, parallel)
    eleven = config.with_params({"dataset.limit": 11, "batch_size": 2, "max_steps": 12, "eval_every": 12})
    result["eleven"] = without_speed(train(eleven, cache, warm, worker))
    result["diverged"] = _diverged_at(config.with_params({"learning_rate": 1e30}), worker, cache, warm)
    result["eval"] = _evaluate_with_a_bad_share(config, worker, folder)
    result["no space"] = _save_without_space(config, worker, folder, warm)
    return result


def _diverged_at(config: TrainConfig, worker: Worker, cache: Path, warm: Warm) -> int | None:
    try:
        train(config, cache, warm, worker)
    except Diverged as error:
        return error.step
    return None


def _evaluate_with_a_bad_share(config: TrainConfig, worker: Worker, folder: Path) -> tuple[float, float]:
    model = build_model(config, byte_level_tokenizer(), worker.device)
    data = prepare(config.with_params({"dataset.eval_split": "train"}), "eval", folder / "cache", byte_level_tokenizer)
    batch = make_eval_batch(data, config, worker, micro_batch_size=8)
    good = evaluate(model, batch, config, worker)
    if worker.rank == 1:
        targets = batch.micro_batches[0].targets_BT
        targets[targets != IGNORED] = 7
    return good, evaluate(model, batch, config, worker)


def _in_one_go(config: TrainConfig, worker: Worker, folder: Path, parallel: Parallelism) -> dict[str, Any]:
    reports = []
    for report in finetune(config, worker, cache_dir=folder / "cache", parallel=parallel):
        reports.append(report)
        if report.step == 10:
            save_checkpoint(report.state, folder / parallel / "step_00000010", worker)
    return _outcome(reports)


def _outcome(reports: list[Report]) -> dict[str, Any]:
    last = reports[-1]
    return {"reports": without_speed(reports), "weights": weights_of(last), "rng": torch.get_rng_state()}


def _save_without_space(config: TrainConfig, worker: Worker, folder: Path, warm: Warm) -> tuple[str, str]:
    messages = []
    trial = finetune(config, worker, cache_dir=folder / "cache", warm=warm)
    report = next(trial)
    for failing_rank in (0, 1):
        with limited_file_size(100_000 if worker.rank == failing_rank else None):
            try:
                save_checkpoint(report.state, folder / "full" / "step_00000005", worker)
            except CheckpointError as error:
                messages.append(str(error))
        dist.barrier()
    save_checkpoint(report.state, folder / "full" / "step_00000005", worker)
    trial.close()
    first, second = messages
    return first, second


def _resumed_on_two(worker: Worker, folder: Path) -> dict[str, Any]:
    config, cache = dropout_config(folder), folder / "cache"
    outcomes = {}
    for parallel in KINDS:
        path = folder / parallel / "step_00000010"
        outcomes[parallel] = _outcome(
            list(finetune(config, worker, cache_dir=cache, parallel=parallel, resume_from=path))
        )
    return outcomes


def _resumed_without_dropout(worker: Worker, folder: Path) -> dict[str, list[dict[str, float]]]:
    return {
        name: _metrics(base_config(folder), worker, folder, parallel, checkpoint)
        for name, parallel, checkpoint in (
            ("whole as whole", "ddp", CHECKPOINT),
            ("whole as shards", "fsdp", CHECKPOINT),
            ("shards as shards", "fsdp", SHARDED_CHECKPOINT),
        )
    }


def _metrics(
    config: TrainConfig, worker: Worker, folder: Path, parallel: Parallelism, checkpoint: str
) -> list[dict[str, float]]:
    config = config.with_params({"max_steps": 14, "eval_every": 2})
    options: dict[str, Any] = {"parallel": parallel, "resume_from": folder / checkpoint}
    return [report.metrics for report in finetune(config, worker, cache_dir=folder / "cache", **options)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ddp")
    write_texts(path / "texts.jsonl")
    return path


@pytest.fixture(scope="module")
def on_two(folder: Path) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_ranks(_on_two, 2, folder)
    return results


@pytest.mark.parametrize("name", STEPS)
def test_the_first_step_on_two_ranks_equals_the_one_in_one_process(
    on_two: list[dict[str, Any]], folder: Path, name: str
) -> None:
    alone = first_step(base_config(folder).with_params(STEPS[name]), CPU, folder, Warm())
    kinds = [parallel for parallel in KINDS if name in steps_of(parallel)]
    for step in (on_two[rank][f"{parallel} {name}"] for parallel in kinds for rank in (0, 1)):
        assert step["metrics"] == pytest.approx(alone["metrics"], rel=1e-6)
        # Adam's first step is of the size of the rate however small a gradient, so rounding shows where that is tiny.
        torch.testing.assert_close(step["weights"], alone["weights"], rtol=1e-5, atol=1e-5)


def test_metrics_and_weights_are_equal_on_both_ranks(on_two: list[dict[str, Any]]) -> None:
    for parallel in KINDS:
        zero, one = (result[f"{parallel} in one go"] for result in on_two)
        assert zero["reports"] == one["reports"]
        assert all(torch.equal(weight, one["weights"][name]) for name, weight in zero["weights"].items())


def test_eleven_examples_on_two_ranks_at_batch_two(on_two: list[dict[str, Any]], folder: Path) -> None:
    config = base_config(folder)
    eleven = config.with_params({"dataset.limit": 11, "batch_size": 2, "max_steps": 12, "eval_every": 12})
    [(metrics, history)] = without_speed(train(eleven, folder / "cache"))
    [(metrics_on_two, history_on_two)] = on_two[0]["eleven"]
    assert len(history_on_two) == 12
    assert [entry["train_loss"] for entry in history_on_two] == pytest.approx(
        [entry["train_loss"] for entry in history], rel=1e-4
    )
    assert metrics_on_two["epoch"] == metrics["epoch"] == 24 / 11


def test_divergence_is_raised_at_the_same_step_on_every_rank(on_two: list[dict[str, Any]]) -> None:
    assert on_two[0]["diverged"] == on_two[1]["diverged"]
    assert 2 <= on_two[0]["diverged"] <= 4


def test_the_eval_loss_is_over_all_ranks(on_two: list[dict[str, Any]]) -> None:
    (good, bad), other = on_two[0]["eval"], on_two[1]["eval"]
    assert (good, bad) == other
    assert abs(bad - good) > 0.01


def test_twenty_steps_on_two_ranks_equal_ten_and_ten_in_new_processes(
    on_two: list[dict[str, Any]], folder: Path
) -> None:
    resumed = run_ranks(_resumed_on_two, 2, folder)
    for parallel in KINDS:
        for rank in (0, 1):
            second, whole = resumed[rank][parallel], on_two[rank][f"{parallel} in one go"]
            assert second["reports"] == whole["reports"][2:]
            assert all(torch.equal(weight, whole["weights"][name]) for name, weight in second["weights"].items())
            assert torch.equal(second["rng"], whole["rng"])
        assert not torch.equal(resumed[0][parallel]["rng"], resumed[1][parallel]["rng"])


@pytest.mark.usefixtures("on_two")
def test_saved_on_two_ranks_resumed_on_one_and_on_four(folder: Path) -> None:
    on_one = _resumed_without_dropout(CPU, folder)
    on_four = run_ranks(_resumed_without_dropout, 4, folder)
    for name, reports in on_one.items():
        losses, others = ([metrics["eval_loss"] for metrics in on_one[key]] for key in (name, "whole as whole"))
        assert losses == pytest.approx(others, rel=1e-4)
        assert [metrics["step"] for metrics in reports] == [12, 14]
        for rank in range(4):
            for one, four in zip(reports, on_four[rank][name], strict=True):
                assert four["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-4)
                assert four["tokens"] == one["tokens"]


def test_a_rank_without_disk_space_fails_the_save_on_all_and_a_later_one_succeeds(
    on_two: list[dict[str, Any]], folder: Path
) -> None:
    for messages in (on_two[0]["no space"], on_two[1]["no space"]):
        assert all("step_00000005: cannot be written: " in message for message in messages)
        assert all("\n" not in message for message in messages)
    assert [path.name for path in (folder / "full").iterdir()] == ["step_00000005"]
    assert is_complete(folder / "full" / "step_00000005")


@pytest.mark.usefixtures("on_two")
def test_every_rank_writes_a_part_of_a_checkpoint(folder: Path) -> None:
    for checkpoint in (CHECKPOINT, SHARDED_CHECKPOINT):
        manifest = read_manifest(folder / checkpoint)
        assert manifest is not None
        assert manifest["step"] == manifest["metrics"]["step"] == 10
        sizes = [manifest["files"][f"__{rank}_0.distcp"] for rank in (0, 1)]
        assert max(sizes) < 1.5 * min(sizes)


@pytest.mark.usefixtures("on_two")
def test_a_checkpoint_of_another_model_is_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    other = base_config(folder).with_params({"model.hidden_size": 32})
    with pytest.raises(CheckpointError, match=r"step_00000010: cannot be read: .+") as caught:
        list(finetune(other, CPU, cache_dir=folder / "cache", resume_from=folder / CHECKPOINT))
    assert "\n" not in str(caught.value)
    report = next(finetune(other, CPU, cache_dir=folder / "cache"))
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        load_checkpoint(report.state, tmp_path / "step_00000010", CPU)
