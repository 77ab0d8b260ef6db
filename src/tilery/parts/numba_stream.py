"""TEMPORARY: old place of what is in languages/numba_stream.py."""

from tilery.languages.numba_stream import *  # noqa: F403
from tilery.languages.numba_stream import store_past as store_past
