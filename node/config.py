"""Where a flag's value comes from: the command line, else the environment, else a config file, else the default.

The one rule: a value that is refused names its source, so nobody hunts for a setting in the wrong place. Unknown keys
and variables are refused like unknown flags. The environment is an argument; only the command line reads it.

A config file is TOML with flag names, dashes written as underscores. Keys at the top hold for every verb that has the
flag; a table named after a verb holds for that verb and beats the top.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from platformdirs import user_config_path

from sparseloco.bootstrap.errors import RunFileError, UsageError, nearest
from sparseloco.node.arguments import CONFIG, VERBS, BadValue, Flag, Verb

PREFIX = "SPARSELOCO_"
_ON = ("1", "true", "yes", "on")
_OFF = ("0", "false", "no", "off", "")


def resolve(verb: Verb, typed: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """The options fields that were given anywhere, parsed; UsageError or RunFileError names source, rule and remedy.

    `typed` holds, by flag key, a text, a list of texts or a bool; keys that were not typed are absent.
    """
    _refuse_unknown_variables(environment)
    config_path, from_config = _config(verb, typed, environment)
    values: dict[str, Any] = {}
    for flag in verb.flags:
        variable = PREFIX + flag.key.upper()
        if flag is CONFIG:
            continue
        if flag.key in typed:
            values[flag.option] = _parsed(flag, typed[flag.key], f"--{flag.name}")
        elif variable in environment:
            values[flag.option] = _parsed(flag, _from_variable(flag, environment[variable], variable), variable)
        elif flag.key in from_config:
            where = f"{config_path}: {flag.key}"
            try:
                values[flag.option] = _parsed(flag, _from_toml(flag, from_config[flag.key], where), where)
            except UsageError as error:
                raise RunFileError(str(error)) from None
        elif flag.required:
            raise UsageError(
                f"{verb.name} needs --{flag.name} {flag.metavar} (or {variable}, or {flag.key} in a config file): "
                f"{flag.help}"
            )
    return values


def _parsed(flag: Flag, raw: Any, where: str) -> Any:
    if flag.switch:
        return raw
    try:
        return tuple(_one(flag, item, where) for item in raw) if flag.many else _one(flag, raw, where)
    except BadValue as error:
        raise UsageError(str(error)) from None


def _one(flag: Flag, item: str, where: str) -> Any:
    try:
        return flag.parse(item)
    except BadValue as error:
        raise BadValue(f"{where}: {item!r} {error}") from None


def _from_variable(flag: Flag, value: str, variable: str) -> Any:
    """An environment variable's text as the command line would have given it; lists are split as a shell does."""
    if flag.switch:
        word = value.strip().lower()
        if word not in _ON + _OFF:
            raise UsageError(f"{variable}: {value!r} must be 1 or 0")
        return word in _ON
    if not flag.many:
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise UsageError(f"{variable}: {value!r} cannot be split into words: {error}") from None


def _from_toml(flag: Flag, value: Any, where: str) -> Any:
    if flag.switch:
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {value!r} must be true or false")
        return value
    items = value if flag.many and isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in items):
        raise UsageError(f"{where}: {value!r} must be a text or a number" + (", or a list of them" * flag.many))
    texts = [str(item) for item in items]
    return texts if flag.many else texts[0]


def _config(verb: Verb, typed: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[Path, dict[str, Any]]:
    """The config file's path and what it says for this verb; a file that was named must exist."""
    variable = PREFIX + CONFIG.key.upper()
    if CONFIG.key in typed:
        named, where = str(typed[CONFIG.key]), "--config"
    elif variable in environment:
        named, where = environment[variable], variable
    else:
        default = user_config_path("sparseloco", appauthor=False) / "config.toml"
        return default, _keys_for(verb, default) if default.is_file() else {}
    path: Path = _parsed(CONFIG, named, where)
    if not path.is_file():
        raise RunFileError(f"{where}: there is no config file {path}")
    return path, _keys_for(verb, path)


def _keys_for(verb: Verb, path: Path) -> dict[str, Any]:
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RunFileError(f"{path}: cannot be read as a config file: {error}") from None
    verbs = {item.name: item for item in VERBS}
    anywhere = _keys(flag for item in VERBS for flag in item.flags)
    for word, value in given.items():
        if word in verbs and isinstance(value, dict):
            _refuse_unknown_keys(value, _keys(verbs[word].flags), f"{path}: [{word}]")
        elif word not in anywhere:
            raise RunFileError(f"{path}: there is no key {word!r}{nearest(word, anywhere | set(verbs))}")
    own = given.get(verb.name, {})
    top = {word: value for word, value in given.items() if word in _keys(verb.flags)}
    return {**top, **(own if isinstance(own, dict) else {})}


def _keys(flags: Iterable[Flag]) -> set[str]:
    return {flag.key for flag in flags if flag is not CONFIG}


def _refuse_unknown_keys(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for word in given:
        if word not in known:
            raise RunFileError(f"{where} has no key {word!r}{nearest(word, known)}")


def _refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """A misspelt variable would be ignored in silence; a variable of another verb's flag is fine."""
    known = {PREFIX + flag.key.upper() for verb in VERBS for flag in verb.flags}
    for name in environment:
        if name.startswith(PREFIX) and name not in known:
            raise UsageError(f"environment variable {name} is not a setting{nearest(name, known)}")
