"""What a mutation is, and how its place in the source is found: by text, not by path, so that files may move."""

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFORMANCE = "test_kernel_is_right_or_refuses_as_declared"


class NotApplicable(Exception):
    """A mutation or its test no longer fits the source; the message says how."""


@dataclass(frozen=True)
class Mutation:
    """A bug: `old` becomes `new` at the one place where it stands, and one of the `tests` must fail then."""

    name: str
    layer: str
    old: str
    new: str
    tests: tuple[str, ...]  # "test_timing.py::test_x", wherever that file lies
    inside: str = ""  # the function or class in which `old` stands, if it stands elsewhere too


@dataclass(frozen=True)
class Place:
    """Where a mutation goes: character `start` of a file."""

    path: Path
    start: int


class Layer:
    """Collects the mutations of one layer: `add` is called once for each."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mutations: list[Mutation] = []

    def add(self, name: str, old: str, new: str, *tests: str, inside: str = "") -> None:
        self.mutations.append(Mutation(name, self.name, old, new, tests, inside))


def case(op: str, kernel: str, params: str) -> str:
    """The conformance test of one case, given as the case prints itself."""
    return f"test_ops.py::{CONFORMANCE}[{op}-{kernel}-{params}]"


def sources(package: Path) -> list[Path]:
    """What bugs are planted in: Python, and CUDA C++ that the emulator runs where there is no GPU."""
    return sorted(path for path in package.rglob("*") if path.suffix in (".py", ".cu", ".cuh"))


def find(mutation: Mutation, package: Path) -> Place:
    """The one place below `package` where it applies; raises NotApplicable if there is none, or more than one."""
    found = [Place(path, at) for path in sources(package) for at in _places(mutation, path)]
    if len(found) == 1:
        return found[0]
    where = f" inside {mutation.inside}" if mutation.inside else ""
    seen = ", ".join(str(place.path.relative_to(package)) for place in found)
    count = f"{len(found)} places ({seen})" if found else "no place"
    raise NotApplicable(f"{mutation.name} no longer applies: {count} with {mutation.old!r}{where}, expected one")


def mutated(mutation: Mutation, place: Place) -> str:
    """The text of the file with the bug in it."""
    text = place.path.read_text()
    made = text[: place.start] + mutation.new + text[place.start + len(mutation.old) :]
    try:
        if place.path.suffix == ".py":
            ast.parse(made)
    except SyntaxError as error:
        raise NotApplicable(f"{mutation.name} makes no Python: {error}") from None
    return made


def _places(mutation: Mutation, path: Path) -> Iterator[int]:
    text = _text(path, path.stat().st_mtime_ns)
    if mutation.old not in text or (mutation.inside and path.suffix != ".py"):
        return
    for first, last in _spans(text, mutation.inside):
        at = text.find(mutation.old, first, last)
        while at >= 0:
            yield at
            at = text.find(mutation.old, at + 1, last)


def _spans(text: str, name: str) -> Iterator[tuple[int, int]]:
    """First and last character of every function or class of that name; without a name, of the whole text."""
    if not name:
        yield 0, len(text)
        return
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name and node.end_lineno is not None:
            yield starts[node.lineno - 1], starts[node.end_lineno]


def test_path(test: str, tests: Path) -> str:
    """The test's id with the path of its file, relative to `tests`; raises NotApplicable if it is not there."""
    file, _, rest = test.partition("::")
    function = rest.partition("[")[0]
    found = sorted(tests.rglob(file))
    if len(found) != 1:
        raise NotApplicable(f"there must be one file {file} below {tests.name}, found {len(found)}")
    if function not in _functions(found[0], found[0].stat().st_mtime_ns):
        raise NotApplicable(f"{file} has no test {function}")
    return f"{found[0].relative_to(tests)}::{rest}"


test_path.__test__ = False  # type: ignore[attr-defined]  # not a test, though its name begins so


@functools.cache
def _text(path: Path, time: int) -> str:
    """A file as it was at that time: it is looked through for every mutation."""
    return path.read_text()


@functools.cache
def _functions(path: Path, time: int) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(_text(path, time))) if isinstance(node, ast.FunctionDef)}
