"""Bugs in attention: its contract, its kernels in both languages, its gradients."""

from mutations.mutation import Layer, case

CONTRACT, NUMBA, TRITON, BACKWARD = LAYERS = (
    Layer("attention"),
    Layer("attention numba"),
    Layer("attention triton"),
    Layer("attention gradient"),
)

CONTRACT.add(
    "bucket-forgets-sinks",
    '    options["sinks"] = p.sinks\n',
    "",
    "test_attention_scalars.py::test_every_option_has_a_bucket_of_its_own[attention]",
)
CONTRACT.add(
    "bucket-forgets-softcap",
    '"softcap": p.softcap, "mask"',
    '"mask"',
    "test_attention_scalars.py::test_every_option_has_a_bucket_of_its_own[attention]",
    inside="bucket",
)
CONTRACT.add(
    "bucket-forgets-window",
    ' + (f",window={p.window}" if p.window else "")',
    "",
    "test_attention_scalars.py::test_every_option_has_a_bucket_of_its_own[attention]",
    inside="bucket",
)
CONTRACT.add(
    "causal-pairs-counted-as-all",
    "last = 1 if causal else window\n",
    "last = window\n",
    "test_attention.py::test_cost_counts_pairs_that_see_each_other",
)
CONTRACT.add(
    "flops-of-the-values-forgotten",
    "pairs(queries, keys, p.causal, p.window) * (p.size + p.value)\n",
    "pairs(queries, keys, p.causal, p.window) * p.size\n",
    "test_attention_cost.py::test_cost_is_what_a_hand_makes_of_it",
    inside="cost",
)
CONTRACT.add(
    "fp8-gives-fp8",
    "kind = torch.bfloat16 if q.dtype in FP8 else q.dtype",
    "kind = q.dtype",
    case("attention", "numba", "m=70,heads=2,kv_heads=1,n=64,dtype=e4m3"),
)
CONTRACT.add(
    "scale-by-the-heads-size",
    "one.size**-0.5 if scale is None else float(scale),\n        causal",
    "one.size**-1.0 if scale is None else float(scale),\n        causal",
    case("attention", "numba", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
)

# Numba

NUMBA.add(
    "window-off-by-one",
    "max(place - rules.window + 1 - first, 0)",
    "max(place - rules.window - first, 0)",
    case("attention", "numba", "m=150,heads=2,kv_heads=1,n=32,dtype=fp16,window=40"),
    inside="span",
)
NUMBA.add(
    "causal-off-by-one",
    "high = min(high, place + 1 - first)",
    "high = min(high, place - first)",
    case("attention", "numba", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
    inside="span",
)
NUMBA.add(
    "sink-forgotten",
    "total = total * factor + exp(sink - shifted)",
    "total = total * factor",
    case("attention", "numba", "m=40,heads=2,kv_heads=1,n=16,dtype=fp16,sinks=True,window=8"),
)
NUMBA.add(
    "padding-ignored",
    "if load(line, j, FP32) != f32(0) else NOTHING",
    "if True else NOTHING",
    case("attention", "numba", "m=20,keys=70,heads=2,kv_heads=1,n=32,dtype=fp32,padding=True,batch=3,causal=False"),
)
NUMBA.add(
    "soft-cap-without-its-size",
    "softcap * _tanh(load(scores, j, FP32) / softcap)",
    "_tanh(load(scores, j, FP32) / softcap)",
    case("attention", "numba", "m=40,heads=2,kv_heads=1,n=16,dtype=fp32,softcap=5.0,strength=4.0"),
)
NUMBA.add(
    "heads-of-a-group-interleaved",
    "return block.group * p.sizes.per + row % p.sizes.per, row // p.sizes.per",
    "return block.group + row % p.sizes.per * p.sizes.groups, row // p.sizes.per",
    case("attention", "numba", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
)
NUMBA.add(
    "lse-in-base-2",
    "base + f32(np.log(total))\n        store(address(p.tensors.lse",
    "base + f32(np.log2(total))\n        store(address(p.tensors.lse",
    case("attention_lse", "numba", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
)
NUMBA.add(
    "page-past-the-cache-followed",
    "return page if 0 <= page < p.sizes.pages else -1",
    "return page if 0 <= page <= p.sizes.pages else -1",
    "test_attention_indices.py::test_pages_that_are_not_there_give_nan",
)
NUMBA.add(
    "last-chunk-not-joined",
    "(block.high + chunk - 1) // chunk\n",
    "block.high // chunk\n",
    case(
        "attention_decode",
        "numba",
        "m=2,keys=1100,heads=2,kv_heads=1,n=16,dtype=fp32,lengths=1100+700,block_size=16",
    ),
    inside="_join",
)
NUMBA.add(
    "sums-not-rescaled",
    "load(room.totals, r, FP32) * shrink + _weigh",
    "load(room.totals, r, FP32) + _weigh",
    case("attention", "numba", "m=3,keys=700,heads=2,kv_heads=1,n=16,dtype=fp32"),
)
NUMBA.add(
    "wrong-length-followed",
    "keys, known = length, 0 <= length <= keys",
    "keys, known = min(length, keys), 0 <= length",
    case("attention_decode", "numba", "m=4,keys=70,heads=2,kv_heads=1,n=16,dtype=fp16,wrong=l0:-1+l1:71+l2:1073741824"),
)

# Triton

TRITON.add(
    "causal-off-by-one",
    "kept = kept & (key[None, :] <= place[:, None])",
    "kept = kept & (key[None, :] < place[:, None])",
    case("attention", "triton", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
    inside="seen",
)
TRITON.add(
    "window-off-by-one",
    "(place[:, None] - key[None, :] < window)",
    "(place[:, None] - key[None, :] <= window)",
    case("attention", "triton", "m=150,heads=2,kv_heads=1,n=32,dtype=fp16,window=40"),
    inside="seen",
)
TRITON.add(
    "sink-forgotten",
    'there = tl.where(sink == -float("inf"), 0.0, 1.0)',
    "there = 0.0",
    case("attention", "triton", "m=40,heads=2,kv_heads=1,n=16,dtype=fp16,sinks=True,window=8"),
)
TRITON.add(
    "last-block-of-keys-dropped",
    "start, inner, end, outer = 0, 0, keys, keys",
    "start, inner, end, outer = 0, 0, keys // BLOCK * BLOCK, keys",
    case("attention", "triton", "m=33,keys=70,heads=3,kv_heads=3,n=80,dtype=fp16,causal=False"),
)
TRITON.add(
    "bias-before-the-soft-cap",
    """        if BENT:
            scores = bent(scores, scale, softcap, SOFTCAP)
        if ALIBI:
            scores += slope * (key[None, :] - place_of[:, None]).to(tl.float32)
        if bias_ptr is not None:
            inside = (rows[:, None] < queries) & there[None, :]
            at = bias_ptr + (rows[:, None] * wide * bias_row + key[None, :] * wide * bias_column)
            scores += tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
""",
    """        if bias_ptr is not None:
            inside = (rows[:, None] < queries) & there[None, :]
            at = bias_ptr + (rows[:, None] * wide * bias_row + key[None, :] * wide * bias_column)
            scores += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if BENT:
            scores = bent(scores, scale, softcap, SOFTCAP)
        if ALIBI:
            scores += slope * (key[None, :] - place_of[:, None]).to(tl.float32)
""",
    case(
        "attention",
        "triton",
        "m=40,keys=90,heads=2,kv_heads=1,n=16,dtype=fp16,bias=fp16,slopes=True,softcap=3.0,window=30,sinks=True",
    ),
)
TRITON.add(
    "lse-in-base-2",
    "return share, (top + tl.log2(total)) * LN2",
    "return share, top + tl.log2(total)",
    case("attention_lse", "triton", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
)
TRITON.add(
    "group-of-the-wrong-heads",
    "head.to(tl.int32), head // GROUP",
    "head.to(tl.int32), head % (heads // GROUP)",
    case("attention", "triton", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
)
TRITON.add(
    "padding-ignored",
    'scores = tl.where(kept[None, :] != 0, scores, -float("inf"))',
    "scores = scores",
    case("attention", "triton", "m=20,keys=70,heads=2,kv_heads=1,n=32,dtype=fp32,padding=True,batch=3,causal=False"),
)
TRITON.add(
    "fp8-scale-of-keys-forgotten",
    "scale *= tl.load(q_scale_ptr) * tl.load(k_scale_ptr)",
    "scale *= tl.load(q_scale_ptr)",
    case("attention", "triton", "m=70,heads=2,kv_heads=1,n=64,dtype=e4m3"),
    inside="forward",
)
TRITON.add(
    "wrong-page-unsaid",
    "if wrong != 0:",
    "if wrong < 0:",
    case(
        "attention_decode",
        "triton",
        "m=2,keys=64,queries=2,heads=2,kv_heads=1,n=16,dtype=fp16,block_size=16,window=16,wrong=t0:-1+t1:99+t6:-1",
    ),
    inside="spoilt",
)
TRITON.add(
    "sums-not-rescaled",
    "return best, total * shrink + tl.sum(weights, 1), weights, shrink",
    "return best, total + tl.sum(weights, 1), weights, shrink",
    case("attention", "triton", "m=40,keys=150,heads=2,kv_heads=1,n=64,dtype=fp16"),
)

# Gradients

BACKWARD.add(
    "numba-dlse-sign",
    "shift -= load(p.tensors.dlse + lse, 0, FP32)",
    "shift += load(p.tensors.dlse + lse, 0, FP32)",
    case("attention_backward", "numba", "m=70,keys=33,heads=3,kv_heads=3,n=32,dtype=fp32"),
)
BACKWARD.add(
    "keys-without-the-scale",
    "_put(dk_ptr, dk * scale, key",
    "_put(dk_ptr, dk, key",
    case("attention_backward", "triton", "m=5,heads=2,kv_heads=1,n=16,dtype=fp32"),
)
BACKWARD.add(
    "shift-of-queries-added",
    '(tl.dot(dout, tl.trans(v), input_precision="ieee") - shift[:, None])',
    '(tl.dot(dout, tl.trans(v), input_precision="ieee") + shift[:, None])',
    case("attention_backward", "triton", "m=5,heads=2,kv_heads=1,n=16,dtype=fp32"),
)
BACKWARD.add(
    "keys-of-the-first-head-alone",
    "for i in range(PER * blocks):",
    "for i in range(blocks):",
    case("attention_backward", "triton", "m=5,heads=2,kv_heads=1,n=16,dtype=fp32"),
)
BACKWARD.add(
    "causal-gradient-off-by-one",
    "weights = tl.where(away <= keys - queries + first - key, weights, 0.0)",
    "weights = tl.where(away < keys - queries + first - key, weights, 0.0)",
    case("attention_backward", "triton", "m=5,heads=2,kv_heads=1,n=16,dtype=fp32"),
)
