"""Attention in cuTile."""
