// Copies lines of 16-bit values to lines that begin at multiples of 16 bytes, so that TMA can load them. A block has a
// line: of `width` values `value_stride` apart. Lines are `line_stride` apart, and there are `lines` of them every
// batch_stride values. The copy has them `to_stride` values apart; what is behind `width` is not written.
#include "common.cuh"

template <int THREADS>
__global__ void __launch_bounds__(THREADS) copy_rows(
    const unsigned short* from, unsigned short* to, int lines, int width, i64 to_stride, i64 batch_stride, i64 line_stride,
    i64 value_stride) {
    pdl_wait();
    pdl_launch_dependents();
    const int batch = blockIdx.x / lines, line = blockIdx.x % lines;
    const unsigned short* const source = from + batch * batch_stride + line * line_stride;
    unsigned short* const target = to + i64{blockIdx.x} * to_stride;
    if (value_stride != 1) {
        for (int i = threadIdx.x; i < width; i += THREADS) target[i] = source[i * value_stride];
        return;
    }
    // Words of two values. Where the line begins in the middle of a word, each is put together from two, and a last pair
    // that ends in the middle of one is copied by itself: the rest of that word may lie behind the tensor.
    const unsigned* const words = reinterpret_cast<const unsigned*>(reinterpret_cast<u64>(source) & ~u64{3});
    const bool halfway = reinterpret_cast<u64>(source) & 2;
    const int whole = (width - halfway) / 2;
#pragma unroll 4
    for (int i = threadIdx.x; i < whole; i += THREADS) {
        const unsigned low = words[i];
        const unsigned word = halfway ? __funnelshift_r(low, words[i + 1], 16) : low;
        reinterpret_cast<unsigned*>(target)[i] = word;
    }
    if (const int i = 2 * whole + threadIdx.x; i < width) target[i] = source[i];
}
