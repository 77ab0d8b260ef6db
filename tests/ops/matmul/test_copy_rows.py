"""The copy of an operand that TMA cannot address, compiled for the host: it is right and stays inside the tensor."""

import shutil
import subprocess

import pytest

from tilery.core.op import REGISTRY

SOURCE = REGISTRY["matmul"].folder / "cuda" / "copy_rows.cu"
COMMON = """
#define __global__
#define __launch_bounds__(threads)
using i64 = long long;
using u64 = unsigned long long;
struct { int x; } blockIdx, threadIdx;
void pdl_wait() {}
void pdl_launch_dependents() {}
unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) { return ((u64)high << 32 | low) >> by; }
"""
MAIN = """
#include "copy_rows.cu"
#include <cstdio>
#include <cstdlib>
#include <vector>

int main() {
    int wrong = 0, all = 0;
    for (int width = 1; width < 12; ++width) for (int shift = 0; shift < 2; ++shift) for (int gap = 0; gap < 3; ++gap)
    for (int step = 1; step < 3; ++step) for (int lines = 1; lines < 4; ++lines) for (int batches = 1; batches < 3; ++batches) {
        const i64 line = width * step + gap, batch = line * lines + gap, to_line = (width + 7) / 8 * 8;
        const i64 count = shift + (batches - 1) * batch + (lines - 1) * line + (width - 1) * step + 1;
        auto* from = static_cast<unsigned short*>(malloc(2 * count));  // it ends where the tensor does
        for (i64 i = 0; i < count; ++i) from[i] = i * 7 + 3;
        std::vector<unsigned short> to(batches * lines * to_line, 0xffff);
        for (blockIdx.x = 0; blockIdx.x < batches * lines; ++blockIdx.x)
            for (threadIdx.x = 0; threadIdx.x < 4; ++threadIdx.x)
                copy_rows<4>(from + shift, to.data(), lines, width, to_line, batch, line, step);
        for (int b = 0; b < batches; ++b) for (int l = 0; l < lines; ++l) for (int j = 0; j < to_line; ++j, ++all)
            wrong += to[(b * lines + l) * to_line + j] != (j < width ? from[shift + b * batch + l * line + j * step] : 0xffff);
        free(from);
    }
    printf("%d wrong of %d", wrong, all);
}
"""  # noqa: E501


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler for the host")
def test_a_copy_is_right_and_reads_nothing_behind_the_tensor(tmp_path):
    """Lines of even length that begin in the middle of a word end in the middle of one."""
    shutil.copy(SOURCE, tmp_path)
    (tmp_path / "common.cuh").write_text(COMMON)
    (tmp_path / "main.cpp").write_text(MAIN)
    flags = ["-std=c++17", "-w", "-O1", "-fno-strict-aliasing", "-fsanitize=address"]
    subprocess.run(["g++", *flags, "main.cpp", "-o", "main"], cwd=tmp_path, check=True)
    done = subprocess.run([tmp_path / "main"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("0 wrong of "), done.stdout + done.stderr
