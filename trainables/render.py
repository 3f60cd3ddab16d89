"""From a row to text: the instruction template, the chat template, or the text itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainables.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stanford Alpaca's two prompts, word for word.
PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
PROMPT = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)


@dataclass(frozen=True)
class Rendered:
    """One example as text.

    Attributes:
        text: What is tokenised.
        responses: Character ranges [start, end) that a model answers with; they count under response_only. Those of a
            chat are looked for only then.
        has_special_tokens: The text holds its own special tokens; the tokenizer must not add any in front.
    """

    text: str
    responses: tuple[tuple[int, int], ...]
    has_special_tokens: bool = False


def detect_format(columns: Iterable[str]) -> str:
    """The format that a dataset's columns fit.

    Raises:
        ValueError: None fits.
    """
    names = set(columns)
    if "messages" in names:
        return "chat"
    if {"instruction", "output"} <= names:
        return "instruction"
    if "text" in names:
        return "text"
    raise ValueError(
        f"dataset.format: cannot tell from the columns {', '.join(sorted(names)) or '(none)'}; a chat has messages, "
        "an instruction has instruction, output and perhaps input, plain text has text"
    )


def render(row: Row, data_format: str, tokenizer: PreTrainedTokenizerBase, *, response_only: bool) -> Rendered:
    """Renders a row.

    Args:
        row: One example.
        data_format: instruction, chat or text.
        tokenizer: Its chat template is used.
        response_only: Look for the replies of a chat. Those without words that the template does not show are left out.

    Raises:
        ValueError: A column is missing or has the wrong type, or a chat template refuses the messages or, under
            response_only, does not show where replies are.
    """
    if data_format == "chat":
        return _render_chat(row, tokenizer, response_only)
    if data_format == "instruction":
        return _render_instruction(row)
    text = _text_of(row, "text")
    return Rendered(text, ((0, len(text)),))


def _render_instruction(row: Row) -> Rendered:
    instruction, output = _text_of(row, "instruction"), _text_of(row, "output")
    context = row.get("input") or ""
    prompt = (PROMPT_WITH_INPUT if context else PROMPT).format(instruction=instruction, input=context)
    return Rendered(prompt + output, ((len(prompt), len(prompt) + len(output)),))


def _text_of(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} must be text, got {value!r}")
    return value


def _render_chat(row: Row, tokenizer: PreTrainedTokenizerBase, response_only: bool) -> Rendered:
    messages = row.get("messages")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise ValueError(f"column 'messages' must be a list of {{role, content}}, got {messages!r}")
    text = _apply_template(tokenizer, messages)
    if not response_only:
        return Rendered(text, (), has_special_tokens=True)
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    responses = (_reply_range(tokenizer, messages, index, text) for index in replies)
    return Rendered(text, tuple(filter(None, responses)), has_special_tokens=True)


def _reply_range(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], index: int, text: str
) -> tuple[int, int] | None:
    # A reply is what the template adds to the prompt that asks for it, up to its end-of-turn marker.
    prompt = _apply_template(tokenizer, messages[:index], add_generation_prompt=True)
    upto = _apply_template(tokenizer, messages[: index + 1])
    if text.startswith(prompt) and text.startswith(upto) and len(upto) > len(prompt):
        return len(prompt), len(prompt) + len(upto[len(prompt) :].rstrip())
    # Some templates write earlier turns differently (they drop the thoughts): look for header and words themselves.
    header = prompt.removeprefix(_apply_template(tokenizer, messages[:index]))
    content = str(messages[index].get("content") or "").strip()
    if not content:
        return None
    found = text.find(header + content, _end_of_previous(messages[:index], text))
    if found < 0:
        raise ValueError("the chat template does not show where replies are; set response_only to false")
    start = found + len(header)
    end = start + len(content)
    eos = tokenizer.eos_token
    return start, end + len(eos) if isinstance(eos, str) and text.startswith(eos, end) else end


def _end_of_previous(messages: list[dict[str, Any]], text: str) -> int:
    position = 0
    for message in messages:
        content = str(message.get("content") or "").strip()
        found = text.find(content, position)
        position = found + len(content) if found >= 0 else position
    return position


def _apply_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], add_generation_prompt: bool = False
) -> str:
    if not messages:
        return ""
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt))
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
