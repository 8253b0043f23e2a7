"""Write the part of TOML that a run file needs, so that reading it back gives the same values.

The standard library reads TOML and does not write it. Strings, integers, floats, booleans, lists and tables are
written; a table inside a list or inside another table becomes an inline table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def toml_string(text: str) -> str:
    """`text` as a TOML basic string."""
    escaped = (
        _ESCAPES.get(char) or (f"\\u{ord(char):04x}" if ord(char) < 0x20 or ord(char) == 0x7F else char)
        for char in text
    )
    return '"' + "".join(escaped) + '"'


def toml_key(name: str) -> str:
    """`name` as a TOML key, quoted if it must be."""
    return name if _BARE_KEY.fullmatch(name) else toml_string(name)


def toml_value(value: object) -> str:
    """`value` as one line of TOML; TypeError for what a run file cannot hold."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return toml_string(value)
    if isinstance(value, int | float):
        return repr(value)  # the shortest text that reads back as the same number
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(k)} = {toml_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"no TOML form for {type(value).__name__}")
