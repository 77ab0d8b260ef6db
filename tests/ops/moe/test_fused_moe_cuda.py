"""fused_moe of few tokens in CUDA C++: what is refused, what runs ahead of what, and that every form is right."""

import re
from dataclasses import replace

import pytest
import torch

from compilers import most_spills
from tilery import languages
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.languages import cuda_glue
from tilery.ops.moe.cuda.fused import Config

OP = REGISTRY["fused_moe"]
KERNEL = OP.kernel("cuda")
SMALL = {"m": 4, "n": 40, "k": 72, "experts": 6, "topk": 2, "dtype": "fp32"}
QWEN = {"m": 1, "n": 768, "k": 2048, "experts": 128, "topk": 8, "dtype": "bf16"}
MIXTRAL = {"m": 1, "n": 14336, "k": 4096, "experts": 8, "topk": 2, "dtype": "bf16"}
DEEPSEEK = {"m": 1, "n": 2048, "k": 7168, "experts": 32, "topk": 8, "away": 224, "dtype": "bf16"}
PLAIN = Config(rows=2, vectors=1, stages=2, warps=4, share=2)
WHERE = place(OP, "cuda").device
runs = pytest.mark.skipif(WHERE is None, reason="needs a GPU or the emulator")


def planned(params, config=None):
    """Both launches."""
    call = call_for(OP, case(**params))
    chosen = config or KERNEL.default(call)
    return KERNEL.launches(policy.with_workspace(OP, KERNEL, call, chosen)[1], chosen)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"m": 65}, "takes up to 128 assignments, which it does not sort, got 65 × 2"),
        ({"k": 70}, "rows of x must be contiguous, and start and end at multiples of 16 bytes"),
        ({"n": 42}, "rows of w_down must be contiguous, and start and end at multiples of 16 bytes"),
        ({"layout_b": "transposed"}, "rows of w_gate_up must be contiguous"),
        ({"layout": "misaligned"}, "rows of x must be contiguous"),
        ({"n": 2**22, "experts": 2, "k": 8}, "H and I must be below 4194304, got 8 and 4194304"),
    ],
    ids=str,
)
def test_what_it_cannot_take_is_said(more, why):
    assert why in KERNEL.refusal(call_for(OP, case(**SMALL | more)))


@pytest.mark.parametrize(
    "more", [{}, {"m": 64}, {"m": 1, "topk": 6}, {"layout": "padded", "layout_b": "padded"}], ids=str
)
@pytest.mark.usefixtures("hopper")
def test_what_it_takes(more):
    call = call_for(OP, case(**SMALL | more))
    assert KERNEL.refusal(call) is None and KERNEL.refusal(call, KERNEL.default(call)) is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rows": 3}, "rows must be 2 or 4, vectors 1, 2 or 4 and share 1, 2, 4 or 8, got 3, 1 and 2"),
        ({"vectors": 3}, "got 2, 3 and 2"),
        ({"share": 16}, "got 2, 1 and 16"),
        ({"warps": 2}, "warps must be 4, 8 or 16, got 2"),
        ({"stages": 60}, "needs 268288 bytes of shared memory, and a block may have 232448"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_configs_that_do_not_fit_are_refused(changes, why):
    assert why in KERNEL.refusal(call_for(OP, case(**SMALL)), replace(PLAIN, **changes))


@pytest.mark.parametrize("params", [QWEN, QWEN | {"m": 8}, MIXTRAL | {"m": 8}, DEEPSEEK], ids=str)
@pytest.mark.parametrize("gpu", ["a100", "l40s", "h200", "b200", "rtx5090"])
def test_both_launches_are_on_an_sm_at_once(gpu, params):
    """Registers aside: the second one's weights are in flight while the first ends."""
    with device.pretend(gpu):
        device_now = device.gpu(torch.device("cuda", 0))
        gate_up, down = planned(params)
        used = sum(x.options["shared"] + 6 * 1024 + device_now.reserved_shared for x in (gate_up, down))
        assert used <= device_now.shared_per_sm and gate_up.options["shared"] >= 24 * 1024
        assert gate_up.grid == device_now.sms and gate_up.pdl and down.pdl
        assert all(
            KERNEL.refusal(call_for(OP, case(**params)), c) is None
            for c in KERNEL.configs(call_for(OP, case(**params)))
        )


@pytest.mark.usefixtures("hopper")
def test_tiles_of_a_row_leave_none_of_their_lanes_idle():
    gate_up, down = planned(QWEN)  # rows of 2048 and of 768
    assert (gate_up.constants["VECS"], down.constants["VECS"]) == (2, 1)
    assert gate_up.constants["EVEN_K"] and down.constants["EVEN_K"] and down.constants["STAGES"] == 12
    assert not planned(SMALL)[0].constants["EVEN_K"]
    sums = planned(QWEN | {"m": 16})[1]
    assert sums.args["max_rows"] * 128 * 4 <= 16 * 1024 and sums.grid * sums.args["max_rows"] >= 2048


@pytest.mark.usefixtures("hopper")
def test_tokens_that_may_choose_one_expert_share_its_weights():
    shares = [KERNEL.default(call_for(OP, case(**QWEN | {"m": m}))).share for m in (1, 2, 3, 8, 16)]
    assert shares == [1, 2, 4, 8, 8]


def test_bulk_copies_need_hopper():
    with device.pretend("a100"):
        call = call_for(OP, case(**QWEN))
        assert KERNEL.refusal(call, replace(PLAIN, bulk=True)) == "bulk copies need sm_90, got sm_80"
        assert not any(config.bulk for config in KERNEL.configs(call))
    with device.pretend("h200"):
        assert any(config.bulk for config in KERNEL.configs(call))


@pytest.mark.parametrize("bulk", [False, True], ids=["cp.async", "bulk"])
@pytest.mark.parametrize("params", [QWEN, QWEN | {"m": 8}, MIXTRAL | {"m": 8}, DEEPSEEK], ids=str)
@pytest.mark.usefixtures("hopper")
def test_what_is_loaded_before_the_wait(params, bulk):
    """gate_up waits first and signals behind; down loads ids, routing weights and experts' weights ahead, no more."""
    config = replace(KERNEL.default(call_for(OP, case(**params))), bulk=bulk)
    gate_up, down = (cuda_glue.compile(launch, "sm_90") for launch in planned(params, config))
    copies = "cp.async.bulk.shared::cluster" if bulk else "cp.async.cg.shared"
    access = r"\b(?:ld|st|red|atom|cp)[\w.:]*global[\w.:]*"
    early, late = down.code["ptx"].split("griddepcontrol.wait", 1)
    assert {op.partition(".global")[0] for op in re.findall(access, early)} == {"ld.relaxed.gpu", copies}
    assert "launch_dependents" not in early and "launch_dependents" in late
    early, late = gate_up.code["ptx"].split("griddepcontrol.wait", 1)
    assert not re.findall(access, early) and "launch_dependents" not in early and "launch_dependents" in late
    for made in (gate_up, down):
        assert made.spills <= most_spills("cuda") and 256 * made.registers * 2 <= 65536


# Where it runs: on a GPU, or in the emulator.


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (PLAIN, {}),
        (replace(PLAIN, rows=4, vectors=2), {"dtype": "bf16", "add": True}),
        (replace(PLAIN, vectors=4, stages=1), {"dtype": "fp16", "k": 1024, "n": 16}),  # a tile fills a row
        (replace(PLAIN, stages=5, warps=8, blocks=2), {"k": 392, "m": 9}),  # the last tile of a row is not full
        (replace(PLAIN, warps=16), {"m": 1, "n": 4}),  # more warps than lines
        (replace(PLAIN, share=1), {"m": 30, "spread": "one"}),  # each token reads the weights
        (replace(PLAIN, share=8), {"m": 30, "spread": "one", "topk": 1}),  # groups of 8, 8, 8 and 6
        (replace(PLAIN, share=4), {"m": 64, "outside": True}),  # as many assignments as it takes
        (replace(PLAIN, share=4), {"m": 21, "topk": 6, "away": 20, "biases": True, "add": True}),
        (PLAIN, {"m": 7, "special": "nan", "limit": 1.0}),
        (replace(PLAIN, bulk=True), {"m": 9, "add": True, "biases": True}),
        (replace(PLAIN, bulk=True, rows=4, vectors=2, stages=3), {"dtype": "fp16", "k": 1024, "n": 520}),
        (PLAIN, {"m": 5, "layout_b": "far", "experts": 2, "dtype": "fp16"}),
        (PLAIN, {"m": 5, "layout": "far", "dtype": "fp16", "add": True}),
        (replace(PLAIN, rows=4), {"interleaved": True, "biases": True, "limit": 0.7, "alpha": 1.702, "up_offset": 1.0}),
    ],
    ids=str,
)
@runs
def test_every_form_is_right(config, more):
    assert check(OP, "cuda", case(**SMALL | more), WHERE, config=config).refused is None


@pytest.mark.parametrize(
    "config", [PLAIN, replace(PLAIN, rows=4, warps=8, blocks=2), replace(PLAIN, bulk=True)], ids=str
)
@runs
def test_blocks_have_many_lines(config):
    """As on a GPU of three SMs: warps go from line to line and from expert to expert."""
    with device.pretend(replace(device.gpu(WHERE), sms=3)):
        params = SMALL | {"m": 6, "n": 48, "k": 136, "outside": True, "away": 2}
        assert check(OP, "cuda", case(**params), WHERE, config=config).refused is None


@runs
def test_a_token_has_the_same_bits_in_any_batch_and_form():
    """No order of sums depends on which tokens share an expert."""
    args = OP.inputs(**SMALL | {"m": 20, "add": True, "biases": True}, device=WHERE)
    whole = OP(**args, backend="cuda", config=PLAIN)
    for share in (1, 4, 8):
        assert torch.equal(OP(**args, backend="cuda", config=replace(PLAIN, share=share, warps=8, stages=3)), whole)
    for order in (torch.randperm(20), torch.arange(9, 2, -1), torch.arange(5, 6)):
        part = args | {name: args[name][order.to(WHERE)] for name in ("x", "weights", "ids", "add")}
        assert torch.equal(OP(**part, backend="cuda", config=PLAIN), whole[order.to(WHERE)])
