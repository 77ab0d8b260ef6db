"""Bugs in attention: its contract, its kernels in both languages, its gradients."""

from mutations.mutation import Layer, case

CONTRACT, NUMBA, TRITON, BACKWARD, SCORED = LAYERS = (
    Layer("attention"),
    Layer("attention numba"),
    Layer("attention triton"),
    Layer("attention gradient"),
    Layer("attention gradient scored"),
)

CONTRACT.add(
    "bucket-forgets-sinks",
    '"slopes": call.slopes, "sinks": call.sinks,',
    '"slopes": call.slopes,',
    "test_attention_scalars.py::test_every_option_has_a_bucket_of_its_own[attention]",
)
CONTRACT.add(
    "bucket-forgets-softcap",
    '"softcap": call.softcap, "mask"',
    '"mask"',
    "test_attention_scalars.py::test_every_option_has_a_bucket_of_its_own[attention]",
    inside="bucket",
)
CONTRACT.add(
    "bucket-forgets-window",
    "return Bucket(_exact(call) + given + _window(call), _scaled(call))",
    "return Bucket(_exact(call) + given, _scaled(call))",
    "test_attention_scalars.py::test_every_option_has_a_bucket_of_its_own[attention]",
)
CONTRACT.add(
    "causal-pairs-counted-as-all",
    "last = 1 if causal else window\n",
    "last = window\n",
    "test_attention.py::test_cost_counts_pairs_that_see_each_other",
)
CONTRACT.add(
    "flops-of-the-values-forgotten",
    "call.visible_pairs * (call.head_dim + call.value_dim)\n    return Cost(flops, reads(attention_lse",
    "call.visible_pairs * call.head_dim\n    return Cost(flops, reads(attention_lse",
    "test_attention_cost.py::test_cost_is_what_a_hand_makes_of_it",
)
CONTRACT.add(
    "fp8-gives-fp8",
    "dtype = torch.bfloat16 if call.is_fp8 else call.q.dtype",
    "dtype = call.q.dtype",
    case("attention", "numba", "m=70,heads=2,kv_heads=1,n=64,dtype=e4m3"),
)
CONTRACT.add(
    "scale-by-the-heads-size",
    "default = self.head_dim**-0.5",
    "default = self.head_dim**-1.0",
    case("attention", "numba", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
)

# Numba

NUMBA.add(
    "window-off-by-one",
    "max(position - scoring.window + 1 - first, 0)",
    "max(position - scoring.window - first, 0)",
    case("attention", "numba", "m=150,heads=2,kv_heads=1,n=32,dtype=fp16,window=40"),
    inside="_visible",
)
NUMBA.add(
    "causal-off-by-one",
    "high = min(high, position + 1 - first)",
    "high = min(high, position - first)",
    case("attention", "numba", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
    inside="_visible",
)
NUMBA.add(
    "sink-forgotten",
    "row_sum = row_sum * factor + exp(sink - new_base)",
    "row_sum = row_sum * factor",
    case("attention", "numba", "m=40,heads=2,kv_heads=1,n=16,dtype=fp16,sinks=True,window=8"),
)
NUMBA.add(
    "padding-ignored",
    "if load(line, j, FP32) != f32(0) else NEG_INF",
    "if True else NEG_INF",
    case("attention", "numba", "m=20,keys=70,heads=2,kv_heads=1,n=32,dtype=fp32,padding=True,batch=3,causal=False"),
)
NUMBA.add(
    "soft-cap-without-its-size",
    "softcap * tanh(load(scores, j, FP32) / softcap)",
    "tanh(load(scores, j, FP32) / softcap)",
    case("attention", "numba", "m=40,heads=2,kv_heads=1,n=16,dtype=fp32,softcap=5.0,strength=4.0"),
)
NUMBA.add(
    "heads-of-a-group-interleaved",
    "return block.kv_head * p.sizes.group + row % p.sizes.group, row // p.sizes.group",
    "return block.kv_head + row % p.sizes.group * p.sizes.kv_heads, row // p.sizes.group",
    case("attention", "numba", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
)
NUMBA.add(
    "lse-in-base-2",
    "base + f32(np.log(row_sum))\n        store(address(p.tensors.lse",
    "base + f32(np.log2(row_sum))\n        store(address(p.tensors.lse",
    case("attention_lse", "numba", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
)
NUMBA.add(
    "page-past-the-cache-followed",
    "return page if 0 <= page < p.sizes.pages else -1",
    "return page if 0 <= page <= p.sizes.pages else -1",
    "test_attention_indices.py::test_pages_that_are_not_there_give_nan",
)
NUMBA.add(
    "last-chunk-not-combined",
    "(block.high + chunk - 1) // chunk\n",
    "block.high // chunk\n",
    case(
        "attention_decode",
        "numba",
        "m=2,keys=1100,heads=2,kv_heads=1,n=16,dtype=fp32,lengths=1100+700,block_size=16",
    ),
    inside="_combine",
)
NUMBA.add(
    "sums-not-rescaled",
    "rescaled = load(buffers.row_sum, r, FP32) * rescale",
    "rescaled = load(buffers.row_sum, r, FP32)",
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
    "mask = mask & (key[None, :] <= position[:, None])",
    "mask = mask & (key[None, :] < position[:, None])",
    case("attention", "triton", "m=20,heads=4,kv_heads=2,n=32,dtype=fp32,batch=2"),
    inside="visible",
)
TRITON.add(
    "window-off-by-one",
    "(position[:, None] - key[None, :] < window)",
    "(position[:, None] - key[None, :] <= window)",
    case("attention", "triton", "m=150,heads=2,kv_heads=1,n=32,dtype=fp16,window=40"),
    inside="visible",
)
TRITON.add(
    "sink-forgotten",
    'exponential = tl.where(sink == -float("inf"), 0.0, 1.0)',
    "exponential = 0.0",
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
    """        if SCALE_FIRST:
            scores = logits(scores, scale, scoring.softcap, SOFTCAP)
        if ALIBI:
            scores += slope * (key[None, :] - position[:, None]).to(tl.float32)
        if bias_ptr is not None:
            inside = (rows[:, None] < queries) & there[None, :]
            at = bias_ptr + (rows[:, None] * wide * bias.query + key[None, :] * wide * bias.key)
            scores += tl.load(at, mask=inside, other=0.0).to(tl.float32) * LOG2E
""",
    """        if bias_ptr is not None:
            inside = (rows[:, None] < queries) & there[None, :]
            at = bias_ptr + (rows[:, None] * wide * bias.query + key[None, :] * wide * bias.key)
            scores += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if SCALE_FIRST:
            scores = logits(scores, scale, scoring.softcap, SOFTCAP)
        if ALIBI:
            scores += slope * (key[None, :] - position[:, None]).to(tl.float32)
""",
    case(
        "attention",
        "triton",
        "m=40,keys=90,heads=2,kv_heads=1,n=16,dtype=fp16,bias=fp16,slopes=True,softcap=3.0,window=30,sinks=True",
    ),
)
TRITON.add(
    "lse-in-base-2",
    "return inverse, (row_max + tl.log2(row_sum)) * LN2",
    "return inverse, row_max + tl.log2(row_sum)",
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
    'scores = tl.where(seen[None, :] != 0, scores, -float("inf"))',
    "scores = scores",
    case("attention", "triton", "m=20,keys=70,heads=2,kv_heads=1,n=32,dtype=fp32,padding=True,batch=3,causal=False"),
)
TRITON.add(
    "fp8-scale-of-keys-forgotten",
    "scale *= tl.load(fp8_scales.q_ptr) * tl.load(fp8_scales.k_ptr)",
    "scale *= tl.load(fp8_scales.q_ptr)",
    case("attention", "triton", "m=70,heads=2,kv_heads=1,n=64,dtype=e4m3"),
    inside="_forward",
)
TRITON.add(
    "wrong-page-unsaid",
    "if missing_any != 0:",
    "if missing_any < 0:",
    case(
        "attention_decode",
        "triton",
        "m=2,keys=64,queries=2,heads=2,kv_heads=1,n=16,dtype=fp16,block_size=16,window=16,wrong=t0:-1+t1:99+t6:-1",
    ),
    inside="_nan_where_missing",
)
TRITON.add(
    "sums-not-rescaled",
    "return new_max, row_sum * rescale + tl.sum(p, 1), p, rescale",
    "return new_max, row_sum + tl.sum(p, 1), p, rescale",
    case("attention", "triton", "m=3,keys=700,heads=2,kv_heads=1,n=16,dtype=fp32"),  # a row's maximum grows for sure
)

# Gradients

BACKWARD.add(
    "numba-dlse-sign",
    "delta -= load(p.tensors.dlse + lse, 0, FP32)",
    "delta += load(p.tensors.dlse + lse, 0, FP32)",
    case("attention_backward", "numba", "m=70,keys=33,heads=3,kv_heads=3,n=32,dtype=fp32"),
)
BACKWARD.add(
    "keys-without-the-scale",
    "_store_rows(dk_ptr, dk_acc * scale, key",
    "_store_rows(dk_ptr, dk_acc, key",
    case("attention_backward", "triton", "m=5,heads=2,kv_heads=1,n=16,dtype=fp32"),
)
BACKWARD.add(
    "delta-of-queries-added",
    '(tl.dot(dout, tl.trans(v), input_precision="ieee") - delta[:, None])',
    '(tl.dot(dout, tl.trans(v), input_precision="ieee") + delta[:, None])',
    case("attention_backward", "triton", "m=5,heads=2,kv_heads=1,n=16,dtype=fp32"),
)
BACKWARD.add(
    "keys-of-the-first-head-alone",
    "for i in range(GROUP * blocks):",
    "for i in range(blocks):",
    case("attention_backward", "triton", "m=5,heads=2,kv_heads=1,n=16,dtype=fp32"),
)
BACKWARD.add(
    "causal-gradient-off-by-one",
    "p = tl.where(away <= keys - queries + first - key, p, 0.0)",
    "p = tl.where(away < keys - queries + first - key, p, 0.0)",
    case("attention_backward", "triton", "m=5,heads=2,kv_heads=1,n=16,dtype=fp32"),
)

# Gradients with windows, soft caps and sinks

WINDOW = "m=150,heads=4,kv_heads=2,n=32,dtype=fp32,window=40"
BOTH_SIDES = "m=100,keys=170,heads=4,kv_heads=2,n=32,dtype=fp16,window=33,causal=False,batch=2,order=bhsd"
CAPPED = "m=70,heads=4,kv_heads=2,n=32,dtype=fp32,softcap=2.0"

SCORED.add(
    "numba-keys-see-one-query-too-many",
    "high = (query + window) * p.sizes.group - first",
    "high = (query + window + 1) * p.sizes.group - first",
    case("attention_backward", "numba", WINDOW),
)
SCORED.add(
    "numba-queries-see-one-key-too-many",
    "low = key - window + 1\n    low",
    "low = key - window\n    low",
    case("attention_backward", "numba", WINDOW),
    inside="_visible",
)
SCORED.add(
    "numba-window-of-the-future-forgotten",
    "high = last // group + position + window",
    "high = last // group + position",
    case("attention_backward", "numba", BOTH_SIDES),
)
SCORED.add(
    "numba-soft-cap-without-its-derivative",
    "store(ds, j, load(ds, j, FP32) * slope, FP32)",
    "store(ds, j, load(ds, j, FP32), FP32)",
    case("attention_backward", "numba", CAPPED),
)
SCORED.add(
    "triton-queries-of-a-window-end-too-early",
    "tl.minimum(key + ROWS - 1 + scoring.window - keys + queries, queries)",
    "tl.minimum(key + scoring.window - keys + queries, queries)",
    case("attention_backward", "triton", WINDOW),
)
SCORED.add(
    "triton-window-off-by-one",
    "mask = away < window\n",
    "mask = away <= window\n",
    case("attention_backward", "triton", WINDOW),
    inside="_in_window",
)
SCORED.add(
    "triton-one-side-of-the-window",
    "mask = mask & (away > -window)",
    "mask = mask",
    case("attention_backward", "triton", BOTH_SIDES),
)
SCORED.add(
    "triton-keys-before-the-inner-blocks-skipped",
    "k_ptr, v_ptr, start, inner, keys, position + rows, scoring,",
    "k_ptr, v_ptr, inner, inner, keys, position + rows, scoring,",
    case("attention_backward", "triton", WINDOW),
)
SCORED.add(
    "triton-queries-soft-cap-without-its-derivative",
    "            ds *= slope\n        dq =",
    "            ds *= 1.0\n        dq =",
    case("attention_backward", "triton", CAPPED),
)
SCORED.add(
    "triton-keys-soft-cap-without-its-derivative",
    "                ds *= slope\n            dk_acc",
    "                ds *= 1.0\n            dk_acc",
    case("attention_backward", "triton", CAPPED),
)
SCORED.add(
    "bucket-of-gradients-forgets-the-window",
    "return Bucket(_exact(call) + options + _window(call), _scaled(call))",
    "return Bucket(_exact(call) + options, _scaled(call))",
    "test_attention_scalars.py::test_every_option_has_a_bucket_of_its_own[attention_backward]",
)
SCORED.add(
    "autograd-forgets-the-window",
    "            window=call.window, softcap=call.softcap,\n        )  # fmt: skip\n    if",
    "            softcap=call.softcap,\n        )  # fmt: skip\n    if",
    "test_attention_backward.py::test_autograd_through_the_op_is_that_of_its_reference[{'window': 4}-attention-False]",
)
SCORED.add(
    "sinks-sign",
    "total -= tl.where(seen, p * delta, 0.0)",
    "total += tl.where(seen, p * delta, 0.0)",
    case("attention_sinks_backward", "triton", "m=9,heads=4,n=32,dtype=fp32"),
)
SCORED.add(
    "sinks-of-tokens-of-no-sequence",
    "if known == NEG_INF:\n                continue",
    "if False:\n                continue",
    case("attention_sinks_backward", "numba", "m=0,heads=2,n=32,dtype=fp32,order=thd,lengths=3+17+0+9"),
)
SCORED.add(
    "sinks-without-dlse",
    "if dlse != 0:\n                delta -= load(address(dlse",
    "if False:\n                delta -= load(address(dlse",
    case("attention_sinks_backward", "numba", "m=9,heads=4,n=32,dtype=fp32"),
)
SCORED.add(
    "sinks-have-no-gradient-in-decoding",
    "any(x is not None and x.requires_grad for x in (q, k, v, sinks))",
    "any(x is not None and x.requires_grad for x in (q, k, v))",
    "test_huggingface.py::test_sinks_alone_may_be_trained",
)
TRITON.add(
    "mla-takes-tiles-that-ptxas-128-miscompiles",
    "if call.value_dim == 16 and config.block_n > _KEYS_OF_16_VALUES and not config.tma:",
    "if False:",
    "test_mla.py::test_values_of_16_are_not_multiplied_by_what_ptxas_128_left_unset",
)
