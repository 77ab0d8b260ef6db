"""Measuring one kernel: timing, ceilings, checking against float64, compiling in a child process, storing rows."""
