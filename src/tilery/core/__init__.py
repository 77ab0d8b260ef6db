"""Ops: the contract, the call path, plans, the choice of a kernel, tuned configs."""
