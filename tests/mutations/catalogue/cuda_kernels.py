"""Bugs in CUDA C++: what the emulator must notice, or the check of what it gives."""

from mutations.mutation import Layer, case

(CUDA,) = LAYERS = (Layer("CUDA C++"),)
BACKWARD = "test_attention_backward_hopper.py::test_every_form_is_right"
CAUSAL, PACKED = f"{BACKWARD}[causal-64-dkdv-128x80]", f"{BACKWARD}[packed-64-dkdv-128x80]"
GROUPED = "test_grouped_hopper.py::test_every_form_is_right"
ATTENTION = case("attention", "cuda.hopper", "m=150,heads=2,kv_heads=1,n=128,dtype=fp16,order=bhsd,batch=2")
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
