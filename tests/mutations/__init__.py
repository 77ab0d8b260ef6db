"""Planted bugs, each with the tests that must notice it: `PYTHONPATH=tests python -m mutations` plants them in turn.

A test suite is worth what it notices. Each mutation of `catalogue/` is a bug that somebody could write by mistake. The
runner puts it into a copy of the source, runs its tests there and expects one to fail. It is run before a release.
"""
