"""A first TileLang kernel: C = A · B in fp16, checked against torch, and the CUDA C++ that TileLang makes of it.

pip install 'tilery[tilelang]' && python examples/gemm.py

TileLang calls nvcc to run a kernel. Should it pick the wrong one, set CUDA_HOME to the root of the CUDA toolkit.
Without a GPU the source is still generated and printed; for that nvcc is not needed.
"""

import sys

try:
    import tilelang
    import tilelang.language as T
    import torch
except ModuleNotFoundError as missing:
    if missing.name not in ("tilelang", "torch"):
        raise
    sys.exit(f"{missing.name} is not installed: pip install 'tilery[tilelang]'")


def gemm(M: int, N: int, K: int, block_M: int = 64, block_N: int = 64, block_K: int = 32):
    """The kernel for these sizes: a block of 128 threads makes a tile of C."""

    @T.prim_func
    def main(A: T.Tensor((M, K), "float16"), B: T.Tensor((K, N), "float16"), C: T.Tensor((M, N), "float16")):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_tile = T.alloc_shared((block_M, block_K), "float16")
            B_tile = T.alloc_shared((block_K, block_N), "float16")
            C_tile = T.alloc_fragment((block_M, block_N), "float32")  # in registers, spread over the threads

            T.clear(C_tile)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=3):  # the next copies fly while gemm multiplies
                T.copy(A[by * block_M, k * block_K], A_tile)
                T.copy(B[k * block_K, bx * block_N], B_tile)
                T.gemm(A_tile, B_tile, C_tile)
            T.copy(C_tile, C[by * block_M, bx * block_N])

    return main


def source(kernel, arch: str) -> str:
    """The CUDA C++ for an architecture that need not be here."""
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": arch})
    with target:
        return tilelang.lower(kernel, target=target).kernel_source


def main() -> int:
    M = N = K = 512
    kernel = gemm(M, N, K)
    if not torch.cuda.is_available():
        print(source(kernel, "sm_90a"))
        print("There is no CUDA GPU here: above is the source for sm_90a; nothing was multiplied and nothing checked.")
        return 0

    torch.manual_seed(0)
    A = torch.randn(M, K, dtype=torch.float16, device="cuda")
    B = torch.randn(K, N, dtype=torch.float16, device="cuda")
    compiled = tilelang.compile(kernel, out_idx=[-1])  # the last argument is made by the call
    C = compiled(A, B)
    want = (A.double() @ B.double()).to(torch.float16)
    error = (C - want).abs().max().item()

    print(f"A = {A}\nB = {B}\nC = A · B = {C}\ntorch = {want}")
    print(compiled.get_kernel_source())
    right = torch.allclose(C, want, rtol=1e-2, atol=1e-2)
    print(f"The greatest difference from torch is {error:.4f}: {'right' if right else 'WRONG'}.")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
