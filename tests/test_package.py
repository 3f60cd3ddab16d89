"""What goes along to a cluster, and what stays."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from tuner.errors import InputError
from tuner.remote.package import name_of, pack

GOES = ["study.yaml", "loop.py", "data/texts.jsonl", "pkg/checkpoints/model.py"]
STAYS = [
    ".git/HEAD",
    ".venv/bin/python",
    "mine/pyvenv.cfg",
    "mine/lib/big.py",
    "pkg/__pycache__/x.pyc",
    ".mypy_cache/x",
    "studies/q/optuna.journal",
    "elsewhere/q/spec.json",
    "elsewhere/q/study.lock",
    "elsewhere/q/data/x",
    "saved/step_00000010/manifest.json",
    "saved/step_00000010/weights",
    "mlflow.db",
    ".env",
]


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name, encoding="utf-8")


def names_in(content: bytes) -> set[str]:
    return set(zipfile.ZipFile(io.BytesIO(content)).namelist())


def test_code_and_data_go_along_and_what_studies_make_stays(tmp_path: Path) -> None:
    write(tmp_path, *GOES, *STAYS)
    names = names_in(pack(tmp_path))
    assert {name for name in names if not name.startswith(("tuner/", "trainables/"))} == set(GOES)
    assert {"tuner/cli.py", "tuner/remote/launch_node.sh", "tuner/reports/page.css", "trainables/finetune.py"} <= names


def test_the_same_files_are_the_same_package(tmp_path: Path) -> None:
    write(tmp_path / "one", *GOES)
    write(tmp_path / "two", *reversed(GOES))
    assert name_of(pack(tmp_path / "one")) == name_of(pack(tmp_path / "two"))
    write(tmp_path / "two", "more.txt")
    assert name_of(pack(tmp_path / "one")) != name_of(pack(tmp_path / "two"))


def test_what_is_too_big_is_named_with_its_size(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(bytes(range(256)) * 40_000)
    with pytest.raises(
        InputError, match=r"more than the 1 MB that Ray takes along; the largest:\n  weights.bin  10.2 MB"
    ):
        pack(tmp_path, limit=1_000_000)
