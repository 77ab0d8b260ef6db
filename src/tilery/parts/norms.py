"""TEMPORARY: old place of what is in ops/norms/contract.py."""

from tilery.ops.norms.contract import check_eps as check_eps
