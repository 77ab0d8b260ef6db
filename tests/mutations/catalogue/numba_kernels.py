"""Bugs in Numba's kernels and in what they stand on."""

from mutations.mutation import Layer, case

GLUE, ROWS, OTHERS = LAYERS = Layer("numba glue"), Layer("numba rows"), Layer("numba others")

# Elements, the cache, threads

GLUE.add(
    "fp8-becomes-nan",
    'builder.icmp_signed(">", chosen, _I32(fp8.largest))',
    'builder.icmp_signed(">", chosen, _I32(fp8.infinity))',
    "test_numba_elements.py::test_fp8_is_rounded_as_torch_rounds_it_and_saturates",
)
GLUE.add(
    "fp8-ties-away-from-zero",
    "builder.add(odd, _I32((1 << (dropped - 1)) - 1))",
    "_I32(1 << (dropped - 1))",
    "test_numba_elements.py::test_fp8_is_rounded_as_torch_rounds_it_and_saturates",
)
GLUE.add(
    "bf16-ties-away-from-zero",
    "builder.add(odd, _I32(0x7FFF))",
    "_I32(0x8000)",
    "test_numba_elements.py::test_bf16_is_rounded_to_nearest_even",
)
GLUE.add(
    "bf16-nan-becomes-infinite",
    'builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)',
    "rounded",
    "test_numba_elements.py::test_every_nan_stays_one_in_bf16",
)
GLUE.add(
    "small-fp8-read-as-normal",
    "_I32(1 << fp8.mantissa)), small, normal)",
    "_I32(1)), small, normal)",
    "test_numba_elements.py::test_every_fp8_value_is_read_as_torch_reads_it",
)
GLUE.add(
    "cache-hash-unchecked",
    "if hashlib.sha256(data[_HASH:]).digest() != data[:_HASH]:",
    "if len(data) < _HASH:",
    "test_numba_glue.py::test_damaged_code_on_disk_is_built_anew",
)
GLUE.add(
    "threads-outlive-a-fork",
    "_threads, _lock = 1, threading.Lock()",
    "_threads, _lock = _threads, threading.Lock()",
    "test_fork.py::test_a_child_is_told_of_one_thread",
)
GLUE.add(
    "torchs-threads-changed",
    "        torch.set_num_threads(before)\n",
    "        pass\n",
    "test_fork.py::test_the_first_numba_call_keeps_torchs_number_of_threads",
    inside="_kept_threads",
)

# Rows

STREAMED = "test_numba_stream.py::test_whole_lines_are_moved[softmax-{}-fp32-False]"
ROWS.add(
    "streamed-values-doubled",
    "_results(x_block, e_block, block, count, top, by, log, dtype)",
    "_results(x_block, e_block, block, count, top, by + by, log, dtype)",
    STREAMED.format(64),
)
ROWS.add(
    "streamed-tail-lost",
    "for start in range(0, n, BLOCK):\n                count, x_block",
    "for start in range(0, n - n % BLOCK, BLOCK):\n                count, x_block",
    STREAMED.format(288),
)
ROWS.add(
    "streamed-rows-not-on-lines",
    " and row % LINE == 0",
    "",
    "test_numba_stream.py::test_rows_that_do_not_begin_on_lines_are_not_moved[softmax]",
)
ROWS.add(
    "streamed-result-not-on-a-line",
    " and y % LINE == 0",
    "",
    "test_numba_stream_lines.py::test_a_result_that_does_not_begin_on_a_line_is_not_moved",
)
ROWS.add(
    "streamed-backward-tail-lost",
    "for start in range(0, n, BLOCK):",
    "for start in range(0, n - n % BLOCK, BLOCK):",
    "test_numba_stream.py::test_whole_lines_are_moved[softmax_backward-288-fp32-False]",
    inside="_rows_backward",
)
ROWS.add(
    "only-the-last-block-summed",
    "        total += part\n    return f32(total)",
    "        total = part\n    return f32(total)",
    case("softmax", "numba", "m=5,n=1000,dtype=fp16"),
    inside="_exponentials",
)
ROWS.add(
    "row-stride-ignored",
    "x_row, y_row = at(x, row * x_stride, dtype), at(y, row * n, dtype)",
    "x_row, y_row = at(x, row * n, dtype), at(y, row * n, dtype)",
    case("softmax", "numba", "m=5,n=256,dtype=fp16,layout=padded"),
    inside="_rows",
)
ROWS.add(
    "step-of-heads-ignored",
    "return row // heads * stride + row % heads * step",
    "return row * stride // heads",
    case("rms_norm", "numba", "m=3,n=64,dtype=fp32,heads=4"),
)
ROWS.add(
    "eps-ignored",
    "np.sqrt(squares / f32(n) + f32(eps))",
    "np.sqrt(squares / f32(n) + f32(1e-6))",
    case("rms_norm", "numba", "m=3,n=96,dtype=fp32,eps=0.5"),
)
ROWS.add(
    "variance-about-zero",
    "rstd = row_rstd(x_row, centre, n, eps, dtype)",
    "rstd = row_rstd(x_row, centre * 0, n, eps, dtype)",
    case("layer_norm", "numba", "m=3,n=127,dtype=fp32"),
)
ROWS.add(
    "sums-of-half-the-threads",
    "for i in range(2 * threads):",
    "for i in range(threads):",
    case("rms_norm_backward", "numba", "m=1100,n=24,dtype=fp32"),
)
ROWS.add(
    "earlier-sums-overwritten",
    "store(sums, n + j, load(sums, n + j, FP32) + load(sums, j, FP32), FP32)",
    "store(sums, n + j, load(sums, j, FP32), FP32)",
    case("rms_norm_backward", "numba", "m=1100,n=24,dtype=fp32"),
)
ROWS.add(
    "backward-without-the-mean",
    "normal * projection - middle), dtype)",
    "normal * projection), dtype)",
    case("layer_norm_backward", "numba", "m=5,n=1000,dtype=fp16"),
)
ROWS.add(
    "residual-gradient-dropped",
    "own + load(dresidual, j, dtype) if passed else own",
    "own",
    case("add_rms_norm_backward", "numba", "m=5,n=1000,dtype=fp16"),
)
ROWS.add(
    "softmax-backward-sign",
    "load(y, j, dtype) * (load(dy, j, dtype) - total)",
    "load(y, j, dtype) * (load(dy, j, dtype) + total)",
    case("softmax_backward", "numba", "m=3,n=127,dtype=fp32"),
)
ROWS.add(
    "amax-of-earlier-groups",
    "        for j in range(start, stop):\n            top = max(",
    "        for j in range(stop):\n            top = max(",
    case("rms_norm_fp8", "numba", "m=16,n=512,dtype=bf16,per=group"),
    inside="_quantise_row",
)
ROWS.add(
    "pow2-scale-rounded-down",
    "made = unrank((rank(made) + _MANTISSA) & _INFINITY)",
    "made = unrank(rank(made) & _INFINITY)",
    case("quantize_fp8", "numba", "m=5,n=1000,dtype=fp16,scales=column,pow2=True"),
)
ROWS.add(
    "scale-not-inverted",
    "inverse = f32(1) / made\n    row, values",
    "inverse = made\n    row, values",
    case("quantize_fp8", "numba", "m=3,n=1024,dtype=fp32"),
)
ROWS.add(
    "scales-by-row-in-columns",
    "store(scales, i * s_row + c * s_column, made, FP32)",
    "store(scales, i * s_row + c, made, FP32)",
    case("quantize_fp8", "numba", "m=5,n=1000,dtype=fp16,scales=column,pow2=True"),
)
ROWS.add(
    "negative-target-followed",
    "if 0 <= target < n else f32(np.nan)",
    "if target < n else f32(np.nan)",
    case("cross_entropy", "numba", "m=8,n=200,dtype=fp32,outside=True"),
)
ROWS.add(
    "smoothing-added",
    "value -= label_smoothing * (logit_sum / f32(n))",
    "value += label_smoothing * (logit_sum / f32(n))",
    case("cross_entropy", "numba", "m=5,n=1000,dtype=fp16,label_smoothing=0.1,z_loss=0.001,ignored=True"),
)
ROWS.add(
    "z-loss-gradient-halved",
    "(f32(1) + f32(2) * z_loss * lse)",
    "(f32(1) + z_loss * lse)",
    case("cross_entropy_backward", "numba", "m=3,n=127,dtype=fp32,label_smoothing=0.1,z_loss=0.001,ignored=True"),
)

# Others

OTHERS.add(
    "negative-id-followed",
    "if 0 <= index < v:",
    "if index < v:",
    case("embedding", "numba", "m=9,n=72,v=3,dtype=fp32,outside=True"),
)
OTHERS.add(
    "first-of-a-tie-missed",
    "    while order(load(x, j, dtype)) != top:\n        j += 1\n",
    "    for i in range(n):\n        if order(load(x, i, dtype)) == top:\n            j = i\n",
    case("argmax", "numba", "m=5,n=3000,dtype=fp32,ties=True"),
)
OTHERS.add(
    "one-more-than-top-k",
    "np.int32(middle), top, scale, count) >= wanted:",
    "np.int32(middle), top, scale, count) > wanted:",
    "test_sample.py::test_only_the_kept_are_drawn",
)
OTHERS.add(
    "temperature-inverted",
    "scale = 1 / temperature if temperature > 0 else 0.0",
    "scale = temperature if temperature > 0 else 0.0",
    "test_sample.py::test_tokens_follow_softmax[0]",
)
OTHERS.add(
    "min-p-without-temperature",
    "cutoff = top_value + temperature * np.log(min_p)",
    "cutoff = top_value + np.log(min_p)",
    case("sample", "numba", "m=4,n=200,dtype=fp32,temperature=2.0,min_p=0.1"),
)
OTHERS.add(
    "dropout-of-other-numbers",
    "(first + head) // 4\n",
    "first // 4\n",
    case("dropout", "numba", "m=3,n=127,dtype=fp32,p=0.1"),
)
OTHERS.add(
    "dropout-unscaled",
    "value = load(x, j, dtype) * scale\n",
    "value = load(x, j, dtype)\n",
    case("dropout", "numba", "m=3,n=127,dtype=fp32,p=0.1"),
)
OTHERS.add(
    "silu-slope-without-g",
    "return s, s * (f32(1) + g * (f32(1) - s))",
    "return s, s * (f32(1) + (f32(1) - s))",
    case("silu_mul_backward", "numba", "m=5,n=1000,dtype=fp16"),
)
OTHERS.add(
    "last-block-of-k-dropped",
    "for k0 in range(0, k, DEPTH):",
    "for k0 in range(0, k - k % DEPTH, DEPTH):",
    case("matmul", "numba", "m=65,n=33,k=97,dtype=fp32"),
    inside="_multiply",
)
OTHERS.add(
    "beta-ignored",
    "+ beta * load(addend, j * addend_step, dtype)",
    "+ load(addend, j * addend_step, dtype)",
    case("matmul_add", "numba", "m=40,n=72,k=80,dtype=fp32,alpha=0.5,beta=-2.0"),
)
OTHERS.add(
    "addend-stride-ignored",
    "beta * load(addend, j * addend_step, dtype)",
    "beta * load(addend, j, dtype)",
    case("matmul_add", "numba", "m=40,n=56,k=64,dtype=fp32,layout_c=transposed,beta=0.25"),
)
OTHERS.add(
    "falling-offsets-followed",
    "        if end < before:\n            return False\n",
    "",
    case("grouped_matmul", "numba", "m=37,n=40,k=48,experts=4,dtype=fp32,sizes=9+0+12+3,wrong=falls"),
    inside="_rise",
)
OTHERS.add(
    "rows-of-no-group-left",
    "for i in range(start + thread, total, threads):",
    "for i in range(start + thread, start, threads):",
    case("grouped_matmul", "numba", "m=37,n=40,k=48,experts=3,dtype=fp32,sizes=5+0+12"),
)
OTHERS.add(
    "rope-rotated-the-other-way",
    "store(y, 2 * i + 1, b * c + a * s, FP32)",
    "store(y, 2 * i + 1, b * c - a * s, FP32)",
    case("rope", "numba", "m=5,heads=3,kv_heads=2,n=128,dtype=fp16,interleaved=True"),
)
OTHERS.add(
    "slot-past-the-cache-written",
    "if 0 <= slot < slots_end:",
    "if 0 <= slot <= slots_end:",
    "test_cache_bounds.py::test_the_slot_past_the_last_is_not_written",
)
OTHERS.add(
    "values-scaled-as-keys",
    "v_scale, h, v_step, cache_dtype)",
    "k_scale, h, k_step, cache_dtype)",
    case("rope_cache_write_", "numba", "m=7,heads=4,kv_heads=2,n=64,dtype=fp32,format=e5m2,per=head,interleaved=True"),
)
OTHERS.add(
    "scale-of-zeros-is-zero",
    "made = unrank(max(amax, rank(_TINY))) / f32(largest)",
    "made = unrank(amax) / f32(largest)",
    "test_quantize_zeros.py::test_zeros_are_quantized_to_zeros",
)
GLUE.add(
    "threading-layer-asked-too-early",
    "        with contextlib.suppress(ValueError):  # no kernel has asked for threads yet, and numba does not know\n",
    "        if True:\n",
    "test_numba_glue.py::test_the_first_kernel_of_a_process_may_ask_for_no_threads",
)
