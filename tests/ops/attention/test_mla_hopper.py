"""mla by TMA and wgmma: what it refuses and chooses, what the driver gets, that it is attention of whole heads."""

import re
from dataclasses import replace

import pytest
import torch
from hopper_checks import runs_here, softmax_overlaps_products
from hopper_launches import run

from compilers import most_spills
from tilery import languages
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.hardware import device
from tilery.measure.check import check, check_call
from tilery.ops.attention.attention import attention
from tilery.ops.attention.mla import inputs, mla

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.ops.attention.cuda import forward
from tilery.ops.attention.cuda import mla as implementation
from tilery.ops.attention.cuda.forward import Config

kernel = mla.kernel("cuda.hopper")
PLAIN = {"m": 300, "heads": 4, "nope": 128, "rope": 64, "value": 128, "dtype": "bf16"}
SIZES = [(n, r, e) for n in (16, 32, 64, 128) for r in (16, 32, 64) for e in (16, 32, 64, 128) if e <= n]
DEFAULT = Config(128, 112, 4)


def call(**more):
    return call_for(mla, case(**PLAIN | more))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "fp32"}, "multiplies fp16 and bf16 alone, got fp32"),
        ({"layout": "misaligned"}, "q must start at a multiple of 16 bytes"),
        ({"layout": "padded"}, None),
        ({"order": "thd", "lengths": "3+300"}, None),
        ({"order": "bhsd", "causal": False, "keys": 77}, None),
        ({"keys": 0}, None),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_takes_what_tma_can_load(more, said):
    why = kernel.refusal(call(**more))
    assert why is None if said is None else said in why


@pytest.mark.parametrize("name", ["q", "q_rope", "k", "k_rope", "v"])
@pytest.mark.usefixtures("hopper")
def test_every_tensor_must_lie_on_16_bytes(name):
    specs = [
        x._replace(aligned=False) if each == name else x for each, x in zip(mla.names, specs_for(mla, case(**PLAIN)))
    ]
    why = kernel.refusal(mla.call_type(mla.signature.references(specs)))
    assert why == f"{name} must start at a multiple of 16 bytes for TMA to load from it"


@pytest.mark.parametrize(
    ("config", "more", "said"),
    [
        (Config(128, 80, 4), {}, "tiles of heads of 192 must be 128 × 112, 128 × 128, 128 × 96, got 128 × 80"),
        (Config(128, 128, 4), {}, "stages must be 2 to 3 for shared memory to hold them, got 4"),
        (replace(DEFAULT, multicast=2), {"order": "thd"}, "of sequences that are not packed"),
        (replace(DEFAULT, multicast=2), {}, None),
        (Config(128, 176, 4), {"nope": 64, "value": 64}, None),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_says_why_it_refuses_a_config(config, more, said):
    why = kernel.refusal(call(**more), config)
    assert why is None if said is None else said in why


@pytest.mark.parametrize("order", ["bshd", "thd"])
@pytest.mark.parametrize(("nope", "rope", "value"), SIZES)
@pytest.mark.usefixtures("hopper")
def test_the_default_and_all_configs_are_taken(nope, rope, value, order):
    for m in (1, 4096):
        problem = call(m=m, nope=nope, rope=rope, value=value, order=order)
        found = kernel.configs(problem)
        assert kernel.default(problem) in found and 4 <= len(found) == len(set(found)) <= 9
        assert all(kernel.refusal(problem, c) is None for c in found)
        assert all(kernel.estimate(problem, c).blocks > 0 for c in found)


@pytest.mark.usefixtures("hopper")
def test_is_asked_after_triton():
    assert list(mla.kernels).index("cuda.hopper") > list(mla.kernels).index("triton")
    assert kernel.default(call()) == DEFAULT
    assert kernel.default(call(order="thd")) == replace(DEFAULT, persistent=False)


FORMS = [
    (DEFAULT, {}),
    (replace(DEFAULT, multicast=2), {"dtype": "fp16"}),
    (Config(128, 128, 3), {}),
    (DEFAULT, {"rope": 16, "value": 64}),
    (Config(128, 176, 4), {"nope": 64, "value": 64}),
]


@pytest.mark.parametrize(("config", "more"), FORMS, ids=str)
@pytest.mark.usefixtures("hopper")
def test_every_form_builds_and_computes_p_while_it_multiplies(config, more):
    problem = call(**more)
    assert kernel.refusal(problem, config) is None
    made = policy.compiled(mla, "cuda.hopper", problem, config, "sm_90")
    assert made.spills <= most_spills("cuda") and made.registers == 168
    shared = forward.shared_bytes(config.block_m, config.block_n, config.stages, kernel.width(problem))
    assert made.shared == shared + 1024 <= device.gpu(torch.device("cuda", 0)).shared_per_block
    sass = toolkit.sass(made.cubin)
    assert f"HGMMA.64x{config.block_n}x16.F32" in sass and "UTMALDG.4D" in sass
    assert ("MULTICAST" in sass) == (config.multicast > 1)
    columns = forward.columns(problem.value_dim)
    assert re.search(rf"HGMMA\.64x{columns}x16\.F32\S* R\d+, R\d+, gdesc\[UR\d+\]\.tnspB", sass)  # P from registers
    assert softmax_overlaps_products(sass, config.block_n)


# What is handed to the driver, without one.


def given(**more):
    return mla.complete((), inputs(**PLAIN | {"device": "cpu"} | more))


def test_launches_as_planned(launches):
    config = replace(DEFAULT, multicast=2)
    q, q_rope, k, k_rope, v, *rest = given(
        batch=3, layout="padded"
    )  # q and q_rope are views of one tensor, k and v too
    ((one, grid, args),), (out,), _ = run(mla, config, (q, q_rope, k, k_rope, v, *rest), launches)
    assert (one.threads, one.shared, one.cluster, one.pdl) == (384, forward.shared_bytes(128, 112, 4, 192), 2, True)
    assert grid == 3 * 4 * 2 * 2  # sequences, heads, and tiles of 256, for two blocks each
    assert "128, 64, 128, 112, 2, 4, 2>" in one.name
    addresses, sizes, steps, boxes, _ = zip(*launches[1])
    assert addresses == tuple(x.data_ptr() for x in (q, q_rope, k, k_rope, v))
    assert boxes == ((128,), (128,), (56,), (56,), (56,))
    assert [size[:3] for size in sizes] == [(128, 300, 4), (64, 300, 4), (128, 300, 4), (64, 300, 1), (128, 300, 4)]
    assert [step[:2] for step in steps] == [(832, 192), (832, 192), (1088, 256), (128, 64), (1088, 256)]
    names = "q_map", "q_rope_map", "k_map", "k_rope_map", "v_map", "out", "lse"
    assert [args[name] for name in names] == [1, 2, 3, 4, 5, out.data_ptr(), 0]
    assert args["softmax_scale"] == pytest.approx(192**-0.5)


def test_packed_sequences_are_launched_even_where_there_are_no_keys(launches):
    """Their numbers may say otherwise, and their rows are NaN then. What is mapped as keys is never read."""
    q, q_rope, k, k_rope, v, *rest = given(order="thd", lengths="20+0+9", m=20)
    nothing = (k[:0], k_rope[:0], v[:0])
    ((_, grid, args),), _, _ = run(mla, replace(DEFAULT, persistent=False), (q, q_rope, *nothing, *rest), launches)
    assert grid == 4 * 4 and args["seqlen_k"] == args["max_seqlen_k"] == 0
    assert {how[0] for how in launches[1][2:]} == {q.data_ptr()}


def test_where_there_are_no_keys_nothing_is_launched(launches):
    _, (out,), _ = run(mla, DEFAULT, given(keys=0), launches)
    assert not launches[0] and not out.any()


# In the emulator, or on a card.

TILES = [(m, n, width) for width, tiles in implementation.Mla.tiles.items() for m, n in tiles]


@pytest.mark.parametrize(
    ("tile", "form"),
    [(tile, {}) for tile in TILES]
    + [(tile, form) for tile in TILES[2:4] for form in ({"persistent": False, "stages": 2}, {"multicast": 2})],
    ids=str,
)
def test_every_form_is_right(tile, form):
    m, n, width = tile
    config = replace(Config(m, n, 3), **form)
    one = case(m=150, keys=290, heads=3, nope=width - 64, rope=64, value=width - 64, dtype="fp16")
    assert check(mla, "cuda.hopper", one, runs_here(mla), config=config).refused is None


@pytest.mark.parametrize(
    ("nope", "more"),
    [(128, {}), (128, {"causal": False, "order": "thd", "lengths": "150+0+37"}), (64, {"scale": -0.1})],
)
def test_is_attention_of_whole_heads(nope, more):
    """The same products in the same order: bit for bit, where the tiles are the same."""
    where, config = runs_here(mla), Config(128, 96 if nope == 128 else 128, 4)
    drawn = PLAIN | {"m": 150, "heads": 2, "nope": nope, "value": nope, "device": str(where)} | more
    args = mla.complete((), inputs(**drawn))
    q, q_rope, k, k_rope, v, *ends, scale, causal, layout, most_q, most_k = args
    whole_q, whole_k = torch.cat((q, q_rope), -1), torch.cat((k, k_rope.expand(*k.shape[:-1], -1)), -1)
    how = {"scale": scale, "causal": causal, "layout": layout, "max_seqlen_q": most_q, "max_seqlen_k": most_k}
    whole_v = torch.nn.functional.pad(v, (0, 64))  # which attention takes of the size of keys alone
    tensors = {"q": whole_q, "k": whole_k, "v": whole_v, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends))}
    found, want = (
        policy.decide(op, op.call(op.specs(given)), "cuda.hopper", config)(given)
        for op, given in ((mla, args), (attention, attention.complete((), tensors | how)))
    )
    assert found.isfinite().all() and torch.equal(found, want[..., :nope])


@pytest.mark.parametrize("wrong", [None, (1, -3), (2, 2**30)])
def test_packed_sequences_may_have_more_keys_than_queries(wrong):
    """As chunks of a prefill have. k and v are views of one tensor, and k_rope of one with the latent."""
    where, g = runs_here(mla), torch.Generator().manual_seed(0)
    q, kv = (torch.randn(*shape, generator=g).half().to(where) for shape in ((20, 2, 192), (150, 2, 256)))
    latent = torch.randn(150, 1, 576, generator=g).half().to(where)
    q_ends, k_ends = (
        torch.tensor(ends, dtype=torch.int32, device=where) for ends in ([0, 5, 5, 18], [0, 120, 121, 140])
    )
    if wrong:
        k_ends[wrong[0]] = wrong[1]
    tensors = {"q": q[..., :128], "q_rope": q[..., 128:], "k": kv[..., :128], "k_rope": latent[..., 512:]}
    tensors |= {"v": kv[..., 128:], "cu_seqlens_q": q_ends, "cu_seqlens_k": k_ends}
    how = {"causal": True, "layout": "thd", "max_seqlen_q": 13, "max_seqlen_k": 120}
    args = mla.complete((), tensors | how)
    assert check_call(mla, "cuda.hopper", args, "keys of a chunk").refused is None
