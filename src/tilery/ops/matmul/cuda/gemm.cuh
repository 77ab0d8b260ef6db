// What the large-M and the small-M product share. For sm_90a.
#pragma once
#include "epilogue.cuh"
#include "operand_tile.cuh"
#include "split_k.cuh"
#include "tile_pipeline.cuh"
#include "tile_scheduler.cuh"

constexpr int WGMMAS = SWIZZLE_BYTES / 32;  // along K in a k-block, each over 32 bytes

// Arguments of a product besides its tensor maps. There are `batch` products, one after another in c. a_batch and b_batch
// are 1, or 0 where all products have the same a or b. What the epilogue adds is described there.
template <typename T>
struct GemmParams {
    T* c;
    int m;
    int n;
    int k;
    int batch;
    int a_batch;
    int b_batch;
    int a_rows;  // that TMA loads of a tile of a
    const T* bias;
    const T* addend;
    i64 addend_row_stride;
    i64 addend_col_stride;
    float alpha;
    float beta;
};
