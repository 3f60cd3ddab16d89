"""From a dataset to tokens: readers, slices, templates, what counts in the loss, and tokenising once."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import processes, tiny_config, write_texts
from trainables.config import DatasetConfig
from trainables.data import HELD_OUT_MAX, TokenStore, encode, held_out_rows, prepare
from trainables.render import PROMPT, PROMPT_WITH_INPUT, detect_format, render
from trainables.rows import load_rows
from trainables.tokenizer import byte_level_tokenizer, load_tokenizer

EOS = 257
ROWS = [{"text": f"row {index}"} for index in range(10)]


def store_of(rows: list[dict[str, Any]], folder: Path, role: Any = "train", **settings: Any) -> TokenStore:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    settings.setdefault("dataset", {})
    settings["dataset"] = {"path": str(path), "eval_split": "train[:1]"} | settings["dataset"]
    config = tiny_config(path, **settings)
    return prepare(config, role, folder / "cache", byte_level_tokenizer)


def text_of(tokens: np.ndarray[Any, Any]) -> str:
    return bytes(int(token) for token in tokens if token < 256).decode()


def counted_text(store: TokenStore, index: int) -> str:
    tokens, counts = store.example(index)
    return text_of(tokens[counts == 1])


def test_one_token_a_byte() -> None:
    tokenizer = byte_level_tokenizer()
    text = "naïve 😀\n\ttab"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (
        256,
        257,
        258,
        259,
    )


def test_local_files_of_every_kind_give_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    (tmp_path / "a.txt").write_text("".join(row["text"] + "\n" for row in ROWS) + "\n \n")
    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["text"])
        writer.writeheader()
        writer.writerows(ROWS)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    for suffix in ("jsonl", "json", "txt", "csv", "parquet"):
        assert load_rows(DatasetConfig(path=str(tmp_path / f"a.{suffix}")), "train") == ROWS, suffix


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", "text\na\n"), ("a.txt", "a"), ("a.json", '[{"text": "a"}]'), ("a.jsonl", '{"text": "a"}')],
)
def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert load_rows(DatasetConfig(path=str(tmp_path / name)), "train") == [{"text": "a"}]


def test_only_a_line_break_ends_an_example_of_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("one\u2028two\r\nthree\x0cfour\n".encode())
    rows = load_rows(DatasetConfig(path=str(tmp_path / "a.txt")), "train")
    assert [row["text"] for row in rows] == ["one\u2028two", "three\x0cfour"]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(10)),
        ("train[:3]", range(3)),
        ("train[7:]", range(7, 10)),
        ("train[-2:]", range(8, 10)),
        ("train[20%:50%]", range(2, 5)),
        ("train[:10%]+train[90%:]", [0, 9]),
        ("train[:100]", range(10)),
    ],
)
def test_a_slice_of_a_local_file(tmp_path: Path, split: str, expected: Any) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    assert load_rows(DatasetConfig(path=str(tmp_path / "a.json")), split) == [ROWS[index] for index in expected]


@pytest.mark.parametrize("split", ["test", "train[", "train[a:b]", "train[:3", "train[::2]", ""])
def test_a_split_that_a_local_file_does_not_have(tmp_path: Path, split: str) -> None:
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    with pytest.raises(ValueError, match="has one split, train"):
        load_rows(DatasetConfig(path=str(tmp_path / "a.json")), split)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": \n', "line 2"),
        ("a.jsonl", '"text"\n', "line 1: expected a mapping of columns, got str"),
        ("a.json", "{}", "expected a list of rows"),
        ("a.parquet", "not parquet", "cannot be read"),
        ("missing.csv", None, "no such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | None, words: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=words) as caught:
        load_rows(DatasetConfig(path=str(tmp_path / name)), "train")
    assert name in str(caught.value)


def test_a_hub_dataset_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no-such-org/no-such-data"):
        load_rows(DatasetConfig(path="no-such-org/no-such-data"), "train")


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["messages", "id"], "chat"),
        (["instruction", "input", "output"], "instruction"),
        (["instruction", "output", "text"], "instruction"),
        (["text", "url"], "text"),
    ],
)
def test_the_format_follows_from_the_columns(columns: list[str], expected: str) -> None:
    assert detect_format(columns) == expected


def test_columns_that_fit_no_format_are_listed() -> None:
    with pytest.raises(ValueError, match="answer, question"):
        detect_format(["question", "answer"])


def test_with_response_only_the_alpaca_prompt_does_not_count_but_the_response_and_its_end_do(tmp_path: Path) -> None:
    rows = [
        {"instruction": "Add {x}.", "input": "1 1", "output": "2"},
        {"instruction": "Greet.", "input": "", "output": " hello "},
    ]
    store = store_of(rows, tmp_path, max_length=1024, response_only=True)
    assert text_of(store.example(0)[0]) == PROMPT_WITH_INPUT.format(instruction="Add {x}.", input="1 1") + "2"
    assert text_of(store.example(1)[0]) == PROMPT.format(instruction="Greet.") + " hello "
    assert [counted_text(store, index) for index in (0, 1)] == ["2", " hello "]
    for index in (0, 1):
        tokens, counts = store.example(index)
        assert (tokens[-1], counts[-1]) == (EOS, 1)
    assert store.num_targets.tolist() == [2, 8]


def test_all_tokens_count_otherwise(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "output": "b"}]
    store = store_of(rows, tmp_path, max_length=1024, response_only=False)
    assert store.example(0)[1].all()
    assert store.num_targets[0] == store.lengths[0] - 1


def test_with_response_only_only_the_assistant_counts_in_a_chat_and_every_reply_ends_in_the_end_of_text_token(
    tmp_path: Path,
) -> None:
    messages = [
        {"role": "user", "content": "yes"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "so"},
    ]
    store = store_of([{"messages": messages}, {"messages": messages[:3]}], tmp_path, response_only=True)
    tokens, counts = store.example(0)
    assert text_of(tokens) == "<|user|>\nyes\n<|assistant|>\nyes\n<|user|>\nwhy\n<|assistant|>\nso\n"
    assert tokens[counts == 1].tolist() == [*b"yes", EOS, *b"so", EOS]
    unanswered, counts = store.example(1)
    assert unanswered[-1] == EOS
    assert unanswered[counts == 1].tolist() == [*b"yes", EOS]


def test_a_template_that_rewrites_earlier_turns_still_shows_its_replies() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m['role'] }}]"
        "{{ '(thinks) ' if loop.last and m['role'] == 'assistant' else '' }}{{ m['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    turns = [("user", "a b"), ("assistant", "a"), ("user", "c"), ("assistant", "d")]
    rendered = render(
        {"messages": [{"role": r, "content": c} for r, c in turns]}, "chat", tokenizer, response_only=True
    )
    assert [rendered.text[start:end] for start, end in rendered.responses] == ["a<|end|>", "(thinks) d<|end|>"]


# As Qwen3's: the last reply is written unlike those before it.
THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ '(thinks) ' if loop.last and m.role == 'assistant' else '' }}"
    "{{ m.content or '' }}{% for call in m.tool_calls or () %}<call>{{ call }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize("reply", [{"content": ""}, {"content": None, "tool_calls": ["f()"]}])
def test_a_reply_without_words_costs_a_chat_at_most_that_reply(reply: dict[str, Any]) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = THINKING
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", **reply}, {"role": "user", "content": "b"}]
    row = {"messages": [*asked, {"role": "assistant", "content": "yes"}]}
    whole, searched = (render(row, "chat", tokenizer, response_only=only) for only in (False, True))
    assert (whole.text, whole.responses) == (searched.text, ())
    assert [searched.text[start:end] for start, end in searched.responses] == ["(thinks) yes<|end|>"]


@pytest.mark.parametrize("template", ["{{ raise_exception('no such role') }}", "{{ 'a' + none }}"])
def test_an_example_that_a_chat_template_refuses_is_named(tmp_path: Path, template: str) -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = template
    (tmp_path / "chat.json").write_text(json.dumps([{"messages": [{"role": "user", "content": "a"}]}] * 2))
    config = tiny_config(tmp_path / "chat.json")
    with pytest.raises(ValueError, match=r"example \d: the chat template refuses the messages"):
        prepare(config, "train", tmp_path / "cache", lambda: tokenizer)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": "a", "output": None}, "column 'output' must be text, got None"),
        ({"text": 5}, "column 'text' must be text, got 5"),
        ({"messages": "hi"}, "must be a list of"),
        ({"messages": [{"content": "hi"}]}, "must be a list of"),
        ({"text": "a\ud800b"}, "surrogates not allowed"),
    ],
)
def test_a_bad_row_is_named_with_its_number(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        store_of([row, row], tmp_path, dataset={"eval_split": None})
    assert "example" in str(caught.value)


def test_the_end_of_text_token_counts_and_a_cut_example_has_none(tmp_path: Path) -> None:
    store = store_of([{"text": "abc"}, {"text": "abcdefghij"}], tmp_path, max_length=6)
    assert [store.example(index)[0].tolist() for index in (0, 1)] == [[*b"abc", EOS], [*b"abcdef"]]
    assert store.num_targets.tolist() == [3, 5]


def test_an_end_of_text_token_in_the_text_is_not_doubled() -> None:
    tokenizer = byte_level_tokenizer()
    [(tokens, counts)] = encode(
        [render({"text": "ab<|end|>"}, "text", tokenizer, response_only=True)], tokenizer, 99, True
    )
    assert (tokens.tolist(), counts.tolist()) == ([*b"ab", EOS], [1, 1, 1])


def test_examples_without_a_token_to_learn_from_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"instruction": "x" * 200, "output": "y"}, {"instruction": "x", "output": "y"}]
    store = store_of(rows, tmp_path, max_length=200, response_only=True, dataset={"eval_split": "train[1:]"})
    assert len(store) == 1
    assert "left out 1 of 2 train examples" in caplog.text
    with pytest.raises(ValueError, match="none of the 2 train examples has a token to learn from within max_length 50"):
        store_of(rows, tmp_path, max_length=50, response_only=True)


def test_held_out_examples_are_not_trained_on(tmp_path: Path) -> None:
    rows = [{"text": f"example {index}"} for index in range(100)]
    held_out, kept = (store_of(rows, tmp_path, role, dataset={"eval_split": None}) for role in ("eval", "train"))
    texts = [{text_of(store.example(index)[0]) for index in range(len(store))} for store in (held_out, kept)]
    assert [len(part) for part in texts] == [5, 95]
    assert texts[0].isdisjoint(texts[1])


@pytest.mark.parametrize(("num_rows", "expected"), [(2, 1), (10, 1), (100, 5), (10**6, HELD_OUT_MAX)])
def test_five_percent_are_held_out(num_rows: int, expected: int) -> None:
    assert len(held_out_rows(num_rows)) == expected


def test_nothing_can_be_held_out_of_one_example(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs two"):
        store_of([{"text": "alone"}], tmp_path, dataset={"eval_split": None})


def test_the_limit_cuts_training_examples_only(tmp_path: Path) -> None:
    rows = [{"text": f"example {index}"} for index in range(100)]
    for settings, num_eval in (({"eval_split": None}, 5), ({"eval_split": "train[90:]"}, 10)):
        stores = [store_of(rows, tmp_path, role, dataset={"limit": 7} | settings) for role in ("train", "eval")]
        assert [len(store) for store in stores] == [7, num_eval]


def test_the_built_in_docstrings_are_text() -> None:
    rows = load_rows(DatasetConfig(path="python-docstrings"), "train[:50]")
    assert len(rows) == 50
    assert all(len(row["text"]) >= 40 for row in rows)


def test_prepared_data_follows_the_file_and_the_settings(tmp_path: Path) -> None:
    assert len(store_of([{"text": "a b"}], tmp_path)) == 1
    assert len(store_of([{"text": "a b"}, {"text": "c d"}], tmp_path)) == 2
    assert store_of([{"text": "a b"}], tmp_path, max_length=2).lengths.tolist() == [2]


def test_an_interrupted_preparation_is_made_anew(tmp_path: Path) -> None:
    store_of([{"text": "a b"}], tmp_path)
    for folder in [path for path in (tmp_path / "cache/prepared").iterdir() if path.is_dir()]:
        draft = folder.rename(folder.with_name(folder.name + ".partial"))
        (draft / "tokens.bin").write_bytes(b"torn")
    config = tiny_config(
        tmp_path / "rows.jsonl", dataset={"path": str(tmp_path / "rows.jsonl"), "eval_split": "train[:1]"}
    )
    assert text_of(prepare(config, "train", tmp_path / "cache", byte_level_tokenizer).example(0)[0]) == "a b"


def test_a_tokenizer_folder_is_known_by_its_contents(tmp_path: Path) -> None:
    byte_level_tokenizer().save_pretrained(tmp_path / "one")
    byte_level_tokenizer().save_pretrained(tmp_path / "two")
    data = write_texts(tmp_path / "texts.jsonl")
    for name in ("one", "two"):
        config = tiny_config(data, tokenizer=str(tmp_path / name))
        prepare(config, "train", tmp_path / "cache", lambda config=config: load_tokenizer(config))  # type: ignore[misc]
    roles = [path for path in (tmp_path / "cache/prepared").iterdir() if path.is_dir()]
    assert len(roles) == 2, "training and evaluation, once"


def _prepare_and_note(folder: Path, number: int, barrier: Any) -> None:
    def load() -> Any:
        (folder / f"tokenised_by_{number}").touch()
        return byte_level_tokenizer()

    barrier.wait(60)
    prepare(tiny_config(folder / "texts.jsonl"), "train", folder / "cache", load)
    (folder / f"done_{number}").touch()


@pytest.mark.timeout(90)
def test_four_processes_on_an_empty_cache_tokenise_once(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.jsonl", num=2000)
    context = processes()
    barrier = context.Barrier(4)
    started = [context.Process(target=_prepare_and_note, args=(tmp_path, number, barrier)) for number in range(4)]
    for process in started:
        process.start()
    for process in started:
        process.join(80)
    assert len(list(tmp_path.glob("done_*"))) == 4
    assert len(list(tmp_path.glob("tokenised_by_*"))) == 1
