// The pipeline between TMA and wgmma: stages of tiles in shared memory with full and empty barriers. For sm_90a.
#pragma once
#include "tile_scheduler.cuh"
#include "tma.cuh"

// STAGES stages of STAGE_BYTES bytes of tiles, and SCALES floats beside them: the quantisation scales of an fp8 stage,
// else none. One producer thread loads tiles by TMA, one warp loads the scales (if there are any), consumer warps read
// both. Each role keeps its own copy of this struct, whose `stage` and `phase` say where it is.
//
// full[s] completes when the tiles (and scales) have arrived; empty[s] when all consumer warps have released the stage.
// In a cluster of DOWN × ACROSS blocks, those one above the other load b for each other and those side by side a. A
// stage is empty when the consumers of all blocks that this one loads for have released it.
template <int STAGES, int STAGE_BYTES, int SCALES = 0, int DOWN = 1, int ACROSS = 1>
struct TilePipeline {
    static constexpr int PARTNERS = DOWN + ACROSS - 1;  // blocks that this one loads for, and is loaded for by
    static_assert(STAGE_BYTES % SWIZZLE_ATOM == 0, "tiles start at multiples of the swizzle atom");
    static_assert(SCALES % 4 == 0, "scales are read by 16 bytes");
    unsigned char* tiles;
    float* all_scales;
    Mbarrier *full, *empty;
    int stage = 0, phase = 0;

    // Layout of `smem`: up to SWIZZLE_ATOM bytes to align the tiles, tiles, `extra` bytes for other uses (see
    // `after_tiles`), scales, full barriers, empty barriers. Its size is at least
    // SWIZZLE_ATOM + extra + STAGES · (STAGE_BYTES + 4 · SCALES + 16) bytes.
    __device__ explicit TilePipeline(unsigned char* smem, int extra = 0) {
        tiles = smem + (-smem_address(smem) & (SWIZZLE_ATOM - 1));
        all_scales = reinterpret_cast<float*>(tiles + STAGES * STAGE_BYTES + extra);
        full = reinterpret_cast<Mbarrier*>(all_scales + STAGES * SCALES);
        empty = full + STAGES;
    }
    // One thread calls this before the block (or the cluster) syncs.
    __device__ void init(int consumer_warps) {
        for (int s = 0; s < STAGES; ++s) full[s].init(SCALES ? 1 + 32 : 1), empty[s].init(consumer_warps * PARTNERS);
        fence_mbarrier_init();
    }
    __device__ unsigned char* after_tiles() const { return tiles + STAGES * STAGE_BYTES; }
    __device__ unsigned char* tile() const { return tiles + stage * STAGE_BYTES; }
    __device__ const float* scales() const { return all_scales + stage * SCALES; }

    // Producer: waits until the stage is empty. The first time round every stage is.
    __device__ void wait_empty() { empty[stage].wait(phase ^ 1); }
    // Producer: waits until the stage is empty and returns its full barrier, which expects so many bytes.
    __device__ Mbarrier& producer_acquire(unsigned bytes = STAGE_BYTES) {
        wait_empty();
        full[stage].arrive_expect_tx(bytes);
        return full[stage];
    }
    // The warp that loads scales: every lane calls load_scale for its scales and then commit_scales once. The lane's
    // arrival at the full barrier comes when its cp.async copies have landed.
    __device__ void load_scale(int index, const float* from) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem_address(all_scales + stage * SCALES + index)),
                     "l"(__cvta_generic_to_global(from)) : "memory");
    }
    // The same, but 0 where it is not `inside`; `from` must be an address of the tensor all the same.
    __device__ void load_scale_or_zero(int index, const float* from, bool inside) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                     ::"r"(smem_address(all_scales + stage * SCALES + index)), "l"(__cvta_generic_to_global(from)),
                       "r"(inside ? 4 : 0) : "memory");
    }
    __device__ void commit_scales() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
                     ::"r"(smem_address(&full[stage].state)) : "memory");
    }

    // Consumers: wait until the stage is full; later every warp releases it.
    __device__ void consumer_wait() { full[stage].wait(phase); }
    __device__ void consumer_release() {
        const int lane = threadIdx.x % 32;
        __syncwarp();  // all lanes have read their scales
        if constexpr (PARTNERS == 1) {
            if (lane == 0) empty[stage].arrive();
        } else if (lane < PARTNERS) {
            empty[stage].arrive_remote(ClusterTiles<DOWN, ACROSS>().partner(lane));
        }
    }
    __device__ void advance() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};
