"""Matrix products: matmul, those with an epilogue, those of several matrices, and the sum of split-K's parts."""
