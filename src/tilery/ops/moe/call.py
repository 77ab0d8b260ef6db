"""What kernels of experts ask of a call."""

SCORINGS = ("softmax", "sigmoid", "softmax_topk")
