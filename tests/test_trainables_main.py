"""`torchrun -m trainables train.yaml`: one fine-tune without Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_config, train, write_texts
from trainables.__main__ import main
from trainables.checkpoint_dir import complete_checkpoints, step_of

TORCHRUN = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--nproc-per-node",
    "2",
    "--master-port",
    "0",
    "--standalone",
]


def write_config(folder: Path, **settings: Any) -> Path:
    # JSON is YAML: what a config dumps is what a file may hold.
    values = tiny_config(write_texts(folder / "texts.jsonl"), **settings).model_dump(exclude_unset=True)
    (folder / "train.yaml").write_text(json.dumps(values), encoding="utf-8")
    return folder / "train.yaml"


def command(*arguments: str | Path, program: list[str] | None = None) -> list[str]:
    return [*(program or [sys.executable]), "-m", "trainables", *map(str, arguments)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: a\ndataset: {path: b}\nlearning_rat: 1e-5\nmax_steps: 1.5\n", ["learning_rat", "max_steps"]),
        ("model: a\nmodel: b\n", ["duplicate key", "line 2"]),
        ("- model\n", ["expected keys and values"]),
        ("model: [\n", ["train.yaml"]),
        ("model: a\ndataset: {path: b}\nlearning_rate: '1e-5'\n", ["learning_rate", "valid number"]),
    ],
)
def test_a_bad_file_ends_with_code_2_and_every_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    (tmp_path / "train.yaml").write_text(text)
    assert main([str(tmp_path / "train.yaml")]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words)


def test_an_unknown_key_ends_the_process_with_code_2_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text("model: a\ndataset: {path: b}\nlearning_rat: 1e-5\n")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command("train.yaml")[1:]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 2
    assert "train.yaml: learning_rat: Extra inputs are not permitted" in done.stderr
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    from trainables.__main__ import read_config

    (tmp_path / "train.yaml").write_text("model: on\ndataset: {path: no}\nlearning_rate: 1e-5\nmax_steps: 012\n")
    config = read_config(tmp_path / "train.yaml")
    assert (config.model, config.dataset.path, config.learning_rate, config.max_steps) == ("on", "no", 1e-5, 12)


def test_the_same_folder_twice_needs_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [
        str(write_config(tmp_path)), "--cache-dir", str(tmp_path / "cache"), "--checkpoint-dir", str(tmp_path / "c"),
    ]  # fmt: skip
    assert main(options) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["step", "3"], ["step", "6"]]
    assert [step_of(path) for path in complete_checkpoints(tmp_path / "c")] == [3, 6]
    assert main(options) == 2
    assert "add --resume" in capsys.readouterr().err
    assert main([*options, "--resume"]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["step", "6"]]


def test_a_diverged_fine_tune_ends_with_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_config(tmp_path, learning_rate=1e30)
    assert main([str(file), "--cache-dir", str(tmp_path / "cache")]) == 1
    assert capsys.readouterr().err.startswith("diverged at step ")


def numbers(line: str) -> dict[str, float]:
    words = line.split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2], strict=True)}


@pytest.mark.timeout(120)
def test_two_ranks_killed_and_resumed_in_shards_end_where_one_process_does(tmp_path: Path) -> None:
    file = write_config(tmp_path, max_steps=20, eval_every=5)
    arguments = command(file, "--checkpoint-dir", "checkpoints", "--cache-dir", "cache", program=TORCHRUN)
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        "stdout": subprocess.PIPE,
        "text": True,
    }
    with subprocess.Popen(arguments, start_new_session=True, **options) as killed:
        assert killed.stdout is not None
        for line in killed.stdout:
            if line.startswith("step 15"):
                break
        for process in processes_of_session(killed.pid):
            os.kill(process, signal.SIGKILL)
    assert complete_checkpoints(tmp_path / "checkpoints")
    resumed = subprocess.run([*arguments, "--resume", "--parallel", "fsdp"], timeout=60, check=True, **options)
    last = numbers(resumed.stdout.splitlines()[-1])
    uninterrupted = train(tiny_config(tmp_path / "texts.jsonl", max_steps=20, eval_every=5), tmp_path / "cache")[-1]
    for name in ("step", "tokens", "eval_loss", "learning_rate", "epoch"):
        assert last[name] == pytest.approx(uninterrupted.metrics[name], rel=1e-4), name


def processes_of_session(session: int) -> list[int]:
    # torchrun gives every worker a session of its own; they are its descendants all the same.
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(status.parent.name)] = int(fields[1])
    found = [session]
    for process in found:
        found.extend(child for child, parent in parents.items() if parent == process)
    return found
