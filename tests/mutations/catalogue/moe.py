"""Bugs in ops of experts: routing, alignment, and their products."""

from mutations.mutation import Layer, case

NUMBA, TRITON, CUDA, GRADIENTS = LAYERS = [
    Layer("moe numba"), Layer("moe triton"), Layer("moe CUDA C++"), Layer("moe gradients")
]  # fmt: skip
ROUTE, ALIGN = "test_moe_route.py::test_{}[{}]", "test_moe_align.py::test_{}[{}]"
OUTSIDE = "m=30,outside=True,n=24,k=40,experts=6,topk=2,dtype=fp32"
OSS = "interleaved=True,biases=True,limit=7.0,alpha=1.702,up_offset=1.0"
CLAMPED = "m=21,n=40,k=64,experts=5,topk=2,dtype=fp16,limit=0.3,alpha=0.3,up_offset=-0.3"

# Numba

NUMBA.add(
    "bias-weighs",
    "store(row_weights, i, load(work, places[i], FP32), FP32)",
    "store(row_weights, i, load(values if biased else work, places[i], FP32), FP32)",
    ROUTE.format("a_bias_chooses_and_does_not_weigh", "numba"),
)
NUMBA.add(
    "a-groups-best-decides",
    "load(own, places[0], FP32) + load(own, places[1], FP32)",
    "load(own, places[0], FP32)",
    ROUTE.format("a_groups_two_best_decide_and_not_its_best", "numba"),
)
NUMBA.add(
    "best-groups-in-order-of-their-sums",
    "            kept[count] = group\n",
    "            kept[count] = places[count]\n",
    case("moe_route", "numba", "m=4,n=24,k=3,dtype=fp32,groups=12,top_groups=12"),
)
NUMBA.add(
    "nothing-divided-by-nothing",
    "_LEAST_SUM = f32(1e-20)",
    "_LEAST_SUM = f32(0)",
    ROUTE.format("scores_of_nothing_weigh_nothing", "numba"),
)
NUMBA.add(
    "saturated-scores-decide",
    "if biased or groups > 1:\n            for j",
    "if biased or groups > 0:\n            for j",
    ROUTE.format("values_that_round_to_one_score_are_chosen_by_themselves", "numba"),
)
NUMBA.add(
    "free-slots-unwritten",
    "for slot in range(start + own, last * block):",
    "for slot in range(start + own, start + own):",
    case("moe_align", "numba", "m=40,topk=3,experts=7,block=16"),
)
NUMBA.add(
    "map-followed-outside",
    "if 0 <= expert < known else np.int64(-1)",
    "if expert < known else np.int64(-1)",
    ALIGN.format("ids_and_maps_that_lie_are_not_followed", "numba"),
)
NUMBA.add(
    "unwritten-parts-summed",
    "if integer(inverse, choice, 4) >= 0:",
    "if integer(inverse, choice, 4) >= -1:",
    case("fused_moe", "numba", OUTSIDE),
)
NUMBA.add(
    "gate-and-up-swapped",
    "ups if half else gates, own",
    "gates if half else ups, own",
    case("fused_moe", "numba", "m=37,n=33,k=65,experts=5,topk=3,dtype=fp32"),
)
NUMBA.add(
    "up-not-clamped-from-below",
    "    up = -limit if up < -limit else up\n",
    "",
    case("fused_moe", "numba", CLAMPED),
)
NUMBA.add(
    "bias-of-half-the-columns",
    "at_gate = expert * 2 * size + (j + c) * step",
    "at_gate = expert * 2 * size + j + c",
    case("fused_moe", "numba", f"m=21,n=40,k=64,experts=5,topk=2,dtype=fp32,{OSS}"),
)

# Triton

TRITON.add(
    "bias-weighs",
    "    values = scores\n    if bias_ptr is not None:\n        values += tl.load(",
    "    values = scores\n    if bias_ptr is not None:\n        scores = values = values + tl.load(",
    ROUTE.format("a_bias_chooses_and_does_not_weigh", "triton"),
)
TRITON.add(
    "a-groups-best-decides",
    " + tl.sum(tl.where(second, values, 0.0), axis=1)",
    "",
    ROUTE.format("a_groups_two_best_decide_and_not_its_best", "triton"),
)
TRITON.add(
    "groups-that-are-out-sink-to-zero",
    "kept = tl.full((ROWS, BLOCK), TAKEN, tl.int64)",
    "kept = keys(values * 0, cols, BLOCK, BLOCK)",
    ROUTE.format("a_negative_bias_does_not_let_other_groups_in", "triton"),
)
TRITON.add(
    "nothing-divided-by-nothing",
    "weights / (tl.sum(weights, axis=1) + 1e-20)[:, None]",
    "weights / tl.sum(weights, axis=1)[:, None]",
    ROUTE.format("scores_of_nothing_weigh_nothing", "triton"),
)
TRITON.add(
    "scaling-forgotten",
    "weights * scaling, mask=mask)",
    "weights, mask=mask)",
    ROUTE.format("deepseek_v3_beside_plain_python", "0-triton"),
)
TRITON.add(
    "blocks-rounded-down",
    "last = (start + count + PAD - 1) // PAD",
    "last = (start + count) // PAD",
    case("moe_align", "triton", "m=40,topk=3,experts=7,block=16"),
)
TRITON.add(
    "later-rounds-over-the-first",
    "            slot += tl.sum(hit.to(tl.int32), 0)\n",
    "            slot += 0 * tl.sum(hit.to(tl.int32), 0)\n",
    "test_moe_align.py::test_many_rounds_of_a_program",
)
TRITON.add(
    "map-followed-outside",
    "mask=(expert >= 0) & (expert < G), other=-1)",
    "mask=expert >= 0, other=-1)",
    ALIGN.format("ids_and_maps_that_lie_are_not_followed", "triton"),
)
TRITON.add(
    "experts-past-the-last-followed",
    "tl.where((expert >= 0) & (expert < E), expert, E)",
    "tl.where(expert >= 0, expert, E)",
    "test_moe_align.py::test_it_is_what_plain_python_makes",
)
TRITON.add(
    "unwritten-parts-summed",
    "here = (columns < H) & (tl.load(inverse_ptr + index) >= 0)",
    "here = columns < H",
    case("fused_moe", "triton", OUTSIDE),
)
TRITON.add(
    "weights-forgotten-in-groups",
    "    acc *= tl.load(weights_ptr + index, mask=index < A, other=0.0)[:, None]\n",
    "",
    case("fused_moe", "triton", "m=37,n=33,k=65,experts=5,topk=3,dtype=fp32"),
)
TRITON.add(
    "weights-forgotten-one-by-one",
    "total += part * tl.load(weights_ptr + index)",
    "total += part",
    case("fused_moe", "triton", "m=1,n=48,k=96,experts=16,topk=4,dtype=fp16"),
)
TRITON.add(
    "rows-of-the-assignments-number",
    "x_ptr, index // TOPK, index < A,",
    "x_ptr, index % TOPK, index < A,",
    case("fused_moe", "triton", "m=37,n=33,k=65,experts=5,topk=3,dtype=fp32"),
)
TRITON.add(
    "interleaved-ignored",
    "return columns * 2 + half if INTERLEAVED else columns + half * N",
    "return columns + half * N",
    case("fused_moe", "triton", f"m=1,n=40,k=64,experts=8,topk=2,dtype=fp16,{OSS.replace('7.0', '0.3')},add=True"),
)
TRITON.add(
    "far-weights-in-32-bits",
    "return max(x if isinstance(x, int) else _extent(x) for x in given) >= 2**31 - 2**16",
    "return False",
    case("fused_moe", "triton", "m=5,layout_b=far,n=24,k=40,experts=1,topk=1,dtype=fp16"),
)

# CUDA C++

LIES = "test_fused_moe.py::test_ids_and_maps_that_lie_count_nowhere[cuda]"
AHEAD = "test_fused_moe_cuda.py::test_what_is_loaded_before_the_wait"
CUDA.add(
    "a-tile-read-before-it-has-landed",
    '::"n"(STAGES - 1) : "memory");',
    '::"n"(STAGES) : "memory");',
    case("fused_moe", "cuda", "m=3,n=40,k=64,experts=40,topk=2,dtype=fp16,biases=True"),
)
CUDA.add(
    "map-followed-outside",
    "expert_here >= 0 && expert_here < r.known ? load_settled",
    "expert_here >= 0 ? load_settled",
    LIES,
)
CUDA.add(
    "experts-past-the-last-followed",
    "if (expert_here < 0 || expert_here >= r.experts) expert_here = -1;",
    "if (expert_here < 0) expert_here = -1;",
    case("fused_moe", "cuda", OUTSIDE),
)
CUDA.add(
    "groups-without-end",
    "if (++place == SHARE) place = 0, leader = own;",
    "place = min(place + 1, SHARE - 1);",
    case("fused_moe", "cuda", "m=33,spread=one,n=24,k=40,experts=6,topk=1,dtype=fp32"),
)
CUDA.add(
    "unwritten-parts-summed",
    "if (groups.expert_of[a] >= 0) total +=",
    "total +=",
    case("fused_moe", "cuda", OUTSIDE),
)
CUDA.add(
    "up-not-clamped-from-below",
    "    up = up < -t.limit ? -t.limit : up;\n",
    "",
    case("fused_moe", "cuda", CLAMPED),
)
CUDA.add(
    "past-the-end-of-a-row",
    "return EVEN_K || k + v * STEP_K + lane_k < weights.k;",
    "return EVEN_K || k + v * STEP_K + lane_k <= weights.k;",
    case("fused_moe", "cuda", "m=9,n=24,k=40,experts=3,topk=2,dtype=fp16"),
)
CUDA.add(
    "a-line-too-far",
    "for (line += WARPS; line >= lines; ++group) line -= lines;",
    "for (line += WARPS; line > lines; ++group) line -= lines;",
    "test_fused_moe_cuda.py::test_blocks_have_many_lines",
)
CUDA.add(
    "weights-from-a-cache-that-is-not-told",
    "= load_settled(c.choice_weights + threadIdx.x);",
    "= c.choice_weights[threadIdx.x];",
    AHEAD,
)
CUDA.add("dependents-before-the-wait", "stream.template fill<false>();", "stream.template fill<true>();", AHEAD)

# Gradients

GRADIENT = "test_fused_moe_gradients.py::test_gradients_are_right"
GRADIENTS.add(
    "rows-of-other-ranks-reach-a-token",
    "return found.masked_fill(away, 0)",
    "return found",
    GRADIENT,
)
GRADIENTS.add(
    "clamped-values-pass-a-gradient",
    "dgate.masked_fill(gate > call.limit, 0), dup.masked_fill(up.abs() > call.limit, 0)",
    "dgate, dup.masked_fill(up.abs() > call.limit, 0)",
    GRADIENT,
)
GRADIENTS.add(
    "slope-of-silu-without-alpha",
    "share * (1 + call.alpha * kept_gate * (1 - share))",
    "share * (1 + kept_gate * (1 - share))",
    GRADIENT,
)
GRADIENTS.add(
    "weights-gradient-without-the-bias",
    "dots = dots + (dy.to(gate.dtype) * call.b_down[of.expert]).sum(1)",
    "pass",
    GRADIENT,
)
