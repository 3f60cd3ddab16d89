"""The README names what there is: every module, every key of a study file, every verb."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Tune
from trainables.config import TrainConfig
from tuner.reference import updated
from tuner.study_file import sections

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SECTIONS = ("objective", "search", "scheduler", "scaling", "checkpoint", "failures", "mlflow")


PACKAGES = [path.parent.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("tuner/*/__init__.py")]


@pytest.mark.parametrize("folder", ["tuner", *sorted(PACKAGES), "trainables", "tests", "tests/benchmarks"])
def test_every_module_is_in_the_file_map(folder: str) -> None:
    names = sorted(path.stem for path in (REPOSITORY / folder).glob("*.py"))
    assert [name for name in names if f"`{name}`:" not in README and name != "__init__"] == []
    assert f"| `{folder}/` |" in README


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_section_is_in_the_reference(section: str) -> None:
    fields = getattr(sections, section.capitalize()).model_fields
    assert [key for key in fields if f"| `{section}.{key}` |" not in README] == []


def test_every_key_of_train_is_in_the_reference() -> None:
    assert [key for key in TrainConfig.model_fields if f"| `{key}` |" not in README and f"`{key}." not in README] == []


def test_the_tables_of_keys_are_those_that_the_docstrings_make() -> None:
    assert updated(README) == README, "make reference"


def test_every_verb_is_in_the_table(tune: Tune) -> None:
    listed = tune("--help").stdout.partition("Commands:")[2].splitlines()
    indented = [line for line in listed if line.startswith("  ") and not line.startswith("   ")]
    verbs = [line.split()[0] for line in indented if not line.strip().startswith("Example")]
    assert len(verbs) >= 8
    assert [verb for verb in verbs if f"`tune {verb}" not in README] == []


def test_no_placeholder_is_left() -> None:
    assert "<!--" not in README


def test_files_that_the_readme_names_exist() -> None:
    studies = ("quickstart.yaml", "qwen_lr.yaml", "qwen_lora.yaml", "llama_fsdp.yaml", "own_loop.yaml")
    assert all(Path(REPOSITORY, "search_spaces", name).exists() for name in (*studies, "own_loop.py"))
