// c [m, n] = act(alpha · a [m, k] · b [n, k]ᵀ + bias) + beta · addend on Hopper by TMA and wgmma, in fp16 and bf16; or
// silu(a · gateᵀ) · (a · upᵀ), with gate and up stacked in b (HALVES = 2). a and b may each be K-major or MN-major. There
// are two kernels:
//
// - hopper_gemm (large-M): tiles of 128 × BLOCK_N, a producer warp and two consumer warpgroups;
// - hopper_gemm_small_m (swap-AB): columns of c are on the side where wgmma has 64 rows, rows of c on its narrow side.
#include "gemm_large_m.cuh"
#include "gemm_small_m.cuh"

template <typename T, bool A_MN, bool B_MN, int BLOCK_N, int STAGES, int GROUP_M, int DOWN, int ACROSS, int SPLIT_K,
          bool TMA_STORE, int HALVES, Activation ACT, bool HAS_BIAS, bool HAS_ADDEND, bool HAS_ALPHA_BETA, bool VECTORS>
__global__ void __launch_bounds__(384) hopper_gemm(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
    const __grid_constant__ TensorMap c_map, const GemmParams<T> p) {
    const Epilogue<T, ACT, HAS_BIAS, HAS_ADDEND, HAS_ALPHA_BETA, VECTORS> epilogue{
        p.bias, p.addend, p.addend_row_stride, p.addend_col_stride, p.alpha, p.beta, p.m, p.n};
    gemm_large_m<T, A_MN, B_MN, BLOCK_N, STAGES, GROUP_M, DOWN, ACROSS, SPLIT_K, TMA_STORE, HALVES>(
        a_map, b_map, c_map, p, epilogue);
}
template <typename T, bool A_MN, bool B_MN, int BLOCK_M, int WARPGROUPS, int WARPGROUP_N, int STAGES, int K_BLOCKS,
          int DOWN, int ACROSS, int SPLIT_K, int HALVES, Activation ACT, bool HAS_BIAS, bool HAS_ADDEND, bool HAS_ALPHA_BETA,
          bool VECTORS>
__global__ void __launch_bounds__(WARPGROUPS * 128 + 32) hopper_gemm_small_m(
    const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, const GemmParams<T> p) {
    const Epilogue<T, ACT, HAS_BIAS, HAS_ADDEND, HAS_ALPHA_BETA, VECTORS> epilogue{
        p.bias, p.addend, p.addend_row_stride, p.addend_col_stride, p.alpha, p.beta, p.m, p.n};
    gemm_small_m<T, A_MN, B_MN, BLOCK_M, WARPGROUPS, WARPGROUP_N, STAGES, K_BLOCKS, DOWN, ACROSS, SPLIT_K, HALVES>(
        a_map, b_map, p, epilogue);
}
