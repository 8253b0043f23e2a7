"""The arrows of docs/architecture.md: which folder may import which, read from the source of every file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("node", "protocol", "compression", "bootstrap")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))

MAY_IMPORT = {
    "node": {"node", "bootstrap", "protocol", "compression"},
    "bootstrap": {"bootstrap", "protocol"},
    "protocol": {"protocol"},
    "compression": {"compression"},
}
HIVEMIND_FILES = {"bootstrap/network.py", "bootstrap/transport.py"}
# Modules that would give `protocol` a socket, a clock or an event loop. `random` is named as the type of an argument.
NOT_IN_PROTOCOL = {"torch", "hivemind", "numpy", "socket", "time", "datetime", "secrets", "asyncio", "threading", "os"}
# The command line reads the environment; the other two pass it on to the processes they start.
ENVIRONMENT_FILES = {"node/cli.py", "node/swarm_processes.py", "bootstrap/daemon.py"}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(dotted module, whether at import time) of every import."""
    tree = ast.parse(path.read_text())
    inside = {id(node) for function in ast.walk(tree)
              if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
              for node in ast.walk(function)}  # fmt: skip
    for node in ast.walk(tree):
        at_once = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = f"sparseloco.{path.parent.name}." if node.level else ""
            yield from ((f"{package}{node.module}.{alias.name}", at_once) for alias in node.names)


def third_parties(path: Path) -> set[str]:
    return {module.split(".")[0] for module, _ in imports(path)} - set(sys.stdlib_module_names) - {"sparseloco"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_folder_imports_only_what_its_arrows_allow(path: Path):
    for module, _ in imports(path):
        parts = module.split(".")
        assert parts[0] not in FOLDERS or parts[0] in sys.stdlib_module_names, f"write sparseloco.{module}"
        if parts[0] == "sparseloco" and parts[1] in FOLDERS:
            assert parts[1] in MAY_IMPORT[path.parent.name], f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_name_the_whole_path(path: Path):
    """One module has one name, wherever it is imported from."""
    relative = [node.module for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.ImportFrom) and node.level]  # fmt: skip
    assert not relative, f"write sparseloco.{path.parent.name}.{relative[0]}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_hivemind_is_imported_in_two_files_only(path: Path):
    if "hivemind" in third_parties(path):
        assert name_of(path) in HIVEMIND_FILES


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name == "protocol"], ids=name_of)
def test_protocol_has_no_clock_socket_or_chance(path: Path):
    assert not {module.split(".")[0] for module, _ in imports(path)} & NOT_IN_PROTOCOL
    if path.name == "simulator.py":
        return  # it makes up a network, from a seed
    tree = ast.parse(path.read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not {name for name in called if name.startswith("random.") or name == "Random"}, "take the generator as input"


def test_compression_imports_torch_and_numpy_only():
    for path in FILES:
        if path.parent.name == "compression":
            assert third_parties(path) <= {"torch", "numpy"}, name_of(path)


def test_torch_is_imported_in_compression_and_node_only():
    for path in FILES:
        if path.parent.name in ("bootstrap", "protocol"):
            assert "torch" not in third_parties(path), name_of(path)


def test_command_line_reaches_torch_through_no_import_at_start():
    """Follow every import that happens when node/cli.py is imported."""
    seen: set[str] = set()
    waiting = ["node/cli.py"]
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for module, at_once in imports(ROOT / name):
            parts = module.split(".")
            assert not (at_once and parts[0] in ("torch", "hivemind", "transformers")), f"{name} imports {module}"
            if at_once and parts[0] == "sparseloco" and len(parts) > 2 and f"{parts[1]}/{parts[2]}.py" not in seen:
                waiting.append(f"{parts[1]}/{parts[2]}.py")
    assert "node/options.py" in seen and "node/store.py" not in seen


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_environment_is_read_by_the_command_line_only(path: Path):
    read = [node for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")]  # fmt: skip
    assert not read or name_of(path) in ENVIRONMENT_FILES


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_module_says_what_it_is_for(path: Path):
    assert ast.get_docstring(ast.parse(path.read_text())), f"{name_of(path)} has no docstring"


def test_compression_and_tests_are_no_packages_of_their_own():
    """As packages they would hide Python 3.14's own `compression`, which gzip and lzma import."""
    assert not (ROOT / "compression" / "__init__.py").exists()
    assert not list((ROOT / "tests").rglob("__init__.py"))
