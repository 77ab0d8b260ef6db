"""Bugs in gradients of products and of embedding: what backwards ask of which op, and the kernels of their own."""

from mutations.mutation import Layer, case

GRADIENTS, NUMBA, TRITON = LAYERS = (
    Layer("product gradients"),
    Layer("product gradients numba"),
    Layer("product gradients triton"),
)
WRONG_ENDS = "m=37,n=40,k=48,experts=4,dtype=fp32,sizes=9+0+12+3,wrong={}"
UNEVEN = "m=37,n=40,k=48,experts=3,dtype=fp32,sizes=5+0+12"

# What backwards do

GRADIENTS.add(
    "bias-not-in-what-is-computed-again",
    "z = linear(call.x, call.weight, call.bias, precision=call.precision)",
    "z = linear(call.x, call.weight, precision=call.precision)",
    "test_product_gradients.py::test_gradients_of_an_empty_linear[4-3-0-silu]",
)
GRADIENTS.add(
    "bias-gradient-before-the-activation",
    "matmul(dz.new_ones(1, call.m), dz).view(call.n)",
    "matmul(dz.new_ones(1, call.m), grads.y.reshape(call.m, call.n)).view(call.n)",
    "test_product_gradients.py::test_gradients_of_an_empty_linear[4-3-0-silu]",
)
GRADIENTS.add(
    "residual-gradient-of-linear-through-its-activation",
    '    dz = dz.reshape(call.m, call.n)\n    if "x" in',
    '    found = {"residual": dz} if found else {}\n    dz = dz.reshape(call.m, call.n)\n    if "x" in',
    "test_product_gradients.py::test_gradients_of_an_empty_linear[4-3-0-silu]",
)
GRADIENTS.add(
    "x-gradient-of-linear-not-in-tf32",
    'found["x"] = matmul(dz, call.weight, call.precision)',
    'found["x"] = matmul(dz, call.weight)',
    "test_product_gradients.py::test_gradients_of_tf32_are_products_in_tf32[linear-numba]",
)
GRADIENTS.add(
    "linear-computed-again-for-the-residual-alone",
    '    if not grads.needed & {"x", "weight", "bias"}:\n        return found\n',
    "",
    "test_product_gradients.py::test_linear_computes_again_what_an_activation_was_given_and_no_more",
)
GRADIENTS.add(
    "gradient-of-groups-that-nobody-asked-for",
    '    if "b" in grads.needed:\n        found["b"] = grouped_matmul_backward(',
    '    if "b" in call._values:\n        found["b"] = grouped_matmul_backward(',
    "test_product_gradients.py::test_no_gradient_is_computed_that_nobody_asked_for[grouped_matmul]",
)
GRADIENTS.add(
    "gradients-of-a-list-to-its-first-part",
    "graded = torch.is_grad_enabled() and any(t.requires_grad for t in (*a, *b))",
    "graded = False",
    "test_grouped_matmul.py::test_a_list_has_the_gradients_of_its_parts",
)

# Numba

NUMBA.add(
    "relu-passes-a-gradient-at-zero",
    "f32(0) if z <= f32(0) else dy",
    "f32(0) if z < f32(0) else dy",
    "test_product_gradients.py::test_what_relu_cut_off_takes_no_gradient_even_an_infinite_one",
)
NUMBA.add(
    "gelu-gradient-by-tanh",
    '"gelu": ACTS["none"], "gelu_tanh": ACTS["tanh"]}',
    '"gelu": ACTS["tanh"], "gelu_tanh": ACTS["tanh"]}',
    case("activation_backward", "numba", "m=3,n=1000,dtype=fp32,activation=gelu"),
)
NUMBA.add(
    "every-group-starts-at-the-first-row",
    "        start = end\n",
    "        start = np.int64(0)\n",
    case("grouped_matmul_backward", "numba", UNEVEN),
    inside="_gradient_tiles",
)
NUMBA.add(
    "last-row-of-a-group-left-out",
    "min(tile_n, n - j), end - start\n",
    "min(tile_n, n - j), max(end - start - 1, 0)\n",
    case("grouped_matmul_backward", "numba", UNEVEN),
)
NUMBA.add(
    "wrong-ends-leave-the-gradient-as-it-was",
    "for i in range(thread, groups * k, threads):",
    "for i in range(thread, k, threads):",
    case("grouped_matmul_backward", "numba", WRONG_ENDS.format("falls")),
)
NUMBA.add(
    "only-the-first-column-block-of-a-tables-gradient",
    "source = at(dy, t * stride + start, dtype)\n                    for j",
    "source = at(dy, t * stride, dtype)\n                    for j",
    "test_embedding_backward.py::test_rows_longer_than_a_block",
)

# Triton

TRITON.add(
    "relu-passes-a-gradient-at-zero",
    "tl.where(z <= 0, 0.0, dy)",
    "tl.where(z < 0, 0.0, dy)",
    "test_product_gradients.py::test_what_relu_cut_off_takes_no_gradient_even_an_infinite_one",
)
TRITON.add(
    "gradient-of-every-group-from-the-first-row",
    "dc.ptr + first * dc.row",
    "dc.ptr",
    case("grouped_matmul_backward", "triton", UNEVEN),
)
TRITON.add(
    "rows-past-the-group-counted",
    "tl.where(sound, tl.load(offset_ptr + group) - start, 0)",
    "tl.where(sound, T - start, 0)",
    case("grouped_matmul_backward", "triton", UNEVEN),
)
TRITON.add(
    "last-end-not-compared-with-the-rows",
    "mask=(groups > 0) & (groups <= G), other=0)",
    "mask=(groups > 0) & (groups < G), other=0)",
    case("grouped_matmul_backward", "triton", WRONG_ENDS.format("past")),
)
TRITON.add(
    "gradients-of-all-groups-in-the-first",
    "db_ptr += group.to(tl.int64) * K * N",
    "db_ptr += group.to(tl.int64) * 0",
    case("grouped_matmul_backward", "triton", UNEVEN),
)
TRITON.add(
    "an-id-counted-once-a-block",
    "place = tl.min(tl.where(own & (places > place), places, IDS), 0)",
    "place = IDS",
    case("embedding_backward", "triton", "m=40,n=1000,v=7,dtype=fp32"),
)
TRITON.add(
    "ids-that-do-not-exist-compared",
    "mask=places < m - first, other=-1) == row",
    "mask=places < m - first, other=0) == row",
    "test_embedding_backward.py::test_ids_of_no_row_add_nothing",
)
