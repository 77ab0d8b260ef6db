// What the source of an emulated kernel sees: CUDA's built-in variables and functions, for threads that are fibers of
// one host thread. Included before everything else; translate.py makes the rest of CUDA C++ into C++.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#define __CUDA_ARCH__ 900  // after CUDA's headers, which must take their host branches
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
#undef __shared__  // the word itself, for translate.py
#define __shared__ __shared__

namespace emulator {

struct Index {
    unsigned x, y, z;
};
struct Place {  // of a thread
    Index thread, block;
};
extern Place* place;  // of the thread that runs
extern Index grid_size, block_size;

void sync_threads();
void sync_warp(unsigned mask);
enum class Shuffle { index, up, down, exclusive_or };
std::uint64_t shuffle(unsigned mask, std::uint64_t bits, Shuffle how, int argument, int width);
unsigned ballot(unsigned mask, bool vote);
unsigned shared_address(const void* p);
constexpr std::size_t NOT_PLACED = ~std::size_t{0};
void* static_shared(std::size_t& used, std::size_t& offset, std::size_t size, std::size_t alignment);
void* dynamic_shared();
std::uint64_t clock();

// Operands of an asm statement. Inputs are copied; outputs are written when the instruction completes, which is later for
// an asynchronous one.
struct Operand {
    void* target = nullptr;  // where an output lies
    std::uint64_t bits = 0;  // of an input
    int size = 0;
};
template <typename T>
Operand out(T& x) {
    static_assert(sizeof(T) <= 8);
    return {&x, 0, sizeof(T)};
}
template <typename T>
Operand in(T x) {
    Operand made{nullptr, 0, sizeof(T)};
    static_assert(sizeof(T) <= 8);
    std::memcpy(&made.bits, &x, sizeof(T));
    return made;
}
class Program;
const Program* parse(const char* ptx);
void execute(const Program* program, Operand* operands);

template <typename T>
T shuffled(unsigned mask, T value, Shuffle how, int argument, int width) {
    static_assert(sizeof(T) <= 8);
    std::uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    bits = shuffle(mask, bits, how, argument, width);
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

// Each variable in shared memory has its own Tag, and so its own offset, the same in all blocks.
static std::size_t static_shared_used = 0;
template <typename T, typename Tag>
T& shared_variable(Tag) {
    static std::size_t offset = NOT_PLACED;
    return *static_cast<T*>(static_shared(static_shared_used, offset, sizeof(T), alignof(T)));
}

template <typename... P, std::size_t... I>
void call(void (*kernel)(P...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<std::remove_reference_t<P>>*>(args[I])...);
}
template <typename... P>
void call(void (*kernel)(P...), void** args) {
    call(kernel, args, std::index_sequence_for<P...>{});
}

}  // namespace emulator

#define threadIdx (::emulator::place->thread)
#define blockIdx (::emulator::place->block)
#define gridDim (::emulator::grid_size)
#define blockDim (::emulator::block_size)
constexpr int warpSize = 32;

inline void __syncthreads() { ::emulator::sync_threads(); }
inline void __syncwarp(unsigned mask = 0xffffffff) { ::emulator::sync_warp(mask); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline std::size_t __cvta_generic_to_shared(const void* p) { return ::emulator::shared_address(p); }
inline std::size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<std::size_t>(p); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane, int width = 32) {
    return ::emulator::shuffled(mask, value, ::emulator::Shuffle::index, lane, width);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32) {
    return ::emulator::shuffled(mask, value, ::emulator::Shuffle::exclusive_or, lanes, width);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    return ::emulator::shuffled(mask, value, ::emulator::Shuffle::up, static_cast<int>(lanes), width);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32) {
    return ::emulator::shuffled(mask, value, ::emulator::Shuffle::down, static_cast<int>(lanes), width);
}
inline unsigned __ballot_sync(unsigned mask, int vote) { return ::emulator::ballot(mask, vote != 0); }
inline int __any_sync(unsigned mask, int vote) { return ::emulator::ballot(mask, vote != 0) != 0; }
inline int __all_sync(unsigned mask, int vote) { return ::emulator::ballot(mask, vote == 0) == 0; }

// Threads change places only where they wait, so an ordinary read, change and write is atomic.
template <typename T, typename U>
T atomicAdd(T* at, U value) {
    const T old = *at;
    *at = old + static_cast<T>(value);
    return old;
}
inline unsigned atomicInc(unsigned* at, unsigned most) {
    const unsigned old = *at;
    *at = old >= most ? 0 : old + 1;
    return old;
}
template <typename T>
T atomicExch(T* at, T value) {
    return std::exchange(*at, value);
}
template <typename T>
T atomicMax(T* at, T value) {
    const T old = *at;
    *at = old > value ? old : value;
    return old;
}

template <typename T>
T __ldg(const T* at) {
    return *at;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
using std::isfinite;
using std::isinf;
using std::isnan;
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __saturatef(float x) { return x > 1.0f ? 1.0f : x > 0.0f ? x : 0.0f; }
inline float __int_as_float(int bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
inline float __uint_as_float(unsigned bits) { return __int_as_float(static_cast<int>(bits)); }
inline int __float_as_int(float x) {
    int bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
inline unsigned __float_as_uint(float x) { return static_cast<unsigned>(__float_as_int(x)); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((std::uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((std::uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline long long clock64() { return static_cast<long long>(::emulator::clock()); }
