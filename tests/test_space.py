"""Room for checkpoints is looked at before a study starts and while it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.studies import study_spec
from tests.tiny import MODEL
from trainables.architecture import architecture_of
from tuner.errors import InputError
from tuner.planning import space


def write_model(folder: Path) -> Path:
    folder.mkdir()
    save_file({"a": torch.zeros(10, 20), "b": torch.zeros(5)}, folder / "model-1.safetensors")
    save_file({"c": torch.zeros(3, dtype=torch.bfloat16)}, folder / "model-2.safetensors", {"format": "pt"})
    return folder


def test_parameters_are_counted_over_all_shards_whatever_their_type(tmp_path: Path) -> None:
    assert space.count_parameters(str(write_model(tmp_path / "model"))) == 208


@pytest.mark.parametrize("model", ["nobody/has-this", {"model_type": "unheard-of"}, None])
def test_a_model_that_is_not_known_is_not_guessed_at(model: object) -> None:
    assert space.count_parameters(model) is None


def test_a_model_without_files_is_counted_from_its_numbers() -> None:
    architecture = architecture_of(MODEL)
    assert architecture is not None
    assert space.count_parameters(MODEL) == architecture.parameters
    assert space.count_parameters(MODEL, "org/tokenizer") is None


def test_a_model_in_the_hubs_cache_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--a--b" / "snapshots"
    snapshot.mkdir(parents=True)
    write_model(snapshot / "0123")
    assert space.count_parameters("a/b") == 208
    for file in (snapshot / "0123").glob("*.safetensors"):
        file.unlink()
    (snapshot / "0123" / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 259}))
    assert space.count_parameters("a/b") == space.count_parameters(MODEL)


def test_a_study_whose_checkpoints_cannot_fit_is_refused_with_both_figures(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model"))
    spec = study_spec(tmp_path, train={"model": model}, checkpoint={"keep_last": 2, "keep_best_trials": 4})
    assert space.num_kept(spec, num_slots=2) == 10
    space.check_room(spec, tmp_path / "studies" / "not" / "there", num_slots=2)
    free = space.free_bytes(tmp_path)
    slots = free // (208 * space.BYTES_PER_PARAMETER) + 1
    with pytest.raises(InputError, match=r"checkpoints of 0\.0 MB each need .* GB, .* has .* free"):
        space.check_room(spec, tmp_path, num_slots=slots)


@pytest.mark.parametrize(("size", "text"), [(2_500_000_000, "2.5 GB"), (100_000_000, "0.1 GB"), (1_500_000, "1.5 MB")])
def test_sizes_read_as_people_say_them(size: int, text: str) -> None:
    assert space.gigabytes(size) == text
