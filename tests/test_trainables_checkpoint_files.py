"""The file of a rank: what torch itself writes and reads."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.tiny import CPU, limited_file_size
from trainables.checkpoint import TrainState, save_checkpoint
from trainables.checkpoint_files import write_tensor

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "scalar": torch.tensor(5),
    "transposed": torch.arange(24.0).reshape(4, 6).t(),
    "slice": torch.arange(10.0)[2:5],
    "empty": torch.empty(0),
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "bytes": torch.zeros(2, dtype=torch.uint8),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_written_as_torch_writes_it(name: str) -> None:
    tensor = TENSORS[name]
    ours, theirs = io.BytesIO(), io.BytesIO()
    write_tensor(ours, tensor)
    torch.save(tensor.clone(), theirs)
    assert ours.getvalue() == theirs.getvalue()
    ours.seek(0)
    assert torch.equal(torch.load(ours, weights_only=True), tensor)


@pytest.mark.filterwarnings("ignore")
def test_torch_converts_a_checkpoint_to_one_file(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    state = TrainState(model, torch.optim.AdamW(model.parameters()), step=3, tokens=70)
    model(torch.ones(1, 4)).sum().backward()
    state.optimizer.step()
    save_checkpoint(state, tmp_path / "step_00000003", CPU)
    dcp_to_torch_save(tmp_path / "step_00000003", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["progress"].tolist() == [3, 70]
    assert torch.equal(whole["model"]["weight"], model.weight)
    assert torch.equal(whole["optimizer"]["state"]["bias"]["exp_avg"], state.optimizer.state[model.bias]["exp_avg"])
    assert whole["optimizer"]["param_groups"][0]["params"] == ["weight", "bias"]
    assert torch.equal(whole["rng"]["rank_0"]["cpu"], torch.get_rng_state())


def test_a_write_that_fails_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    with (
        limited_file_size(1000),
        pytest.raises((OSError, RuntimeError)),
        open(tmp_path / "full", "wb", buffering=0) as file,
    ):
        write_tensor(file, torch.zeros(10_000))
