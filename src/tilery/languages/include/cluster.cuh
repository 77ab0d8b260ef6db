// Thread block clusters (sm_90): ranks, cluster barriers, and values exchanged through distributed shared memory
// (DSMEM).
#pragma once
#include "common.cuh"

// CLUSTER blocks work together. With 1 there is no cluster, and the code runs on every architecture.
template <int CLUSTER>
struct Cluster {
    // Every block calls this first. It arrives at the cluster barrier, for `wait_started`, and waits for the kernel
    // before (PDL). A grid of many blocks does not launch dependents: the next kernel's blocks would be placed wherever
    // blocks of this one leave room, unevenly over the SMs. The limit of 264 blocks is two for each of the 132 SMs of
    // an H200.
    static __device__ void begin(bool launch_dependents = gridDim.x <= 264) {
        if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;");
        pdl_wait();
        if (launch_dependents) pdl_launch_dependents();
    }
    static __device__ int rank() {
        int rank = 0;
        if constexpr (CLUSTER > 1) asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        return rank;
    }
    // Stores to the shared memory of block `rank`, at the address that `place` has in this block.
    static __device__ void store_remote(float4* place, int rank, float4 value) {
        asm volatile("{ .reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;\n"
                     "st.shared::cluster.v4.f32 [remote], {%2, %3, %4, %5}; }"
                     ::"r"(smem_address(place)), "r"(rank),
                       "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w) : "memory");
    }
    // Completes the barrier that `begin` arrived at: all blocks of the cluster run, so their shared memory may be
    // accessed.
    static __device__ void wait_started() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
    // Barrier of all threads of the cluster.
    static __device__ void sync() {
        asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
    // All-gather: every block gets all[b], the value of block b. `iteration` counts the calls from 0.
    static __device__ void all_gather(float4 (&all)[CLUSTER], float4 own, int iteration) {
        if constexpr (CLUSTER == 1) {
            all[0] = own;
        } else {
            __shared__ float4 buffer[2][CLUSTER];  // double buffer: a fast block writes again while a slow one still reads
            if (iteration == 0) wait_started();
            if (threadIdx.x < CLUSTER) store_remote(buffer[iteration % 2] + rank(), threadIdx.x, own);
            sync();
#pragma unroll
            for (int b = 0; b < CLUSTER; ++b) all[b] = buffer[iteration % 2][b];
        }
    }
    // Threads with `writes` store `own` at `place` in the first block. Then all threads of that block may read it.
    static __device__ void gather_to_first(float4* place, float4 own, bool writes) {
        if constexpr (CLUSTER == 1) {
            if (writes) *place = own;
            __syncthreads();
        } else {
            wait_started();
            if (writes) store_remote(place, 0, own);
            sync();
        }
    }
};
