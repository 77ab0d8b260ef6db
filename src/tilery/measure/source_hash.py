"""A hash of the source that a kernel is built of, so that a measurement says which kernel it is of.

What changes no kernel changes no hash: comments, docstrings, formatting, imports, and where files lie.
"""

import ast
import hashlib
import importlib.util
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import tilery
from tilery.core.op import Op

_DIGITS = 12
_PACKAGE = Path(tilery.__file__).parent
_INCLUDE = _PACKAGE / "languages" / "include"
_DEVICE_CODE = ("tilery.ops.", "tilery.languages.")  # where kernels may take code from
_INCLUDED = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
# A string is matched so that what looks like a comment inside of it is none.
_CUDA_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_UNTOLD = ("ctx", "kind", "type_comment")  # fields of Python's syntax tree that follow from the others


@cache
def source_hash(op: Op, kernel: str) -> str:
    """12 hex digits over the files of the kernel; empty where its module has no file."""
    path = kernel_file(op, kernel)
    return hash_of([path]) if path else ""


def kernel_file(op: Op, kernel: str) -> Path | None:
    module = op.kernels[kernel].partition(":")[0]
    return module_file(module if "." in module else f"{op.package}.{module}")


def hash_of(paths: Iterable[Path]) -> str:
    """12 hex digits over these files and all that they are built of, whatever the files are called."""
    files = set().union(*map(closure, paths))
    hashes = sorted(hashlib.sha256(text.encode()).hexdigest() for text in map(normalised, files) if text)
    return hashlib.sha256(" ".join(hashes).encode()).hexdigest()[:_DIGITS]


@cache
def module_file(module: str) -> Path | None:
    """The file of a module; None of what is no module. A module of this package is not imported for it."""
    if module.partition(".")[0] == _PACKAGE.name:
        base = _PACKAGE.parent.joinpath(*module.split("."))
        return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
    found = importlib.util.find_spec(module)
    return Path(found.origin) if found and found.origin and Path(found.origin).is_file() else None


def closure(path: Path) -> set[Path]:
    """The file and all that it takes code from within ops and languages: imports, .cu files, includes."""
    seen, waiting = {path}, [path]
    while waiting:
        now = waiting.pop()
        found = (_used_by_python(now) if now.suffix == ".py" else _used_by_cuda(now)) - seen
        seen |= found
        waiting += found
    return seen


@cache
def _used_by_python(path: Path) -> set[Path]:
    names, files = set(), set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if _is_ours(name) and module_file(name) else node.module for name in full}
        elif _names_cuda(node):
            files.add(path.with_name(node.value))  # type: ignore[attr-defined]
    found = {module_file(name) for name in names if _is_ours(name)} | {file for file in files if file.is_file()}
    return {file for file in found if file is not None}


def _is_ours(module: str) -> bool:
    return module.startswith(_DEVICE_CODE)


def _names_cuda(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith((".cu", ".cuh"))


@cache
def _used_by_cuda(path: Path) -> set[Path]:
    names = _INCLUDED.findall(path.read_text(encoding="utf-8"))
    places = [folder / name for name in names for folder in (path.parent, _INCLUDE)]
    return {place for place in places if place.is_file()}


@cache
def normalised(path: Path) -> str:
    """What is left of a file without that which changes no kernel."""
    text = path.read_text(encoding="utf-8")
    return _python(text) if path.suffix == ".py" else _cuda(text)


def _python(text: str) -> str:
    """The syntax tree, told alike by every version of Python (`ast.unparse` and `ast.dump` are not)."""
    return "\n".join(_told(statement) for statement in _kept(ast.parse(text).body))


def _kept(body: list[ast.stmt]) -> list[ast.stmt]:
    return [statement for statement in body if not _says_nothing(statement)]


def _says_nothing(node: ast.stmt) -> bool:
    """Imports, docstrings, and an `if` around imports alone."""
    if isinstance(node, ast.If):
        return not _kept(node.body) and not _kept(node.orelse)
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, ast.Import | ast.ImportFrom)


def _told(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_told(item) for item in _kept(node)) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if _names_cuda(node):
        return "file"  # it may be renamed; what is in it counts by itself
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, []) and name not in _UNTOLD]
    return f"{type(node).__name__}({','.join(f'{name}={_told(value)}' for name, value in fields)})"


def _cuda(text: str) -> str:
    text = _CUDA_COMMENT.sub(lambda found: found[0] if found[0].startswith('"') else " ", text)
    parts: list[str] = []
    for line in text.replace("\\\n", " ").splitlines():
        line = " ".join(line.split())
        if re.match(r"# ?include\b", line):
            continue
        parts.append(f"\n{line}\n" if line.startswith("#") else line)  # a directive ends with its line
    code = re.sub(r"[^\S\n]+", " ", " ".join(parts))
    lines = [line.strip() for line in code.splitlines()]
    return "\n".join(line if line.startswith("#") else _packed(line) for line in lines if line)


def _packed(code: str) -> str:
    """Without the spaces that a formatter may add or take: those beside punctuation, but for a string's own."""
    parts = re.split(r'("(?:\\.|[^"\\])*")', code)
    return "".join(part if i % 2 else re.sub(r" ?([^\w\s]) ?", r"\1", part) for i, part in enumerate(parts))
