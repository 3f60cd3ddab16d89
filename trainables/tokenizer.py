"""Tokenizers: from the hub, from a folder, or the built-in byte-level one."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.config import TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_LEVEL = "byte-level"
_TOKENIZER_FILES = ("*token*", "*vocab*", "merges*", "chat_template*")

# For tokenizers that bring none: every turn is announced by its role, and what the assistant says ends in the
# end-of-text token, which is where a deployed model has to stop.
DEFAULT_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] }}"
    "{{ (eos_token if message['role'] == 'assistant' else '') + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def tokenizer_name(config: TrainConfig) -> str:
    """The name a config's tokenizer is found under: its own, else the model's, else byte-level."""
    return config.tokenizer or (config.model if isinstance(config.model, str) else BYTE_LEVEL)


def load_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a config and gives it a chat template where it has none.

    Raises:
        ValueError: It cannot be found or read.
    """
    name = tokenizer_name(config)
    if name == BYTE_LEVEL:
        return byte_level_tokenizer()
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            name, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"tokenizer {name!r} cannot be loaded: {error}") from error
    tokenizer.chat_template = tokenizer.chat_template or DEFAULT_CHAT_TEMPLATE
    return tokenizer


def byte_level_tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer without files: token i is byte i; 256, 257 and 258 are begin, end and padding.

    Text is brought into Unicode's composed form (NFC) first: beside a Qwen2 model transformers would do so with any
    tokenizer that is loaded from its folder, and an exported model must see what it was trained on.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={_byte_symbol(byte): byte for byte in range(256)}, merges=[]))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<|begin|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        # Never used, but a saved copy beside a Qwen2 model would be given one, and be longer than the vocabulary.
        unk_token="<|end|>",
        chat_template=DEFAULT_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _byte_symbol(byte: int) -> str:
    # The printable stand-ins of GPT-2's byte-level alphabet: bytes that print are themselves, the others follow at 256.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [other for other in range(256) if other not in printable].index(byte))


def tokenizer_identity(config: TrainConfig) -> dict[str, Any]:
    """What tokenised data depends on, as plain values: the name and, for a folder, a digest of its tokenizer files."""
    name = tokenizer_name(config)
    folder = Path(name)
    files = sorted({file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)})
    digest = hashlib.sha256()
    for file in files if folder.is_dir() else ():
        digest.update(file.name.encode() + file.read_bytes() if file.is_file() else b"")
    return {"name": name if not folder.is_dir() else "folder", "files": digest.hexdigest()}
