"""Bugs on the host side of products on Hopper: what is copied, which configs are taken, what is launched."""

from mutations.mutation import Layer

(HOPPER,) = LAYERS = (Layer("products on Hopper"),)
COPIED = "test_matmul_hopper.py::test_rows_that_overlap_or_lie_off_16_bytes_are_copied"
LAYOUTS = "test_matmul_hopper.py::test_takes_every_layout"
CHUNKS = "test_matmul_hopper.py::test_tiles_of_mn_major_operands_come_in_chunks_of_64"

HOPPER.add(
    "no-default-without-columns",
    "if n < max(self.n, halves) + 64 * halves]",
    "if n < self.n + 64 * halves]",
    "test_matmul_hopper.py::test_a_product_of_nothing_has_a_default_too",
)
HOPPER.add(
    "rows-that-overlap-loaded-as-they-lie",
    "(outer % _ALIGNED == 0 and outer >= width))",
    "outer % _ALIGNED == 0)",
    COPIED,
)
HOPPER.add("misaligned-operand-not-copied", "    aligned = given.x.aligned and", "    aligned =", COPIED)
HOPPER.add(
    "lines-of-any-length-not-copied",
    "count <= 1 or (outer % _ALIGNED == 0 and",
    "count <= 1 or (outer % 4 == 0 and",
    LAYOUTS,
)
HOPPER.add(
    "products-of-any-distance-not-copied",
    "(given.batches == 1 or given.batch_stride % _ALIGNED == 0)",
    "True",
    "test_bmm_hopper.py::test_products_that_are_no_16_bytes_apart_are_copied",
)
HOPPER.add("mn-major-a-in-any-rows", "if a.mn_major and config.block_m % _MN_ROWS:", "if a.mn_major and False:", CHUNKS)
HOPPER.add("mn-major-b-in-any-columns", "if b.mn_major and each % _MN_ROWS:", "if b.mn_major and False:", CHUNKS)
HOPPER.add(
    "rows-of-the-next-product-stored",
    "rows = config.block_m * config.multicast_b  #",
    "rows = config.block_m  #",
    "test_bmm_hopper.py::test_a_store_of_all_products_takes_whole_tiles",
)
HOPPER.add(
    "all-products-with-the-first-b",
    '"b_batch": b.batches > 1,',
    '"b_batch": False,',
    "test_bmm_hopper.py::test_every_product_is_launched_and_has_its_own_operands",
)
HOPPER.add(
    "addend-read-by-vectors-from-any-row",
    "rows = addend.aligned and n % 8 == 0 and",
    "rows = addend.aligned and n % 4 == 0 and",
    "test_linear_hopper.py::test_what_is_added_off_16_bytes_is_read_element_by_element",
)
HOPPER.add(
    "power-not-thought-of",
    "_MANY_ROWS and flops > _LONG and tiles >=",
    "_MANY_ROWS and flops < _LONG and tiles >=",
    "test_matmul_hopper.py::test_large_products_get_the_tiles_that_need_the_least_power",
)
HOPPER.add(
    "power-thought-of-with-few-rows",
    "return self.m >= _MANY_ROWS and flops > _LONG",
    "return flops > _LONG",
    "test_matmul_hopper.py::test_large_products_get_the_tiles_that_need_the_least_power",
)
