"""Imports point one way, modules lie where their importers are, importing is cheap, public names are the design's."""

from __future__ import annotations

import ast
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache, reduce
from itertools import takewhile
from pathlib import Path

import pytest

import keyhole

SOURCE = Path(keyhole.__file__).parent
TESTS = Path(__file__).parent

# From the bottom up; a module may import from its own layer and those below. What is not here has no place yet.
LAYERS = (
    {"arrays", "errors", "optional", "inference_protocol"},
    {"executors", "shards"},
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
    {"sentence"},
    {"targets"},
    {"testing", "verify", "compress"},
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
LAZY += ("pycurl", "distributed", "pyarrow", "zarr")

PUBLIC = [
    "AttentionLayer",
    "FormHead",
    "FunctionOracle",
    "HttpOracle",
    "KeyholeError",
    "Labels",
    "MultiHead",
    "Noise",
    "NormAfter",
    "NormBefore",
    "OneLayer",
    "OnnxOracle",
    "Outcome",
    "Recovery",
    "RecoveryFailed",
    "ReluNet",
    "Residual",
    "RestOracle",
    "SingleHead",
    "TorchOracle",
    "TransformersOracle",
    "Verdict",
    "Witness",
    "attention_on",
    "audit",
    "canonical",
    "compress",
    "diagnose",
    "distance",
    "equivalent",
    "kinds",
    "learn",
    "load",
    "on_alphabet",
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


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """The modules that a statement names; submodules of Keyhole by their full name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0, f"imports are absolute: {ast.unparse(node)}"
    assert node.module is not None
    within = SOURCE.parent / Path(*node.module.split("."))
    names = [alias.name for alias in node.names]
    are_modules = [(within / name).is_dir() or (within / f"{name}.py").exists() for name in names]
    return [f"{node.module}.{name}" if own else node.module for name, own in zip(names, are_modules, strict=True)]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(path: Path) -> tuple[tuple[str, bool], ...]:
    """(module, whether at import time) for everything that a file imports when it runs."""
    return tuple((module, at_once) for node, at_once in statements(parsed(path).body) for module in imported(node))


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
    assert {part_of(module) for module in inside(path)} <= {"arrays", "errors", "families", "numerics"}


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


# --- rooms ----------------------------------------------------------------------------------------------------------

# May be imported from anywhere: what a folder is for.
ENTRY_POINTS = {"__init__", "__main__", "base", "certificate", "diagnose", "measure", "method"}

# Modules that lie elsewhere than their importers say, and why.
ELSEWHERE: dict[str, str] = {}
MOST_MODULES = 14  # in a folder
MOST_LONG_FUNCTIONS, LONG = 6, 60  # functions of more than LONG lines in the whole package
MEDIAN_LINES = 160  # of a module


def room(path: Path) -> tuple[str, ...]:
    """The folder of a module, from the package down."""
    return path.relative_to(SOURCE).parent.parts


def rooms() -> dict[tuple[str, ...], list[str]]:
    """The names of the modules in each folder."""
    found = defaultdict(list)
    for path in MODULES:
        if path.stem != "__init__":
            found[room(path)].append(path.stem)
    return found


@cache
def importers() -> dict[str, list[Path]]:
    """Who imports a module, also within functions and for type checkers only."""
    found = defaultdict(list)
    for path in MODULES:
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)]
        for module in {module for node in nodes for module in imported(node)} - {name_of(path)}:
            if module.split(".")[0] == "keyhole":
                found[module].append(path)
    return found


def common_room(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
    """The lowest folder that contains both."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return tuple(name for name, _ in same)


def strays() -> dict[str, str]:
    """Modules outside the lowest folder that contains all of their importers, and that folder; deeper ones are fine.

    What several learners share and asks nothing lies in numerics, which knows nothing of plans.
    """
    found = {}
    for path in MODULES:
        users = importers()[name_of(path)]
        if path.stem in ENTRY_POINTS or not users:
            continue
        common = reduce(common_room, map(room, users))
        if common == ("methods",) and room(path) == ("numerics",):
            continue
        if room(path)[: len(common)] != common:
            found[name_of(path).removeprefix("keyhole.")] = "/".join(common) or "."
    return found


def test_every_module_lies_in_the_lowest_folder_that_contains_its_importers() -> None:
    found = strays()
    astray = [f"{name}: its importers live in {where}" for name, where in found.items() if name not in ELSEWHERE]
    assert not astray, "\n".join(astray)
    assert set(ELSEWHERE) <= set(found), "this exception is none any more"


def test_no_folder_has_many_modules() -> None:
    sizes = {"/".join(folder): len(names) for folder, names in rooms().items()}
    assert {folder: size for folder, size in sizes.items() if size > MOST_MODULES} == {}


def test_no_prefix_stands_in_for_a_folder() -> None:
    counts = Counter((folder, name.split("_")[0]) for folder, names in rooms().items() for name in names)
    assert [("/".join(folder), prefix) for (folder, prefix), count in counts.items() if count > 3] == []


def test_no_two_packages_import_each_other() -> None:
    """Neither at the top nor within a package: of two folders beside each other at most one knows the other."""
    pairs = set()
    for module, users in importers().items():
        parts = tuple(module.split(".")[1:])
        other = parts if (SOURCE / Path(*parts)).is_dir() else parts[:-1]
        for mine in map(room, users):
            shared = len(common_room(mine, other))
            if shared < min(len(mine), len(other)):
                pairs.add((mine[: shared + 1], other[: shared + 1]))
    both = {tuple(sorted(("/".join(one), "/".join(other)))) for one, other in pairs if (other, one) in pairs}
    assert both == set()


def test_few_functions_are_long() -> None:
    long = [
        f"{name_of(path)}.{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for path in MODULES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > LONG
    ]
    assert len(long) <= MOST_LONG_FUNCTIONS, long


def test_modules_are_short() -> None:
    lines = [len(path.read_text().splitlines()) for path in MODULES]
    assert statistics.median(lines) <= MEDIAN_LINES


def test_tests_mirror_the_tree() -> None:
    """The tests of a folder lie in a folder of that name; what concerns all of them lies at the top."""
    folders = {path.relative_to(TESTS).parent for path in TESTS.rglob("test_*.py")}
    assert [str(folder) for folder in sorted(folders) if not (SOURCE / folder).is_dir()] == []


# --- what importing costs, and what is public -------------------------------------------------------------------------


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
    tree = (keyhole.errors.__doc__ or "").partition("::\n\n")[2]
    classes = {
        name
        for name, value in vars(keyhole.errors).items()
        if isinstance(value, type) and issubclass(value, keyhole.KeyholeError)
    }
    drawn = {line.replace("│", " ").replace("├──", " ").replace("└──", " ").split()[0] for line in tree.splitlines()}
    assert drawn == classes


FAMILY_NAMES = {"Family", "Residual", "CorrelatedErrors", "FittedNet", "OpaqueNet"} | {
    name for name in PUBLIC if name in {"AttentionLayer", "MultiHead", "OneLayer", "ReluNet", "SingleHead"}
}
# What may be asked for its attributes: systems, sockets, modules of PyTorch, and what a user's factory returns.
PROBED = {"signal", "connection", "module", "box", "oracle"}
PARAMETERS = {"params", "radius", "standard_error", "truth", "partial"}
OUTSIDE_FAMILIES = [path for path in MODULES if path.relative_to(SOURCE).parts[0] not in {"families", "gauge"}]


@pytest.mark.parametrize("path", OUTSIDE_FAMILIES, ids=name_of)
def test_families_are_asked_and_never_guessed(path: Path) -> None:
    """No `isinstance` on families and no `hasattr` outside families/ and gauge/: the Protocol has an answer."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"isinstance", "hasattr"}:
            about, what = ast.unparse(node.args[0]), ast.unparse(node.args[1])
            where = f"{name_of(path)}:{node.lineno}: {ast.unparse(node)}"
            if node.func.id == "hasattr":
                assert about in PROBED, where
            else:
                named = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                assert not named & FAMILY_NAMES, where
                assert "__class__" not in what, where
                assert "type(" not in what, where


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_parameters_have_a_type(path: Path) -> None:
    """Nothing that holds parameters is declared as `Any`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.arg):
            name, annotation = node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign):
            name, annotation = ast.unparse(node.target).removeprefix("self."), node.annotation
        else:
            continue
        if name in PARAMETERS and annotation is not None:
            assert "Any" not in {each.id for each in ast.walk(annotation) if isinstance(each, ast.Name)}, (
                f"{name_of(path)}:{node.lineno}: {name} is Any"
            )
