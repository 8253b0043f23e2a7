"""Rules for the values of a run file: each turns what TOML gave into the value used, or says what is wrong with it.

A rule is a function (where, value) -> value. `where` is the dotted key, for the message. The same rules run when a file
is read and when a dataclass is built in code, so no other place has to check.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import field, fields
from typing import Any

from sparseloco.bootstrap.errors import RunFileError, nearest

Rule = Callable[[str, object], Any]

PEER_ID_PATTERN = re.compile(r"Qm[1-9A-HJ-NP-Za-km-z]{44}")  # base58 of a SHA-256 multihash, the form of an RSA peer id
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
MODEL_CONFIG_DEPTH = 8


def key(default: Any, rule: Rule, doc: str, unit: str = "") -> Any:
    """A documented dataclass field; mutable defaults are copied by the rule, not shared."""
    metadata = {"rule": rule, "doc": doc, "unit": unit}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


class Table:
    """Base of the run file's tables: the constructor applies every key's rule."""

    table_name = ""

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            where = f"[{self.table_name}] {item.name}"
            object.__setattr__(self, item.name, item.metadata["rule"](where, getattr(self, item.name)))
        self.check_together()

    def check_together(self) -> None:
        """Rules between keys of this table; RunFileError."""


def build_table(kind: type[Any], name: str, given: object) -> Any:
    """One table from what TOML gave; unknown keys are refused with the nearest known one."""
    if not isinstance(given, Mapping):
        raise RunFileError(f"[{name}] must be a table of keys, not {_shown(given)}")
    known = [item.name for item in fields(kind)]
    for word in given:
        if word not in known:
            raise RunFileError(f"[{name}] has no key {word!r}{nearest(str(word), known)}")
    return kind(**given)


def integer(low: int, high: int) -> Rule:
    def rule(where: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise RunFileError(f"{where} must be a whole number, not {_shown(value)}")
        if not low <= value <= high:
            raise RunFileError(f"{where} = {value} is outside {low} to {high}; choose a value in that range")
        return value

    return rule


def number(low: float, high: float, *, above: bool = False, below: bool = False) -> Rule:
    """A float in [low, high]; `above`/`below` leave that end out. Whole numbers become floats: one canonical form."""

    def rule(where: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RunFileError(f"{where} must be a number, not {_shown(value)}")
        result = float(value) + 0.0  # -0.0 becomes 0.0
        inside = (low < result if above else low <= result) and (result < high if below else result <= high)
        if not inside or not math.isfinite(result):
            left, right = ("above" if above else "from"), ("below" if below else "to")
            raise RunFileError(f"{where} = {value} must be {left} {low:g} {right} {high:g}; choose such a value")
        return result

    return rule


def only(allowed: object) -> Rule:
    """A key that a later version gives a meaning; until then it is refused rather than ignored."""

    def rule(where: str, value: object) -> object:
        if type(value) is not type(allowed) or value != allowed:
            raise RunFileError(f"{where} = {_shown(value)} is not known to this version; leave it at {json.dumps(allowed)}")
        return value

    return rule


def one_of(*allowed: int) -> Rule:
    """A whole number out of a short list."""
    words = ", ".join(map(str, allowed))

    def rule(where: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value not in allowed:
            raise RunFileError(f"{where} = {_shown(value)} must be one of {words}")
        return value

    return rule


def choice(*allowed: str) -> Rule:
    def rule(where: str, value: object) -> str:
        if not isinstance(value, str):
            raise RunFileError(f"{where} must be one of {', '.join(allowed)}, not {_shown(value)}")
        if value not in allowed:
            raise RunFileError(f"{where} = {value!r} is not a choice{nearest(value, allowed)}")
        return value

    return rule


def text(pattern: str | re.Pattern[str], what: str, *, empty: bool = False) -> Rule:
    compiled = re.compile(pattern)

    def rule(where: str, value: object) -> str:
        if not isinstance(value, str):
            raise RunFileError(f"{where} must be a text in quotes, not {_shown(value)}")
        if not (empty and value == "") and not compiled.fullmatch(value):
            raise RunFileError(f"{where} = {_shown(value)} must be {what}" + (", or empty" if empty else ""))
        return value

    return rule


peer_id = text(PEER_ID_PATTERN, "a peer id (46 characters that begin with Qm; `identity show` prints yours)")
peer_id_or_empty = text(PEER_ID_PATTERN, "a peer id (46 characters that begin with Qm)", empty=True)
digest_or_empty = text(DIGEST_PATTERN, "a SHA-256 digest: 64 lower-case hex digits", empty=True)


def list_of(rule: Rule, *, longest: int, shortest: int = 0, distinct: bool = False) -> Rule:
    def rule_list(where: str, value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise RunFileError(f"{where} must be a list in square brackets, not {_shown(value)}")
        if not shortest <= len(value) <= longest:
            raise RunFileError(f"{where} has {len(value)} entries; it must have {shortest} to {longest}")
        result = tuple(rule(f"{where}[{index}]", item) for index, item in enumerate(value))
        if distinct and len(set(result)) < len(result):
            raise RunFileError(f"{where} names an entry twice; remove the second")
        return result

    return rule_list


def pair(first: Rule, second: Rule, what: str) -> Rule:
    def rule(where: str, value: object) -> tuple[Any, Any]:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise RunFileError(f"{where} must be {what}, not {_shown(value)}")
        return first(where, value[0]), second(where, value[1])

    return rule


def steps_over_rounds(value_rule: Rule) -> Rule:
    """A number, or [[from_round, value], ...] with rising rounds from 0; becomes ((from_round, value), ...)."""
    entries = list_of(pair(integer(0, 10**9), value_rule, "[from_round, value]"), shortest=1, longest=1000)

    def rule(where: str, value: object) -> tuple[tuple[int, float], ...]:
        if not isinstance(value, list | tuple):
            return ((0, value_rule(where, value)),)
        steps: tuple[tuple[int, float], ...] = entries(where, value)
        rounds = [step[0] for step in steps]
        if rounds[0] != 0 or rounds != sorted(set(rounds)):
            raise RunFileError(f"{where} must begin with round 0 and its rounds must rise; they are {rounds}")
        return steps

    return rule


def json_table(where: str, value: object) -> dict[str, Any]:
    """A nested table of strings, booleans, 64-bit integers, finite floats and lists: what JSON and TOML share."""
    if not isinstance(value, Mapping):
        raise RunFileError(f"{where} must be a table, not {_shown(value)}")
    return {str(name): _json_value(f"{where}.{name}", item, 1) for name, item in value.items()}


def _json_value(where: str, value: object, depth: int) -> Any:
    if depth > MODEL_CONFIG_DEPTH:
        raise RunFileError(f"{where} is nested deeper than {MODEL_CONFIG_DEPTH} tables")
    if isinstance(value, str | bool):
        return value
    if isinstance(value, int) and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    if isinstance(value, list | tuple):
        return [_json_value(f"{where}[{index}]", item, depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {str(name): _json_value(f"{where}.{name}", item, depth + 1) for name, item in value.items()}
    raise RunFileError(f"{where} must be text, a finite number, true, false, a list or a table, not {_shown(value)}")


def _shown(value: object) -> str:
    """A short form for messages: a whole table or a pasted file must not fill the screen."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
