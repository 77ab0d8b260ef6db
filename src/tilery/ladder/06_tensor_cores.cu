// 6. Tensor cores (mma.sync, sm_80): a warp multiplies 16 × 16 by 16 × 8 in one instruction.
//
// Its operands are spread over the registers of a warp, as ldmatrix reads them: 8 lines of 16 bytes for each of 4 matrices.
// Lines are 128 bytes now, all banks, so that the xor is with the line's number. So much faster, memory comes into view:
// blocks go through c in bands of BAND tile rows, and those at work together find each other's tiles in the L2.
#include "tilery.cuh"

using T = __nv_bfloat16;
constexpr int BM = 128, BN = 128, BK = 64, STAGES = 3, THREADS = 128, BAND = 16;
constexpr int VEC = 8, CHUNKS = BK / VEC, LINES = THREADS / CHUNKS, COPIES = BM / LINES, SIZE = BM * BK;
constexpr int WM = 64, WN = 64;  // a warp's part of the tile

__device__ int swizzled(int line, int i) { return line * BK + (i / VEC ^ line % CHUNKS) * VEC + i % VEC; }

__device__ unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
__device__ void copy_async(T* to, const T* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;"
                 ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)) : "memory");
}
__device__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT>
__device__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// 16 lines from `line` on by 16 values from `i` on: words 0 and 2 are of the first 8 lines, 1 and 3 of the others.
__device__ void load_fragment(unsigned (&words)[4], const T* tile, int line, int i) {
    const int lane = threadIdx.x % 32;
    const T* const from = tile + swizzled(line + lane % 16, i + lane / 16 * 8);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "r"(shared_address(from)) : "memory");
}

// c [16, 8] += a [16, 16] · b [16, 8].
__device__ void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__global__ void __launch_bounds__(THREADS, 2) tensor_cores(const T* a, const T* b, T* c, int m, int n, int k) {
    extern __shared__ __align__(128) unsigned char memory[];
    T* const ring = reinterpret_cast<T*>(memory);
    const int down = m / BM, across = n / BN, blocks = k / BK;
    const int first = blockIdx.x / (BAND * across) * BAND, t = blockIdx.x % (BAND * across);
    const int height = min(down - first, BAND), top = (first + t % height) * BM, left = t / height * BN;
    // What this thread copies: a chunk of every LINES-th line.
    const int line = threadIdx.x / CHUNKS, at = threadIdx.x % CHUNKS * VEC, place = swizzled(line, at);
    const T *const from_a = a + i64{top + line} * k + at, *const from_b = b + i64{left + line} * k + at;
    const auto fetch = [&](int t) {
        if (t < blocks) {
            T* const tiles = ring + t % STAGES * 2 * SIZE;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                copy_async(tiles + place + i * LINES * BK, from_a + i64{i * LINES} * k + t * BK);
                copy_async(tiles + SIZE + place + i * LINES * BK, from_b + i64{i * LINES} * k + t * BK);
            }
        }
        commit_copies();
    };
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row0 = warp / 2 * WM, col0 = warp % 2 * WN;
    float sums[WM / 16][WN / 8][4] = {};
    for (int t = 0; t < STAGES - 1; ++t) fetch(t);
    for (int t = 0; t < blocks; ++t) {
        wait_for_copies<STAGES - 2>();
        __syncthreads();
        fetch(t + STAGES - 1);
        const T* const tiles = ring + t % STAGES * 2 * SIZE;
#pragma unroll
        for (int i = 0; i < BK; i += 16) {
            unsigned rows[WM / 16][4], columns[WN / 16][4];
#pragma unroll
            for (int r = 0; r < WM / 16; ++r) load_fragment(rows[r], tiles, row0 + 16 * r, i);
#pragma unroll
            for (int s = 0; s < WN / 16; ++s) load_fragment(columns[s], tiles + SIZE, col0 + 16 * s, i);
#pragma unroll
            for (int r = 0; r < WM / 16; ++r)
#pragma unroll
                for (int s = 0; s < WN / 8; ++s)
                    multiply(sums[r][s], rows[r], columns[s / 2][s % 2], columns[s / 2][s % 2 + 2]);
        }
    }
#pragma unroll
    for (int r = 0; r < WM / 16; ++r)
#pragma unroll
        for (int s = 0; s < WN / 8; ++s)
#pragma unroll
            for (int half = 0; half < 2; ++half) {  // a thread has two neighbours in each of two rows
                const int row = top + row0 + 16 * r + 8 * half + lane / 4, col = left + col0 + 8 * s + lane % 4 * 2;
                store(c + i64{row} * n + col, {sums[r][s][2 * half], sums[r][s][2 * half + 1]});
            }
}
