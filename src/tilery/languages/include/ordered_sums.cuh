// Sums in memory that blocks add to in a fixed order, so that every run gives the same bits: bulk copies and additions
// from shared memory, and counters that say whose turn it is. For sm_90a.
#pragma once
#include "mbarrier.cuh"

// Copies, or adds, `bytes` bytes of fp32 from shared to global memory. Addresses and size are multiples of 16 bytes. The
// threads that wrote them call fence_async_proxy and sync; then one thread issues this and commits.
__device__ inline void bulk_store(float* to, const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(__cvta_generic_to_global(to)), "r"(smem_address(from)), "r"(bytes) : "memory");
}
__device__ inline void bulk_add(float* to, const void* from, unsigned bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(__cvta_generic_to_global(to)), "r"(smem_address(from)), "r"(bytes) : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until this thread's copies have read shared memory, or until they are complete.
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// How many blocks have added to a sum. A block that waits for those before it must have a larger blockIdx than they: the
// blocks of a grid start in that order, so the one that all others wait for runs.
struct Turns {
    int* done;

    __device__ void wait_for(int before) const {
        int value;
        do
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                         : "=r"(value) : "l"(__cvta_generic_to_global(done)) : "memory");
        while (value < before);
        asm volatile("fence.proxy.async.global;" ::: "memory");  // what they have added comes before this block's copy
    }
    __device__ void pass_on() const {
        asm volatile("fence.proxy.async.global;" ::: "memory");
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(__cvta_generic_to_global(done)) : "memory");
    }
};
