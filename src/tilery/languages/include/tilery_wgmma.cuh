// Hopper's products: tiles that TMA brings into a ring in shared memory, and warpgroups that multiply them. For sm_90a.
#pragma once
#include "tilery_ring.cuh"

// What a warpgroup multiplies, by the names that PTX has for them.
struct e4m3;
struct e5m2;
struct f16;
struct bf16;

// Adds 64 × N products over 32 bytes of K to sums in fp32, N / 2 a thread: sums[4 g + 2 h + i] is in row
// 16 · warp + lane / 4 + 8 h and column 8 g + 2 · (lane % 4) + i. `keep` 0 starts anew. Not done before product_end.
template <typename A, typename B, int N>
struct Product;

#define TILERY_SUMS4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define TILERY_SUMS8(i) TILERY_SUMS4(i), TILERY_SUMS4(i + 4)
#define TILERY_SUMS16(i) TILERY_SUMS8(i), TILERY_SUMS8(i + 8)
#define TILERY_SUMS24(i) TILERY_SUMS16(i), TILERY_SUMS8(i + 16)
#define TILERY_SUMS32(i) TILERY_SUMS16(i), TILERY_SUMS16(i + 16)
#define TILERY_SUMS40(i) TILERY_SUMS32(i), TILERY_SUMS8(i + 32)
#define TILERY_SUMS44(i) TILERY_SUMS32(i), TILERY_SUMS8(i + 32), TILERY_SUMS4(i + 40)
#define TILERY_SUMS48(i) TILERY_SUMS32(i), TILERY_SUMS16(i + 32)
#define TILERY_SUMS56(i) TILERY_SUMS48(i), TILERY_SUMS8(i + 48)
#define TILERY_SUMS64(i) TILERY_SUMS32(i), TILERY_SUMS32(i + 32)
#define TILERY_SUMS80(i) TILERY_SUMS64(i), TILERY_SUMS16(i + 64)
#define TILERY_SUMS88(i) TILERY_SUMS64(i), TILERY_SUMS24(i + 64)
#define TILERY_SUMS96(i) TILERY_SUMS64(i), TILERY_SUMS32(i + 64)
#define TILERY_SUMS112(i) TILERY_SUMS96(i), TILERY_SUMS16(i + 96)
#define TILERY_SUMS128(i) TILERY_SUMS64(i), TILERY_SUMS64(i + 64)
#define TILERY_NAMES4 "%0,%1,%2,%3"
#define TILERY_NAMES8 TILERY_NAMES4 ",%4,%5,%6,%7"
#define TILERY_NAMES16 TILERY_NAMES8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TILERY_NAMES24 TILERY_NAMES16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define TILERY_NAMES32 TILERY_NAMES24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define TILERY_NAMES40 TILERY_NAMES32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define TILERY_NAMES44 TILERY_NAMES40 ",%40,%41,%42,%43"
#define TILERY_NAMES48 TILERY_NAMES44 ",%44,%45,%46,%47"
#define TILERY_NAMES56 TILERY_NAMES48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define TILERY_NAMES64 TILERY_NAMES56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define TILERY_NAMES80 TILERY_NAMES64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define TILERY_NAMES88 TILERY_NAMES80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define TILERY_NAMES96 TILERY_NAMES88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define TILERY_NAMES112 TILERY_NAMES96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define TILERY_NAMES128 TILERY_NAMES112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
// COUNT sums a thread; X, Y and KEEP are the places of the operands behind them; FLAGS end the list of operands.
#define TILERY_PRODUCT(A, B, N, K, COUNT, X, Y, KEEP, FLAGS)                                           \
    template <>                                                                                        \
    struct Product<A, B, N> {                                                                          \
        static __device__ void add(float (&sums)[COUNT], u64 a, u64 b, int keep) {                     \
            asm volatile("{ .reg .pred keep; setp.ne.b32 keep, %" #KEEP ", 0;\n"                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." #A "." #B               \
                         " {" TILERY_NAMES##COUNT "}, %" #X ", %" #Y ", keep, 1, 1" FLAGS "; }"        \
                         : TILERY_SUMS##COUNT(0)                                                       \
                         : "l"(a), "l"(b), "r"(keep));                                                 \
        }                                                                                              \
    };
#define TILERY_PRODUCTS(A, B, K, FLAGS)                \
    TILERY_PRODUCT(A, B, 8, K, 4, 4, 5, 6, FLAGS)      \
    TILERY_PRODUCT(A, B, 16, K, 8, 8, 9, 10, FLAGS)    \
    TILERY_PRODUCT(A, B, 32, K, 16, 16, 17, 18, FLAGS) \
    TILERY_PRODUCT(A, B, 48, K, 24, 24, 25, 26, FLAGS) \
    TILERY_PRODUCT(A, B, 64, K, 32, 32, 33, 34, FLAGS) \
    TILERY_PRODUCT(A, B, 88, K, 44, 44, 45, 46, FLAGS) \
    TILERY_PRODUCT(A, B, 96, K, 48, 48, 49, 50, FLAGS) \
    TILERY_PRODUCT(A, B, 128, K, 64, 64, 65, 66, FLAGS)
#define TILERY_WIDE_PRODUCTS(A, B, K, FLAGS)             \
    TILERY_PRODUCTS(A, B, K, FLAGS)                      \
    TILERY_PRODUCT(A, B, 80, K, 40, 40, 41, 42, FLAGS)   \
    TILERY_PRODUCT(A, B, 112, K, 56, 56, 57, 58, FLAGS)  \
    TILERY_PRODUCT(A, B, 160, K, 80, 80, 81, 82, FLAGS)  \
    TILERY_PRODUCT(A, B, 176, K, 88, 88, 89, 90, FLAGS)  \
    TILERY_PRODUCT(A, B, 192, K, 96, 96, 97, 98, FLAGS)  \
    TILERY_PRODUCT(A, B, 224, K, 112, 112, 113, 114, FLAGS) \
    TILERY_PRODUCT(A, B, 256, K, 128, 128, 129, 130, FLAGS)
TILERY_WIDE_PRODUCTS(f16, f16, 16, ", 0, 0")  // K along the rows of both tiles
TILERY_WIDE_PRODUCTS(bf16, bf16, 16, ", 0, 0")
TILERY_PRODUCTS(e4m3, e4m3, 32, "")
TILERY_PRODUCTS(e4m3, e5m2, 32, "")
TILERY_PRODUCTS(e5m2, e4m3, 32, "")
TILERY_PRODUCTS(e5m2, e5m2, 32, "")

// The same over 16 of K, of rows that are held in registers and of a tile whose rows are K. Sums that are rounded to two bytes
// are such rows: four words a thread, of its rows as above, for every 16 columns. They may not change before product_end.
template <typename T, int N>
struct HeldProduct;

#define TILERY_HELD_PRODUCT(T, N, COUNT, A0, A1, A2, A3, Y)                                                       \
    template <>                                                                                                  \
    struct HeldProduct<T, N> {                                                                                   \
        static __device__ void add(float (&sums)[COUNT], const unsigned (&a)[4], u64 b) {                        \
            asm volatile("{ .reg .pred keep; setp.eq.b32 keep, 0, 0;\n"                                          \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" TILERY_NAMES##COUNT "}," \
                         "{%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #Y ", keep, 1, 1, 1; }"                      \
                         : TILERY_SUMS##COUNT(0)                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                  \
        }                                                                                                        \
    };
#define TILERY_HELD_PRODUCTS(T)                                   \
    TILERY_HELD_PRODUCT(T, 64, 32, 32, 33, 34, 35, 36)            \
    TILERY_HELD_PRODUCT(T, 128, 64, 64, 65, 66, 67, 68)           \
    TILERY_HELD_PRODUCT(T, 192, 96, 96, 97, 98, 99, 100)          \
    TILERY_HELD_PRODUCT(T, 256, 128, 128, 129, 130, 131, 132)
TILERY_HELD_PRODUCTS(f16)
TILERY_HELD_PRODUCTS(bf16)

// Sums that products change stay where they are from one end to the other: the compiler does not see how long they take.
template <int COUNT>
__device__ void pin(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}
template <int COUNT>
__device__ void product_begin(float (&sums)[COUNT]) {
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until all but the last LEFT commits are done; their sums may not be touched before product_end.
template <int LEFT>
__device__ void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
template <int COUNT>
__device__ void product_end(float (&sums)[COUNT]) {
    product_wait<0>();
    pin(sums);
}

constexpr int SPAN = 128;  // bytes of a row of a tile, which a swizzle spans
constexpr int PATTERN = 1024;  // bytes after which it repeats: tiles start at multiples

// Rows of SPAN bytes, swizzled, one behind the other. Every 32 bytes further along K add 2.
__device__ inline u64 tile_descriptor(const void* tile) {
    const u64 address = shared_address(tile);
    return ((address & 0x3ffff) >> 4) | (u64{1} << 16) | (u64{PATTERN >> 4} << 32) | (u64{1} << 62);
}
// Of a tile whose rows are K: every SPAN bytes of a row lie `apart` from those before. Every 16 rows add 128.
__device__ inline u64 held_descriptor(const void* tile, int apart) {
    const u64 address = shared_address(tile);
    return ((address & 0x3ffff) >> 4) | (static_cast<u64>(apart >> 4) << 16) | (u64{PATTERN >> 4} << 32) | (u64{1} << 62);
}

struct __align__(128) TensorMap { u64 words[16]; };  // made on the host: languages/tensor_maps.py

__device__ inline void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// The box at (k, row), zeros where it is outside.
__device__ inline void load_tile(Arrival& arrival, void* to, const TensorMap& map, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)), "l"(&map),
                 "r"(shared_address(&arrival.state)), "r"(k), "r"(row) : "memory");
}
// The same of a tensor of four dimensions, of which a box has two; and into every block that `blocks` has a bit for.
__device__ inline void load_box(Arrival& arrival, void* to, const TensorMap& map, int column, int row, int third, int fourth) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(shared_address(to)), "l"(&map),
                 "r"(shared_address(&arrival.state)), "r"(column), "r"(row), "r"(third), "r"(fourth) : "memory");
}
__device__ inline void load_box_for(unsigned blocks, Arrival& arrival, void* to, const TensorMap& map, int column, int row,
                                    int third, int fourth) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)), "l"(&map),
                 "r"(shared_address(&arrival.state)), "r"(column), "r"(row), "r"(third), "r"(fourth),
                 "h"(static_cast<unsigned short>(blocks)) : "memory");
}
// The same of what nobody asks for again: it is the first to leave the L2.
__device__ inline u64 once() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ inline void load_tile_once(u64 policy, Arrival& arrival, void* to, const TensorMap& map, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)), "l"(&map),
                 "r"(shared_address(&arrival.state)), "r"(k), "r"(row), "l"(policy) : "memory");
}
__device__ inline void load_box_once(u64 policy, Arrival& arrival, void* to, const TensorMap& map, int column, int row, int third,
                                     int fourth) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared_address(to)), "l"(&map),
                 "r"(shared_address(&arrival.state)), "r"(column), "r"(row), "r"(third), "r"(fourth), "l"(policy) : "memory");
}

// load_tile into every block of the cluster that `blocks` has a bit for, where `to` and `arrival` have the same places.
__device__ inline void load_tile_for(unsigned blocks, Arrival& arrival, void* to, const TensorMap& map, int k, int row) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(shared_address(to)), "l"(&map),
                 "r"(shared_address(&arrival.state)), "r"(k), "r"(row), "h"(static_cast<unsigned short>(blocks))
                 : "memory");
}
// All ROWS of a tile from `row` on, for SHARE blocks of a cluster that need the same: each fetches a part for all.
template <int ROWS, int SHARE>
__device__ void load_rows(Arrival& arrival, unsigned char* to, const TensorMap& map, int k, int row) {
    if constexpr (SHARE == 1) {
        load_tile(arrival, to, map, k, row);
    } else {
        static_assert(ROWS / SHARE * SPAN % PATTERN == 0, "parts start at multiples of the swizzle's pattern");
        const int skip = Cluster<SHARE>::rank() * (ROWS / SHARE);
        load_tile_for((1 << SHARE) - 1, arrival, to + skip * SPAN, map, k, row + skip);
    }
}

// SLOTS of BYTES for tiles and NOTES floats about them, between a thread that asks for tiles, a warp that takes notes (if
// there are any), and warps that read both. Each has its own place in the ring. BLOCKS of a cluster fetch for each other: a
// slot is free when the readers of all of them have let go.
template <int SLOTS, int BYTES, int NOTES = 0, int BLOCKS = 1>
struct TileRing {
    static_assert(BYTES % PATTERN == 0, "tiles start at multiples of the swizzle's pattern");
    static_assert(NOTES % 4 == 0, "notes are read by 16 bytes");
    unsigned char* tiles;
    float* all_notes;
    Arrival *full, *empty;
    int slot = 0, phase = 0;

    // `memory` has PATTERN + SLOTS · (BYTES + 4 · NOTES + 16) bytes and need not start at a multiple of PATTERN; `more` are
    // left for others, behind the tiles.
    __device__ explicit TileRing(unsigned char* memory, int more = 0) {
        tiles = memory + (-shared_address(memory) & (PATTERN - 1));
        all_notes = reinterpret_cast<float*>(tiles + SLOTS * BYTES + more);
        full = reinterpret_cast<Arrival*>(all_notes + SLOTS * NOTES);
        empty = full + SLOTS;
    }
    // Of one thread, before all meet.
    __device__ void init(int reading_warps) {
        for (int s = 0; s < SLOTS; ++s) full[s].init(NOTES ? 1 + 32 : 1), empty[s].init(reading_warps * BLOCKS);
        asm volatile("fence.mbarrier_init.release.cluster; fence.proxy.async;" ::: "memory");
    }
    __device__ unsigned char* behind() const { return tiles + SLOTS * BYTES; }
    __device__ unsigned char* tile() const { return tiles + slot * BYTES; }
    __device__ const float* notes() const { return all_notes + slot * NOTES; }

    __device__ void wait_until_free() { empty[slot].wait(phase ^ 1); }  // the first time round every slot is
    __device__ Arrival& ask() {
        wait_until_free();
        full[slot].expect(BYTES);
        return full[slot];
    }
    // Every lane of the warp that takes notes: they arrive by themselves, when it has said that there are no more.
    __device__ void note(int place, const float* from) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(all_notes + slot * NOTES + place)),
                     "l"(__cvta_generic_to_global(from)) : "memory");
    }
    __device__ void noted() {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
                     ::"r"(shared_address(&full[slot].state)) : "memory");
    }

    __device__ void wait() { full[slot].wait(phase); }
    __device__ void release() {
        const int lane = threadIdx.x % 32;
        __syncwarp();  // all lanes have read their notes
        if constexpr (BLOCKS == 1) {
            if (lane == 0) empty[slot].arrive();
        } else if (lane < BLOCKS) {
            empty[slot].arrive_at(lane);
        }
    }
    __device__ void next() {
        if (++slot == SLOTS) slot = 0, phase ^= 1;
    }
};

// Registers go from warpgroups that need few to those that need many; every warp of a warpgroup calls it.
template <int COUNT>
__device__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Which tile is the t-th: bands of GROUP tiles of M share b in the L2.
template <int GROUP>
__device__ void place_of(int t, int down, int across, int& i, int& j) {
    const int band = GROUP * across, first = t / band * GROUP, height = min(down - first, GROUP);
    i = first + t % band % height;
    j = t % band / height;
}
