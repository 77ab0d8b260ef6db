"""Norms in Numba: the forwards, the backwards."""
