"""Imports point one way, importing Keyhole is cheap, and the public names are those of the design."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import keyhole

SOURCE = Path(keyhole.__file__).parent

# From the bottom up; a module may import from its own layer and those below. What is not here has no place yet.
LAYERS = (
    {"arrays", "errors", "optional", "inference_protocol"},
    {"noise", "queries"},
    {"families"},
    {"recovery"},
    {"gauge"},
    {"numerics"},
    {"methods"},
    {"samples"},
    {"oracles"},
    {"journal", "progress"},
    {"session"},
    {"recover"},
    {"recover_model"},
    {"targets"},
    {"testing", "verify"},
    {"audit"},
    {"runs"},
    {"report"},
    {"serve"},
    {"live"},
    {"cli"},
    {"__main__", "__init__"},
)
LAYER = {part: number for number, parts in enumerate(LAYERS) for part in parts}

# Never imported before they are needed; the last two are no dependency of the core at all.
LAZY = ("torch", "matplotlib", "jinja2", "cupy", "onnxruntime", "httpx", "orjson", "fastapi", "uvicorn", "transformers")

PUBLIC = [
    "AttentionLayer",
    "FunctionOracle",
    "HttpOracle",
    "KeyholeError",
    "MultiHead",
    "Noise",
    "OneLayer",
    "OnnxOracle",
    "Outcome",
    "Recovery",
    "RecoveryFailed",
    "ReluNet",
    "Residual",
    "SingleHead",
    "TorchOracle",
    "TransformersOracle",
    "Verdict",
    "Witness",
    "audit",
    "canonical",
    "distance",
    "equivalent",
    "kinds",
    "learn",
    "load",
    "recover",
    "recover_model",
    "verify",
    "witness",
]

MODULES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """keyhole.methods.forms.reader -> methods; keyhole -> __init__."""
    return module.split(".")[1] if "." in module else "__init__"


def statements(nodes: list[ast.stmt]) -> Iterator[tuple[ast.stmt, bool]]:
    """Import statements, and whether they run when the module is imported; not those for type checkers only."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, True
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from statements(node.orelse)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from ((found, False) for found in ast.walk(node) if isinstance(found, ast.Import | ast.ImportFrom))
        else:
            inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]
            for child in inner:
                yield from statements(child.body if isinstance(child, ast.ExceptHandler) else [child])


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """(module, whether at import time) for everything a file imports; submodules of Keyhole by their full name."""
    found = []
    for node, at_once in statements(ast.parse(path.read_text()).body):
        if isinstance(node, ast.Import):
            found += [(alias.name, at_once) for alias in node.names]
            continue
        assert node.level == 0, f"{path}: imports are absolute"
        assert node.module is not None
        for alias in node.names:
            inner = SOURCE.parent / Path(*node.module.split("."), alias.name)
            is_module = inner.is_dir() or inner.with_suffix(".py").exists()
            found.append((f"{node.module}.{alias.name}" if is_module else node.module, at_once))
    return tuple(found)


def inside(path: Path) -> list[str]:
    return [module for module, _ in imports(path) if module.split(".")[0] == "keyhole"]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_one_way(path: Path) -> None:
    own = part_of(name_of(path))
    assert own in LAYER, f"say in tests/test_layers.py to which layer {own!r} belongs"
    for module in inside(path):
        part = part_of(module)
        assert LAYER[part] <= LAYER[own], f"{name_of(path)} imports {module}, which lies above it"


METHODS = [path for part in ("methods", "samples") for path in sorted((SOURCE / part).rglob("*.py"))]


@pytest.mark.parametrize("path", METHODS, ids=name_of)
def test_methods_touch_no_oracle(path: Path) -> None:
    touched = {part_of(module) for module in inside(path)}
    assert not touched & {"oracles", "journal", "session", "progress"}


@pytest.mark.parametrize("path", sorted((SOURCE / "numerics").glob("*.py")), ids=name_of)
def test_numerics_know_nothing_of_plans_and_oracles(path: Path) -> None:
    assert {part_of(module) for module in inside(path)} <= {"arrays", "errors", "model", "numerics"}


def test_there_is_no_cycle() -> None:
    graph = {name_of(path): {m for m in inside(path) if m != name_of(path)} for path in MODULES}
    # A package's own __init__ imports its files; a file that imports its package would close the circle.
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " → ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for imported in graph.get(module, ()):
                visit(imported, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_imports_a_heavy_library_at_once(path: Path) -> None:
    at_once = {module.split(".")[0] for module, now in imports(path) if now}
    assert not at_once & set(LAZY)


def test_importing_keyhole_imports_nothing_heavy() -> None:
    check = f"import sys, keyhole; print(sorted(set({LAZY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_public_names_are_those_of_the_design_so_far() -> None:
    assert keyhole.__all__ == PUBLIC == sorted(PUBLIC)
    for name in PUBLIC:
        assert getattr(keyhole, name).__doc__


def test_errors_are_drawn_in_their_docstring() -> None:
    """The tree of exceptions shows every one of them, and nothing that does not exist."""
    tree = (keyhole.errors.__doc__ or "").partition("```text\n")[2].partition("```")[0]
    classes = {
        name
        for name, value in vars(keyhole.errors).items()
        if isinstance(value, type) and issubclass(value, keyhole.KeyholeError)
    }
    drawn = {line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()[0] for line in tree.splitlines()}
    assert drawn == classes
