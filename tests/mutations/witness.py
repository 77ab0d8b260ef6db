"""A pytest plugin for the children: is the mutated source the one that is tested, does it import, which tests failed.

What it sees goes to the file that TILERY_MUTATION_REPORT names, as JSON.
"""

import importlib
import json
import os
from pathlib import Path

import pytest

BROKEN = 70  # the exit code of a child that tests nothing; pytest itself uses 0 to 5
_outcomes: dict[str, str] = {}
_raised: list[list[str]] = []


def pytest_sessionstart() -> None:
    """Once the conftest is imported: it prepares the environment before anything of tilery is."""
    import tilery

    source, module = os.environ["TILERY_MUTATION_SOURCE"], os.environ.get("TILERY_MUTATION_MODULE")
    if not Path(tilery.__file__).is_relative_to(source):
        pytest.exit(f"tilery comes from {tilery.__file__}, not from {source}", BROKEN)
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:
            pytest.exit(f"{module} cannot be imported: {type(error).__name__}: {error}", BROKEN)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(name: str, obj: object) -> list[object] | None:
    """Other tests of a file are not even made: thousands of cases would take longer than the test itself."""
    wanted = os.environ["TILERY_MUTATION_TESTS"].split(",")
    return [] if name.startswith("test") and callable(obj) and name not in wanted else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    if call.excinfo is not None and report.failed:
        _raised.append(_kinds(call.excinfo.value))
    if report.when == "call" or report.outcome != "passed":
        _outcomes[item.nodeid] = report.outcome
    return report


def _kinds(error: BaseException | None) -> list[str]:
    """The types of an exception and of those that it comes of."""
    found: list[str] = []
    while error is not None:
        found += [kind.__name__ for kind in type(error).__mro__]
        error = error.__cause__ or error.__context__
    return found


def pytest_sessionfinish() -> None:
    report = {"outcomes": _outcomes, "raised": _raised}
    Path(os.environ["TILERY_MUTATION_REPORT"]).write_text(json.dumps(report))
