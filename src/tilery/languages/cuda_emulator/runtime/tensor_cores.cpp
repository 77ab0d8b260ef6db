// wgmma of a warpgroup, mma.sync of a warp, and the moves of matrices between shared memory and registers.
#include "machine.h"

namespace emulator {

namespace {

float half_to_float(uint16_t bits) {
    __half_raw raw;
    raw.x = bits;
    return __half2float(__half(raw));
}

float bf16_to_float(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
}

float fp8_to_float(uint8_t bits, __nv_fp8_interpretation_t kind) {
    const __half_raw raw = __nv_cvt_fp8_to_halfraw(bits, kind);
    return __half2float(__half(raw));
}

uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// One operand in shared memory as a matrix [rows, K] of floats, as its descriptor says.
void read_operand(uint64_t desc, int rows, int k, char type, bool mn_major, float* out) {
    const uint32_t start = (desc & 0x3fff) << 4, leading = (desc >> 16 & 0x3fff) << 4, stride = (desc >> 32 & 0x3fff) << 4;
    if (desc >> 62 != 1) fail(where() + "only the 128-byte swizzle of wgmma is emulated");
    const int size = type == 'b' || type == 'h' ? 2 : 1;
    const unsigned char* const window = pointer_to(0, 0);
    for (int r = 0; r < rows; ++r)
        for (int c = 0; c < k; ++c) {
            const uint32_t at = mn_major ? start + r / 64 * leading + c / 8 * stride + c % 8 * 128 + r % 64 * size
                                         : start + r / 8 * stride + r % 8 * 128 + c * size;
            out[r * k + c] = to_float(window + swizzled(at), type);
        }
    const int last_r = rows - 1, last_c = k - 1;
    const uint32_t end = mn_major ? start + last_r / 64 * leading + last_c / 8 * stride + last_c % 8 * 128 + (last_r % 64 + 1) * size
                                  : start + last_r / 8 * stride + last_r % 8 * 128 + k * size;
    pointer_to(end - 1, 1);
}

// acc [64, n] += a [64, k] · b [n, k]ᵀ, spread over the 128 threads as wgmma does.
void multiply(const Wgmma& it, const float* a, const float* b, int k) {
    std::vector<float> transposed(static_cast<std::size_t>(it.n) * k), sums(static_cast<std::size_t>(it.n));
    for (int n = 0; n < it.n; ++n)
        for (int i = 0; i < k; ++i) transposed[i * it.n + n] = b[n * k + i];
    for (int row = 0; row < 64; ++row) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int i = 0; i < k; ++i) {
            const float factor = a[row * k + i];
            const float* const line = &transposed[i * it.n];
            for (int n = 0; n < it.n; ++n) sums[n] += factor * line[n];
        }
        const int warp = row / 16, half = row % 16 / 8;
        for (int n = 0; n < it.n; ++n) {
            const int thread = warp * 32 + row % 8 * 4 + n % 8 / 2;
            float& acc = it.accumulators[thread][n / 8 * 4 + 2 * half + n % 2];
            acc = it.accumulate ? acc + sums[n] : sums[n];
        }
    }
}

}  // namespace

float to_float(const unsigned char* at, char type) {
    uint16_t wide;
    switch (type) {
        case 'b': std::memcpy(&wide, at, 2); return bf16_to_float(wide);
        case 'h': std::memcpy(&wide, at, 2); return half_to_float(wide);
        case '4': return fp8_to_float(*at, __NV_E4M3);
        default: return fp8_to_float(*at, __NV_E5M2);
    }
}

void wgmma_issue(const Wgmma& mine) {
    Thread& thread = *current;
    Warpgroup& group = *thread.warpgroup;
    const int lane = thread.index % 128;
    if (thread.wgmmas < group.done) fail(where() + "a wgmma that other threads of the warpgroup did not issue");
    const std::size_t at = thread.wgmmas - group.done;
    ++thread.wgmmas;
    if (at == group.issued.size()) group.issued.push_back(mine), group.issued.back().threads = 0;
    Wgmma& shared = group.issued[at];
    if (shared.a_desc != mine.a_desc || shared.b_desc != mine.b_desc || shared.n != mine.n)
        fail(where() + "threads of a warpgroup issue different wgmmas");
    shared.accumulators[lane] = mine.accumulators[lane];
    std::memcpy(shared.a[lane], mine.a[lane], sizeof mine.a[lane]);
    if (++shared.threads == 128) {
        Warpgroup* const all = &group;
        later(*thread.block, [all, block = thread.block] {
            Thread* const before = current;  // descriptors are addresses of this block
            current = block->threads[0].get();
            run_wgmma(*all);
            current = before;
            wake(all);
        });
    }
}

void run_wgmma(Warpgroup& group) {
    const Wgmma& it = group.issued.front();
    const int k = it.a_type == 'b' || it.a_type == 'h' ? 16 : 32;
    std::vector<float> a(64 * static_cast<std::size_t>(k)), b(static_cast<std::size_t>(it.n) * k);
    if (it.a_in_registers) {
        for (int row = 0; row < 64; ++row)
            for (int c = 0; c < 16; ++c) {  // register c / 8 · 2 + half; a pair of columns in each
                const int thread = row / 16 * 32 + row % 8 * 4 + c % 8 / 2, half = row % 16 / 8;
                const uint16_t bits = static_cast<uint16_t>(it.a[thread][c / 8 * 2 + half] >> c % 2 * 16);
                a[row * 16 + c] = it.a_type == 'b' ? bf16_to_float(bits) : half_to_float(bits);
            }
    } else {
        read_operand(it.a_desc, 64, k, it.a_type, it.a_mn_major, a.data());
    }
    read_operand(it.b_desc, it.n, k, it.b_type, it.b_mn_major, b.data());
    multiply(it, a.data(), b.data(), k);
    group.issued.pop_front();
    ++group.done;
}

void wgmma_commit() { current->wgmma_groups.push_back(current->wgmmas); }

void wgmma_wait(int pending) {
    const auto& groups = current->wgmma_groups;
    if (static_cast<int>(groups.size()) <= pending) return;
    const uint64_t upto = groups[groups.size() - 1 - static_cast<std::size_t>(pending)];
    while (current->warpgroup->done < upto) wait_on(current->warpgroup, "wgmma.wait_group");
}

}  // namespace emulator
