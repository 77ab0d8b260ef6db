"""Norms in Triton: how rows are cut, the forwards, the backwards."""
