"""TEMPORARY: old place of what is in ops/matmul/numba/tiles.py."""

from tilery.ops.matmul.numba.tiles import pack as pack
