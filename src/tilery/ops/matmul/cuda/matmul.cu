// Each block makes a BM x BN tile of c from a ring of tiles of a and b in shared memory, which cp.async fills ahead
// while the oldest is multiplied: by tensor cores for fp16 and bf16, by FMAs for fp32.
#include "tilery.cuh"

__device__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// 16 bytes to shared memory without passing registers; what lies beyond the first `bytes` is filled with zeros.
__device__ void copy_async(void* to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
}

__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int LEFT>
__device__ void wait_for_copies() {  // until all groups but the LEFT latest have landed
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four 8 x 8 matrices of 16-bit values, a row at each lane's address; a lane gets two neighbours of row lane / 4.
template <bool TRANSPOSED>
__device__ void load_matrices(unsigned (&m)[4], const void* row) {
    if constexpr (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}

// c [16, 8] += a [16, 16] . b [16, 8] by the whole warp.
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

// Tiles [ROWS, BK] of an operand [rows, depth]: of a, or of b seen as [N, K]. A tile lies in shared memory as in global
// memory: K_INNER where depth is contiguous. WIDE: base and stride keep to 16 bytes, so cp.async can fetch it.
template <typename T, int ROWS, int BK, bool K_INNER, bool WIDE>
struct Operand {
    static constexpr int VEC = 16 / sizeof(T), INNER = K_INNER ? BK : ROWS, OUTER = K_INNER ? ROWS : BK;
    static constexpr int PACKS = INNER / VEC, SIZE = ROWS * BK;

    const T* data;
    i64 stride;
    int rows, depth;

    // The packs of a line are permuted by an xor with its number: 8 lines read at one column meet different banks.
    static __device__ int at(int row, int k) {
        const int outer = K_INNER ? row : k, inner = K_INNER ? k : row;
        const int phase = PACKS >= 8 ? outer % 8 : outer / (8 / PACKS) % PACKS;
        return outer * INNER + (inner / VEC ^ phase) * VEC + inner % VEC;
    }

    template <int THREADS>
    __device__ void fetch(T* tile, int row0, int k0) const {
#pragma unroll
        for (int pack = threadIdx.x; pack < OUTER * PACKS; pack += THREADS) {
            const int line = pack / PACKS, offset = pack % PACKS * VEC;
            const int outer = line + (K_INNER ? row0 : k0), inner = offset + (K_INNER ? k0 : row0);
            T* to = tile + (K_INNER ? at(line, offset) : at(offset, line));
            const T* from = data + outer * stride + inner;
            int count = outer < (K_INNER ? rows : depth) ? (K_INNER ? depth : rows) - inner : 0;
            count = min(max(count, 0), VEC);  // values of this pack that are inside the matrix
            if constexpr (WIDE) {
                copy_async(to, count ? from : data, count * sizeof(T));
            } else {
                Pack<T, VEC> values;
#pragma unroll
                for (int i = 0; i < VEC; ++i) values.at[i] = i < count ? from[i] : T(0.0f);
                values.to_shared(to);
            }
        }
    }

    // A [16, 16] fragment for `mma`: m[0] and m[2] hold its first 8 rows, m[1] and m[3] the others.
    static __device__ void fragment(unsigned (&m)[4], const T* tile, int row, int k) {
        const int lane = threadIdx.x % 32, line = lane % 8, lower = lane & 8, right = (lane & 16) / 2;
        const int place = K_INNER ? at(row + lower + line, k + right) : at(row + lower, k + right + line);
        load_matrices<!K_INNER>(m, tile + place);
    }
};

// sum += a . b for a warp's part of the tile, which begins at (row, col). Lanes own values as `mma` lays them out.
template <typename T, int BK, typename A, typename B, int M, int N>
__device__ void multiply(float (&sum)[M][N][4], const T* a, const T* b, int row, int col) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
        for (int k = 0; k < BK; k += 16) {
            unsigned left[M][4], right[N / 2][4];
#pragma unroll
            for (int i = 0; i < M; ++i) A::fragment(left[i], a, row + 16 * i, k);
#pragma unroll
            for (int j = 0; j < N / 2; ++j) B::fragment(right[j], b, col + 16 * j, k);
#pragma unroll
            for (int i = 0; i < M; ++i)
#pragma unroll
                for (int j = 0; j < N; ++j) mma<T>(sum[i][j], left[i], right[j / 2][j % 2], right[j / 2][j % 2 + 2]);
        }
    } else {
        row += threadIdx.x % 32 / 4;
        col += threadIdx.x % 4 * 2;
#pragma unroll 1  // unrolled, some layouts spill on sm_80
        for (int k = 0; k < BK; ++k) {
            float left[2 * M], right[2 * N];
#pragma unroll
            for (int i = 0; i < 2 * M; ++i) left[i] = a[A::at(row + 8 * i, k)];
#pragma unroll
            for (int j = 0; j < 2 * N; ++j) right[j] = b[B::at(col + j / 2 * 8 + j % 2, k)];
#pragma unroll
            for (int i = 0; i < 2 * M; ++i)
#pragma unroll
                for (int j = 0; j < 2 * N; ++j) sum[i / 2][j / 2][i % 2 * 2 + j % 2] += left[i] * right[j];
        }
    }
}

template <typename T, int BM, int BN, int BK, int WARPS_M, int WARPS_N, int STAGES,
          bool A_K_INNER, bool A_WIDE, bool B_K_INNER, bool B_WIDE>
__global__ void __launch_bounds__(32 * WARPS_M * WARPS_N, sizeof(T) / 2)  // fp32 has registers for two blocks at once
matmul(const T* a, const T* b, T* c, i64 a_stride, i64 b_stride, int m, int n, int k) {
    constexpr int THREADS = 32 * WARPS_M * WARPS_N, WM = BM / WARPS_M, WN = BN / WARPS_N, BAND = 8;
    using A = Operand<T, BM, BK, A_K_INNER, A_WIDE>;
    using B = Operand<T, BN, BK, B_K_INNER, B_WIDE>;
    using C = Operand<T, BM, BN, true, true>;
    extern __shared__ __align__(128) unsigned char memory[];
    T* const ring = reinterpret_cast<T*>(memory);
    const A left{a, a_stride, m, k};
    const B right{b, b_stride, n, k};

    // Blocks go through c in bands of BAND tile rows, so that those at work together share tiles of a and b in L2.
    const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + BN - 1) / BN, tiles_k = (k + BK - 1) / BK;
    const int band = blockIdx.x / (BAND * tiles_n), place = blockIdx.x % (BAND * tiles_n);
    const int height = min(tiles_m - band * BAND, BAND);
    const int row0 = (band * BAND + place % height) * BM, col0 = place / height * BN;

    const auto tile = [&](int t) { return ring + t % STAGES * (A::SIZE + B::SIZE); };
    const auto fetch = [&](int t) {
        if (t < tiles_k) {
            left.template fetch<THREADS>(tile(t), row0, t * BK);
            right.template fetch<THREADS>(tile(t) + A::SIZE, col0, t * BK);
        }
        commit_copies();  // an empty group too: the count of groups tells which tile has landed
    };
    const int warp = threadIdx.x / 32, warp_row = warp / WARPS_N * WM, warp_col = warp % WARPS_N * WN;
    float sum[WM / 16][WN / 8][4] = {};
    for (int t = 0; t < STAGES - 1; ++t) fetch(t);
    for (int t = 0; t < tiles_k; ++t) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();  // tile t is here for all, and all are done with tile t - 1, whose place is filled next
        fetch(t + STAGES - 1);
        multiply<T, BK, A, B>(sum, tile(t), tile(t) + A::SIZE, warp_row, warp_col);
    }

    // Through shared memory, for stores of 16 bytes along the rows of c.
    wait_for_copies<0>();
    __syncthreads();
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < WM / 16; ++i)
#pragma unroll
        for (int j = 0; j < WN / 8; ++j)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float pair[2] = {sum[i][j][2 * half], sum[i][j][2 * half + 1]};
                const int row = warp_row + 16 * i + 8 * half + lane / 4, col = warp_col + 8 * j + lane % 4 * 2;
                Pack<T, 2>::rounded(pair).to_shared(ring + C::at(row, col));
            }
    __syncthreads();
    for (int pack = threadIdx.x; pack < BM * C::PACKS; pack += THREADS) {
        const int line = pack / C::PACKS, offset = pack % C::PACKS * C::VEC, row = row0 + line, col = col0 + offset;
        if (row >= m || col >= n) continue;
        const auto values = Pack<T, C::VEC>::from(ring + C::at(line, offset));
        T* to = c + static_cast<i64>(row) * n + col;
        if (n % C::VEC == 0) {
            values.to_global(to);
        } else {
#pragma unroll
            for (int i = 0; i < C::VEC; ++i)
                if (col + i < n) to[i] = values.at[i];
        }
    }
}
