"""Ops that move memory and compute little: dropout, embedding, transpose."""
