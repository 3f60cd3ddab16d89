"""Plain data as a YAML 1.2 file that reads back the same."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any


def to_yaml(data: Mapping[str, Any]) -> str:
    """Block style at the top, one line for what is small, lines of text as lines; keys in their order.

    Args:
        data: Dicts, lists, text, numbers, booleans and None.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.representer import SafeRepresenter

    class Representer(SafeRepresenter):
        """Text of several lines stays as it is."""

    Representer.add_representer(str, _text)
    yaml = YAML(typ="safe", pure=True)
    yaml.Representer = Representer
    yaml.default_flow_style = None
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.width = 120
    text = io.StringIO()
    yaml.dump(dict(data), text)
    return text.getvalue()


def _text(representer: Any, value: str) -> Any:
    style = "|" if "\n" in value else None
    return representer.represent_scalar("tag:yaml.org,2002:str", value, style=style)
