"""The rules of CONTRIBUTING.md that a machine can check, checked on every source file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("kvstore", "connectors", "tests", "bench", "proto")
FILE_LINES_MAX, FUNCTION_LINES_MAX, PARAMETERS_MAX, LINE_CHARACTERS_MAX = 400, 60, 6, 100

FORBIDDEN_CLASS_WORDS = ("Manager", "Controller", "Factory", "Helper", "Wrapper")
FORBIDDEN_MODULES = ("utils.py", "common.py", "util.py", "helpers.py", "misc.py")
MARKERS = re.compile(
    r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "HA" + "CK")) + r")\b"
)

BROAD_EXCEPT = "kvstore/core/guard.py"
"""Where the one broad ``except`` is."""
BOUNDARIES = {
    "kvstore/server_sessions.py": "the request boundary of the engine link",
    "kvstore/server.py": "whatever the core raises stops the daemon",
    "kvstore/client_link.py": "an engine's event may raise anything into the client's thread",
    "kvstore/mover.py": "a Move's end must be reported, whatever happened below",
    "kvstore/mover_remote.py": "a probe or clear must be answered, whatever happened below",
    "connectors/kvstore_transformers/engine.py": "the connector's entry",
    "connectors/kvstore_vllm/connector.py": "the connector's entry",
}
"""Which files call ``guarded``, and why: once each."""

CORE_FORBIDDEN = {
    "asyncio",
    "os",
    "time",
    "random",
    "threading",
    "multiprocessing",
    "socket",
    "secrets",
}
"""Standard modules through which the world would get into the core."""

ALLOWED_IMPORTS: dict[str, set[str]] = {
    "core": set(),
    "units": set(),
    "machine": set(),
    "memory": {"core"},
    "proto_gen": set(),
    "config": {"core", "units"},
    "sizing": {"core", "codecs", "config", "machine", "units", "tiers"},
    "verify": {"core", "codecs", "tiers"},
    "testing": {"core", "codecs", "device", "tiers"},
    "wire": {"core", "proto_gen"},
    "client": {"core", "wire", "proto_gen", "memory"},
    "codecs": {"core"},
    "device": {"core", "memory"},
    "tiers": {"core", "codecs", "memory"},
    "mover": {"core", "device", "codecs", "tiers"},
    "server": {"core", "wire", "proto_gen", "device", "memory", "mover"},
    "admin": {"core", "proto_gen", "mover", "server", "machine"},
    "report": {"core", "units"},
}
"""What each part of kvstore may import of kvstore; parts not listed are the outermost and may
import all.

A part is a folder, or the modules that share a first word: ``server.py`` and
``server_session.py``."""

OUTERMOST = {"daemon", "cli", "doctor", "demo"}


def python_files() -> list[Path]:
    files = [p for name in SOURCE_ROOTS for p in sorted((ROOT / name).rglob("*.py"))]
    return [p for p in files if "proto_gen" not in p.parts and "__pycache__" not in p.parts]


FILES = python_files()
PRODUCT = [p for p in FILES if p.relative_to(ROOT).parts[0] in ("kvstore", "connectors")]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, also inside functions; relative ones made absolute."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def part_of(dotted: str) -> str:
    """The part of kvstore that a dotted name belongs to; "" for the package itself."""
    words = dotted.split(".")
    return (
        words[1].split("_")[0]
        if len(words) > 1 and words[1] != "proto_gen"
        else (words[1:] or [""])[0]
    )


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def test_files_and_lines_are_short_enough() -> None:
    """A file of more than 400 lines holds two things; a line of more than 100 characters isn't
    read."""
    problems = []
    for path in FILES:
        lines = path.read_text(encoding="utf-8").splitlines()
        if len(lines) > FILE_LINES_MAX:
            problems.append(f"{name_of(path)}: {len(lines)} lines, {FILE_LINES_MAX} at most")
        problems += [
            f"{name_of(path)}:{number}: {len(line)} characters, {LINE_CHARACTERS_MAX} at most"
            for number, line in enumerate(lines, 1)
            if len(line) > LINE_CHARACTERS_MAX
        ]
    report(problems)


def test_functions_are_short_and_take_few_parameters() -> None:
    """60 lines and 6 parameters beside ``self`` are the most a function has."""
    problems = []
    for path in FILES:
        for function in functions(tree_of(path)):
            where = f"{name_of(path)}:{function.lineno}: {function.name}"
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > FUNCTION_LINES_MAX:
                problems.append(f"{where} has {length} lines, {FUNCTION_LINES_MAX} at most")
            arguments = function.args
            names = [
                a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            ]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > PARAMETERS_MAX and path in PRODUCT:
                problems.append(f"{where} takes {count} parameters, {PARAMETERS_MAX} at most")
    report(problems)


def test_imports_go_one_way() -> None:
    """core <- {device, codecs, tiers} <- mover <- {server, admin} <- daemon; client and wire
    import core only."""
    problems = []
    for path in PRODUCT:
        name = name_of(path)
        if not name.startswith("kvstore/") or name == "kvstore/__init__.py":
            continue
        part = part_of(name.removesuffix(".py").replace("/", "."))
        if part in OUTERMOST:
            continue
        assert part in ALLOWED_IMPORTS, f"{name}: say in ALLOWED_IMPORTS what {part!r} may import"
        for line, dotted in imported(path):
            if not dotted.startswith("kvstore."):
                continue
            target = part_of(dotted)
            if target not in ("", part) and target not in ALLOWED_IMPORTS[part]:
                problems.append(f"{name}:{line}: {part} imports {dotted}")
    report(problems)


def test_connectors_import_only_the_client_side() -> None:
    """A connector runs in the engine: it sees kvstore's client and core's keys, layout and
    messages."""
    core = r"core(\.(keys|layout|messages|errors|guard)\b.*)?"
    allowed = re.compile(rf"kvstore(\.(client\w*|memory|{core}|[A-Z]\w*))?(\.\w+)?$")
    problems = []
    for path in FILES:
        if path.relative_to(ROOT).parts[0] != "connectors":
            continue
        for line, dotted in imported(path):
            if (dotted == "kvstore" or dotted.startswith("kvstore.")) and not allowed.match(dotted):
                problems.append(f"{name_of(path)}:{line}: imports {dotted}")
    report(problems)


def test_core_is_pure() -> None:
    """The core imports the standard library and itself, and nothing that brings a clock, threads
    or I/O."""
    problems = []
    for path in PRODUCT:
        if not name_of(path).startswith("kvstore/core/"):
            continue
        for line, dotted in imported(path):
            top = dotted.split(".")[0]
            ours = dotted.startswith("kvstore.core") or dotted == "kvstore"
            if top in CORE_FORBIDDEN or (not ours and top not in sys_stdlib()):
                problems.append(f"{name_of(path)}:{line}: imports {dotted}")
        for node in ast.walk(tree_of(path)):
            if called(node) == "open":
                problems.append(f"{name_of(path)}:{line_of(node)}: opens a file")
    report(problems)


def line_of(node: ast.AST) -> int:
    return int(getattr(node, "lineno", 0))


def called(node: ast.AST) -> str:
    """The plain name that a call calls; "" for anything else."""
    plain = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return node.func.id if plain else ""  # type: ignore[attr-defined]


def sys_stdlib() -> frozenset[str]:
    import sys

    return sys.stdlib_module_names


def test_no_broad_except_but_at_the_boundaries() -> None:
    """A broad ``except`` hides bugs: there is one, and each outer boundary calls it once."""
    problems = []
    for path in PRODUCT:
        name, nodes = name_of(path), list(ast.walk(tree_of(path)))
        broad = [n for n in nodes if isinstance(n, ast.ExceptHandler) and is_broad(n.type)]
        allowed = 1 if name == BROAD_EXCEPT else 0
        problems += [f"{name}:{line_of(n)}: broad except" for n in broad[allowed:]]
        if name in BOUNDARIES:
            calls = [n for n in nodes if called(n) == "guarded"]
            problems += [f"{name}:{line_of(n)}: guarded twice" for n in calls[1:]]
        elif any(dotted == "kvstore.core.guard" for _, dotted in imported(path)):
            problems.append(f"{name}: guarded, and no boundary")
    report(problems)


def test_every_boundary_that_is_listed_is_one() -> None:
    """A list that outlives what it allows would allow the next one."""
    for name in BOUNDARIES:
        assert any(called(node) == "guarded" for node in ast.walk(tree_of(ROOT / name))), name


def is_broad(kind: ast.expr | None) -> bool:
    if kind is None:
        return True
    names = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(isinstance(n, ast.Name) and n.id in ("Exception", "BaseException") for n in names)


def test_no_forbidden_names() -> None:
    """Manager and its kin say nothing; ``utils`` collects what has no place."""
    problems = [
        f"{name_of(p)}: forbidden module name" for p in FILES if p.name in FORBIDDEN_MODULES
    ]
    for path in PRODUCT:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                words = [word for word in FORBIDDEN_CLASS_WORDS if word in node.name]
                problems += [f"{name_of(path)}:{line_of(node)}: class {node.name}" for _ in words]
    report(problems)


def test_environment_is_read_in_config_only() -> None:
    """``os.environ`` and ``os.getenv`` stand in files called config.py and nowhere else."""
    problems = []
    for path in PRODUCT:
        if path.name == "config.py":
            continue
        for node in ast.walk(tree_of(path)):
            names = {node.attr} if isinstance(node, ast.Attribute) else set()
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                names = {alias.name for alias in node.names}
            if names & {"environ", "environb", "getenv", "getenvb"}:
                problems.append(f"{name_of(path)}:{line_of(node)}: reads the environment")
    report(problems)


def test_kvstore_never_imports_torch() -> None:
    """The daemon, the client and the command line run without torch; only connectors use it."""
    problems = [
        f"{name_of(path)}:{line}: imports {dotted}"
        for path in PRODUCT
        if name_of(path).startswith("kvstore/")
        for line, dotted in imported(path)
        if dotted.split(".")[0] in ("torch", "transformers")
    ]
    report(problems)


def test_nothing_evaluates_code() -> None:
    """No pickle, marshal, eval or exec: bytes that come from outside are never code."""
    problems = []
    for path in PRODUCT:
        for line, dotted in imported(path):
            if dotted.split(".")[0] in ("pickle", "marshal", "shelve", "dill", "cloudpickle"):
                problems.append(f"{name_of(path)}:{line}: imports {dotted}")
        for node in ast.walk(tree_of(path)):
            name = called(node)
            if name in ("eval", "exec", "__import__"):
                problems.append(f"{name_of(path)}:{line_of(node)}: calls {name}")
    report(problems)


def test_nothing_is_left_for_later() -> None:
    """No markers and no stubs: what isn't there is said in the documentation."""
    problems = []
    for path in FILES:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if MARKERS.search(line) or "NotImplemented" + "Error" in line:
                problems.append(f"{name_of(path)}:{number}: {line.strip()}")
    report(problems)


def test_no_global_state_is_assigned_from_functions() -> None:
    """``global`` would be state that no constructor shows."""
    problems = [
        f"{name_of(path)}:{line_of(node)}: global {', '.join(node.names)}"
        for path in PRODUCT
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Global)
    ]
    report(problems)


@pytest.mark.parametrize(
    "entry", ["kvstore", "proto", "cuda", "connectors", "deploy", "tests", "bench"]
)
def test_every_top_level_entry_is_there_and_says_what_it_is(entry: str) -> None:
    """Each top-level folder exists, with code or a README that says what belongs there."""
    files = list((ROOT / entry).rglob("*.py")) + list((ROOT / entry).glob("README.md"))
    assert files, f"{entry}/ holds neither code nor a README.md"
