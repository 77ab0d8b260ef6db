"""Runs tests on the mutated source, in a child for each mutation, and says who noticed."""

import json
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from mutations.mutation import ROOT, Mutation, NotApplicable, find, mutated, test_path
from mutations.nursery import PRELOADED, Nursery
from mutations.tree import Tree

NOTICED, UNNOTICED, INVALID = "noticed", "UNNOTICED", "INVALID"
_FAILED = 1  # pytest's exit code where tests failed; the others, but for 0, mean that they did not run
# A mutant that raises one of these was not run at all: no bug that anybody would ship.
_NOT_RUN = {"SyntaxError", "ImportError", "NameError", "NumbaError", "CompileFailed"}
_OPTIONS = ("-q", "--no-header", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "mutations.witness")


@dataclass(frozen=True)
class Project:
    """Where the package and its tests lie."""

    package: Path = ROOT / "src" / "tilery"
    tests: Path = ROOT / "tests"
    preload: tuple[str, ...] = PRELOADED  # what its tests import anyway


@dataclass(frozen=True)
class Verdict:
    mutation: Mutation
    status: str  # NOTICED, UNNOTICED, or INVALID: it says nothing of the tests
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Run:
    """What a child said: its exit code (negative: a signal), outcomes of tests by id, types that failures raised."""

    code: int | None  # None: it took too long
    outcomes: dict[str, str]
    raised: list[list[str]]
    said: str = ""


class Bench:
    """A tree to plant bugs in, and who runs tests on it."""

    def __init__(self, folder: Path, project: Project) -> None:
        self.project, self.tree, self.nursery = project, Tree(folder, project.package), Nursery(project.preload)

    def run(self, tests: Iterable[str], limit_s: float, module: str = "") -> Run:
        """Runs these tests; until the first failure if a `module` is mutated, else all of them."""
        ids = [test_path(test, self.project.tests) for test in tests]
        if not ids:
            return Run(0, {}, [])
        with self.tree.state() as state:
            report, output = state / "report.json", state / "output.txt"
            environment = {
                "TILERY_TEST_STATE": str(state),
                "TILERY_MUTATION_REPORT": str(report),
                "TILERY_MUTATION_SOURCE": str(self.tree.source),
                "TILERY_MUTATION_MODULE": module,
                "TILERY_MUTATION_TESTS": ",".join({i.partition("::")[2].partition("[")[0] for i in ids}),
            }
            code = self.nursery.run(
                arguments=[*_OPTIONS, *(["-x"] if module else []), *ids], environment=environment,
                paths=[str(self.tree.source), str(self.project.tests), str(Path(__file__).parents[1])],
                folder=str(self.project.tests), output=str(output), limit_s=limit_s,
            )  # fmt: skip
            seen = json.loads(report.read_text()) if report.exists() else {"outcomes": {}, "raised": []}
            said = _last_words(output.read_text(errors="replace")) if code not in (0, _FAILED) else ""
        return Run(code, seen["outcomes"], seen["raised"], said)


def applies(mutation: Mutation, project: Project) -> str | None:
    """Why it cannot be planted, or its tests cannot be run, in a sentence; None if all fits."""
    try:
        mutated(mutation, find(mutation, project.package))
        for test in mutation.tests:
            test_path(test, project.tests)
    except NotApplicable as error:
        return str(error)
    return None


def run_all(
    mutations: Sequence[Mutation], project: Project, jobs: int, limit_s: float, tell: Callable[[Verdict], None]
) -> list[Verdict]:
    """A verdict on each, given to `tell` as soon as there is one; all of them in the order of the mutations."""
    verdicts: dict[Mutation, Verdict] = {}

    def keep(verdict: Verdict) -> None:
        verdicts[verdict.mutation] = verdict
        tell(verdict)

    for mutation in mutations:
        if why := applies(mutation, project):
            keep(Verdict(mutation, INVALID, why))
    fitting = [mutation for mutation in mutations if mutation not in verdicts]
    with tempfile.TemporaryDirectory(prefix="tilery-mutations-") as folder:
        benches = [Bench(Path(folder) / str(i), project) for i in range(max(jobs, 1))]
        red = _without_mutations(fitting, benches, limit_s)
        free: SimpleQueue[Bench] = SimpleQueue()
        for bench in benches:
            free.put(bench)

        def judge(mutation: Mutation) -> None:
            bench = free.get()
            try:
                keep(_judged(mutation, bench, red, limit_s))
            finally:
                free.put(bench)

        with ThreadPoolExecutor(len(benches)) as pool:
            list(pool.map(judge, fitting))
        for bench in benches:
            bench.nursery.close()
    return [verdicts[mutation] for mutation in mutations]


def _without_mutations(mutations: Sequence[Mutation], benches: Sequence[Bench], limit_s: float) -> dict[str, str]:
    """Tests that do not pass as the source is, and what they do instead: they can notice nothing."""
    wanted = sorted({test for mutation in mutations for test in mutation.tests})
    shares = [wanted[i :: len(benches)] for i in range(len(benches))]
    with ThreadPoolExecutor(len(benches)) as pool:
        runs = list(pool.map(lambda bench, tests: bench.run(tests, 20 * limit_s), benches, shares))
    for bench in benches:
        for other in benches:
            if other is not bench:
                bench.tree.take_kernels(other.tree)
    found = zip(benches, shares, runs)
    return {test: why for bench, tests, run in found for test in tests if (why := _red(test, run, bench.project))}


def _red(test: str, run: Run, project: Project) -> str | None:
    """Why a test can notice nothing; an id without brackets is that of all its cases."""
    wanted = test_path(test, project.tests)
    found = {outcome for node, outcome in run.outcomes.items() if node.endswith(wanted) or f"{wanted}[" in node}
    if found and found <= {"passed", "skipped"} and "passed" in found:
        return None
    return f"{test} must pass as the source is: {', '.join(sorted(found)) or run.said or 'it was not run'}"


def _judged(mutation: Mutation, bench: Bench, red: dict[str, str], limit_s: float) -> Verdict:
    if why := [red[test] for test in mutation.tests if test in red]:
        return Verdict(mutation, INVALID, why[0])
    start = time.monotonic()
    with bench.tree.planted(mutation) as module:
        run = bench.run(mutation.tests, limit_s, module)
    return Verdict(mutation, *judged(run), time.monotonic() - start)


def judged(run: Run) -> tuple[str, str]:
    """Whether a child's tests noticed the bug, and how; a test that dies with its process has."""
    if run.code is None:
        return UNNOTICED, "the tests did not end; a test must say that something is wrong"
    if run.code == 0:
        return UNNOTICED, "all tests passed"
    if run.code < 0:
        return NOTICED, f"pytest was killed by signal {-run.code}"
    if run.code != _FAILED:
        return INVALID, f"nothing was tested: {run.said}"
    broken = [kinds[0] for kinds in run.raised if _NOT_RUN & set(kinds)]
    if broken:
        return INVALID, f"the mutated code does not run: {broken[0]}"
    return NOTICED, next(node for node, outcome in run.outcomes.items() if outcome == "failed")


def _last_words(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-3:])[:300]
