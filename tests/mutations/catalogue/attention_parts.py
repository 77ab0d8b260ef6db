"""Bugs in what merges parts of attention: merge_attention, its gradients, and prefixes that sequences share."""

from mutations.mutation import Layer, case

MERGE, NUMBA, TRITON, CASCADE = LAYERS = (
    Layer("attention parts"),
    Layer("attention parts numba"),
    Layer("attention parts triton"),
    Layer("attention prefixes"),
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
    "weights-in-base-2",
    "p = tl.exp(found - finite)",
    "p = tl.exp2(found - finite)",
    case("merge_attention", "triton", PLAIN),
)
TRITON.add(
    "dlse-sign",
    "shift -= tl.load(dlse.ptr",
    "shift += tl.load(dlse.ptr",
    case("merge_attention_backward", "triton", PLAIN),
)

# Shared prefixes

SHARED = "m=3,keys=40,prefix=70,n=32,dtype=fp32"
SPLIT = "m=2,keys=1100,prefix=1100,heads=2,kv_heads=1,n=16,dtype=fp32,block_size=64"
WITHOUT = "m=6,keys=70,prefix=90,n=32,dtype=fp32,groups=2+0+1,prefix_lengths=90+9+0"
CAPPED = "m=4,keys=40,prefix=70,n=64,dtype=fp16,sinks=True,softcap=5.0,heads=8"
SEVERAL = "m=5,keys=40,prefix=200,queries=3,n=64,dtype=fp16,groups=2+3,prefix_lengths=200+33"

CASCADE.add(
    "prefix-causal",
    "    def causal(self) -> bool:\n        return False",
    "    def causal(self) -> bool:\n        return True",
    case("attention_cascade", "numba", SHARED),
    case("attention_cascade", "triton", SHARED),
)
CASCADE.add(
    "a-sink-counts-twice",
    '"sinks": None, "max_seqlen_q": 0',
    '"sinks": call.sinks, "max_seqlen_q": 0',
    case("attention_cascade", "numba", CAPPED),
)
CASCADE.add(
    "both-passes-write-one-lse",
    "(call.heads, 1), i * rows)",
    "(call.heads, 1), 0)",
    case("attention_cascade", "numba", SHARED),
)
CASCADE.add(
    "tokens-one-sequence-apart",
    "by_token = q.stride(1) if q.shape[1] > 1 else q.stride(0)",
    "by_token = q.stride(0)",
    case("attention_cascade", "numba", SEVERAL),
)
CASCADE.add(
    "uneven-tokens-taken",
    "return sequences <= 1 or queries == 1 or",
    "return True or",
    "test_attention_cascade.py::test_bad_input_is_named",
)
CASCADE.add(
    "wrong-prefixes-not-looked-at",
    "    require_pages(*shared, call.k_cache",
    "    require_pages(call.lengths, call.block_table, call.k_cache",
    "test_attention_cascade.py::test_a_wrong_entry_is_named_if_asked",
)
CASCADE.add(
    "triton-lse-of-splits-as-mla-has-it",
    "combine(call, *how, lse_by_row=True)",
    "combine(call, *how)",
    case("attention_cascade", "triton", SPLIT),
)
CASCADE.add(
    "triton-tokens-without-a-prefix-weigh-something",
    'tl.where(value == 0, -float("inf"), value)',
    "value",
    case("attention_cascade", "triton", WITHOUT),
)
CASCADE.add(
    "triton-position-of-the-first-key",
    "position = length - 1 + t * 0",
    "position = t * 0",
    case("attention_cascade", "triton", SHARED),
)
CASCADE.add(
    "numba-lse-of-a-sequence-as-of-a-token",
    "0 if packed else call.queries * call.heads",
    "0",
    case("attention_cascade", "numba", SEVERAL),
)
