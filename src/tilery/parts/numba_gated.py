"""TEMPORARY: old place of what is in ops/gated/numba_activations.py."""

from tilery.ops.gated.numba_activations import ACTS as ACTS
from tilery.ops.gated.numba_activations import factor as share  # noqa: F401
