// Barriers in shared memory (mbarrier), bulk copies that complete on them, and fences of the async proxy. From sm_90
// on.
#pragma once
#include "common.cuh"

// A phase completes when `count` arrivals and all expected bytes have come; then the next phase begins.
struct Mbarrier {
    u64 state;

    __device__ void init(unsigned count = 1) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(&state)), "r"(count) : "memory");
    }
    __device__ void arrive() {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(&state)) : "memory");
    }
    // Arrives at the same barrier of block `rank` of the cluster. This does not order writes of this thread: with
    // `.release.cluster` it would, and would take as long as a trip to memory.
    __device__ void arrive_remote(int rank) {
        asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
                     "mbarrier.arrive.shared::cluster.b64 _, [remote]; }"
                     ::"r"(smem_address(&state)), "r"(rank) : "memory");
    }
    __device__ void arrive_expect_tx(unsigned bytes) {
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     ::"r"(smem_address(&state)), "r"(bytes) : "memory");
    }
    // Waits until the phase with this parity has completed; only the lowest bit of `phase` counts.
    __device__ void wait(unsigned phase) {
        asm volatile("{ .reg .pred done;\n"
                     "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                     "@!done bra again; }" ::"r"(smem_address(&state)), "r"(phase & 1) : "memory");
    }
    // Bulk copy from global to shared memory, issued by one thread; its bytes complete on this barrier. Addresses and
    // size are multiples of 16 bytes.
    __device__ void bulk_load(void* to, const void* from, unsigned bytes) {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                     ::"r"(smem_address(to)), "l"(__cvta_generic_to_global(from)), "r"(bytes),
                       "r"(smem_address(&state)) : "memory");
    }
};

// Makes initialised barriers visible to the cluster and to the async proxy (TMA). One thread calls it after `init`.
__device__ inline void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
}

// Makes this thread's writes to shared memory visible to the async proxy: to bulk copies, TMA stores and wgmma.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
