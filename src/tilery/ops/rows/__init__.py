"""What row-wise families share: tensors [..., N] read as rows, and how kernels in each language cut rows."""
