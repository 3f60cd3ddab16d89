"""Passes that do not fit into memory are halved, and nothing else changes; what a trial will take is estimated."""

from __future__ import annotations

import ctypes
import gc
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.benchmarks.head import peak_bytes
from tests.benchmarks.packing import alpaca_like
from tests.tiny import CPU, run_ranks, tiny_config, train, without_speed, write_texts
from trainables.architecture import architecture_of
from trainables.batches import Batch, MicroBatch, make_batch
from trainables.config import TrainConfig
from trainables.data import prepare
from trainables.errors import OutOfMemory, is_out_of_memory
from trainables.finetune import Worker, train_step
from trainables.memory import estimate
from trainables.micro_batch import NOTES, MicroBatchSize
from trainables.model import build_model, set_gradient_checkpointing
from trainables.optim import make_optimizer
from trainables.packing import set_packing
from trainables.tokenizer import byte_level_tokenizer
from tuner.decisions.failures import cause_of
from tuner.planning.plan import make_plan
from tuner.study_file.spec import load_spec

MIB = 1 << 20


@contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """Whatever asks for more than this beyond what the process has fails to get it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    # What was freed before is not to be had again.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def large_config(folder: Path) -> TrainConfig:
    # Attention that makes few and large tensors: a pass over 16 examples takes some 70 MB for each.
    settings = {"max_length": 512, "batch_size": 16, "max_steps": 1, "eval_every": 1, "eval_batches": 1}
    return tiny_config(folder / "texts.jsonl", **settings, attention="eager", packing=False)


def _short_of_memory(worker: Worker, folder: Path) -> dict[str, Any]:
    config = large_config(folder)
    # What is allocated once is there then before memory becomes short.
    result: dict[str, Any] = {"one": without_speed(train(config.with_params({"micro_batch_size": 1}), folder / "one"))}
    with limited_memory(120 * MIB):
        result["found"] = without_speed(train(config, folder / "cache"))
        result["notes"] = json.loads((folder / "cache" / NOTES).read_text())
        result["again"] = without_speed(train(config, folder / "cache"))
    # A single example of these takes a tensor of 67 MB, more than the allocator has left over from before.
    long = config.with_params({"max_length": 2048})
    prepare(long, "train", folder / "cache", byte_level_tokenizer)
    with limited_memory(MIB):
        try:
            train(long, folder / "cache")
        except OutOfMemory as error:
            result["failure"] = (error.num_examples, cause_of(error).reason)
    return result


def test_passes_that_do_not_fit_are_halved_and_the_size_is_remembered(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", num=64, max_words=500)
    [result] = run_ranks(_short_of_memory, 1, tmp_path)
    [size] = result["notes"].values()
    assert 1 <= size < 16
    for (found, _), (one, _) in zip(result["found"], result["one"], strict=True):
        assert found == pytest.approx(one, rel=1e-5)
    for (again, _), (one, _) in zip(result["again"], result["one"], strict=True):
        assert again == pytest.approx(one, rel=1e-5)
    assert result["failure"] == (1, "out of memory: OutOfMemory: out of memory in a pass over 1 example")


def test_a_size_found_is_that_of_all_trials_whose_passes_take_as_much(tmp_path: Path) -> None:
    config = config_of(QWEN2, lora={"rank": 4, "dropout": 0.1})
    lacking = OutOfMemory(16)
    tokens = torch.zeros(16, 2, dtype=torch.int64)
    MicroBatchSize(config, CPU, tmp_path, 64.0).shrink(lacking, Batch([MicroBatch(tokens, tokens)], 32, 32))
    same = ({}, {"lora.alpha": 3.0}, {"lora.dropout": 0.2}, {"learning_rate": 1.0})
    other = ({"lora.rank": 8}, {"lora.dropout": 0.0}, {"lora": None}, {"max_length": 8})
    sizes = [MicroBatchSize(config.with_params(each), CPU, tmp_path, 64.0).examples for each in (*same, *other)]
    assert sizes == [8] * 4 + [16] * 4
    assert MicroBatchSize(config, CPU, tmp_path, 64.0, "fsdp").examples == 16


@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN"])
def test_what_the_libraries_of_a_gpu_say_when_memory_is_short(library: str) -> None:
    assert is_out_of_memory(RuntimeError(f"error: {library}_STATUS_ALLOC_FAILED when calling `create(handle)`"))
    assert not is_out_of_memory(RuntimeError(f"error: {library}_STATUS_EXECUTION_FAILED"))


def _rank_one_short_of_memory(worker: Worker, folder: Path) -> tuple[str, int, list[Any]]:
    config = large_config(folder)
    limit = 40 * MIB if worker.rank == 1 else 8192 * MIB
    train(config.with_params({"micro_batch_size": 1, "max_steps": 1}), folder / "first", worker=worker)
    # Tokenising is no part of this: the library ends its process when it gets no memory.
    prepare(config, "train", folder / "cache", byte_level_tokenizer)
    try:
        with limited_memory(limit):
            reports = train(config, folder / "cache", worker=worker)
    except (OutOfMemory, RuntimeError) as error:
        # The end of the process is what frees the others.
        return type(error).__name__, getattr(error, "num_examples", 0), []
    return "completed", 0, without_speed(reports)


@pytest.mark.slow
def test_a_rank_short_of_memory_ends_the_attempt_on_all_and_the_next_one_is_smaller(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", num=64, max_words=100)
    attempts = []
    while not attempts or attempts[-1][1][0] != "completed":
        attempts.append(run_ranks(_rank_one_short_of_memory, 2, tmp_path))
        assert len(attempts) <= 4
    *failed, [(_, _, reports), (_, _, reports_of_one)] = attempts
    assert [one[:2] for _, one in failed] == [("OutOfMemory", size) for size in (8, 4, 2)][: len(failed)]
    assert {zero[0] for zero, _ in failed} == {"RuntimeError"}
    alone = without_speed(train(large_config(tmp_path), tmp_path / "alone"))
    assert reports == reports_of_one
    assert reports[0][0] == pytest.approx(alone[0][0], rel=1e-5)


QWEN2 = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 8000}


def config_of(model: dict[str, Any], **settings: Any) -> TrainConfig:
    values = {"model": model, "dataset": {"path": "x"}, "precision": "fp32", "batch_size": 16}
    return TrainConfig.model_validate(values | settings)


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ({}, {}),
        ({}, {"precision": "bf16"}),
        ({}, {"gradient_checkpointing": "full"}),
        ({}, {"gradient_checkpointing": "selective"}),
        ({"vocab_size": 20000}, {}),
        (WIDE, {"batch_size": 2, "micro_batch_size": 1}),
    ],
)
def test_the_estimate_is_within_a_fifth_of_what_is_measured(model: dict[str, Any], settings: dict[str, Any]) -> None:
    config = config_of(QWEN2 | model, **settings)
    network: Any = build_model(config, byte_level_tokenizer(), CPU.device)
    set_gradient_checkpointing(network, config.gradient_checkpointing)
    assert set_packing(network, config, CPU)
    optimizer = make_optimizer(network.train(), config)
    size = config.micro_batch_size or config.batch_size
    batch = make_batch(
        alpaca_like(config.batch_size), np.arange(config.batch_size), 0, 1, size, CPU.device, is_packed=True
    )
    train_step(network, optimizer, batch, config, CPU)
    optimizer.zero_grad()
    measured = peak_bytes(lambda: train_step(network, optimizer, batch, config, CPU))
    tokens = max(micro_batch.tokens_BT.numel() for micro_batch in batch.micro_batches)
    architecture = architecture_of(config.model, config.tokenizer)
    assert architecture is not None
    memory = estimate(config, architecture, device="cpu", tokens=tokens)
    # Weights and optimizer were there before; the copies that autocast makes of weights were not.
    before = architecture.parameters * 4 + memory.optimizer
    assert memory.peak - before == pytest.approx(measured, rel=0.2)


def test_dividing_a_model_among_workers_saves_what_is_divided() -> None:
    config = config_of(QWEN2 | WIDE)
    architecture = architecture_of(config.model, config.tokenizer)
    assert architecture is not None
    whole, divided = (estimate(config, architecture, world_size=8, is_sharded=sharded) for sharded in (False, True))
    assert divided.optimizer == whole.optimizer // 8
    assert divided.gradients == whole.gradients // 8
    assert divided.peak < whole.peak


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"micro_batch_size": 2}, {}),
        ({"fsdp": {"reduce_every_pass": False}}, {"gradients": 1}),
        ({"fsdp": {"reduce_every_pass": True}}, {"gradients": 1 / 8}),
        ({"fsdp": {"cpu_offload": True}}, {"gradients": 1, "optimizer": 0}),
        ({"fsdp": {"cpu_offload": True, "reduce_every_pass": True}}, {"gradients": 0, "optimizer": 0}),
    ],
)
def test_what_shards_leave_on_a_device_follows_from_their_settings(
    settings: dict[str, Any], part: dict[str, float]
) -> None:
    config = config_of(QWEN2 | WIDE, **{"micro_batch_size": 1, **settings})
    architecture = architecture_of(config.model, config.tokenizer)
    assert architecture is not None
    memory, whole = (
        estimate(config, architecture, world_size=8, is_sharded=is_sharded) for is_sharded in (True, False)
    )
    expected = {"gradients": 1 / 8, "optimizer": 1 / 8} | part
    assert {name: getattr(memory, name) for name in expected} == {
        name: share * getattr(whole, name) for name, share in expected.items()
    }
    is_offloaded = config.fsdp is not None and config.fsdp.cpu_offload
    gathered = 4 * 2 * (architecture.layer_parameters + architecture.head_parameters)
    assert memory.weights == gathered + (0 if is_offloaded else whole.weights // 8)


def test_a_plan_names_the_memory_of_the_largest_trial(demo_file: Path) -> None:
    model = ", ".join(f"{key}: {value}" for key, value in QWEN2.items())
    overrides = [f"train.model={{{model}}}", "scaling.gpus_per_worker=0"]
    adamw = make_plan(load_spec(demo_file, overrides), None).memory
    assert adamw.startswith("about ")
    assert "optimizer 2.13 MiB" in adamw
    sgd = [
        *overrides,
        "search_space.optimizer.choices=[sgd, adafactor]",
        "search_space.beta2=null",
        "train.optimizer=sgd",
    ]
    assert "optimizer 1.06 MiB" in make_plan(load_spec(demo_file, sgd), None).memory
