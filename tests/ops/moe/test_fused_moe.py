"""Experts end to end: both forms in Triton, experts without tokens, ids that lie, bits that do not change."""

import pytest
import torch

import tilery
from cases import home
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.measure.check import check, check_baseline
from tilery.measure.place import place

OP = REGISTRY["fused_moe"]
Config = OP.kernel("triton").Config
EACH, GROUPED = Config(1, 16, 32, 4, 2, "each"), Config(16, 32, 32, 4, 2)
FORMS = pytest.mark.parametrize("config", [EACH, GROUPED], ids=["each", "grouped"])
CUDA = pytest.param(
    "cuda", None, id="cuda", marks=pytest.mark.skipif(place(OP, "cuda").device is None, reason="no GPU, no emulator")
)
RUNS = pytest.mark.parametrize(
    ("kernel", "config"),
    [
        pytest.param("numba", None, id="numba"),
        pytest.param("triton", EACH, id="each"),
        pytest.param("triton", GROUPED, id="grouped"),
        CUDA,
    ],
)
SMALL = {"n": 40, "k": 70, "experts": 6, "topk": 2, "dtype": "fp32"}
OSS = {"interleaved": True, "biases": True, "limit": 0.7, "alpha": 1.702, "up_offset": 1.0, "add": True}


def drawn(kernel, seed=1, **params):
    sizes = SMALL | {"k": 72} if kernel == "cuda" else SMALL  # its rows start and end at multiples of 16 bytes
    return OP.inputs(**(sizes | params), device=home(kernel), seed=seed)


def run(kernel, config, args):
    return OP(**args, backend=kernel, config=config)


@FORMS
@pytest.mark.parametrize(
    "params",
    [
        {"m": 23} | OSS,
        {"m": 1} | OSS,
        {"m": 23, "away": 9, "add": True},
        {"m": 23, "outside": True, "biases": True},
        {"m": 9, "layout_b": "transposed"},
        {"m": 5, "layout_b": "far", "experts": 2, "dtype": "fp16"},
        {"m": 5, "layout_b": "far", "experts": 1, "topk": 1, "dtype": "fp16"},  # far within an expert
        {"m": 5, "layout": "far", "dtype": "fp16", "add": True},
        {"m": 7, "special": "nan", "limit": 1.0},
        {"m": 50, "experts": 1, "topk": 1},  # several blocks of one expert
        {"m": 40, "spread": "one", "n": 33, "k": 65},
    ],
    ids=str,
)
def test_both_forms_are_right(config, params):
    assert check(OP, "triton", case(**(SMALL | params)), home("triton"), config=config).refused is None


@pytest.mark.parametrize(
    ("params", "form"),
    [
        ({"m": 1, "experts": 128, "topk": 8}, "each"),
        ({"m": 8, "experts": 128, "topk": 8}, "each"),
        ({"m": 64, "experts": 128, "topk": 8}, "grouped"),
        ({"m": 1, "experts": 8, "topk": 2}, "each"),
        ({"m": 8, "experts": 8, "topk": 2}, "grouped"),
        ({"m": 8, "experts": 32, "topk": 8, "away": 224}, "each"),  # most choices are other ranks'
    ],
    ids=str,
)
def test_tokens_choose_the_form(params, form):
    call = call_for(OP, case(**(SMALL | params)))
    chosen = OP.kernel("triton").default(call)
    assert chosen.form == form and len(OP.kernel("triton").workspace(call, chosen)) == (1 if form == "each" else 7)


@RUNS
def test_weights_of_experts_without_tokens_are_not_read(kernel, config):
    args = drawn(kernel, m=9, experts=8)
    args["ids"].remainder_(4)
    wanted = run(kernel, config, args)
    for name in ("w_gate_up", "w_down"):
        args[name][4:] = float("nan")
    assert torch.equal(run(kernel, config, args), wanted) and wanted.isfinite().all()


@RUNS
def test_ids_and_maps_that_lie_count_nowhere(kernel, config):
    """In memory beside the map and the weights stands what would be seen."""
    args = drawn(kernel, m=4, experts=8)
    args |= {name: args[name][:6] for name in ("w_gate_up", "w_down")}
    ids = [[-1, 10], [11, 2**31 - 1], [-(2**31), 9], [0, 12]]
    args["ids"] = torch.tensor(ids, dtype=torch.int32, device=home(kernel))
    memory = torch.ones(30, dtype=torch.int32, device=home(kernel))
    args["expert_map"] = memory[10:20]
    args["expert_map"].copy_(torch.tensor([3, *[-1] * 7, 2**31 - 1, 7]))
    y = run(kernel, config, args)
    assert (y[:3] == 0).all() and (y[3] != 0).any()
    assert torch.allclose(
        y[3:], OP.reference(**{n: v[3:] if n in ("x", "weights", "ids") else v for n, v in args.items()}), 1e-4, 1e-5
    )


@FORMS
def test_a_token_has_the_same_bits_in_any_batch(config):
    """Within one form."""
    where = home("triton")
    if where.type == "cpu" and config is GROUPED:
        pytest.skip("NumPy's products, which the interpreter takes, depend on where in a tile a row lies")
    args, rows = drawn("triton", m=30, **OSS), ("x", "weights", "ids", "add")
    whole = run("triton", config, args)
    for order in (torch.randperm(30), torch.arange(9, 2, -1), torch.arange(5, 6)):
        part = {n: v[order.to(where)] if n in rows else v for n, v in args.items()}
        assert torch.equal(run("triton", config, part), whole[order.to(where)])


@RUNS
def test_an_addend_alone_is_left_where_no_expert_is_here(kernel, config):
    args = drawn(kernel, m=5, add=True)
    args["ids"].fill_(-1)
    assert torch.equal(run(kernel, config, args), args["add"])


@RUNS
def test_an_expert_that_is_chosen_twice_counts_twice(kernel, config):
    args = drawn(kernel, m=6)
    args["ids"][:, 1] = args["ids"][:, 0]
    once = args | {"ids": args["ids"][:, :1].contiguous(), "weights": args["weights"].sum(1, keepdim=True)}
    assert torch.allclose(run(kernel, config, args), run(kernel, config, once), 1e-4, 1e-5)


@pytest.mark.parametrize("name", ["baseline:torch", "baseline:loop"])
@pytest.mark.parametrize("params", [{}, OSS, {"away": 9}, {"dtype": "bf16", "outside": True, "biases": True}], ids=str)
def test_torch_agrees(name, params):
    sizes = SMALL | {"k": 72}  # torch's grouped products take rows on 16 bytes
    assert check_baseline(OP, name, case(m=30, **(sizes | params)), "cpu").errors


def test_routed_experts_are_a_layer_of_a_model():
    """moe_route, then fused_moe, beside a loop over experts."""
    g = torch.Generator().manual_seed(5)
    x, router, gate_up, down = (
        torch.randn(*shape, generator=g) / 6 for shape in ((12, 32), (8, 32), (8, 48, 32), (8, 32, 24))
    )
    weights, ids = tilery.moe_route(tilery.linear(x, router), None, 2)
    y, p = tilery.fused_moe(x, gate_up, down, weights, ids), torch.softmax(x @ router.t(), -1)
    for t in range(12):
        values, chosen = p[t].topk(2)
        wanted = 0
        for value, e in zip(values / values.sum(), chosen):
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            wanted = wanted + value * (down[e] @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(y[t], wanted, 1e-4, 1e-5)


def test_it_costs_what_its_experts_weigh():
    call = call_for(OP, case(m=1, n=768, k=2048, experts=128, topk=8, dtype="bf16"))
    cost = OP.cost(call)
    assert call.experts_hit == 8 and cost.flops == 8 * 6 * 768 * 2048
    assert cost.reads == 8 * 3 * 768 * 2048 * 2 + 2048 * 2 + 8 * 4 + 8 * 4 and cost.writes == 2048 * 2
    many = call_for(OP, case(m=8, n=768, k=2048, experts=128, topk=8, dtype="bf16"))
    assert many.experts_hit == 52 and many.rows_per_expert == 2  # 128 · (1 - (15/16)⁸) = 51.6
    away = call_for(OP, case(m=16, n=768, k=2048, experts=32, topk=8, away=224, dtype="bf16"))
    assert away.expected == 16 and away.experts_hit == 13


def test_models_with_experts_have_sizes():
    from tilery import models

    assert OP.model_sizes(models.load("qwen3-30b-a3b")) == [{"n": 768, "k": 2048, "experts": 128, "topk": 8}]
    assert OP.model_sizes(models.load("llama-8b")) == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(1, 16, 32, 4, 2, "some"), "form must be grouped or each, got 'some'"),
        (Config(1, 24, 32, 4, 2, "each"), "block_n and block_k must be powers of two"),
        (Config(8, 32, 32, 4, 2), "blocks must be powers of two from 16 to 256"),
    ],
)
def test_a_wrong_config_is_refused(config, message):
    assert message in OP.kernel("triton").refusal(call_for(OP, case(m=3, **SMALL)), config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(3, 2, 70)}, r"x must be \[T, H\], got \[3, 2, 70\]"),
        ({"x": torch.ones(3, 71)}, r"w_down must be \[E, 71, I\] as x is \[T, H\], got \[6, 70, 40\]"),
        ({"w_gate_up": torch.ones(6, 40, 70)}, r"w_gate_up must be \[6, 80, 70\] .* got \[6, 40, 70\]"),
        ({"w_down": torch.ones(6, 70, 40).half()}, "w_down must be fp32 as x is, got fp16"),
        ({"w_down": torch.ones(0, 70, 40)}, r"E and I from 1 on, got \[0, 70, 40\]"),
        ({"weights": torch.ones(3, 2).half()}, r"weights must be fp32\[3, 2\], got fp16\[3, 2\]"),
        ({"weights": torch.ones(2, 3).t()}, "weights must be contiguous, got strides"),
        ({"ids": torch.ones(4, 2, dtype=torch.int32)}, r"ids must be \[3, k\] as x is, got \[4, 2\]"),
        ({"ids": torch.ones(3, 2)}, r"ids must be int32\[T, k\], got fp32\[3, 2\]"),
        ({"b_gate_up": torch.ones(6, 40)}, r"b_gate_up must be fp32\[6, 80\], got fp32\[6, 40\]"),
        ({"b_down": torch.ones(6, 70).half()}, r"b_down must be fp32\[6, 70\], got fp16\[6, 70\]"),
        ({"add": torch.ones(4, 70)}, r"add must be \[3, 70\] as x is, got \[4, 70\]"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(BadInput, match=f"fused_moe: .*{message}"):
        tilery.fused_moe(**(drawn("numba", m=3) | changes))
