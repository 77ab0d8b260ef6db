"""Mixtures of experts: route tokens, sort them by expert, and run the experts."""
