"""Choices by logits: the largest, a random one, and the k largest as a router of experts picks them."""
