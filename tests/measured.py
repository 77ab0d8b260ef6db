"""Lines of results/*.csv with what follows from them, for tests/figures.py."""

import csv
import math
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tilery.ops  # noqa: F401  fills the registry
from tilery.core.op import REGISTRY
from tilery.ladder.rungs import RUNGS
from tilery.measure.result import is_ours
from tilery.measure.source_hash import source_hash

RESULTS = Path(__file__).parents[1] / "results"
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?(?![\w])")


class Wrong(Exception):
    """A figure, or the comment that names its source."""


@dataclass
class Result:
    """A line of a results file: its columns, the numbers of its case, and what follows from the arms beside it."""

    file: str
    columns: dict[str, float | str]

    def __getitem__(self, name: str) -> float:
        value = self.columns.get(name, "")
        if isinstance(value, str):
            has = ", ".join(column for column, found in self.columns.items() if not isinstance(found, str))
            raise Wrong(f"{self.file}: expected a number in the column {name}, got {value!r}; there are {has}")
        return value

    def takes(self, condition: str) -> bool:
        """`M<=128`, `peer=deepgemm`, `queries=1|none` (none: the case does not say)."""
        found = re.fullmatch(r"([\w.]+)(<=|>=|!=|=|<|>)(\S+)", condition)
        if found is None:
            raise Wrong(f"expected a condition such as M<=128 or peer=torch, got {condition!r}")
        name, relation, wanted = found.groups()
        value = self.columns.get(name, "")
        if relation in ("=", "!="):
            same = any(_same(value, one) for one in wanted.split("|"))
            return same if relation == "=" else not same
        if isinstance(value, str):
            return False
        limit = float(wanted)
        return {"<=": value <= limit, ">=": value >= limit, "<": value < limit, ">": value > limit}[relation]

    @property
    def is_current(self) -> bool:
        """Whether the kernel is the one that was measured; what is not ours, or was not timed, has no source."""
        op, kernel = str(self.columns.get("op", "")), str(self.columns.get("kernel", ""))
        if not kernel or not is_ours(kernel) or self.columns.get("ms") == "":
            return True
        source = self.columns.get("source", "")
        if op == "ladder":
            return kernel in RUNGS and source == RUNGS[kernel].source_hash
        return op in REGISTRY and kernel in REGISTRY[op].kernels and source == source_hash(REGISTRY[op], kernel)


def _same(value: float | str, text: str) -> bool:
    if text == "none":
        return value == ""
    return value == _parsed(text)


def _parsed(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@cache
def results(file: str) -> tuple[Result, ...]:
    path = RESULTS / file
    if not path.is_file():
        there = ", ".join(sorted(path.name for path in RESULTS.glob("*.csv")))
        raise Wrong(f"expected a file of results/, got {file!r}; there are {there}")
    with path.open(encoding="utf-8", newline="") as opened:
        lines = list(csv.DictReader(opened))
    found = []
    for line in lines:
        numbers = dict(part.split("=", 1) for part in line.get("case", "").split(",") if "=" in part)
        columns = {name: _parsed(value) for name, value in (numbers | line).items()}
        found.append(Result(file, columns))
    problems: dict[tuple, list[Result]] = {}
    for one in found:
        problems.setdefault((one.columns["op"], one.columns.get("case")), []).append(one)
    for arms in problems.values():
        if "ms" in arms[0].columns:
            _add_derived(arms)
    return tuple(found)


def _add_derived(arms: list[Result]) -> None:
    """us, tbps, percent; against each PEER vs_PEER and error_vs_PEER; against the fastest vs_best, best_us, best_peer.

    vs: how many times faster, by the medians. of_copy: the time of a copy of as many bytes over this time. fastest: 1
    for the fastest kernel of ours.
    """
    timed = {
        str(arm.columns["kernel"]): arm for arm in arms if arm.columns["status"] == "pass" and arm.columns["ms"] != ""
    }
    peers = {name.removeprefix("baseline:"): arm for name, arm in timed.items() if name.startswith("baseline:")}
    best = min(peers, key=lambda peer: peers[peer]["ms"], default=None)
    fastest = min((arm for name, arm in timed.items() if is_ours(name)), key=lambda arm: arm["ms"], default=None)
    copy = timed.get("control:copy")
    for arm in timed.values():
        columns, ms = arm.columns, arm["ms"]
        columns |= {"us": ms * 1e3, "tbps": arm["gbps"] / 1e3, "fastest": float(arm is fastest)}
        if columns["ratio"] != "":
            columns["percent"] = 100 * arm["ratio"]
        for name, peer in peers.items():
            columns[f"vs_{name}"] = peer["ms"] / ms
            if columns.get("error", "") != "" and peer.columns["error"] not in ("", 0.0):
                columns[f"error_vs_{name}"] = arm["error"] / peer["error"]
        if best is not None:
            columns |= {"vs_best": peers[best]["ms"] / ms, "best_us": peers[best]["ms"] * 1e3, "best_peer": best}
        if copy is not None:
            columns |= {"copy_us": copy["ms"] * 1e3, "of_copy": copy["ms"] / ms}


def chosen(file: str, conditions: list[str]) -> list[Result]:
    return [one for one in results(file) if all(one.takes(condition) for condition in conditions)]


def value_of(one: Result, name: str) -> float:
    """A column, or `column*1000`."""
    column, _, factor = name.partition("*")
    return one[column] * float(factor or 1)


def agrees(printed: str, value: float) -> bool:
    """Whether the value is printed so at this precision."""
    text = printed.replace(",", "")
    digits, _, power = text.partition("e")
    step = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
    return math.isclose(float(text), value, rel_tol=0, abs_tol=0.5000001 * step)
