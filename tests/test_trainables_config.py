"""TrainConfig: what it accepts, what it refuses, and that reading it is cheap."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest

from trainables.config import DatasetConfig, LoraConfig, TrainConfig

MINIMAL: dict[str, Any] = {"model": "org/model", "dataset": {"path": "org/data"}}


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, trainables.config, trainables.checkpoint_dir; print(*({'torch', 'numpy'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.split() == []


def test_every_field_has_a_description() -> None:
    for model in (TrainConfig, DatasetConfig, LoraConfig):
        for name, field in model.model_fields.items():
            assert field.description, name


def test_json_round_trip() -> None:
    config = TrainConfig.model_validate(MINIMAL | {"model": {"model_type": "qwen2"}, "learning_rate": 1e-6})
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("learning_rate", "1e-5", "valid number"),
        ("learning_rate", 0.0, "greater than 0"),
        ("learning_rate", math.nan, "finite"),
        ("weight_decay", math.inf, "finite"),
        ("max_steps", 1.5, "valid integer"),
        ("max_steps", True, "valid integer"),
        ("batch_size", 0, "greater than 0"),
        ("seed", -1, "greater than or equal to 0"),
        ("beta2", 1.0, "less than 1"),
        ("warmup_ratio", 1.1, "less than or equal to 1"),
        ("compile", "yes", "valid boolean"),
        ("optimizer", "adam", "'adamw', 'adafactor' or 'sgd'"),
        ("lr_schedule", "cosin", "'constant', 'linear', 'cosine' or 'wsd'"),
        ("model", {"hidden_size": 64}, "needs model_type"),
        ("model", "", "at least 1 character"),
        ("packing", True, "not available yet"),
        ("lora", {"rank": 0}, "greater than 0"),
        ("lora", {"target_modules": []}, "at least 1 item"),
        ("lora.dropout", 1.0, "less than 1"),
        ("dataset.limt", 5, "Extra inputs are not permitted"),
        ("learning_rat", 1e-5, "Extra inputs are not permitted"),
        ("model.hidden_size", 64, "has no keys to set"),
    ],
)
def test_an_illegal_value_is_refused_by_name(key: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        TrainConfig.model_validate(MINIMAL).with_params({key: value})
    assert key.split(".")[0] in str(caught.value)


def test_flash_attention_needs_bf16() -> None:
    with pytest.raises(ValueError, match="needs precision bf16"):
        TrainConfig.model_validate(MINIMAL | {"attention": "flash_attention_2", "precision": "fp32"})


def test_dotted_parameters_reach_nested_keys_and_leave_the_original_alone() -> None:
    config = TrainConfig.model_validate(MINIMAL | {"model": {"model_type": "qwen2", "hidden_size": 32}})
    changed = config.with_params({"dataset.limit": 7, "model.hidden_size": 64, "learning_rate": 1})
    assert (changed.dataset.limit, changed.model, changed.learning_rate) == (
        7,
        {"model_type": "qwen2", "hidden_size": 64},
        1.0,
    )
    assert (config.dataset.limit, config.model) == (None, {"model_type": "qwen2", "hidden_size": 32})
