"""Products of fp8 with scales: what they refuse, what they carry, and that parts of K are added up the same way."""

import pytest
import torch

from tilery.base.errors import BadInput, NoBackend
from tilery.base.spec import TensorSpec, case
from tilery.core.cases import call_for, specs_for
from tilery.hardware import device
from tilery.measure.check import check, check_baseline
from tilery.measure.place import place
from tilery.ops import dequantize_fp8, fp8_matmul, fp8_matmul_rowwise, quantize_fp8


def given(op, m=8, n=130, k=256, **more):
    return op.complete((), op.inputs(m=m, n=n, k=k, out="fp32", device="cpu", **more))


def with_one(args, **changed):
    names = ("a", "a_scale", "b", "b_scale", "out_dtype")
    return [changed.get(name, value) for name, value in zip(names, args)]


A, A_SCALE, B, B_SCALE, _ = given(fp8_matmul)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"a": A.bfloat16()}, "a must be e4m3 or e5m2, got bf16; quantize_fp8 makes it"),
        ({"b": B.float()}, "b must be e4m3 or e5m2, got fp32"),
        ({"a": A[0]}, r"a must be a matrix \[M, K\], got shape \[256\]"),
        ({"b": B[:, :128]}, r"must agree in K, got \[8, 256\] and \[130, 128\]"),
        ({"b": B.t().contiguous().t()}, r"b \[N, K\] must have K contiguous, got strides \[1, 130\]"),
        ({"a": A[:, ::2], "b": B[:, ::2]}, r"a \[M, K\] must have K contiguous, got strides \[256, 2\]"),
        ({"a": A[:, :144], "b": B[:, :144]}, "K must be a multiple of 128, got 144; pad a and b with zeros along K"),
        ({"a_scale": A_SCALE[:, :1]}, r"a_scale must be \[8, 2\] \(one per group of 128\) .* got \[8, 1\]"),
        ({"a_scale": A_SCALE[:4]}, r"a_scale must be \[8, 2\] .* got \[4, 2\]"),
        ({"a_scale": A_SCALE.t()}, r"a_scale must be \[8, 2\] .* got \[2, 8\]"),
        ({"b_scale": B_SCALE[:1]}, r"b_scale must be \[2, 2\] .* for b \[130, 256\], got \[1, 2\]"),
        ({"b_scale": torch.ones(130, 1)}, r"b_scale must be \[2, 2\] .* got \[130, 1\]"),
        ({"a_scale": A_SCALE.half()}, "a_scale must be fp32, got fp16"),
        ({"b_scale": B_SCALE.double()}, "b_scale must be fp32, got float64"),
        ({"a_scale": torch.ones(16, 4)[::2, ::2]}, r"a_scale must have stride 1 along one .* strides \[8, 2\]"),
        ({"a_scale": torch.ones(8, 1).expand(8, 2)}, "a_scale must not be expanded, got stride 0 along dimension 1"),
        ({"out_dtype": "e4m3"}, "out_dtype must be one of fp32, fp16, bf16, got 'e4m3'"),
        ({"out_dtype": torch.float16}, "out_dtype must be str, got dtype"),
        ({"a_scale": 1.0}, "a_scale must be Tensor, got float"),
    ],
)  # fmt: skip
def test_bad_input_is_named(changed, said):
    with pytest.raises(BadInput, match=said):
        fp8_matmul(*with_one((A, A_SCALE, B, B_SCALE, "fp32"), **changed))


@pytest.mark.parametrize("name", ["a_scale", "b_scale"])
@pytest.mark.parametrize("op", [fp8_matmul, fp8_matmul_rowwise], ids=lambda op: op.name)
def test_scales_on_another_device_are_named(op, name):
    specs = dict(zip(op.names, specs_for(op, case(m=8, n=130, k=256), "cuda:0")))
    specs[name] = specs[name]._replace(device=torch.device("cpu"))
    with pytest.raises(BadInput, match=f"all tensors must be on one device, got a on cuda:0, .*{name} on cpu"):
        op.call(tuple(specs.values()))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"a": A[:, :24], "b": B[:, :24]}, "K must be a multiple of 16, got 24"),
        ({"a_scale": torch.ones(8)}, r"a_scale must be \[8, 1\] \(one per row\) or \[1\] \(one for all\) .* got \[8\]"),
        ({"a_scale": torch.ones(())}, r"a_scale must be .* got \[\]"),
        ({"b_scale": torch.ones(1, 130)}, r"b_scale must be \[130, 1\] \(one per row\) or \[1\] .* got \[1, 130\]"),
        ({"b_scale": torch.ones(1).bfloat16()}, "b_scale must be fp32, got bf16"),
    ],
)
def test_bad_input_of_rows_is_named(changed, said):
    with pytest.raises(BadInput, match=said):
        fp8_matmul_rowwise(*with_one(given(fp8_matmul_rowwise), **changed))


def test_a_config_of_another_kernel_or_variant_is_refused():
    triton, numba = (fp8_matmul.kernel(name) for name in ("triton", "numba"))
    args = A, A_SCALE, B, B_SCALE, "fp32"
    with pytest.raises(BadInput, match="config"):
        fp8_matmul(*args, backend="numba", config=triton.Config(64, 64, 4, 3))
    with pytest.raises(NoBackend, match="tile of 5 x 7 is not made of register tiles"):
        fp8_matmul(*args, backend="numba", config=numba.Config(5, 7, False))
    call = call_for(fp8_matmul, case(m=64, n=128, k=256))
    for config, said in (
        (triton.Config(48, 64, 4, 3), "powers of two"),
        (triton.Config(64, 64, 4, 3, split_k=3), "powers of two"),
        (triton.Config(64, 64, 4, 3, split_k=4), "split_k must be at most 2, the blocks of 128 in K, got 4"),
        (triton.Config(64, 64, 4, 3, block_k=64), "block_k must be 128"),
        (triton.Config(128, 128, 8, 9), "bytes of shared memory, a block has"),
    ):
        with device.pretend("sm_90"):
            assert said in triton.refusal(call, config)


def test_sums_of_quantised_tensors_are_those_of_what_they_stand_for():
    x, w = torch.randn(40, 384, generator=torch.Generator().manual_seed(1)), torch.randn(200, 384)
    for layout in ("row", "column"):
        (a, a_scale), (b, b_scale) = quantize_fp8(x, layout=layout), quantize_fp8(w, per="block")
        expected = dequantize_fp8(a, a_scale, dtype="fp32") @ dequantize_fp8(b, b_scale, per="block", dtype="fp32").t()
        torch.testing.assert_close(fp8_matmul(a, a_scale, b, b_scale, "fp32"), expected, rtol=1e-5, atol=1e-4)
    for per in ("token", "tensor"):
        (a, a_scale), (b, b_scale) = quantize_fp8(x, per=per), quantize_fp8(w, per=per)
        expected = dequantize_fp8(a, a_scale, per, "fp32") @ dequantize_fp8(b, b_scale, per, "fp32").t()
        torch.testing.assert_close(fp8_matmul_rowwise(a, a_scale, b, b_scale, "fp32"), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("m", [8, 40])  # by dot products, by tiles
def test_nan_and_zero_scales_are_carried(m):
    a, a_scale, b, b_scale, out = given(fp8_matmul, m=m)
    a_scale[1, 1], a_scale[2] = float("nan"), 0
    b_scale[1, 0] = float("nan")
    c = fp8_matmul(a, a_scale, b, b_scale, out)
    assert c[1].isnan().all() and c[:, 128:].isnan().all() and (c[2, :128] == 0).all()
    assert c[3:, :128].isfinite().all() and c[0, :128].isfinite().all()
    a, a_scale, b, b_scale, out = given(fp8_matmul_rowwise, m=m)
    a_scale[1], a_scale[2], b_scale[5] = float("nan"), 0, float("nan")
    c = fp8_matmul_rowwise(a, a_scale, b, b_scale, out)
    assert c[1].isnan().all() and c[:, 5].isnan().all() and c[0, :5].isfinite().all() and (c[2, :5] == 0).all()


@pytest.mark.parametrize("op", [fp8_matmul, fp8_matmul_rowwise], ids=lambda op: op.name)
@pytest.mark.parametrize("split_k", [1, 2, 4, 8])
def test_parts_of_k_are_right_and_give_the_same_bits(op, split_k):
    """Seven blocks of K: the parts are not equal, and of eight one would be empty."""
    where = place(op, "triton")
    if where.device is None:
        pytest.skip("needs a GPU or Triton's interpreter")
    problem, config = case(m=17, n=70, k=7 * 128, out="fp32"), op.kernel("triton").Config(16, 64, 4, 3, split_k)
    if split_k == 8:
        assert "split_k must be at most 7" in check(op, "triton", problem, where.device, config=config).refused
        return
    assert check(op, "triton", problem, where.device, config=config).errors[0] < 1e-3
    args = op.complete((), op.inputs(**problem.params, device=where.device, seed=3))
    first, *others = (op(*args, backend="triton", config=config) for _ in range(10))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("op", [fp8_matmul, fp8_matmul_rowwise], ids=lambda op: op.name)
def test_wide_tiles_take_a_scale_per_column(op):
    """A tile of 256 columns has two blocks of b's scales."""
    where = place(op, "triton")
    if where.device is None:
        pytest.skip("needs a GPU or Triton's interpreter")
    config = op.kernel("triton").Config(16, 256, 8, 2)
    assert check(op, "triton", case(m=20, n=300, k=256, out="fp16"), where.device, config=config).errors


def test_a_dropped_block_of_k_is_found():
    a, a_scale, b, b_scale, _ = given(fp8_matmul, m=64, k=1024)
    less = fp8_matmul(a[:, :-128], a_scale[:, :-1], b[:, :-128], b_scale[:, :-1], "fp32").double()
    right = fp8_matmul.reference(a, a_scale.double(), b, b_scale.double())
    assert (less - right).square().mean().sqrt() / right.square().mean().sqrt() > 0.1 > max(fp8_matmul.allowed.values())


def test_few_tiles_are_cut_along_k_by_default():
    kernel = fp8_matmul.kernel("triton")
    with device.pretend("sm_90"):
        splits = [
            kernel.default(call_for(fp8_matmul, case(m=m, n=n, k=k))).split_k
            for m, n, k in ((16, 512, 8192), (16, 512, 256), (4096, 4096, 8192))
        ]
    assert splits == [8, 1, 1]


def test_buckets_tell_formats_outputs_and_layouts_apart():
    def bucket(op=fp8_matmul, **more):
        return op.bucket(call_for(op, case(**{"m": 16, "n": 256, "k": 512, **more})))

    assert bucket() == ("n=256,k=512,e4m3,e4m3,bf16,column", {"m": 16})
    assert bucket(m=1).exact == bucket().exact  # one row in the layout of columns too
    different = [{"dtype": "e5m2"}, {"dtype_b": "e5m2"}, {"out": "fp16"}, {"scales": "row"}, {"n": 128}, {"k": 256}]
    assert len({bucket(**more).exact for more in ({}, *different)}) == 7
    assert bucket(fp8_matmul_rowwise, scales="tensor").exact == "n=256,k=512,e4m3,e4m3,bf16,tensor,token"


def test_the_peers_of_a_cpu_answer_right():
    for op in (fp8_matmul, fp8_matmul_rowwise):
        for out in ("bf16", "fp32"):
            found = check_baseline(op, "baseline:torch", case(m=9, n=130, k=256, out=out), "cpu", seed=1)
            assert found.errors[0] < 5e-3


def test_outputs_are_planned_without_a_gpu():
    x, w = (TensorSpec.contiguous((m, 256), torch.float8_e4m3fn, "cuda:0") for m in (0, 130))
    x_scale, w_scale = (TensorSpec.contiguous((m, 2), torch.float32, "cuda:0") for m in (0, 2))
    c = fp8_matmul.call((x, x_scale, w, w_scale, "fp16")).c
    assert c.shape == (0, 130) and c.dtype == torch.float16
