// What several kernels share: values moved 16 bytes at a time and widened to float, and sums and maxima over a block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using i64 = long long;  // offsets: row * stride overflows int past 2**31 elements

// Of a kernel that is launched early: what the kernel before wrote may be read from here on, and what it read be written. The
// next may start `now`, or when all blocks of this one have ended. All threads call it. Before sm_90 kernels follow one another.
__device__ inline void take_over(bool now = true) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (now) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <int BYTES>
struct Word;  // what one instruction moves
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

template <typename W>
__device__ void store_word(void* address, W word) {
    *static_cast<W*>(address) = word;
}
// Spelled out, because the compiler may split the store of a uint4 in four.
__device__ inline void store_word(void* address, uint4 w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(__cvta_generic_to_global(address)), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}

// N neighbours in one word, from and to an address that is a multiple of its size.
template <typename T, int N>
struct Pack {
    using word = typename Word<N * sizeof(T)>::type;
    T at[N];

    static __device__ Pack from(const T* address) {
        const word bits = *reinterpret_cast<const word*>(address);
        Pack pack;
        memcpy(&pack, &bits, sizeof(word));
        return pack;
    }
    static __device__ Pack rounded(const float (&values)[N]) {
        Pack pack;
#pragma unroll
        for (int i = 0; i < N; ++i) pack.at[i] = static_cast<T>(values[i]);
        return pack;
    }
    __device__ void widen(float (&values)[N]) const {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = static_cast<float>(at[i]);
    }
    __device__ float squares() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) sum += static_cast<float>(at[i]) * static_cast<float>(at[i]);
        return sum;
    }
    __device__ word bits() const {
        word bits;
        memcpy(&bits, this, sizeof(word));
        return bits;
    }
    __device__ void to_shared(T* address) const { *reinterpret_cast<word*>(address) = bits(); }
    __device__ void to_global(T* address) const { store_word(address, bits()); }
};

template <typename T, int N>
__device__ void load(float (&values)[N], const T* from) {
    Pack<T, N>::from(from).widen(values);
}

template <typename T, int N>
__device__ void store(T* to, const float (&values)[N]) {
    Pack<T, N>::rounded(values).to_global(to);
}

struct Sum {
    static constexpr float start = 0.0f;
    static __device__ float join(float a, float b) { return a + b; }
};

// Starts finite: -inf - (-inf) would make a NaN where a row begins with -inf. It drops NaN, which a sum carries.
struct Max {
    static constexpr float start = -3.402823466e38f;
    static __device__ float join(float a, float b) { return fmaxf(a, b); }
};

template <typename Op>
__device__ float reduce_warp(float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = Op::join(value, __shfl_xor_sync(0xffffffff, value, mask));
    return value;
}

// Every thread of the block gets the result. Once per Op and ID in a kernel: slow warps may still read its `parts`.
template <typename Op, int THREADS, int ID = 0>
__device__ float reduce_block(float value) {
    __shared__ float parts[THREADS / 32];
    const int lane = threadIdx.x % 32;
    value = reduce_warp<Op>(value);
    if (lane == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    return reduce_warp<Op>(lane < THREADS / 32 ? parts[lane] : Op::start);
}

// Of values that were T, or will be: 16 bits do not show the fast one's error, 2 units of fp32 and one for each unit of x.
template <typename T>
__device__ float exponential(float x) {
    if constexpr (sizeof(T) == 2) return __expf(x);
    return expf(x);
}
