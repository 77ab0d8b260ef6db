"""Bugs in CUDA C++: what the emulator must notice, or the check of what it gives."""

from mutations.mutation import Layer, case

CUDA, GEMV = LAYERS = Layer("CUDA C++"), Layer("gemv CUDA C++")
BACKWARD = "test_attention_backward_hopper.py::test_every_form_is_right"
CAUSAL, PACKED = f"{BACKWARD}[causal-64-dkdv-128x80]", f"{BACKWARD}[packed-64-dkdv-128x80]"
ONE_PASS = f"{BACKWARD}[causal-64-one_pass-128x64]", f"{BACKWARD}[window-128-one_pass-128x64]"
SAME_BITS = "test_attention_backward_hopper.py::test_every_run_of_one_pass_gives_the_same_bits[every key]"
OTHERS = "test_attention_backward_hopper.py::test_nothing_of_another_sequence_gets_into_one_pass[tile0]"
GROUPED = "test_grouped_hopper.py::test_every_form_is_right"
ATTENTION = case("attention", "cuda.hopper", "m=150,heads=2,kv_heads=1,n=128,dtype=fp16,order=bhsd,batch=2")
MLA = case("mla", "cuda.hopper", "m=70,keys=21,heads=2,dtype=fp16")
WRONG = "m=0,heads=2,kv_heads=1,n=16,dtype=fp16,order=thd,lengths=9+4+20,wrong=k3:36"

CUDA.add(
    "a-key-short",
    "column >= first_key[h] && column <= last_key[h]",
    "column >= first_key[h] && column < last_key[h]",
    ATTENTION,
)
CUDA.add("output-not-rescaled", "if (softmax.any_max_grew()) softmax.rescale_output(acc);", "", ATTENTION)
CUDA.add(
    "sums-read-before-all-are-there",
    "    if (lane == 0) partials[threadIdx.x / 32] = value;\n    __syncthreads();\n",
    "    if (lane == 0) partials[threadIdx.x / 32] = value;\n",
    case("softmax", "cuda", "m=3,n=4096,dtype=bf16"),
)
CUDA.add("an-arrival-too-few", "full[s].init(SCALES ? 1 + 32 : 1)", "full[s].init(SCALES ? 32 : 1)", CAUSAL)
CUDA.add(
    "rows-of-another-sequence-multiplied",
    "if (p.cu_seqlens_q && first + STEP > tile.streamed_rows())",
    "if (false)",
    PACKED,
)
CUDA.add(
    "keys-past-the-last",
    "distance > p.window_left || (OF_KEYS ? row : column) > last_key)",
    "distance > p.window_left)",
    "test_attention_backward_hopper.py::test_keys_past_the_last_do_not_overflow[False]",
)
CUDA.add(
    "a-query-ahead",
    "if (distance < -p.window_right || distance",
    "if (distance < -p.window_right - 1 || distance",
    CAUSAL,
)
CUDA.add(
    "dp-not-waited-for",
    "                warpgroup_wait<1>();\n            } else {",
    "                warpgroup_wait<2>();\n            } else {",
    CAUSAL,
)
CUDA.add(
    "wrong-sequences-not-poisoned",
    "poison = quiet_nan(), exists = false;",
    "exists = false;",
    case("attention_backward", "cuda.hopper", WRONG),
)
CUDA.add(
    "offsets-that-fall-taken",
    "if (begin < 0 || end < begin || end > rows) wrong = 1;",
    "if (begin < 0 || end > rows) wrong = 1;",
    f"{GROUPED}[64-{{'wrong': 'falls'}}]",
)
CUDA.add(
    "rows-of-no-group-nan",
    "const T fill = all.sound ? 0.0f",
    "const T fill = !all.sound ? 0.0f",
    f"{GROUPED}[64-{{'sizes': '128+256+0+1+300', 'dtype': 'bf16'}}]",
)
CUDA.add(
    "tile-of-the-group-before",
    "if (tile_ends[middle] > t / tiles_n) last = middle;",
    "if (tile_ends[middle] >= t / tiles_n) last = middle;",
    f"{GROUPED}[64-{{}}]",
)
CUDA.add(
    "sums-stored-before-they-are-complete",
    "            warpgroup_wait_all(acc);\n            release.consumer_release();\n            store_row(c",
    "            release.consumer_release();\n            store_row(c",
    f"{GROUPED}[64-{{}}]",
)
CUDA.add("dq-added-out-of-turn", "while (value < before);", "while (value < 0);", SAME_BITS)
CUDA.add(
    "turn-passed-on-before-dq-is-there",
    "                bulk_wait();\n                turns.pass_on();",
    "                turns.pass_on();\n                bulk_wait();",
    SAME_BITS,
)
CUDA.add(
    "counters-of-the-call-before",
    "i += i64{gridDim.x} * 256) counters[i] = 0;",
    "i += i64{gridDim.x} * 256) {}",
    SAME_BITS,
)
CUDA.add("first-part-of-dq-added-to-nothing", "if (before == 0)\n", "if (false)\n", *ONE_PASS)
CUDA.add(
    "turn-after-tiles-outside-of-the-window",
    "const int before = tile.first / ROWS - first_key / ROWS;",
    "const int before = tile.first / ROWS;",
    ONE_PASS[1],
)
CUDA.add(
    "ds-of-one-warpgroup-read-too-early",
    '            asm volatile("bar.sync %0, %1;" ::"n"(1 + WARPGROUPS), "n"(WARPGROUPS * 128) : "memory");\n',
    "",
    *ONE_PASS,
)
CUDA.add(
    "keys-of-another-sequence-in-dq",
    "            zero_rows<ROWS, CHUNKS>(kept.tile(), tile.keys - tile.first, warpgroup);\n",
    "",
    OTHERS,
)
CUDA.add(
    "values-of-another-sequence-in-dq",
    "            zero_rows<ROWS, CHUNKS>(kept.tile() + KEPT_BYTES, tile.keys - tile.first, warpgroup);\n",
    "",
    OTHERS,
)
CUDA.add(
    "sums-of-two-sequences-in-one-block",
    "(packed ? tile.token_q / step + tile.number : 0)",
    "(packed ? tile.token_q / step : 0)",
    f"{BACKWARD}[packed-64-one_pass-128x64]",
)
CUDA.add(
    "heads-of-a-group-mixed-up",
    "int row = packed ? head : tile.sequence",
    "int row = packed ? tile.head : tile.sequence",
    f"{BACKWARD}[packed-64-one_pass-128x64]",
)
CUDA.add(
    "last-group-of-heads-taken-for-full",
    "in_turn = min(pairs - first_pair, p.pairs_per_group)",
    "in_turn = p.pairs_per_group",
    "test_attention_backward_hopper.py::test_groups_of_heads_follow_each_other[2]",
)
CUDA.add(
    "dq-overwritten-before-it-is-copied",
    "            if (at.count > 0) dq_empty[1 - at.count % 2].wait((at.count - 1) / 2);\n",
    "",
    SAME_BITS,
    *ONE_PASS,
)
CUDA.add(
    "a-group-between-eight-rows",
    "using Tiles = GroupedTiles<A_MN ? 16 / sizeof(T) : 1>;",
    "using Tiles = GroupedTiles<1>;",
    case("grouped_matmul", "cuda.hopper", "m=40,n=24,k=64,experts=3,dtype=fp16,layout=transposed"),
)
CUDA.add(
    "probabilities-of-a-query-that-saw-nothing",
    "lse2[row] = saw_nothing ? -minus_infinity() : lse[row] * LOG2E;",
    "lse2[row] = lse[row] * LOG2E;",
    "test_attention_backward.py::test_a_query_whose_lse_says_that_it_saw_nothing_has_no_gradient[cuda.hopper]",
)

# Products of a few rows

ROWS = tuple(f"test_gemv.py::test_every_number_of_rows_is_right_in_several_configs[{m}]" for m in (1, 3, 8))
GEMV.add("loads-past-k", "            if (v >= vectors) continue;\n", "", *ROWS)
GEMV.add(
    "a-part-of-k-left-out",
    "for (int other = 1; other < SPLIT_K; ++other)",
    "for (int other = 2; other < SPLIT_K; ++other)",
    *ROWS,
)
GEMV.add(
    "sums-read-before-all-are-there",
    "partial[warp][h][lane] = sums[h];\n        __syncthreads();\n",
    "partial[warp][h][lane] = sums[h];\n",
    *ROWS,
)
GEMV.add(
    "rows-past-the-last-stored",
    "if (lane % LANES > 0 || row >= p.m || col >= p.n) return;",
    "if (lane % LANES > 0 || col >= p.n) return;",
    *ROWS,
)
GEMV.add(
    "halves-of-sums-swapped",
    "sent = upper ? values[i] : values[i + left], kept = upper ? values[i + left] : values[i];",
    "sent = upper ? values[i + left] : values[i], kept = upper ? values[i] : values[i + left];",
    *ROWS,
)
GEMV.add(
    "gate-for-up",
    "const i64 row = h * p.n + min(col0 + j, p.n - 1);",
    "const i64 row = min(col0 + j, p.n - 1);",
    case("linear_silu_mul", "cuda.gemv", "m=3,n=67,k=1032,dtype=fp16"),
)
GEMV.add(
    "a-product-of-the-batch-stored-in-the-first",
    "p.c[(i64{product} * p.m + row) * p.n + col]",
    "p.c[i64{row} * p.n + col]",
    case("bmm", "cuda.gemv", "batch=3,m=7,n=35,k=520,dtype=fp16,layout_b=transposed"),
)
GEMV.add(
    "epilogue-left-out",
    "epilogue.applied(sums[0], row, col);",
    "sums[0];",
    case("linear", "cuda.gemv", "m=6,n=75,k=1032,dtype=fp16,bias=True,residual=True,activation=silu"),
)
GEMV.add(
    "dispatched-for-many-rows",
    'one = call.m == 1 and call.a.device.type == "cuda"',
    'one = call.a.device.type == "cuda"',
    "test_gemv.py::test_dispatch_takes_it_for_one_row",
)
GEMV.add(
    "dispatched-where-loads-are-half-empty",
    "whole = warps_of_k(call.k) is not None and",
    "whole =",
    "test_gemv.py::test_dispatch_takes_it_for_one_row",
)
GEMV.add(
    "rows-that-are-not-there-loaded",
    "return config.block_m if whole else min(config.block_m, call.m)",
    "return config.block_m",
    "test_matmul_hopper.py::test_launches_as_planned",
)
GEMV.add(
    "lines-that-start-anywhere",
    "(count <= 1 or stride % _VALUES == 0)",
    "True",
    "test_gemv.py::test_lines_start_at_multiples_of_16_bytes",
)

# Latent attention

CUDA.add(
    "a-rope-for-every-head",
    "maps.k_rope, column - ROPE_COL, row, 0, sequence);",
    "maps.k_rope, column - ROPE_COL, row, head, sequence);",
    MLA,
)
CUDA.add("rope-of-q-behind-its-columns", "rope ? column - ROPE_COL : column, row,", "column, row,", MLA)
CUDA.add(
    "values-awaited-as-wide-as-keys",
    "kv.producer_acquire(Mainloop::VALUE_CHUNKS * BLOCK_N * SWIZZLE_BYTES)",
    "kv.producer_acquire()",
    MLA,
)
CUDA.add(
    "values-of-the-next-sequence-behind-the-first-columns",
    "zero_rows<BLOCK_N, VALUE_CHUNKS>(v.tile()",
    "zero_rows<BLOCK_N, 1>(v.tile()",
    case("mla", "cuda.hopper", "m=130,heads=2,dtype=bf16,order=thd,lengths=5+0+130+1"),
)
CUDA.add(
    "output-as-wide-as-keys",
    "0, VALUE_DIM, inside, acc, 2 * h);",
    "0, HEAD_DIM, inside, acc, 2 * h);",
    case("mla", "cuda.hopper", "m=20,heads=2,nope=128,rope=16,value=16,dtype=fp16,order=thd,lengths=20+7"),
)
CUDA.add(
    "columns-of-both-parts-in-one-chunk",
    "return columns(call.q.shape[-1]) + columns(call.rope_dim)",
    "return columns(call.head_dim)",
    "test_mla_hopper.py::test_the_default_and_all_configs_are_taken",
)
CUDA.add(
    "a-map-of-no-keys",
    "x = getattr(call, name) if of_q or call.key_tokens else call.q",
    "x = getattr(call, name)",
    "test_mla_hopper.py::test_packed_sequences_are_launched_even_where_there_are_no_keys",
)
