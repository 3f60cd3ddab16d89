"""A plain Ray Train function, as it would stand in any script with a TorchTrainer: it knows nothing of this project.

tune run search_spaces/own_loop.yaml
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import ray.train.torch
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_func(config: dict[str, Any]) -> None:
    """Fits a curve; `config` holds the keys of `train` with the searched ones put in."""
    torch.manual_seed(config["seed"])
    x, y = make_data()
    model = nn.Sequential(nn.Linear(1, config["hidden_size"]), nn.Tanh(), nn.Linear(config["hidden_size"], 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    first_epoch = load(model, optimizer)

    # On the worker's device, in DDP when there are several; the loader deals the examples out to them.
    model = ray.train.torch.prepare_model(model)
    batch_size = config["batch_size"] // ray.train.get_context().get_world_size()
    loader = ray.train.torch.prepare_data_loader(DataLoader(TensorDataset(x, y), batch_size, shuffle=True))

    for epoch in range(first_epoch, config["epochs"]):
        if ray.train.get_context().get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(x), y).item()
        # Every report needs `step` and the objective's metric. When the trial is over, this call does not return.
        with tempfile.TemporaryDirectory() as folder:
            save(model, optimizer, epoch + 1, Path(folder))
            metrics = {"step": (epoch + 1) * len(loader), "loss": loss}
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """256 points of a sine with two periods."""
    x = torch.linspace(-1, 1, 256).unsqueeze(1)
    return x, torch.sin(2 * torch.pi * x)


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Goes on from the trial's newest checkpoint, if there is one; returns the number of epochs done."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        state = torch.load(Path(folder, "state.pt"), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["epochs"])


def save(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int, folder: Path) -> None:
    """Writes a checkpoint; all ranks hold the same, so one writes it."""
    if ray.train.get_context().get_world_rank() == 0:
        weights = getattr(model, "module", model).state_dict()
        torch.save({"model": weights, "optimizer": optimizer.state_dict(), "epochs": epochs}, folder / "state.pt")
