// Hopper's tensor core instruction, wgmma: instruction wrappers, shared memory descriptors, fences, setmaxnreg. For
// sm_90a.
#pragma once
#include "common.cuh"

// Operand types, named as in PTX.
struct e4m3;
struct e5m2;
struct f16;
struct bf16;

template <typename T> struct WgmmaType;
template <> struct WgmmaType<__half> { using type = f16; };
template <> struct WgmmaType<__nv_bfloat16> { using type = bf16; };

// WgmmaSS: acc [64, N] += a [64, K] · b [N, K]ᵀ in fp32, both operands in shared memory, where K is 32 bytes. A thread
// has N / 2 accumulators: acc[4 g + 2 h + i] is row 16 · warp + lane / 4 + 8 h, column 8 g + 2 · (lane % 4) + i. With
// scale_d = 0 the accumulators are overwritten. The instruction is asynchronous: see warpgroup_wait. A_MN and B_MN say
// which operands are MN-major; fp8 is K-major always.
template <typename A, typename B, int N>
struct WgmmaSS;

#define TILERY_ACC4(i) "+f"(acc[i]), "+f"(acc[i + 1]), "+f"(acc[i + 2]), "+f"(acc[i + 3])
#define TILERY_ACC8(i) TILERY_ACC4(i), TILERY_ACC4(i + 4)
#define TILERY_ACC12(i) TILERY_ACC8(i), TILERY_ACC4(i + 8)
#define TILERY_ACC16(i) TILERY_ACC12(i), TILERY_ACC4(i + 12)
#define TILERY_ACC20(i) TILERY_ACC16(i), TILERY_ACC4(i + 16)
#define TILERY_ACC24(i) TILERY_ACC20(i), TILERY_ACC4(i + 20)
#define TILERY_ACC28(i) TILERY_ACC24(i), TILERY_ACC4(i + 24)
#define TILERY_ACC32(i) TILERY_ACC28(i), TILERY_ACC4(i + 28)
#define TILERY_ACC36(i) TILERY_ACC32(i), TILERY_ACC4(i + 32)
#define TILERY_ACC40(i) TILERY_ACC36(i), TILERY_ACC4(i + 36)
#define TILERY_ACC44(i) TILERY_ACC40(i), TILERY_ACC4(i + 40)
#define TILERY_ACC48(i) TILERY_ACC44(i), TILERY_ACC4(i + 44)
#define TILERY_ACC52(i) TILERY_ACC48(i), TILERY_ACC4(i + 48)
#define TILERY_ACC56(i) TILERY_ACC52(i), TILERY_ACC4(i + 52)
#define TILERY_ACC60(i) TILERY_ACC56(i), TILERY_ACC4(i + 56)
#define TILERY_ACC64(i) TILERY_ACC60(i), TILERY_ACC4(i + 60)
#define TILERY_ACC68(i) TILERY_ACC64(i), TILERY_ACC4(i + 64)
#define TILERY_ACC72(i) TILERY_ACC68(i), TILERY_ACC4(i + 68)
#define TILERY_ACC76(i) TILERY_ACC72(i), TILERY_ACC4(i + 72)
#define TILERY_ACC80(i) TILERY_ACC76(i), TILERY_ACC4(i + 76)
#define TILERY_ACC84(i) TILERY_ACC80(i), TILERY_ACC4(i + 80)
#define TILERY_ACC88(i) TILERY_ACC84(i), TILERY_ACC4(i + 84)
#define TILERY_ACC92(i) TILERY_ACC88(i), TILERY_ACC4(i + 88)
#define TILERY_ACC96(i) TILERY_ACC92(i), TILERY_ACC4(i + 92)
#define TILERY_ACC100(i) TILERY_ACC96(i), TILERY_ACC4(i + 96)
#define TILERY_ACC104(i) TILERY_ACC100(i), TILERY_ACC4(i + 100)
#define TILERY_ACC108(i) TILERY_ACC104(i), TILERY_ACC4(i + 104)
#define TILERY_ACC112(i) TILERY_ACC108(i), TILERY_ACC4(i + 108)
#define TILERY_ACC116(i) TILERY_ACC112(i), TILERY_ACC4(i + 112)
#define TILERY_ACC120(i) TILERY_ACC116(i), TILERY_ACC4(i + 116)
#define TILERY_ACC124(i) TILERY_ACC120(i), TILERY_ACC4(i + 120)
#define TILERY_ACC128(i) TILERY_ACC124(i), TILERY_ACC4(i + 124)
#define TILERY_REGS4 "%0,%1,%2,%3"
#define TILERY_REGS8 TILERY_REGS4 ",%4,%5,%6,%7"
#define TILERY_REGS12 TILERY_REGS8 ",%8,%9,%10,%11"
#define TILERY_REGS16 TILERY_REGS12 ",%12,%13,%14,%15"
#define TILERY_REGS20 TILERY_REGS16 ",%16,%17,%18,%19"
#define TILERY_REGS24 TILERY_REGS20 ",%20,%21,%22,%23"
#define TILERY_REGS28 TILERY_REGS24 ",%24,%25,%26,%27"
#define TILERY_REGS32 TILERY_REGS28 ",%28,%29,%30,%31"
#define TILERY_REGS36 TILERY_REGS32 ",%32,%33,%34,%35"
#define TILERY_REGS40 TILERY_REGS36 ",%36,%37,%38,%39"
#define TILERY_REGS44 TILERY_REGS40 ",%40,%41,%42,%43"
#define TILERY_REGS48 TILERY_REGS44 ",%44,%45,%46,%47"
#define TILERY_REGS52 TILERY_REGS48 ",%48,%49,%50,%51"
#define TILERY_REGS56 TILERY_REGS52 ",%52,%53,%54,%55"
#define TILERY_REGS60 TILERY_REGS56 ",%56,%57,%58,%59"
#define TILERY_REGS64 TILERY_REGS60 ",%60,%61,%62,%63"
#define TILERY_REGS68 TILERY_REGS64 ",%64,%65,%66,%67"
#define TILERY_REGS72 TILERY_REGS68 ",%68,%69,%70,%71"
#define TILERY_REGS76 TILERY_REGS72 ",%72,%73,%74,%75"
#define TILERY_REGS80 TILERY_REGS76 ",%76,%77,%78,%79"
#define TILERY_REGS84 TILERY_REGS80 ",%80,%81,%82,%83"
#define TILERY_REGS88 TILERY_REGS84 ",%84,%85,%86,%87"
#define TILERY_REGS92 TILERY_REGS88 ",%88,%89,%90,%91"
#define TILERY_REGS96 TILERY_REGS92 ",%92,%93,%94,%95"
#define TILERY_REGS100 TILERY_REGS96 ",%96,%97,%98,%99"
#define TILERY_REGS104 TILERY_REGS100 ",%100,%101,%102,%103"
#define TILERY_REGS108 TILERY_REGS104 ",%104,%105,%106,%107"
#define TILERY_REGS112 TILERY_REGS108 ",%108,%109,%110,%111"
#define TILERY_REGS116 TILERY_REGS112 ",%112,%113,%114,%115"
#define TILERY_REGS120 TILERY_REGS116 ",%116,%117,%118,%119"
#define TILERY_REGS124 TILERY_REGS120 ",%120,%121,%122,%123"
#define TILERY_REGS128 TILERY_REGS124 ",%124,%125,%126,%127"
// COUNT: accumulators of a thread. A_AT to B_MN_AT: numbers of the asm operands that follow the accumulators.
#define TILERY_WGMMA_SS(A, B, N, K, COUNT, A_AT, B_AT, D_AT, A_MN_AT, B_MN_AT, MAJORS)                              \
    template <>                                                                                                    \
    struct WgmmaSS<A, B, N> {                                                                                      \
        template <int A_MN = 0, int B_MN = 0>                                                                      \
        static __device__ void mma(float (&acc)[COUNT], u64 a_desc, u64 b_desc, int scale_d) {                     \
            asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #D_AT ", 0;\n"                                         \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k" #K ".f32." #A "." #B                           \
                         " {" TILERY_REGS##COUNT "}, %" #A_AT ", %" #B_AT ", p, 1, 1" MAJORS(A_MN_AT, B_MN_AT) "; }" \
                         : TILERY_ACC##COUNT(0)                                                                    \
                         : "l"(a_desc), "l"(b_desc), "r"(scale_d), "n"(A_MN), "n"(B_MN));                          \
        }                                                                                                          \
    };
#define TILERY_EITHER_MAJOR(A_MN_AT, B_MN_AT) ", %" #A_MN_AT ", %" #B_MN_AT
#define TILERY_K_MAJOR(A_MN_AT, B_MN_AT) ""
#define TILERY_WGMMA_SS_SIZES(A, B, K, MAJORS)                          \
    TILERY_WGMMA_SS(A, B, 8, K, 4, 4, 5, 6, 7, 8, MAJORS)               \
    TILERY_WGMMA_SS(A, B, 16, K, 8, 8, 9, 10, 11, 12, MAJORS)           \
    TILERY_WGMMA_SS(A, B, 24, K, 12, 12, 13, 14, 15, 16, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 32, K, 16, 16, 17, 18, 19, 20, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 40, K, 20, 20, 21, 22, 23, 24, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 48, K, 24, 24, 25, 26, 27, 28, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 56, K, 28, 28, 29, 30, 31, 32, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 64, K, 32, 32, 33, 34, 35, 36, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 72, K, 36, 36, 37, 38, 39, 40, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 80, K, 40, 40, 41, 42, 43, 44, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 88, K, 44, 44, 45, 46, 47, 48, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 96, K, 48, 48, 49, 50, 51, 52, MAJORS)        \
    TILERY_WGMMA_SS(A, B, 104, K, 52, 52, 53, 54, 55, 56, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 112, K, 56, 56, 57, 58, 59, 60, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 120, K, 60, 60, 61, 62, 63, 64, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 128, K, 64, 64, 65, 66, 67, 68, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 136, K, 68, 68, 69, 70, 71, 72, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 144, K, 72, 72, 73, 74, 75, 76, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 152, K, 76, 76, 77, 78, 79, 80, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 160, K, 80, 80, 81, 82, 83, 84, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 168, K, 84, 84, 85, 86, 87, 88, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 176, K, 88, 88, 89, 90, 91, 92, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 184, K, 92, 92, 93, 94, 95, 96, MAJORS)       \
    TILERY_WGMMA_SS(A, B, 192, K, 96, 96, 97, 98, 99, 100, MAJORS)      \
    TILERY_WGMMA_SS(A, B, 200, K, 100, 100, 101, 102, 103, 104, MAJORS) \
    TILERY_WGMMA_SS(A, B, 208, K, 104, 104, 105, 106, 107, 108, MAJORS) \
    TILERY_WGMMA_SS(A, B, 216, K, 108, 108, 109, 110, 111, 112, MAJORS) \
    TILERY_WGMMA_SS(A, B, 224, K, 112, 112, 113, 114, 115, 116, MAJORS) \
    TILERY_WGMMA_SS(A, B, 232, K, 116, 116, 117, 118, 119, 120, MAJORS) \
    TILERY_WGMMA_SS(A, B, 240, K, 120, 120, 121, 122, 123, 124, MAJORS) \
    TILERY_WGMMA_SS(A, B, 248, K, 124, 124, 125, 126, 127, 128, MAJORS) \
    TILERY_WGMMA_SS(A, B, 256, K, 128, 128, 129, 130, 131, 132, MAJORS)
TILERY_WGMMA_SS_SIZES(f16, f16, 16, TILERY_EITHER_MAJOR)
TILERY_WGMMA_SS_SIZES(bf16, bf16, 16, TILERY_EITHER_MAJOR)
TILERY_WGMMA_SS_SIZES(e4m3, e4m3, 32, TILERY_K_MAJOR)
TILERY_WGMMA_SS_SIZES(e4m3, e5m2, 32, TILERY_K_MAJOR)
TILERY_WGMMA_SS_SIZES(e5m2, e4m3, 32, TILERY_K_MAJOR)
TILERY_WGMMA_SS_SIZES(e5m2, e5m2, 32, TILERY_K_MAJOR)

// WgmmaRS: the same over K = 16, with a in registers and b [K, N] MN-major in shared memory. The layout of a is that of
// accumulators rounded to 16 bits: every 16 columns of them are four registers in each thread. The registers must not
// change before the wgmma is complete.
template <typename T, int N>
struct WgmmaRS;

#define TILERY_WGMMA_RS(T, N, COUNT, A0, A1, A2, A3, B_AT)                                                        \
    template <>                                                                                                   \
    struct WgmmaRS<T, N> {                                                                                        \
        static __device__ void mma(float (&acc)[COUNT], const unsigned (&a)[4], u64 b_desc) {                     \
            asm volatile("{ .reg .pred p; setp.eq.b32 p, 0, 0;\n"                                                 \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #T "." #T " {" TILERY_REGS##COUNT "}," \
                         "{%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B_AT ", p, 1, 1, 1; }"                       \
                         : TILERY_ACC##COUNT(0)                                                                   \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_desc));                              \
        }                                                                                                         \
    };
#define TILERY_WGMMA_RS_SIZES(T)                     \
    TILERY_WGMMA_RS(T, 64, 32, 32, 33, 34, 35, 36)   \
    TILERY_WGMMA_RS(T, 128, 64, 64, 65, 66, 67, 68)  \
    TILERY_WGMMA_RS(T, 192, 96, 96, 97, 98, 99, 100) \
    TILERY_WGMMA_RS(T, 256, 128, 128, 129, 130, 131, 132)
TILERY_WGMMA_RS_SIZES(f16)
TILERY_WGMMA_RS_SIZES(bf16)

// Keeps the compiler from moving or copying registers that an asynchronous wgmma reads or writes; it emits no
// instruction.
template <int COUNT>
__device__ void warpgroup_fence_operand(float (&acc)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}
template <int COUNT>
__device__ void warpgroup_fence_operand(unsigned (&a)[COUNT][4]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
        asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3])::"memory");
}
// Before the first wgmma of a batch.
template <int COUNT>
__device__ void warpgroup_arrive(float (&acc)[COUNT]) {
    warpgroup_fence_operand(acc);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ inline void warpgroup_commit_batch() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING batches are incomplete. Call warpgroup_fence_operand before completed accumulators are
// used.
template <int PENDING>
__device__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Waits for all batches; then `acc` may be used.
template <int COUNT>
__device__ void warpgroup_wait_all(float (&acc)[COUNT]) {
    warpgroup_wait<0>();
    warpgroup_fence_operand(acc);
}

// Tiles in shared memory have rows of 128 bytes and the 128-byte swizzle of TMA and wgmma.
constexpr int SWIZZLE_BYTES = 128;  // bytes of a row of a tile
constexpr int SWIZZLE_ATOM = 1024;  // bytes after which the swizzle repeats, 8 rows; tiles start at multiples of it

// Shared memory descriptor of a K-major tile. To advance by 32 bytes along K, add 2.
__device__ inline u64 smem_desc_k_major(const void* tile) {
    const u64 address = smem_address(tile);
    return ((address & 0x3ffff) >> 4) | (u64{1} << 16) | (u64{SWIZZLE_ATOM >> 4} << 32) | (u64{1} << 62);
}
// Shared memory descriptor of an MN-major tile, whose rows are along K. A row that is longer than 128 bytes is cut into
// chunks of 128, which lie `chunk_stride` bytes apart. To advance by 16 rows along K, add 128.
__device__ inline u64 smem_desc_mn_major(const void* tile, int chunk_stride) {
    const u64 address = smem_address(tile);
    return ((address & 0x3ffff) >> 4) | (static_cast<u64>(chunk_stride >> 4) << 16) | (u64{SWIZZLE_ATOM >> 4} << 32) |
           (u64{1} << 62);
}

// setmaxnreg: the producer warpgroup gives up registers and the consumer warpgroups get them. All warps of a warpgroup
// call it.
template <int COUNT>
__device__ void decrease_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ void increase_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Named barrier of the 128 threads of one warpgroup.
__device__ inline void warpgroup_sync(int warpgroup) { asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory"); }
