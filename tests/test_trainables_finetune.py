"""The loop in one process: exactness, resuming, warm trials, divergence, refusals."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny import CPU, MODEL, run_ranks, tiny_config, train, weights_of, without_speed, write_texts
from trainables import train_state
from trainables.checkpoint import save_checkpoint
from trainables.config import TrainConfig
from trainables.data import prepare
from trainables.errors import Diverged
from trainables.finetune import Warm, Worker, finetune, make_train_batch, train_step
from trainables.model import attention_kernel, build_model
from trainables.optim import make_optimizer
from trainables.tokenizer import byte_level_tokenizer

DROPOUT = MODEL | {"attention_dropout": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finetune")
    write_texts(path / "texts.jsonl")
    return path


@pytest.fixture(scope="module")
def config(folder: Path) -> TrainConfig:
    return tiny_config(folder / "texts.jsonl")


def test_reports_come_every_eval_every_steps_and_at_the_end(config: TrainConfig, folder: Path) -> None:
    reports = train(config.with_params({"max_steps": 7, "eval_every": 3}), folder)
    assert [(report.step, report.is_last) for report in reports] == [(3, False), (6, False), (7, True)]
    assert [[int(entry["step"]) for entry in report.history] for report in reports] == [[1, 2, 3], [4, 5, 6], [7]]
    assert set(reports[0].metrics) == {
        "step", "eval_loss", "train_loss", "learning_rate", "grad_norm", "tokens", "tokens_per_s", "epoch",
    }  # fmt: skip
    assert set(reports[0].history[0]) == {"step", "train_loss", "learning_rate", "grad_norm"}
    assert reports[0].train_s > 0
    assert reports[0].eval_s > 0
    assert reports[-1].metrics["epoch"] == pytest.approx(7 * 8 / 61)
    assert reports[-1].metrics["learning_rate"] == reports[-1].history[-1]["learning_rate"]


def test_training_lowers_the_loss(config: TrainConfig, folder: Path) -> None:
    losses = [report.metrics["eval_loss"] for report in train(config.with_params({"max_steps": 30}), folder)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
def test_accumulation_changes_nothing(config: TrainConfig, folder: Path, micro_batch_size: int) -> None:
    whole, parts = (
        next(finetune(config.with_params({"eval_every": 1, "micro_batch_size": size}), CPU, cache_dir=folder))
        for size in (None, micro_batch_size)
    )
    for name in ("train_loss", "grad_norm", "eval_loss"):
        assert parts.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-6), name
    assert parts.metrics["tokens"] == whole.metrics["tokens"]
    torch.testing.assert_close(weights_of(parts), weights_of(whole), rtol=1e-5, atol=2e-6)


def test_the_loss_is_the_mean_over_the_target_tokens_of_each_example_alone(config: TrainConfig, folder: Path) -> None:
    report = next(finetune(config.with_params({"eval_every": 1, "learning_rate": 1e-30}), CPU, cache_dir=folder))
    store = prepare(config, "eval", folder, byte_level_tokenizer)
    model = build_model(config, byte_level_tokenizer(), CPU.device)
    loss_sum, num = 0.0, 0
    for index in range(len(store)):
        tokens = torch.from_numpy(store.example(index)[0].astype("int64"))
        log_probs = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
        loss_sum -= log_probs[torch.arange(len(tokens) - 1), tokens[1:]].sum().item()
        num += len(tokens) - 1
    assert report.metrics["eval_loss"] == pytest.approx(loss_sum / num, rel=1e-5)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"model": DROPOUT, "lr_schedule": "wsd", "warmup_ratio": 0.2, "micro_batch_size": 3},
        {"optimizer": "adafactor", "weight_decay": 0.1},
        {"optimizer": "sgd", "learning_rate": 0.1},
        {"optimizer": "sgd", "beta1": 0.0},
        {"precision": "bf16", "gradient_checkpointing": "full", "model": DROPOUT},
    ],
)
def test_twenty_steps_in_one_go_equal_ten_and_ten_bit_for_bit(
    config: TrainConfig, folder: Path, tmp_path: Path, params: dict[str, Any]
) -> None:
    config = config.with_params({"max_steps": 20, "eval_every": 5, **params})
    in_one_go = train(config, folder)
    first_half = []
    for report in finetune(config, CPU, cache_dir=folder):
        first_half.append(report)
        if report.step == 10:
            save_checkpoint(report.state, tmp_path / "step_00000010", CPU)
            break
    torch.manual_seed(123)
    second_half = list(finetune(config, CPU, cache_dir=folder, resume_from=tmp_path / "step_00000010"))
    assert without_speed(first_half + second_half) == without_speed(in_one_go)
    one, other = weights_of(in_one_go[-1]), weights_of(second_half[-1])
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert second_half[-1].state.tokens == in_one_go[-1].state.tokens


def test_a_checkpoint_made_without_a_gpu_goes_on_with_one(
    config: TrainConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = finetune(config, CPU, cache_dir=folder)
    save_checkpoint(next(trial).state, tmp_path / "step_00000003", CPU)
    rest = without_speed(list(trial))
    # What a worker with a GPU looks for.
    states = train_state._rng_state
    monkeypatch.setattr(train_state, "_rng_state", lambda worker: {**states(worker), "cuda": torch.get_rng_state()})
    assert without_speed(list(finetune(config, CPU, cache_dir=folder, resume_from=tmp_path / "step_00000003"))) == rest


def test_resuming_a_finished_trial_repeats_its_last_report(config: TrainConfig, folder: Path, tmp_path: Path) -> None:
    last = train(config, folder)[-1]
    save_checkpoint(last.state, tmp_path / "step_00000006", CPU)
    [again] = finetune(config, CPU, cache_dir=folder, resume_from=tmp_path / "step_00000006")
    assert (again.step, again.is_last, again.metrics, again.history) == (6, True, last.metrics, ())


def test_equal_seeds_repeat_and_other_seeds_start_from_the_same_weights(config: TrainConfig, folder: Path) -> None:
    once, twice, other = (train(config.with_params({"seed": seed}), folder) for seed in (0, 0, 1))
    assert without_speed(once) == without_speed(twice)
    assert once[0].metrics["train_loss"] != other[0].metrics["train_loss"]
    still = {"learning_rate": 1e-30, "max_steps": 1}
    losses = [train(config.with_params({"seed": seed, **still}), folder)[0].metrics["eval_loss"] for seed in (0, 1)]
    assert losses[0] == losses[1]


def _train_alone(worker: Worker, folder: Path) -> Any:
    config = TrainConfig.model_validate_json((folder / "config.json").read_text())
    return without_speed(list(finetune(config, worker, cache_dir=folder)))


def test_a_warm_trial_equals_one_in_a_fresh_process_bit_for_bit(config: TrainConfig, folder: Path) -> None:
    config = config.with_params({"model": DROPOUT})
    (folder / "config.json").write_text(config.model_dump_json())
    [fresh] = run_ranks(_train_alone, 1, folder)
    warm = Warm()
    before = config.with_params({"learning_rate": 0.1, "gradient_checkpointing": "full", "seed": 5, "max_length": 64})
    train(before, folder, warm)
    next(finetune(before, CPU, cache_dir=folder, warm=warm))
    with pytest.raises(Diverged):
        train(config.with_params({"learning_rate": 1e30}), folder, warm)
    assert without_speed(train(config, folder, warm)) == fresh


def test_a_warm_keeps_the_model_as_long_as_its_settings_stay(config: TrainConfig, folder: Path) -> None:
    warm = Warm()
    first = weakref.ref(train(config, folder, warm)[-1].state.model)
    assert train(config.with_params({"learning_rate": 0.5}), folder, warm)[-1].state.model is first()
    train(config.with_params({"model.hidden_size": 32}), folder, warm)
    assert first() is None


def test_a_further_trial_reads_neither_the_weights_nor_the_data_again(config: TrainConfig, tmp_path: Path) -> None:
    saved, texts = tmp_path / "saved", write_texts(tmp_path / "texts.jsonl")
    build_model(config, byte_level_tokenizer(), CPU.device).save_pretrained(saved)  # type: ignore[operator]
    byte_level_tokenizer().save_pretrained(saved)
    config = tiny_config(texts, model=str(saved))
    warm = Warm()
    first = train(config, tmp_path / "cache", warm)
    shutil.rmtree(saved)
    shutil.rmtree(tmp_path / "cache")
    texts.unlink()
    assert without_speed(train(config, tmp_path / "cache", warm)) == without_speed(first)


def test_a_closed_trial_leaves_no_gradients_and_no_cycles(config: TrainConfig, folder: Path) -> None:
    warm = Warm()
    train(config, folder, warm)
    gc.collect()
    gc.disable()
    try:
        trial = finetune(config, CPU, cache_dir=folder, warm=warm)
        report = next(trial)
        model, optimizer = report.state.model, weakref.ref(report.state.optimizer)
        trial.close()
        del trial, report
        assert all(parameter.grad is None for parameter in model.parameters())
        assert optimizer() is None
    finally:
        gc.enable()


def resident_pages() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])


def test_memory_does_not_grow_over_sixty_trials(config: TrainConfig, folder: Path) -> None:
    warm = Warm()
    sizes = []
    for number in range(60):
        params = {"learning_rate": 10 ** -(3 + number % 3), "optimizer": ["adamw", "adafactor", "sgd"][number % 3]}
        trial = finetune(config.with_params({"eval_every": 1, **params}), CPU, cache_dir=folder, warm=warm)
        next(trial)
        trial.close()
        sizes.append(resident_pages())
    assert max(sizes[30:]) < 1.05 * max(sizes[:10])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_loss_that_is_not_finite_names_its_first_step(config: TrainConfig, folder: Path, optimizer: str) -> None:
    params = {"learning_rate": 1e30, "optimizer": optimizer, "max_steps": 50, "eval_every": 50}
    with pytest.raises(Diverged) as caught:
        train(config.with_params(params), folder)
    assert 2 <= caught.value.step <= 4
    assert str(caught.value) == f"diverged at step {caught.value.step}"


def test_fewer_examples_than_one_batch_are_refused_before_the_start(config: TrainConfig, folder: Path) -> None:
    with pytest.raises(ValueError, match="has 5 examples, fewer than one batch of 8; set batch_size to at most 5"):
        train(config.with_params({"dataset.limit": 5}), folder)


def test_an_example_beyond_the_positions_of_the_model_is_refused(config: TrainConfig, folder: Path) -> None:
    with pytest.raises(ValueError, match="set max_length: 16"):
        train(config.with_params({"model.max_position_embeddings": 16}), folder)


def test_eval_batches_limits_the_evaluation_whatever_the_batch_size(config: TrainConfig, folder: Path) -> None:
    config = config.with_params({"dataset.eval_split": "train", "learning_rate": 1e-30, "max_steps": 1})
    limited = [
        train(config.with_params({"eval_batches": 1, "batch_size": size}), folder)[0].metrics["eval_loss"]
        for size in (4, 16)
    ]
    first_32 = train(config.with_params({"dataset.eval_split": "train[:32]"}), folder)[0].metrics["eval_loss"]
    whole = train(config, folder)[0].metrics["eval_loss"]
    assert limited == pytest.approx([first_32] * 2, rel=1e-6)
    assert whole != pytest.approx(first_32, rel=1e-6)


def test_clipping_bounds_the_step_and_reports_the_norm_before_it(config: TrainConfig, folder: Path) -> None:
    one_step = {"max_steps": 1, "optimizer": "sgd", "learning_rate": 1.0}
    start = build_model(config, byte_level_tokenizer(), CPU.device).state_dict()
    moved = {}
    for max_norm in (0.0, 0.5):
        report = train(config.with_params({"max_grad_norm": max_norm, **one_step}), folder)[0]
        moved[max_norm] = report.metrics["grad_norm"], {n: w - start[n] for n, w in weights_of(report).items()}
    assert moved[0.0][0] == moved[0.5][0] > 0.5
    torch.testing.assert_close(
        moved[0.5][1], {n: w * 0.5 / moved[0.0][0] for n, w in moved[0.0][1].items()}, rtol=1e-3, atol=1e-6
    )


@pytest.mark.parametrize(
    "params",
    [
        {"gradient_checkpointing": "full"},
        {"gradient_checkpointing": "selective"},
        {"attention": "eager"},
        {"attention": "sdpa"},
        {"packing": False},
        {"packing": True, "attention": "eager", "micro_batch_size": 3},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
)
def test_speed_settings_leave_the_losses_alone(config: TrainConfig, folder: Path, params: dict[str, Any]) -> None:
    plain, other = train(config, folder), train(config.with_params(params), folder)
    for one, two in zip(plain, other, strict=True):
        assert two.metrics["eval_loss"] == pytest.approx(one.metrics["eval_loss"], rel=1e-4)


class Reads(TorchDispatchMode):
    """Notes when a number is read from a tensor: on a GPU, that waits for all that was asked of it before."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_local_scalar_dense":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_reads_nothing_back(config: TrainConfig, folder: Path, optimizer: str) -> None:
    config, warm = config.with_params({"optimizer": optimizer, "micro_batch_size": 3, "precision": "bf16"}), Warm()
    model, data = warm.model(config, CPU), warm.data(config, "train", folder)
    made = make_optimizer(model, config)
    for step in (0, 1):
        batch = make_train_batch(data, step, config, CPU, micro_batch_size=3)
        with Reads() as reads:
            train_step(model, made, batch, config, CPU)
        assert reads.names == []


def test_attention_without_a_gpu_is_what_transformers_takes(config: TrainConfig) -> None:
    device = torch.device("cpu")
    assert attention_kernel(config.with_params({"precision": "bf16"}), device) is None
    assert attention_kernel(config.with_params({"attention": "eager"}), device) == "eager"


def test_bf16_keeps_float32_weights(config: TrainConfig, folder: Path) -> None:
    plain = train(config, folder)[-1]
    mixed = train(config.with_params({"precision": "bf16"}), folder)[-1]
    assert {weight.dtype for weight in weights_of(mixed).values()} == {torch.float32}
    assert mixed.metrics["eval_loss"] == pytest.approx(plain.metrics["eval_loss"], rel=2e-2)


def test_a_folder_with_weights_and_tokenizer_is_a_model(config: TrainConfig, folder: Path) -> None:
    last = train(config, folder)[-1]
    last.state.model.save_pretrained(folder / "saved")  # type: ignore[operator]
    byte_level_tokenizer().save_pretrained(folder / "saved")
    again = train(config.with_params({"model": str(folder / "saved"), "learning_rate": 1e-30, "max_steps": 1}), folder)
    assert again[0].metrics["eval_loss"] == pytest.approx(last.metrics["eval_loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"model": "no/such-model", "tokenizer": "byte-level"}, "'no/such-model' cannot be loaded"),
        ({"tokenizer": "no/such-tokenizer"}, "tokenizer 'no/such-tokenizer' cannot be loaded"),
        ({"model": {"model_type": "qwen9"}}, "of type 'qwen9' cannot be loaded"),
        ({"model": MODEL | {"hiden_size": 64}}, "unknown keys hiden_size"),
        ({"model": MODEL | {"vocab_size": 100}}, "the tokenizer has 259 tokens, vocab_size is 100"),
    ],
)
def test_a_model_that_cannot_be_had_is_named(
    config: TrainConfig, folder: Path, params: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        train(config.with_params(params), folder)
