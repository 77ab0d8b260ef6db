"""Activations of MLPs: gated ones, y = act(gate) · up (silu_mul, gelu_mul, silu_mul_fp8), and relu_squared."""
