// Common device code: programmatic dependent launch (PDL), vectorised loads and stores, warp and block reductions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using i64 = long long;  // for offsets: row * stride overflows int beyond 2**31 elements
using u64 = unsigned long long;

// PDL: waits until the kernel before has completed and its writes are visible. In a kernel that is launched with PDL
// every thread calls this before it touches global memory. Before sm_90 kernels do not overlap and there is nothing to
// wait for.
__device__ inline void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// PDL: the next kernel may start once every block of this grid has called this or has exited. Without the call it
// starts when all blocks have exited. The next kernel's own pdl_wait still waits for this grid to complete.
__device__ inline void pdl_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The 32-bit shared memory address that PTX instructions take.
__device__ inline unsigned smem_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// The type that one load or store of BYTES bytes moves.
template <int BYTES>
struct Word;
template <> struct Word<1> { using type = unsigned char; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<16> { using type = uint4; };

template <typename W>
__device__ void store_word(void* address, W word) {
    *static_cast<W*>(address) = word;
}
// Inline PTX, because the compiler may split the store of a uint4 into four.
__device__ inline void store_word(void* address, uint4 w) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 ::"l"(__cvta_generic_to_global(address)), "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w) : "memory");
}

// N consecutive elements, loaded and stored by one instruction. Addresses are multiples of N * sizeof(T).
template <typename T, int N>
struct Vec {
    using word = typename Word<N * sizeof(T)>::type;
    T data[N];

    static __device__ Vec load(const T* address) {
        const word bits = *reinterpret_cast<const word*>(address);
        Vec vec;
        memcpy(&vec, &bits, sizeof(word));
        return vec;
    }
    static __device__ Vec from_float(const float (&values)[N]) {
        Vec vec;
#pragma unroll
        for (int i = 0; i < N; ++i) vec.data[i] = static_cast<T>(values[i]);
        return vec;
    }
    __device__ void to_float(float (&values)[N]) const {
#pragma unroll
        for (int i = 0; i < N; ++i) values[i] = static_cast<float>(data[i]);
    }
    __device__ float sum_of_squares() const {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < N; ++i) sum += static_cast<float>(data[i]) * static_cast<float>(data[i]);
        return sum;
    }
    __device__ word bits() const {
        word bits;
        memcpy(&bits, this, sizeof(word));
        return bits;
    }
    __device__ void store_shared(T* address) const { *reinterpret_cast<word*>(address) = bits(); }
    __device__ void store_global(T* address) const { store_word(address, bits()); }
};

// Loads N elements and converts them to float.
template <typename T, int N>
__device__ void load(float (&values)[N], const T* from) {
    Vec<T, N>::load(from).to_float(values);
}

// Rounds N floats to T and stores them to global memory.
template <typename T, int N>
__device__ void store(T* to, const float (&values)[N]) {
    Vec<T, N>::from_float(values).store_global(to);
}

struct Sum {
    static constexpr float identity = 0.0f;
    static __device__ float combine(float a, float b) { return a + b; }
};

// The identity is finite: with -inf, a row that begins with -inf would give -inf - (-inf) = NaN. fmaxf drops NaN; the
// sum of exponentials that goes with a maximum carries it.
struct Max {
    static constexpr float identity = -3.402823466e38f;
    static __device__ float combine(float a, float b) { return fmaxf(a, b); }
};

template <typename Op>
__device__ float warp_reduce(float value) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) value = Op::combine(value, __shfl_xor_sync(0xffffffff, value, mask));
    return value;
}

// Every thread of the block gets the result. Two calls with the same Op and ID need a barrier between them: slow warps
// may still read `partials` of the first.
template <typename Op, int THREADS, int ID = 0>
__device__ float block_reduce(float value) {
    __shared__ float partials[THREADS / 32];
    const int lane = threadIdx.x % 32;
    value = warp_reduce<Op>(value);
    if (lane == 0) partials[threadIdx.x / 32] = value;
    __syncthreads();
    return warp_reduce<Op>(lane < THREADS / 32 ? partials[lane] : Op::identity);
}

// exp(x) of values that were read as T or will be rounded to T. 16-bit types do not show the error of __expf: 2 ulp of
// fp32, and one more for each unit of |x|.
template <typename T>
__device__ float exp_for(float x) {
    if constexpr (sizeof(T) == 2) return __expf(x);
    return expf(x);
}
