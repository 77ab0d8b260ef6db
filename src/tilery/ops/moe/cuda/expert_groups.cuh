// Which expert each assignment (a token's choice) has, and which assignments share one.
#pragma once
#include "common.cuh"

constexpr int MAX_ASSIGNMENTS = 128;

struct Routing {
    const int* ids;  // [assignments]
    const int* expert_map;  // [known]: the expert that is here, or none; null: an id is an expert that is here
    int assignments, topk, experts, known;
};

// Loads what no launch of this call writes, past the L1 cache. A kernel may do so before pdl_wait if the kernel before it
// is a launch of the same call that signals its dependents behind its own pdl_wait: all earlier kernels have completed.
__device__ inline int load_settled(const int* from) {
    int value;
    asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ inline float load_settled(const float* from) {
    float value;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
    return value;
}

// Groups of up to SHARE assignments of one expert, whose weights are read once for the group. Lies in shared memory.
template <int SHARE>
struct ExpertGroups {
    int count;
    int expert_of[MAX_ASSIGNMENTS];  // by assignment; -1: not here
    int expert[MAX_ASSIGNMENTS];  // by group
    short members[MAX_ASSIGNMENTS][SHARE];  // assignments of a group, in their order; -1 behind the last
    int leaders[MAX_ASSIGNMENTS / 32];  // first assignments of a group, by warp
    int group_of[MAX_ASSIGNMENTS];  // by leader

    // All threads of the block call this, at least MAX_ASSIGNMENTS.
    __device__ void find(const Routing& r) {
        const int own = threadIdx.x, warp = own / 32, lane = own % 32;
        int expert_here = -1;
        if (own < r.assignments) {  // no id and no entry of the map is followed outside
            expert_here = load_settled(r.ids + own);
            if (r.expert_map)
                expert_here = expert_here >= 0 && expert_here < r.known ? load_settled(r.expert_map + expert_here) : -1;
            if (expert_here < 0 || expert_here >= r.experts) expert_here = -1;
        }
        if (own < MAX_ASSIGNMENTS) {
            expert_of[own] = expert_here;
#pragma unroll
            for (int i = 0; i < SHARE; ++i) members[own][i] = -1;
        }
        __syncthreads();
        int place = 0, leader = own;  // place: in the group
        if (expert_here >= 0)
            for (int i = 0; i < own; ++i)
                if (expert_of[i] == expert_here) {
                    if (place == 0) leader = i;
                    if (++place == SHARE) place = 0, leader = own;
                }
        const bool leads = expert_here >= 0 && place == 0;
        const unsigned mask = __ballot_sync(0xffffffff, leads);
        if (own < MAX_ASSIGNMENTS && lane == 0) leaders[warp] = __popc(mask);
        __syncthreads();
        int group = __popc(mask & ((1u << lane) - 1)), all = 0;
#pragma unroll
        for (int w = 0; w < MAX_ASSIGNMENTS / 32; ++w) group += w < warp ? leaders[w] : 0, all += leaders[w];
        if (leads) group_of[own] = group, expert[group] = expert_here;
        if (own == 0) count = all;
        __syncthreads();
        if (expert_here >= 0) members[group_of[leader]][place] = static_cast<short>(own);
        __syncthreads();
    }
};
