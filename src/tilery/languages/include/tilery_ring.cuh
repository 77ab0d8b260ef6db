// Rows that pass through shared memory: while a block works on one, the next are under way. From sm_90 on.
#pragma once
#include "tilery_rows.cuh"

using u64 = unsigned long long;

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// A barrier in shared memory that waits for `count` arrivals and for bytes, one phase after the other.
struct Arrival {
    u64 state;

    __device__ void init(unsigned count = 1) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&state)), "r"(count) : "memory");
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&state)) : "memory");
    }
    // At the same place of the block with that rank in the cluster. It orders no writes of this thread: with `.release.cluster`
    // it would, and take as long as a trip to memory.
    __device__ void arrive_at(int rank) {
        asm volatile("{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [there]; }"
                     ::"r"(shared_address(&state)), "r"(rank) : "memory");
    }
    __device__ void expect(unsigned bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     ::"r"(shared_address(&state)), "r"(bytes) : "memory");
    }
    __device__ void wait(unsigned phase) {
        asm volatile("{ .reg .pred done;\n"
                     "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again; }" ::"r"(shared_address(&state)), "r"(phase & 1) : "memory");
    }
    // Bytes that one thread asks for and that arrive by themselves; multiples of 16, as the addresses are.
    __device__ void load(void* to, const void* from, unsigned bytes) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(shared_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes),
                       "r"(shared_address(&state)) : "memory");
    }
};

// A block, or a cluster that shares each row, goes from row to row of INPUTS tensors [m, n]. Chunks of its share lie in a
// ring of SLOTS, which a row must fit. `first(row, col, packs)` sees every pack of a row, with what the inputs have there,
// and may replace packs[0]; then `between(turn)` meets others; then `second(row, col, packs[0], ahead(col))` sees them
// again, with what was asked for a chunk earlier.
template <int STEPS, int THREADS, int BLOCKS, int SLOTS, int INPUTS, typename T, typename First, typename Between,
          typename Ahead, typename Second>
__device__ void pass_rows(const T* const (&from)[INPUTS], const i64 (&strides)[INPUTS], i64 m, i64 n, First first,
                          Between between, Ahead ahead, Second second) {
    constexpr int VEC = 16 / sizeof(T), CHUNK = STEPS * THREADS * VEC;
    extern __shared__ __align__(128) unsigned char memory[];
    const auto slots = reinterpret_cast<T(*)[INPUTS][CHUNK]>(memory);
    __shared__ Arrival arrivals[SLOTS];
    Cluster<BLOCKS>::begin();
    const int share = static_cast<int>((n / VEC + BLOCKS - 1) / BLOCKS) * VEC;
    const int start = Cluster<BLOCKS>::rank() * share, length = min(static_cast<int>(n) - start, share);
    const int chunks = max(length + CHUNK - 1, 0) / CHUNK, cluster = blockIdx.x / BLOCKS, clusters = gridDim.x / BLOCKS;
    const int rows = static_cast<int>((m - cluster + clusters - 1) / clusters);

    int asked_row = 0, asked_chunk = 0, asked_slot = 0;  // of the next request, which thread 0 makes
    const auto request = [&] {
        if (asked_row == rows || chunks == 0) return;
        const i64 row = cluster + i64{asked_row} * clusters;
        const int col = asked_chunk * CHUNK;
        const unsigned bytes = min(CHUNK, length - col) * sizeof(T);
        arrivals[asked_slot].expect(bytes * INPUTS);
#pragma unroll
        for (int i = 0; i < INPUTS; ++i)
            arrivals[asked_slot].load(slots[asked_slot][i], from[i] + row * strides[i] + start + col, bytes);
        if (++asked_slot == SLOTS) asked_slot = 0;
        if (++asked_chunk == chunks) asked_chunk = 0, ++asked_row;
    };
    if (threadIdx.x == 0) {
        for (int s = 0; s < SLOTS; ++s) arrivals[s].init();
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
        for (int s = 0; s < SLOTS; ++s) request();
    }
    __syncthreads();

    int slot = 0, phase = 0;
    for (int r = 0; r < rows; ++r) {
        const i64 row = cluster + i64{r} * clusters;
        int at = slot;
        for (int c = 0; c < chunks; ++c) {
            arrivals[at].wait(phase + (at < slot));
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int place = (s * THREADS + threadIdx.x) * VEC, col = c * CHUNK + place;
                if (col < length) {
                    Pack<T, VEC> packs[INPUTS];
#pragma unroll
                    for (int i = 0; i < INPUTS; ++i) packs[i] = Pack<T, VEC>::from(slots[at][i] + place);
                    first(row, start + col, packs);
                    if constexpr (INPUTS > 1) packs[0].to_shared(slots[at][0] + place);
                }
            }
            if (++at == SLOTS) at = 0;
        }
        decltype(ahead(0)) asked[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const int col = (s * THREADS + threadIdx.x) * VEC;
            if (col < length) asked[s] = ahead(start + col);
        }
        between(r);
        for (int c = 0; c < chunks; ++c) {
#pragma unroll
            for (int s = 0; s < STEPS; ++s) {
                const int place = (s * THREADS + threadIdx.x) * VEC, col = c * CHUNK + place;
                const auto got = asked[s];
                if (col + CHUNK < length) asked[s] = ahead(start + col + CHUNK);
                if (col < length) second(row, start + col, Pack<T, VEC>::from(slots[slot][0] + place), got);
            }
            if constexpr (INPUTS > 1) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // replaced packs
            __syncthreads();  // all have read it
            if (threadIdx.x == 0) request();
            if (++slot == SLOTS) slot = 0, ++phase;
        }
    }
}
