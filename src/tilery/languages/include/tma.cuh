// TMA: tensor maps, tile loads (plain, with an L2 policy, multicast to a cluster) and tile stores. For sm_90a.
//
// A tile lies in shared memory as rows of 128 bytes with the 128-byte swizzle (wgmma.cuh). Loads fill what is outside
// the tensor with zeros; stores leave it out. A load completes on an mbarrier, which must expect its bytes.
#pragma once
#include "cluster.cuh"
#include "mbarrier.cuh"
#include "wgmma.cuh"

struct __align__(128) TensorMap { u64 words[16]; };  // a CUtensorMap, made on the host: languages/tensor_maps.py

__device__ inline void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the box at (column, row) of a matrix.
__device__ inline void tma_load_2d(Mbarrier& barrier, void* to, const TensorMap& map, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(smem_address(to)), "l"(&map),
                 "r"(smem_address(&barrier.state)), "r"(column), "r"(row) : "memory");
}
// The same of a tensor with three dimensions, with an L2 policy. With MULTICAST the box goes to every block that has a bit
// in `mask`, as in tma_load_2d_multicast.
template <bool MULTICAST>
__device__ void tma_load_3d(u64 policy, unsigned mask, Mbarrier& barrier, void* to, const TensorMap& map, int c0, int c1,
                            int c2) {
    if constexpr (!MULTICAST)
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                     "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_address(to)), "l"(&map),
                     "r"(smem_address(&barrier.state)), "r"(c0), "r"(c1), "r"(c2), "l"(policy) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                     ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;"
                     ::"r"(smem_address(to)), "l"(&map), "r"(smem_address(&barrier.state)), "r"(c0), "r"(c1), "r"(c2),
                       "h"(static_cast<unsigned short>(mask)), "l"(policy) : "memory");
}
// The same of a tensor with four dimensions.
__device__ inline void tma_load_4d(Mbarrier& barrier, void* to, const TensorMap& map, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem_address(to)), "l"(&map),
                 "r"(smem_address(&barrier.state)), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}

// Multicast: loads into every block of the cluster that has a bit in `block_mask`, at the address that `to` has in this
// block. The bytes complete on the barrier at the same address in each of them.
__device__ inline void tma_load_2d_multicast(unsigned block_mask, Mbarrier& barrier, void* to, const TensorMap& map,
                                             int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(to)), "l"(&map),
                 "r"(smem_address(&barrier.state)), "r"(column), "r"(row), "h"(static_cast<unsigned short>(block_mask))
                 : "memory");
}
__device__ inline void tma_load_4d_multicast(unsigned block_mask, Mbarrier& barrier, void* to, const TensorMap& map, int c0,
                                             int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(to)), "l"(&map),
                 "r"(smem_address(&barrier.state)), "r"(c0), "r"(c1), "r"(c2), "r"(c3),
                 "h"(static_cast<unsigned short>(block_mask)) : "memory");
}
// L2 policies: of most data, and of data that is read once, such as weights of a small-M product, which is the first to
// be evicted.
__device__ inline u64 evict_normal_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline u64 evict_first_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline void tma_load_2d_hint(u64 policy, Mbarrier& barrier, void* to, const TensorMap& map, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(smem_address(to)), "l"(&map),
                 "r"(smem_address(&barrier.state)), "r"(column), "r"(row), "l"(policy) : "memory");
}
__device__ inline void tma_load_4d_hint(u64 policy, Mbarrier& barrier, void* to, const TensorMap& map, int c0, int c1,
                                        int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(to)), "l"(&map),
                 "r"(smem_address(&barrier.state)), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(policy) : "memory");
}

// Stores a box from shared memory to (column, row). The threads that wrote the box call fence_async_proxy and sync;
// then one thread stores and commits. The box may be overwritten after that thread's tma_store_wait_read.
__device__ inline void tma_store_2d(const TensorMap& map, const void* from, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&map), "r"(smem_address(from)), "r"(column), "r"(row) : "memory");
}
__device__ inline void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until the stores of this thread have read shared memory.
__device__ inline void tma_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
