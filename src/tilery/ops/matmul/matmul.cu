// c [m, n] = a [m, k] · b [k, n] for every architecture from sm_80 on. A block computes a tile of BLOCK_M × BLOCK_N.
// Tiles of a and b go through a pipeline of STAGES stages in shared memory: cp.async loads them ahead while the oldest
// stage is multiplied, by tensor cores (mma.sync) for fp16 and bf16, by FMAs for fp32.
#include "common.cuh"

// Copies 16 bytes to shared memory without registers; what lies beyond the first `bytes` is filled with zeros.
__device__ void cp_async(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(smem_address(to)), "l"(from), "r"(bytes) : "memory");
}

__device__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING groups have not landed.
template <int PENDING>
__device__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Loads four 8 × 8 matrices of 16-bit values. Each lane gives the address of one row, and gets two neighbours of row
// lane / 4 of each matrix.
template <bool TRANSPOSED>
__device__ void ldmatrix(unsigned (&m)[4], const void* row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(smem_address(row)) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(smem_address(row)) : "memory");
}

// c [16, 8] += a [16, 16] · b [16, 8], by a warp.
#define MMA(TYPE)                                                            \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "       \
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"    \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <typename T>
__device__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);
template <>
__device__ void mma<__half>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { MMA("f16"); }
template <>
__device__ void mma<__nv_bfloat16>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) { MMA("bf16"); }

// Tiles [ROWS, BLOCK_K] of an operand [rows, k]: of a, or of b seen as [n, k]. A tile lies in shared memory as the
// operand lies in global memory: K_MAJOR if k is contiguous. ALIGNED: base and stride are multiples of 16 bytes, so
// that cp.async can load it.
template <typename T, int ROWS, int BLOCK_K, bool K_MAJOR, bool ALIGNED>
struct Operand {
    static constexpr int VEC = 16 / sizeof(T), INNER = K_MAJOR ? BLOCK_K : ROWS, OUTER = K_MAJOR ? ROWS : BLOCK_K;
    static constexpr int VECS = INNER / VEC, SIZE = ROWS * BLOCK_K;

    const T* data;
    i64 stride;
    int rows, k;

    // Swizzle: the 16-byte vectors of a line are permuted by an xor with the line's number, so that the same column of
    // 8 lines lies in different banks.
    static __device__ int swizzled(int row, int k) {
        const int outer = K_MAJOR ? row : k, inner = K_MAJOR ? k : row;
        const int phase = VECS >= 8 ? outer % 8 : outer / (8 / VECS) % VECS;
        return outer * INNER + (inner / VEC ^ phase) * VEC + inner % VEC;
    }

    template <int THREADS>
    __device__ void load_tile(T* tile, int row0, int k0) const {
#pragma unroll
        for (int vec = threadIdx.x; vec < OUTER * VECS; vec += THREADS) {
            const int line = vec / VECS, offset = vec % VECS * VEC;
            const int outer = line + (K_MAJOR ? row0 : k0), inner = offset + (K_MAJOR ? k0 : row0);
            T* to = tile + (K_MAJOR ? swizzled(line, offset) : swizzled(offset, line));
            const T* from = data + outer * stride + inner;
            int count = outer < (K_MAJOR ? rows : k) ? (K_MAJOR ? k : rows) - inner : 0;
            count = min(max(count, 0), VEC);  // elements of this vector that are inside the matrix
            if constexpr (ALIGNED) {
                cp_async(to, count ? from : data, count * sizeof(T));
            } else {
                Vec<T, VEC> values;
#pragma unroll
                for (int i = 0; i < VEC; ++i) values.data[i] = i < count ? from[i] : T(0.0f);
                values.store_shared(to);
            }
        }
    }

    // A [16, 16] fragment for `mma`: m[0] and m[2] hold its first 8 rows, m[1] and m[3] the others.
    static __device__ void load_fragment(unsigned (&m)[4], const T* tile, int row, int k) {
        const int lane = threadIdx.x % 32, line = lane % 8, lower = lane & 8, right = (lane & 16) / 2;
        const int place = K_MAJOR ? swizzled(row + lower + line, k + right) : swizzled(row + lower, k + right + line);
        ldmatrix<!K_MAJOR>(m, tile + place);
    }
};

// acc += a · b for a warp's part of the tile, which begins at (row, col). Accumulators are laid out as those of `mma`.
template <typename T, int BLOCK_K, typename A, typename B, int M, int N>
__device__ void multiply(float (&acc)[M][N][4], const T* a, const T* b, int row, int col) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int k = 0; k < BLOCK_K; k += 16) {
            unsigned a_frag[M][4], b_frag[N / 2][4];
#pragma unroll
            for (int i = 0; i < M; ++i) A::load_fragment(a_frag[i], a, row + 16 * i, k);
#pragma unroll
            for (int j = 0; j < N / 2; ++j) B::load_fragment(b_frag[j], b, col + 16 * j, k);
#pragma unroll
            for (int i = 0; i < M; ++i)
#pragma unroll
                for (int j = 0; j < N; ++j) mma<T>(acc[i][j], a_frag[i], b_frag[j / 2][j % 2], b_frag[j / 2][j % 2 + 2]);
        }
    } else {
        row += threadIdx.x % 32 / 4;
        col += threadIdx.x % 4 * 2;
#pragma unroll 1  // unrolled, some layouts spill on sm_80
        for (int k = 0; k < BLOCK_K; ++k) {
            float a_frag[2 * M], b_frag[2 * N];
#pragma unroll
            for (int i = 0; i < 2 * M; ++i) a_frag[i] = a[A::swizzled(row + 8 * i, k)];
#pragma unroll
            for (int j = 0; j < 2 * N; ++j) b_frag[j] = b[B::swizzled(col + j / 2 * 8 + j % 2, k)];
#pragma unroll
            for (int i = 0; i < 2 * M; ++i)
#pragma unroll
                for (int j = 0; j < 2 * N; ++j) acc[i / 2][j / 2][i % 2 * 2 + j % 2] += a_frag[i] * b_frag[j];
        }
    }
}

template <typename T, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N, int STAGES,
          bool A_K_MAJOR, bool A_ALIGNED, bool B_K_MAJOR, bool B_ALIGNED>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, sizeof(T) / 2)  // fp32: registers for two blocks on an SM
matmul(const T* a, const T* b, T* c, i64 a_stride, i64 b_stride, int m, int n, int k) {
    constexpr int THREADS = 32 * WARPS_M * WARPS_N, WARP_M = BLOCK_M / WARPS_M, WARP_N = BLOCK_N / WARPS_N, GROUP_M = 8;
    using A = Operand<T, BLOCK_M, BLOCK_K, A_K_MAJOR, A_ALIGNED>;
    using B = Operand<T, BLOCK_N, BLOCK_K, B_K_MAJOR, B_ALIGNED>;
    using C = Operand<T, BLOCK_M, BLOCK_N, true, true>;
    extern __shared__ __align__(128) unsigned char smem[];
    T* const stages = reinterpret_cast<T*>(smem);
    const A a_operand{a, a_stride, m, k};
    const B b_operand{b, b_stride, n, k};

    // Tiles are numbered in groups of GROUP_M rows of tiles: blocks that run together share tiles of a and b in the L2.
    const int tiles_m = (m + BLOCK_M - 1) / BLOCK_M, tiles_n = (n + BLOCK_N - 1) / BLOCK_N;
    const int k_blocks = (k + BLOCK_K - 1) / BLOCK_K;
    const int group = blockIdx.x / (GROUP_M * tiles_n), in_group = blockIdx.x % (GROUP_M * tiles_n);
    const int group_rows = min(tiles_m - group * GROUP_M, GROUP_M);
    const int row0 = (group * GROUP_M + in_group % group_rows) * BLOCK_M, col0 = in_group / group_rows * BLOCK_N;

    const auto stage = [&](int k_block) { return stages + k_block % STAGES * (A::SIZE + B::SIZE); };
    const auto load_stage = [&](int k_block) {
        if (k_block < k_blocks) {
            a_operand.template load_tile<THREADS>(stage(k_block), row0, k_block * BLOCK_K);
            b_operand.template load_tile<THREADS>(stage(k_block) + A::SIZE, col0, k_block * BLOCK_K);
        }
        cp_async_commit();  // an empty group too: the number of groups tells which stage has landed
    };
    const int warp = threadIdx.x / 32, warp_row = warp / WARPS_N * WARP_M, warp_col = warp % WARPS_N * WARP_N;
    float acc[WARP_M / 16][WARP_N / 8][4] = {};
    for (int kb = 0; kb < STAGES - 1; ++kb) load_stage(kb);
    for (int kb = 0; kb < k_blocks; ++kb) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // stage kb has landed for all threads, and all are done with stage kb - 1, which is loaded next
        load_stage(kb + STAGES - 1);
        multiply<T, BLOCK_K, A, B>(acc, stage(kb), stage(kb) + A::SIZE, warp_row, warp_col);
    }

    // Epilogue: c goes through shared memory, for stores of 16 bytes along its rows.
    cp_async_wait<0>();
    __syncthreads();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < WARP_M / 16; ++i)
#pragma unroll
        for (int j = 0; j < WARP_N / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float pair[2] = {acc[i][j][2 * half], acc[i][j][2 * half + 1]};
                const int row = warp_row + 16 * i + 8 * half + lane / 4, col = warp_col + 8 * j + lane % 4 * 2;
                Vec<T, 2>::from_float(pair).store_shared(stages + C::swizzled(row, col));
            }
    __syncthreads();
    for (int vec = threadIdx.x; vec < BLOCK_M * C::VECS; vec += THREADS) {
        const int line = vec / C::VECS, offset = vec % C::VECS * C::VEC, row = row0 + line, col = col0 + offset;
        if (row >= m || col >= n) continue;
        const auto values = Vec<T, C::VEC>::load(stages + C::swizzled(line, offset));
        T* to = c + static_cast<i64>(row) * n + col;
        if (n % C::VEC == 0) {
            values.store_global(to);
        } else {
#pragma unroll
            for (int i = 0; i < C::VEC; ++i)
                if (col + i < n) to[i] = values.data[i];
        }
    }
}
