"""Saving beside the loop: what is written is the state at the call, whole or not at all, on one rank and on two."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.tiny import CPU, MODEL, limited_file_size, processes, run_ranks, tiny_config, write_texts
from trainables.checkpoint import load_checkpoint, save_checkpoint
from trainables.checkpoint_dir import complete_checkpoints, is_complete, newest_complete, read_manifest, step_dir
from trainables.errors import CheckpointError
from trainables.finetune import Worker, finetune
from trainables.saver import CheckpointSaver
from trainables.train_state import TrainState, contents

pytestmark = pytest.mark.timeout(120)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd without momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


class Gate:
    """Stands in the writer's way until it is opened."""

    def __init__(self, saver: CheckpointSaver) -> None:
        self._opened = threading.Event()
        saver._writer.begin(self)  # type: ignore[arg-type]

    def run(self, worker: Worker, group: dist.ProcessGroup | None) -> None:
        assert self._opened.wait(30)

    def open(self) -> None:
        self._opened.set()


def make_state(optimizer: str = "adamw", size: int = 6) -> TrainState:
    torch.manual_seed(size)
    model = nn.Sequential(nn.Linear(size, size), nn.LayerNorm(size), nn.Linear(size, 2))
    model[2].bias.requires_grad_(False)
    model.register_buffer("seen", torch.arange(3))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.0}]
    state = TrainState(model, OPTIMIZERS[optimizer](groups))
    advance(state)
    return state


def advance(state: TrainState) -> None:
    size = next(state.model.parameters()).shape[1]
    state.optimizer.zero_grad()
    state.model(torch.randn(4, size)).square().sum().backward()
    state.optimizer.step()
    state.step += 1
    state.tokens += 4
    state.metrics = {"step": state.step}


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: leaf for item in value for key, leaf in leaves(value[item], f"{name}.{item}").items()}


def values_of(state: TrainState) -> dict[str, Any]:
    model, optimizer = get_state_dict(state.model, state.optimizer)
    return leaves({"model": model, "optimizer": optimizer, "step": state.step, "tokens": state.tokens})


def copied(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def assert_equal(ones: dict[str, Any], others: dict[str, Any]) -> None:
    assert ones.keys() == others.keys()
    for name, one in ones.items():
        assert torch.equal(one, others[name]) if isinstance(one, torch.Tensor) else one == others[name], name


def loaded(path: Path, optimizer: str = "adamw", size: int = 6) -> dict[str, Any]:
    state = make_state(optimizer, size)
    load_checkpoint(state, path, CPU)
    return values_of(state)


@pytest.fixture
def saver() -> Iterator[CheckpointSaver]:
    saver = CheckpointSaver(CPU)
    yield saver
    saver.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_is_written_has_the_names_that_torch_gives(optimizer: str) -> None:
    state = make_state(optimizer)
    written = contents(state, CPU)
    trained = StateDictOptions(ignore_frozen_params=True)
    model, ours = get_state_dict(state.model, state.optimizer, options=trained)
    assert_equal(leaves({"model": written["model"]}), leaves({"model": model}))
    assert_equal(leaves(written["optimizer"]), leaves(ours))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_at_the_call_is_saved_however_it_changes_before_it_is_written(
    tmp_path: Path, saver: CheckpointSaver, optimizer: str
) -> None:
    state, gate = make_state(optimizer), Gate(saver)
    notes = {"reports": [1, 2]}
    saver.save(state, step_dir(tmp_path, 1), notes)
    before, random_before = copied(values_of(state)), torch.get_rng_state()
    advance(state)
    assert saver.poll() == []
    gate.open()
    saver.wait()
    assert saver.poll() == [step_dir(tmp_path, 1)]
    assert saver.poll() == []
    manifest = read_manifest(step_dir(tmp_path, 1))
    assert manifest is not None
    assert (manifest["step"], manifest["metrics"], manifest["notes"]) == (1, {"step": 1}, notes)
    assert_equal(loaded(step_dir(tmp_path, 1), optimizer), before)
    assert torch.equal(torch.get_rng_state(), random_before)


@pytest.mark.parametrize("params", [{}, {"optimizer": "adafactor", "model": MODEL | {"attention_dropout": 0.1}}])
def test_a_checkpoint_written_while_the_loop_goes_on_equals_one_written_at_that_step(
    tmp_path: Path, saver: CheckpointSaver, params: dict[str, Any]
) -> None:
    config = tiny_config(write_texts(tmp_path / "texts.jsonl"), eval_every=2).with_params(params)
    for report in finetune(config, CPU, cache_dir=tmp_path / "cache"):
        save_checkpoint(report.state, step_dir(tmp_path / "at once", report.step), CPU)
        saver.save(report.state, step_dir(tmp_path / "beside", report.step))
    saver.wait()
    for step in (2, 4, 6):
        one, other = step_dir(tmp_path / "at once", step), step_dir(tmp_path / "beside", step)
        assert is_complete(other)
        assert (one / "__0_0.distcp").read_bytes() == (other / "__0_0.distcp").read_bytes()


def test_saves_follow_one_another_and_copies_serve_states_of_any_shape(tmp_path: Path, saver: CheckpointSaver) -> None:
    states = [make_state("adamw", 6), make_state("adamw", 7), make_state("adafactor", 7), make_state("adamw", 6)]
    for step, state in enumerate(states, start=1):
        saver.save(state, step_dir(tmp_path, step))
    saver.wait()
    assert saver.poll() == [step_dir(tmp_path, step) for step in (1, 2, 3, 4)]
    for step, (optimizer, size) in enumerate([("adamw", 6), ("adamw", 7), ("adafactor", 7), ("adamw", 6)], start=1):
        assert_equal(loaded(step_dir(tmp_path, step), optimizer, size), values_of(states[step - 1]))


def test_older_checkpoints_go_once_the_new_one_is_complete(tmp_path: Path, saver: CheckpointSaver) -> None:
    state = make_state()
    for step in (1, 2, 3):
        saver.save(state, step_dir(tmp_path, step), keep_last=1, protected=[step_dir(tmp_path, 1)])
    saver.wait()
    assert complete_checkpoints(tmp_path) == [step_dir(tmp_path, 1), step_dir(tmp_path, 3)]
    gate = Gate(saver)
    saver.save(state, step_dir(tmp_path, 4), keep_last=1)
    assert complete_checkpoints(tmp_path) == [step_dir(tmp_path, 1), step_dir(tmp_path, 3)]
    gate.open()
    saver.wait()
    assert complete_checkpoints(tmp_path) == [step_dir(tmp_path, 4)]


def test_a_save_that_fails_is_raised_once_at_the_next_call_and_leaves_what_was_there(
    tmp_path: Path, saver: CheckpointSaver
) -> None:
    state = make_state(size=100)
    saver.save(state, step_dir(tmp_path, 1))
    saver.wait()
    for step, next_call in ((2, saver.wait), (3, lambda: saver.save(state, step_dir(tmp_path, 9)))):
        with limited_file_size(10_000):
            saver.save(state, step_dir(tmp_path, step), keep_last=1)
            with pytest.raises(CheckpointError, match=rf"step_0000000{step}: cannot be written: .+") as caught:
                next_call()
        assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    saver.save(state, step_dir(tmp_path, 4), keep_last=1)
    saver.wait()
    assert saver.poll() == [step_dir(tmp_path, 1), step_dir(tmp_path, 4)]
    assert complete_checkpoints(tmp_path) == [step_dir(tmp_path, 4)]


def test_a_folder_that_cannot_be_made_is_an_error_of_the_save(tmp_path: Path, saver: CheckpointSaver) -> None:
    (tmp_path / "file").write_text("")
    saver.save(make_state(), step_dir(tmp_path / "file", 1))
    with pytest.raises(CheckpointError, match="cannot be written"):
        saver.wait()
    with pytest.raises(CheckpointError, match="cannot be written"):
        save_checkpoint(make_state(), step_dir(tmp_path / "file", 1), CPU)


def test_an_abandoned_save_ends_quietly_and_does_not_bring_back_a_deleted_folder(
    tmp_path: Path, saver: CheckpointSaver
) -> None:
    root, state, gate = tmp_path / "7", make_state(), Gate(saver)
    saver.save(state, step_dir(root, 1))
    shutil.rmtree(root)
    saver.abandon()
    gate.open()
    saver.save(state, step_dir(tmp_path / "8", 1))
    saver.wait()
    assert saver.poll() == [step_dir(tmp_path / "8", 1)]
    assert [path.name for path in tmp_path.iterdir()] == ["8"]


def test_an_abandoned_save_leaves_the_checkpoints_before_it(tmp_path: Path, saver: CheckpointSaver) -> None:
    state = make_state()
    saver.save(state, step_dir(tmp_path, 1))
    saver.wait()
    gate = Gate(saver)
    saver.save(state, step_dir(tmp_path, 2), keep_last=1)
    saver.abandon()
    gate.open()
    saver.wait()
    assert saver.poll() == []
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert is_complete(step_dir(tmp_path, 1))


def _save_for_ever(root: Path) -> None:
    saver, state = CheckpointSaver(CPU), make_state(size=200)
    for step in range(1, 1_000_000):
        saver.save(state, step_dir(root, step), keep_last=1)


def test_a_kill_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    for attempt in range(4):
        root = tmp_path / str(attempt)
        process = processes().Process(target=_save_for_ever, args=(root,), daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        while (newest := newest_complete(root)) is None or newest == step_dir(root, 1):
            assert time.monotonic() < deadline
            os.sched_yield()
        process.kill()
        process.join()
        newest = newest_complete(root)
        assert newest is not None
        loaded(newest, size=200)
        others = {path.name for path in root.iterdir()} - {path.name for path in complete_checkpoints(root)}
        assert all(name.endswith(".partial") or not is_complete(root / name) for name in others)


# -- two ranks --------------------------------------------------------------------------------------------------


def _on_two(worker: Worker, folder: Path) -> dict[str, Any]:
    saver, state = CheckpointSaver(worker), make_state(size=100)
    result: dict[str, Any] = {"state": copied(values_of(state)), "messages": []}
    saver.save(state, step_dir(folder, 1))
    result["sums"] = _collectives_of_the_loop(state)
    saver.wait()
    result["completed"] = saver.poll()
    for failing_rank in (0, 1):
        with limited_file_size(10_000 if worker.rank == failing_rank else None):
            saver.save(state, step_dir(folder, 2), keep_last=1)
            result["messages"].append(_message(saver.wait))
            dist.barrier()
    if worker.rank == 1:
        state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    saver.save(state, step_dir(folder, 2))
    result["messages"].append(_message(saver.wait))
    gate = Gate(saver)
    saver.save(make_state(size=50), step_dir(folder, 3))
    saver.abandon()
    gate.open()
    saver.save(make_state(size=50), step_dir(folder, 4))
    saver.wait()
    result["completed after"] = saver.poll()
    saver.save(_sharded_state(), step_dir(folder / "sharded", 1))
    saver.wait()
    saver.close()
    return result


def _collectives_of_the_loop(state: TrainState) -> list[float]:
    sums = []
    for _ in range(50):
        advance(state)
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(float(total))
    return sums


def _message(call: Callable[[], None]) -> str:
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return ""


def new_optimizer(state: TrainState) -> TrainState:
    state.model.zero_grad()
    state.optimizer = torch.optim.AdamW([p for p in state.model.parameters() if p.requires_grad], lr=0.1)
    return state


def advanced(state: TrainState) -> TrainState:
    torch.manual_seed(5)
    advance(state)
    return state


def _sharded_state() -> TrainState:
    state = make_state()
    fully_shard(state.model, mesh=init_device_mesh("cpu", (2,)))
    return advanced(new_optimizer(state))


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, run_ranks(_on_two, 2, folder)


def test_two_ranks_write_together_while_the_loop_uses_its_own_collectives(
    on_two: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = on_two
    for result in results:
        assert result["sums"] == [2.0] * 50
        assert result["completed"] == [step_dir(folder, 1)]
        assert_equal(loaded(step_dir(folder, 1), size=100), result["state"])
    manifest = read_manifest(step_dir(folder, 1))
    assert manifest is not None
    sizes = [manifest["files"][f"__{rank}_0.distcp"] for rank in (0, 1)]
    assert max(sizes) < 1.5 * min(sizes)


def test_a_rank_that_cannot_save_fails_on_all_and_what_is_abandoned_on_none(
    on_two: tuple[Path, list[dict[str, Any]]],
) -> None:
    folder, results = on_two
    for result in results:
        assert all("step_00000002: cannot be written: " in message for message in result["messages"])
        assert len(result["messages"]) == 3
        assert result["completed after"] == [step_dir(folder, 4)]
    assert complete_checkpoints(folder) == [step_dir(folder, 1), step_dir(folder, 4)]
    assert list(folder.glob("*.partial")) == []


def test_shards_are_saved_by_their_ranks_and_read_whole(on_two: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = on_two
    state = new_optimizer(make_state())
    load_checkpoint(state, step_dir(folder / "sharded", 1), CPU)
    read, whole = values_of(state), values_of(advanced(new_optimizer(make_state())))
    assert read.keys() == whole.keys()
    for name, value in whole.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(read[name], value)
        else:
            assert read[name] == value
