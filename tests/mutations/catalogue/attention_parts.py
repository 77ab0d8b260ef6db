"""Bugs in what merges parts of attention: merge_attention and its gradients."""

from mutations.mutation import Layer, case

MERGE, NUMBA, TRITON = LAYERS = (
    Layer("attention parts"),
    Layer("attention parts numba"),
    Layer("attention parts triton"),
)
SOME = "parts=3,m=11,heads=4,n=32,dtype=fp16,empty=some,order=thd"
EMPTY = "parts=4,m=11,heads=4,n=32,dtype=fp32,empty=1+3,batch=2"
LARGE = "parts=4,m=9,heads=4,n=32,dtype=fp32,strength=10000.0"
PLAIN = "parts=2,m=7,heads=4,n=64,dtype=fp32"
TURNED = "parts=5,m=9,heads=2,n=128,dtype=fp32,out=fp16,batch=3,order=bhsd"

MERGE.add(
    "lses-read-as-the-result-lies",
    '"bshd": ((0, 1, 2), (0, 2, 1))',
    '"bshd": ((0, 1, 2), (0, 1, 2))',
    case("merge_attention", "numba", PLAIN),
    case("merge_attention", "triton", PLAIN),
)
MERGE.add(
    "bucket-forgets-the-parts",
    'return Bucket(f"parts={call.sizes.parts},e={call.value_dim}',
    'return Bucket(f"e={call.value_dim}',
    "test_merge_attention.py::test_a_bucket_for_every_number_of_parts_and_dtype",
    inside="bucket",
)
MERGE.add(
    "no-gradient-of-the-lse",
    "merge_attention_backward(dout, grads.lse, call.outs",
    "merge_attention_backward(dout, None, call.outs",
    "test_merge_attention.py::test_the_lse_alone_has_gradients",
)

# Numba

NUMBA.add(
    "not-shifted-by-the-largest",
    "base = f32(0) if row_max == NEG_INF else row_max\n    total",
    "base = f32(0)\n    total",
    case("merge_attention", "numba", LARGE),
    inside="_merge_row",
)
NUMBA.add(
    "empty-part-read",
    "if lse == NEG_INF:\n            continue",
    "if False:\n            continue",
    case("merge_attention", "numba", EMPTY),
)
NUMBA.add(
    "last-part-forgotten",
    "    for part in range(p.sizes.parts):\n        lse = _lse(part, row, p)\n        if",
    "    for part in range(p.sizes.parts - 1):\n        lse = _lse(part, row, p)\n        if",
    case("merge_attention", "numba", PLAIN),
)
NUMBA.add(
    "lse-without-the-largest",
    "NEG_INF if total == 0 else row_max + f32(np.log(total))",
    "NEG_INF if total == 0 else f32(np.log(total))",
    case("merge_attention", "numba", PLAIN),
)
NUMBA.add(
    "gradient-of-an-lse-not-shifted",
    "grad = weight * (dot(dout, line, values) - shift)",
    "grad = weight * dot(dout, line, values)",
    case("merge_attention_backward", "numba", PLAIN),
)

# Triton

TRITON.add(
    "empty-part-read",
    'there & (found != -float("inf"))',
    "there",
    case("merge_attention", "triton", EMPTY),
)
TRITON.add(
    "row-without-parts-not-zero",
    "inverse = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, total))\n    _store",
    "inverse = 1.0 / total\n    _store",
    case("merge_attention", "triton", SOME),
)
TRITON.add(
    "one-part-too-many",
    "there = inside & (part < sizes.parts)",
    "there = inside & (part <= sizes.parts)",
    case("merge_attention", "triton", TURNED),
)
TRITON.add(
    "weights-in-base-e",
    "p = tl.exp2((found - finite) * LOG2E)",
    "p = tl.exp2(found - finite)",
    case("merge_attention", "triton", PLAIN),
)
TRITON.add(
    "dlse-sign",
    "shift -= tl.load(dlse.ptr",
    "shift += tl.load(dlse.ptr",
    case("merge_attention_backward", "triton", PLAIN),
)
