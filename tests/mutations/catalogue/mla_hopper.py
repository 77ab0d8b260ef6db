"""Bugs of mla_decode in CUDA C++ for Hopper, and of the kernel that combines its splits."""

from mutations.mutation import Layer

(MLA,) = LAYERS = (Layer("mla_decode on Hopper"),)
SPLITS = "test_mla_decode_hopper.py::test_any_splits_are_right_and_the_same_bits_twice"
WRONG = "test_mla_decode_hopper.py::test_wrong_indices_give_nan_to_their_rows_alone"

MLA.add(
    "page-behind-the-cache-not-noted",
    "if (loads && key < tile.keys && static_cast<unsigned>(page) >= static_cast<unsigned>(p.pages))",
    "if (loads && key < tile.keys && page < 0)",
    WRONG,
)
MLA.add(
    "page-of-another-lane-not-noted",
    "            first_missing = min(first_missing, __shfl_xor_sync(0xffffffff, first_missing, 2));\n",
    "",
    WRONG,
)
MLA.add(
    "values-behind-the-last-key-counted",
    "if ((b + 1) * KEYS > tile.keys) zero_rows",
    "if (b * KEYS > tile.keys) zero_rows",
    SPLITS,
)
MLA.add(
    "p-overwritten-while-it-is-read",
    "        pipes.p.wait_empty();\n        store_swizzled",
    "        store_swizzled",
    SPLITS,
)
MLA.add(
    "keys-overwritten-before-they-are-values",
    "left.init(8), right.init(8);",
    "left.init(4), right.init(4);",
    SPLITS,
)
MLA.add(
    "lower-rows-not-rescaled",
    "factors[0] != 1.0f || factors[1] != 1.0f",
    "factors[0] != 1.0f",
    SPLITS,
)
MLA.add(
    "lse-of-splits-by-token-first",
    "lse[(token / queries * i64{heads} + head) * queries + token % queries]",
    "lse[row]",
    SPLITS,
)
MLA.add(
    "q-of-any-distance-loaded",
    "return by_head if tokens == 1 or by_token == heads * by_head else None",
    "return by_head",
    "test_mla_decode_hopper.py::test_heads_of_tokens_must_be_equally_far_apart",
)
