"""Every planted bug still has its place and its tests; and the runner tells what is noticed from what is not."""

import textwrap

import pytest

from mutations.__main__ import table
from mutations.catalogue import MUTATIONS
from mutations.mutation import CONFORMANCE, Mutation, NotApplicable, find
from mutations.run import INVALID, NOTICED, UNNOTICED, Project, Run, Verdict, applies, judged, run_all
from tilery.core.op import REGISTRY


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.layer}/{m.name}")
def test_a_mutation_applies_at_one_place_and_its_tests_are_there(mutation):
    """If not, the source has changed there: plant the same bug in the new text, or delete it if it has no place."""
    assert applies(mutation, Project()) is None
    assert mutation.tests and mutation.old != mutation.new
    for test in mutation.tests:
        if CONFORMANCE in test:
            op, kernel, case = test.partition("[")[2].removesuffix("]").split("-", 2)
            known = {str(c): c for c in REGISTRY[op].cases["test"]}
            assert case in known and kernel not in known[case].refused_by, f"{op} has no such case: {case}"


def test_names_are_unique():
    assert len({(m.layer, m.name) for m in MUTATIONS}) == len(MUTATIONS)


# A package and tests of its own

PACKAGE = """
    def double(x):
        return 2 * x


    def triple(x):
        return 3 * x
"""
TESTS = """
    import os
    import time

    import tilery


    def test_double():
        assert tilery.double(2) == 4


    def test_nothing():
        assert tilery.triple


    def test_crash():
        if tilery.double(2) != 4:
            os.abort()


    def test_hang():
        if tilery.double(2) != 4:
            time.sleep(100)


    def test_red():
        assert tilery.double(2) == 5
"""


@pytest.fixture
def project(tmp_path):
    package, tests = tmp_path / "src" / "tilery", tmp_path / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(PACKAGE))
    (tests / "conftest.py").write_text("")
    (tests / "test_toy.py").write_text(textwrap.dedent(TESTS))
    return Project(package, tests, preload=("pytest",))


def mutation(new, test="test_double", old="return 2 * x", **more):
    return Mutation(f"{old} -> {new} seen by {test}", "toy", old, new, (f"test_toy.py::{test}",), **more)


def test_the_runner_tells_what_is_noticed_from_what_is_not(project):
    planted = {
        mutation("return x + x"): (UNNOTICED, "all tests passed"),
        mutation("return 4 * x"): (NOTICED, "test_toy.py::test_double"),
        mutation("return 4 * x", "test_nothing"): (UNNOTICED, "all tests passed"),
        mutation("return 4 * x", "test_crash"): (NOTICED, "pytest was killed by signal 6"),
        mutation("return 4 * x", "test_red"): (INVALID, "must pass as the source is: failed"),
        mutation("return 4 * y"): (INVALID, "the mutated code does not run: NameError"),
        mutation("def double(x): raise ImportError\nraise ImportError", old="def double(x):\n    return 2 * x"): (
            INVALID, "nothing was tested",
        ),
        mutation("return 4 *"): (INVALID, "makes no Python"),
        mutation("x", old="return 5 * x"): (INVALID, "no longer applies: no place"),
        mutation("x", old="* x"): (INVALID, "no longer applies: 2 places"),
        mutation("return 4 * x", "test_gone"): (INVALID, "test_toy.py has no test test_gone"),
    }  # fmt: skip
    told = []
    found = run_all(list(planted), project, jobs=2, limit_s=300.0, tell=told.append)
    for verdict, (status, detail) in zip(found, planted.values(), strict=True):
        assert verdict.status == status and detail in verdict.detail, verdict
    assert set(told) == set(found)
    assert (project.package / "__init__.py").read_text() == textwrap.dedent(PACKAGE)


def test_a_test_that_never_ends_notices_nothing(project):
    (verdict,) = run_all([mutation("return 4 * x", "test_hang")], project, 1, limit_s=3.0, tell=lambda verdict: None)
    assert verdict.status == UNNOTICED and "the tests did not end" in verdict.detail


def test_a_place_is_found_inside_of_a_function(project):
    place = find(mutation("* 9", old="* x", inside="triple"), project.package)
    assert place.path.read_text()[: place.start].count("def") == 2
    with pytest.raises(NotApplicable, match=r"no place with .* inside quadruple, expected one"):
        find(mutation("* 9", old="* x", inside="quadruple"), project.package)


def test_a_mutation_that_breaks_numbas_typing_is_no_bug():
    kinds = ["TypingError", "NumbaTypeError", "NumbaError", "Exception"]
    assert judged(Run(1, {"a": "failed"}, [kinds]))[0] == INVALID
    assert judged(Run(1, {"a": "failed"}, [["AssertionError", "Exception"]]))[0] == NOTICED


def test_the_table_counts_by_layer_and_lists_the_rest():
    seen, unseen = (Mutation(name, "toy", "a", "b", ("t",)) for name in ("seen", "unseen"))
    said = table([Verdict(seen, NOTICED), Verdict(unseen, UNNOTICED)])
    assert said.splitlines()[2].split() == ["toy", "2", "1"] and said.splitlines()[-1].strip() == "toy/unseen"
    assert all(len(line) <= 80 for line in said.splitlines())
