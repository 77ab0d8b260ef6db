"""Norms of rows: RMS norm and layer norm, with a residual added first, to fp8, and their backwards."""
