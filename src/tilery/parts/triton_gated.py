"""TEMPORARY: old place of what is in ops/gated/triton_activations.py."""

from tilery.ops.gated.triton_activations import factor as share  # noqa: F401
