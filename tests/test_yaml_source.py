"""YAML 1.2 as people write it in study files, and values from the command line over it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tuner.errors import SpecError
from tuner.study_file.yaml_source import YamlSource, from_data, read_yaml, with_overrides


def source(tmp_path: Path, text: str | bytes) -> YamlSource:
    path = tmp_path / "study.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_yaml(path)


def messages(source: YamlSource) -> list[str]:
    return [str(problem).replace(source.path, "study.yaml") for problem in source.problems]


def fatal(tmp_path: Path, text: str | bytes) -> str:
    with pytest.raises(SpecError) as caught:
        source(tmp_path, text)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(tmp_path / "study.yaml"), "study.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5), ("5E-6", 5e-6), ("+1e-5", 1e-5), ("-1e3", -1e3), ("1.e5", 1e5), (".5", 0.5), ("1e5", 1e5),
        ("2.0e-5", 2e-5), ("0.0", 0.0), ("12", 12), ("+12", 12), ("-0", 0), ("0o12", 10), ("0x1F", 31),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("!!float 1", 1.0), ('!!int "3"', 3),
        (".inf", float("inf")), ("!!str 5", "5"),
        # What YAML 1.1, or ruamel on its own, would convert.
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"), ("012", "012"), ("08", "08"),
        ("1:30", "1:30"), ("1:30.5", "1:30.5"), ("2024-01-01", "2024-01-01"), ("1_000", "1_000"), ("1_0.5", "1_0.5"),
        ("2024-01-01 10:00:00", "2024-01-01 10:00:00"), ("0b11", "0b11"), ("=", "="), ("<<", "<<"), ("nan", "nan"),
        ("1e", "1e"), ('"1e-5"', "1e-5"), ("'12'", "12"), ("train[:8000]", "train[:8000]"),
    ],
)  # fmt: skip
def test_a_plain_scalar_is_what_yaml_1_2_says(tmp_path: Path, text: str, value: Any) -> None:
    assert_same(source(tmp_path, f"a: {text}\n").data["a"], value)
    if text not in ("", "train[:8000]"):
        assert_same(source(tmp_path, f"a: [{text}, x]\n").data["a"][0], value)


def assert_same(read: object, value: object) -> None:
    assert (type(read), read) == (type(value), value)


def test_words_and_dates_stay_text_as_keys_whatever_version_the_file_names(tmp_path: Path) -> None:
    read = source(tmp_path, "%YAML 1.1\n---\non: off\nyes: no\n2024-01-01: 1\n012: 2\n1_000: 3\n")
    assert read.data == {"on": "off", "yes": "no", "2024-01-01": 1, "012": 2, "1_000": 3}
    assert read.problems == ()


def test_values_are_plain_python(tmp_path: Path) -> None:
    read = source(tmp_path, "a: {b: [1, 2.0, x, true]}\n").data
    assert [type(value) for value in (read, read["a"], read["a"]["b"])] == [dict, dict, list]
    assert [type(value) for value in read["a"]["b"]] == [int, float, str, bool]


def test_every_key_and_item_knows_its_line(tmp_path: Path) -> None:
    read = source(tmp_path, "# first\na: 1\nb:\n  c:\n  - 1\n  - {d: 2}\n")
    assert read.lines == {
        ("a",): 2,
        ("b",): 3,
        ("b", "c"): 4,
        ("b", "c", 0): 5,
        ("b", "c", 1): 6,
        ("b", "c", 1, "d"): 6,
    }
    assert str(read.problem(("b", "missing"), "is missing")).endswith("study.yaml:3: b.missing: is missing")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3\n", "study.yaml:3: a: the key is given twice, on lines 1 and 3; keep one of them"),
        ("a:\n  b: 1\n  c: 2\n  b: 1\n", "study.yaml:4: a.b: the key is given twice, on lines 2 and 4"),
        ("a: [{b: 1,\n  b: 2}]\n", "study.yaml:2: a.0.b: the key is given twice, on lines 1 and 2"),
        ("a: {b: 1, b: 2}\n", "study.yaml:1: a.b: the key is given twice, on line 1"),
        ("a: &a {x: 1}\nb:\n  <<: *a\n  <<: *a\n", "study.yaml:4: b.<<: the key is given twice, on lines 3 and 4"),
    ],
)
def test_a_duplicate_key_names_both_lines(tmp_path: Path, text: str, expected: str) -> None:
    (message,) = messages(source(tmp_path, text))
    assert message.startswith(expected)


def test_a_merge_key_gives_defaults_that_the_mapping_overrides(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {y: 3, z: 4}\nc:\n  <<: [*a, *b]\n  x: 5\nd: {<<: *a}\n"
    read = source(tmp_path, text)
    assert read.data["c"] == {"x": 5, "y": 2, "z": 4}
    assert read.data["d"] == {"x": 1, "y": 2}
    assert read.lines["c", "x"] == 5
    assert read.problems == ()


def test_faults_that_leave_the_rest_readable_are_all_collected(tmp_path: Path) -> None:
    text = "a: !foo 1\nb: {a: 1, a: 2}\n1: x\ntrue: y\n? [p, q]\n: 2\nc: !!python/object/apply:os.system [ls]\n"
    assert set(messages(source(tmp_path, text))) == {
        "study.yaml:1: a: unknown tag !foo; remove it",
        "study.yaml:2: b.a: the key is given twice, on line 2; keep one of them",
        'study.yaml:3: 1: a key must be text; quote it: "1"',
        'study.yaml:4: true: a key must be text; quote it: "true"',
        "study.yaml:5: a key must be text, not a list or a mapping",
        "study.yaml:7: c: unknown tag !!python/object/apply:os.system; remove it",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "study.yaml: the file is empty; a study needs"),
        ("# nothing\n", "study.yaml: the file is empty"),
        ("- a\n", "study.yaml:1: must be a mapping with the keys of a study at top level, got a list"),
        ("\n\nhello\n", "must be a mapping with the keys of a study at top level, got the text 'hello'"),
        ("a:\n\tb: 1\n", "study.yaml:2: not valid YAML: a tab; indent with spaces"),
        ("a: [1, 2\nb: 3\n", "study.yaml:2: not valid YAML: expected ',' or ']', but got ':'"),
        ("a: b: c\n", "study.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: 1\n---\nb: 2\n", "study.yaml:2: holds a second YAML document"),
        ("a: *nothing\n", "study.yaml:1: not valid YAML: found undefined alias"),
        ("a: &a [*a]\n", "study.yaml:1: a.0: an alias refers to itself"),
        ("a: &a\n  <<: *a\n", "study.yaml:1: a: an alias refers to itself"),
        (b"a: 1\nb: \xff\n", "study.yaml:2: byte 0xff is not valid UTF-8; save the file as UTF-8"),
        (b"a: 1\nb: \x00\n", "study.yaml:2: character U+0000 is not allowed in YAML"),
        ("[" * 1000, "study.yaml: is nested too deeply"),
        ("- " * 1000, "study.yaml: is nested too deeply"),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_why(tmp_path: Path, text: str | bytes, expected: str) -> None:
    message = fatal(tmp_path, text)
    assert expected in message
    assert message.endswith("1 error; nothing was started.")


def test_a_large_file_is_refused_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    assert "is larger than 256 kB" in fatal(tmp_path, "# x\n" * 2_500_000)
    assert time.monotonic() - began < 2


def test_aliases_that_multiply_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    assert "expands to more than 100000 values" in fatal(tmp_path, "\n".join(lines))


def test_thousands_of_faults_end_the_reading(tmp_path: Path) -> None:
    assert "100 errors; nothing was started." in fatal(tmp_path, "a: 1\n" * 2_000)


def test_a_missing_file_names_a_similar_one_and_a_directory_says_so(tmp_path: Path) -> None:
    (tmp_path / "qwen_lr.yaml").touch()
    with pytest.raises(SpecError, match=r"no such file; did you mean .*qwen_lr.yaml\?"):
        read_yaml(tmp_path / "qwen_rl.yaml")
    with pytest.raises(SpecError, match="is a directory"):
        read_yaml(tmp_path)
    with pytest.raises(SpecError, match="no such file"):
        read_yaml(tmp_path / "no" / "folder.yaml")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_without_permission_says_so(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.touch(mode=0o000)
    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        read_yaml(path)


def test_a_byte_order_mark_and_windows_line_ends_are_fine(tmp_path: Path) -> None:
    read = source(tmp_path, b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: 2\r\n")
    assert (read.data, read.lines["b", "c"]) == ({"a": 1, "b": {"c": 2}}, 3)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_steps=20", {"train": {"max_steps": 20, "lr": 1}, "list": [{"a": 1}]}),
        ("train.lr=1e-5", {"train": {"lr": 1e-5}, "list": [{"a": 1}]}),
        ("train.lr=on", {"train": {"lr": "on"}, "list": [{"a": 1}]}),
        ("train.lr=a=b", {"train": {"lr": "a=b"}, "list": [{"a": 1}]}),
        ("train.lr=null", {"train": {"lr": None}, "list": [{"a": 1}]}),
        ("train.lr=", {"train": {"lr": None}, "list": [{"a": 1}]}),
        ("train={lr: 2}", {"train": {"lr": 2}, "list": [{"a": 1}]}),
        ("new.deep.key=x", {"train": {"lr": 1}, "list": [{"a": 1}], "new": {"deep": {"key": "x"}}}),
        ("list.0.a=[1, 2]", {"train": {"lr": 1}, "list": [{"a": [1, 2]}]}),
        ("train.'a.b'=1", {"train": {"lr": 1, "a.b": 1}, "list": [{"a": 1}]}),
    ],
)
def test_an_override_sets_one_value(override: str, expected: dict[str, Any]) -> None:
    given = {"train": {"lr": 1}, "list": [{"a": 1}]}
    read = with_overrides(from_data(given), [override])
    assert (read.data, read.problems) == (expected, ())
    assert given == {"train": {"lr": 1}, "list": [{"a": 1}]}


def test_an_override_finds_a_searched_key_that_holds_dots(tmp_path: Path) -> None:
    read = source(tmp_path, "search_space:\n  dataset.limit: {low: 1, high: 2}\n")
    changed = with_overrides(read, ["search_space.dataset.limit.low=5"])
    assert changed.data == {"search_space": {"dataset.limit": {"low": 5, "high": 2}}}


def test_the_last_of_two_overrides_wins() -> None:
    assert with_overrides(from_data({}), ["a.b=1", "a.b=2"]).data == {"a": {"b": 2}}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.lr", "--set: train.lr: must be KEY=VALUE, as in --set train.max_steps=20"),
        ("=3", "must be KEY=VALUE"),
        ("train.lr.x=3", "--set: train.lr.x: train.lr is 1, which has no keys; set train.lr itself"),
        ("list.1.a=3", "--set: list.1.a: list is a list of 1: its items are numbered from 0"),
        ("list.x=3", "--set: list.x: list is a list of 1"),
        ("train.lr=[1", "--set: train.lr: not valid YAML"),
        ("train.lr={a: 1, a: 2}", "--set: train.lr.a: the key is given twice"),
    ],
)
def test_a_bad_override_is_a_problem_of_the_command_line(override: str, expected: str) -> None:
    (problem,) = with_overrides(from_data({"train": {"lr": 1}, "list": [{"a": 1}]}), [override]).problems
    assert str(problem).startswith(expected) or expected in str(problem)


def test_a_fault_of_an_overridden_value_is_placed_at_the_command_line(tmp_path: Path) -> None:
    read = with_overrides(source(tmp_path, "a:\n  b: 1\n  c: 2\n"), ["a.b=3", "new.x=1"])
    assert str(read.problem(("a", "b", "deep"), "bad")) == "--set: a.b.deep: bad"
    assert str(read.problem(("new", "y"), "missing")) == "--set: new.y: missing"
    assert str(read.problem(("a", "c"), "bad")).endswith("study.yaml:3: a.c: bad")
