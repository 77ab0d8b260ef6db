"""A fuzzer: random calls of every op against its float64 reference, in guarded memory, in a process that may die.

`python -m fuzz --help`, with PYTHONPATH=tests, says how it is run by hand; test_fuzz.py runs a few calls of every op.
"""
