"""Bugs in Triton's kernels, as the interpreter runs them."""

from mutations.mutation import Layer, case

ROWS, OTHERS = LAYERS = Layer("triton rows"), Layer("triton others")
PIECES = "test_softmax.py::test_rows_in_blocks_and_in_pieces[softmax-cut{}-none]"

ROWS.add(
    "rms-norm-ignores-eps",
    '"n": n, "eps": call.eps}',
    '"n": n, "eps": 1e-6}',
    case("rms_norm", "triton", "m=3,n=96,dtype=fp32,eps=0.5"),
    inside="Norm",
)
ROWS.add(
    "long-row-ignores-eps",
    "rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / n + eps)\n    if SUMMED:",
    "rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / n)\n    if SUMMED:",
    case("rms_norm_fp8", "triton", "m=2,n=33000,dtype=fp32,per=group,eps=2.0"),
)
ROWS.add(
    "mask-forgotten-where-centred",
    "            x = tl.where(mask, x - mean, 0.0)\n        squares",
    "            x = x - mean\n        squares",
    "test_norms.py::test_rows_that_are_read_again_end_where_no_block_does",
)
ROWS.add(
    "offset-forgotten",
    "y = x * (w.to(tl.float32) + offset)",
    "y = x * w.to(tl.float32)",
    case("rms_norm", "triton", "m=3,n=96,dtype=fp32,offset=1.0"),
)
ROWS.add(
    "absent-columns-count",
    'load_pieces(x_ptr + row * x_stride, cols, every, n, -float("inf"), PIECES)',
    "load_pieces(x_ptr + row * x_stride, cols, every, n, 0.0, PIECES)",
    case("softmax", "triton", "m=3,n=127,dtype=fp32"),
    inside="_softmax",
)
ROWS.add(
    "row-stride-ignored",
    "x = load_pieces(x_ptr + row * x_stride, cols",
    "x = load_pieces(x_ptr + row * n, cols",
    case("softmax", "triton", "m=5,n=256,dtype=fp16,layout=padded"),
    inside="_softmax",
)
ROWS.add(
    "first-piece-again",
    "tl.load(ptr + i * cols.shape[-1] + cols, mask",
    "tl.load(ptr + cols, mask",
    "test_row_lengths.py::test_rows_in_pieces_are_right[rms_norm-384]",
)
ROWS.add(
    "piece-left-out-of-sum",
    "    for i in tl.static_range(1, PIECES):\n        squares",
    "    for i in tl.static_range(2, PIECES):\n        squares",
    "test_row_lengths.py::test_rows_in_pieces_are_right[layer_norm-300]",
)
ROWS.add(
    "piece-left-out-of-exponentials",
    "    for i in tl.static_range(1, PIECES):\n        exps",
    "    for i in tl.static_range(2, PIECES):\n        exps",
    "test_row_lengths.py::test_rows_in_pieces_are_right[softmax-300]",
)
ROWS.add("earlier-blocks-not-rescaled", "exps = exps * tl.exp(top - below) + ", "exps = exps + ", PIECES.format(0))
ROWS.add(
    "splits-added-without-their-maximum",
    "tl.sum(tl.load(sums_ptr + m * SPLITS + splits) * tl.exp(base), axis=0)",
    "tl.sum(tl.load(sums_ptr + m * SPLITS + splits), axis=0)",
    PIECES.format(1),
)
ROWS.add(
    "last-split-too-long",
    "first, min(first + split_size, n), top, total, BLOCK, LOG)",
    "first, first + split_size, top, total, BLOCK, LOG)",
    PIECES.format(1),
)
ROWS.add(
    "layer-norm-gradient-without-the-mean",
    "dx = (scaled - normal * dot - mean) * rstd",
    "dx = (scaled - normal * dot) * rstd",
    case("layer_norm_backward", "triton", "m=5,n=1000,dtype=fp16"),
)
ROWS.add(
    "weight-gradient-of-x",
    "dw += tl.where(mask, dy_value * normal, 0.0)",
    "dw += tl.where(mask, dy_value * value, 0.0)",
    case("rms_norm_backward", "triton", "m=5,n=1000,dtype=fp16"),
)
ROWS.add(
    "first-partial-sums-only",
    "for first in range(0, parts, PARTS):",
    "for first in range(0, PARTS, PARTS):",
    case("rms_norm_backward", "triton", "m=1100,n=24,dtype=fp32"),
)
ROWS.add(
    "absent-rows-make-nan",
    "dw += tl.where(mask, dy_value * normal, 0.0)",
    "dw += dy_value * normal",
    "test_norm_gradients.py::test_absent_rows_add_nothing_to_a_weights_gradient",
)
ROWS.add(
    "amax-of-all-groups",
    "made = scale(tl.max(magnitude(y), axis=1), FORMAT, POW2)",
    "made = scale(tl.max(magnitude(y), axis=1) * 0 + tl.max(magnitude(y)), FORMAT, POW2)",
    case("quantize_fp8", "triton", "m=3,n=1024,dtype=fp32"),
)
ROWS.add(
    "scale-not-inverted",
    "quantize(y * (1 / made)[:, None], FORMAT, NATIVE)",
    "quantize(y * made[:, None], FORMAT, NATIVE)",
    case("quantize_fp8", "triton", "m=3,n=1024,dtype=fp32"),
)
ROWS.add(
    "fp8-ties-away-from-zero",
    "up = size + ((size >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)",
    "up = size + (1 << (DROPPED - 1))",
    "test_kv_cache.py::test_fp8_is_rounded_to_nearest_even_and_saturates",
)
ROWS.add(
    "smoothing-added",
    "return lse - (1 - label_smoothing) * target_logit - smooth + z_loss",
    "return lse - (1 - label_smoothing) * target_logit + smooth + z_loss",
    case("cross_entropy", "triton", "m=5,n=1000,dtype=fp16,label_smoothing=0.1,z_loss=0.001,ignored=True"),
)
ROWS.add(
    "ignored-rows-count",
    "counts = 0.0, 0.0, target != ignore_index",
    "counts = 0.0, 0.0, target != -100",
    case("cross_entropy", "triton", "m=4,n=200,dtype=fp16,ignored=True,ignore_index=1099511627776,label_smoothing=1.0"),
)

OTHERS.add(
    "negative-id-followed",
    "inside = (index >= 0) & (index < v)",
    "inside = index < v",
    case("embedding", "triton", "m=9,n=72,v=3,dtype=fp32,outside=True"),
)
OTHERS.add(
    "first-of-a-tie-missed",
    "better = (cols < n) & (ranks > best)",
    "better = (cols < n) & (ranks >= best)",
    "test_argmax.py::test_of_equals_in_several_blocks_the_first_wins",
)
OTHERS.add(
    "weights-always-renormalised",
    "    if RENORMALIZE:\n        total",
    "    if K:\n        total",
    case("topk_softmax", "triton", "m=5,n=256,k=8,dtype=fp32,renormalize=False"),
    inside="_topk_softmax",
)
OTHERS.add(
    "k-tail-unmasked",
    "if not EVEN_K:\n            a_mask",
    "if EVEN_K:\n            a_mask",
    case("matmul", "triton", "m=65,n=33,k=97,dtype=fp32"),
    inside="_gemm",
)
OTHERS.add(
    "activated-before-the-bias-too",
    "    if bias_ptr is not None:\n        acc += tl.load(bias_ptr",
    "    acc = _activated(acc, ACT)\n    if bias_ptr is not None:\n        acc += tl.load(bias_ptr",
    case("linear", "triton", "m=65,n=33,k=97,dtype=fp32,bias=True,activation=silu"),
    inside="_gemm",
)
OTHERS.add(
    "gelu-tanh-is-gelu",
    'return y * factor(y, "tanh")',
    'return y * factor(y, "none")',
    case("linear", "triton", "m=65,n=33,k=97,dtype=fp32,activation=gelu_tanh"),
)
OTHERS.add(
    "silu-slope-without-g",
    'inner = g * (1 - s) if ACT == "silu"',
    'inner = (1 - s) if ACT == "silu"',
    case("silu_mul_backward", "triton", "m=5,n=1000,dtype=fp16"),
)
OTHERS.add(
    "position-past-the-table-read",
    "(position >= 0) & (position < table)",
    "(position >= 0)",
    case("rope", "triton", "m=6,heads=2,kv_heads=1,n=32,dtype=fp32,places=outside"),
)
OTHERS.add(
    "backward-rotates-forward",
    "    if INVERSE:\n        sin = -sin\n",
    "    if False:\n        sin = -sin\n",
    case("rope_backward", "triton", "m=3,heads=9,kv_heads=1,n=64,dtype=fp32,batch=2,places=int64"),
    inside="_rope",
)
OTHERS.add(
    "top-p-of-all-values",
    "wanted = top_p * _amount(x_ptr, n, least, top, scale, False, BLOCK, SHIFT)",
    "wanted = top_p * _amount(x_ptr, n, least * 0 - 2**31, top, scale, False, BLOCK, SHIFT)",
    "test_sample.py::test_top_p_is_a_share_of_what_top_k_leaves",
)
OTHERS.add(
    "far-scales-of-fp8-in-32-bits",
    "max(m * n, _extent(m, k, a, a_scale_strides), _extent(n, k, b, b_scale_strides))",
    "max(m * n, m * a.stride(0), n * b.stride(0))",
    "test_far_scales.py::test_fp8_matmul_counts_far_scales_in_64_bits",
)
OTHERS.add(
    "code-behind-narrow-loads-not-looked-at",
    "if device.arch(where) == _MISCOMPILED and _by_narrow_loads(launch):",
    "if False:",
    "test_triton_glue.py::test_code_is_looked_at_where_tensors_cannot_be_loaded_by_16_bytes",
)
OTHERS.add(
    "unset-registers-let-through",
    "_require_set_registers(launch, made)\n    return made",
    "pass\n    return made",
    "test_mla.py::test_a_cache_at_odd_addresses_is_refused_where_ptxas_128_leaves_registers_unset",
)
OTHERS.add(
    "wide-latent-by-narrow-loads",
    "call.latent_dim > _NARROW_LATENT and _is_narrow(call.cache)",
    "False",
    "test_mla.py::test_a_cache_at_odd_addresses_is_refused_where_ptxas_128_leaves_registers_unset",
)
