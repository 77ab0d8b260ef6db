"""What is worth measuring, and what is left out and why."""

import dataclasses

import pytest
import torch

import plant
from tilery.base import settings
from tilery.base.errors import BadInput
from tilery.base.spec import TensorSpec, Work, case
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.languages import triton_glue
from tilery.measure import ceilings
from tilery.tuning import candidates
from tilery.tuning.candidates import Machine, collect, modelled_ms
from tilery.tuning.data import Candidate, Problem

SOFTMAX = Problem("softmax", "cpu", case(m=64, n=256, dtype="fp32"))
OP, MATMUL = REGISTRY["softmax"], REGISTRY["matmul"]
H200 = Machine(units=132, flops=786e12, bandwidth=4.3e12, least_ms=0.0)  # its measured ceilings


class Modelled(plant.Tiles):
    """A kernel with tiles of 1, 2, 4 and 8, of which the model thinks the larger the slower, `times` by each."""

    def __init__(self, tiles=(1, 2, 4, 8), times=1):
        super().__init__()
        self.tiles, self.times = tiles, times

    def configs(self, call):
        return [plant.Tile(tile) for tile in self.tiles]

    def estimate(self, call, config):
        return Work(blocks=2, flops=self.times * config.tile * 10**9, bytes=0) if self.times else None


@pytest.fixture
def add(monkeypatch):
    """Hangs a kernel below softmax, here only."""
    rates = ceilings.Ceilings(1e12, 1e12, 1e12, {"fp32": 1e12}, 1.0)
    monkeypatch.setattr(ceilings, "ceilings", lambda where: rates)
    monkeypatch.setattr(device, "cores", lambda: 2)
    return lambda name="numba.planted", **how: plant.add(monkeypatch, OP, name, Modelled(**how))


def test_the_default_is_first_then_the_configs_each_once_and_always_alike():
    call, kernel = call_for(OP, SOFTMAX.case, "cpu"), OP.kernel("numba")
    found, _ = collect(SOFTMAX, tuple(OP.kernels))
    ours = [dataclasses.asdict(c) for c in (kernel.default(call), *kernel.configs(call))]
    assert [c.config for c in found] == [fields for i, fields in enumerate(ours) if fields not in ours[:i]]
    assert {c.kernel for c in found} == {"numba"} and all(not c.origin for c in found)
    assert all(collect(SOFTMAX, list(reversed(OP.kernels)))[0] == found for _ in range(3))


def test_kernels_that_cannot_run_here_say_why():
    with settings.override(emulate=False):
        _, left_out = collect(SOFTMAX, ("numba", "triton", "cuda"))
    why = {found.candidate.kernel: found.reason for found in left_out}
    assert {found.status for found in left_out} == {"refused"} and set(why) == {"triton", "cuda"}
    assert "needs a CUDA tensor" in why["cuda"] or "is not installed" in why["cuda"]


def test_what_is_only_interpreted_is_not_timed(monkeypatch):
    """Where Triton interprets on a CPU: right, and no measure of anything."""
    monkeypatch.setattr(triton_glue, "_INTERPRETED", True)
    _, left_out = collect(SOFTMAX, ("triton",))
    assert [found.reason for found in left_out] == ["is interpreted on a CPU, which tells nothing of its speed"]


def test_what_the_model_thinks_hopeless_is_listed_and_the_default_stays(add):
    add()
    found, left_out = collect(SOFTMAX, ("numba.planted",))
    assert [c.config["tile"] for c in found] == [8, 1, 2]  # 8 is modelled 8 times slower, and is the default
    assert [(m.candidate.config["tile"], m.status) for m in left_out] == [(4, "pruned")]
    assert left_out[0].reason == "modelled at 8 ms, more than 2 times the best's 2 ms"


def test_without_an_estimate_nothing_is_pruned(add):
    add(times=0)
    found, left_out = collect(SOFTMAX, ("numba.planted",))
    assert [c.config["tile"] for c in found] == [8, 1, 2, 4] and not left_out


def test_a_kernel_is_pruned_by_the_best_of_all_kernels(add):
    add("numba.fast", tiles=(1,))
    add("numba.slow", times=10)
    found, left_out = collect(SOFTMAX, ("numba.fast", "numba.slow"))
    assert [(c.kernel, c.config["tile"]) for c in found] == [("numba.fast", 8), ("numba.fast", 1), ("numba.slow", 8)]
    assert [m.candidate.config["tile"] for m in left_out] == [1, 2, 4]


def test_an_imported_one_comes_last_with_its_origin_and_is_not_pruned(add):
    add()
    brought = [Candidate("numba.planted", {"tile": 6}, "nvidia_h100"), Candidate("numba.planted", {"tile": 2}, "other")]
    found, _ = collect(SOFTMAX, ("numba.planted",), brought)
    assert found[-1] == Candidate("numba.planted", {"tile": 6, "kind": "plain"}, "nvidia_h100")
    assert [c.config["tile"] for c in found] == [8, 1, 2, 6] and found[2].origin == ""  # ours is ours, whoever has it


def test_an_imported_one_of_an_older_tilery_has_the_names_of_now(add):
    add()
    brought = [Candidate("numba.planted", {"block": 6, "kind": "simple"}, "nvidia_h100")]
    found, left_out = collect(SOFTMAX, ("numba.planted",), brought)
    assert found[-1] == Candidate("numba.planted", {"tile": 6, "kind": "plain"}, "nvidia_h100")
    assert [m.status for m in left_out] == ["pruned"]


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (Candidate("numba.planted", {"tile": 16, "kind": "plain"}, "big"), "tile of 16 is more than 8"),
        (Candidate("numba.planted", {"tiles": 4}, "other"), "takes no config {'tiles': 4}: TypeError"),
        (Candidate("numba.planted", {"tile": "4"}, "by hand"), "takes no config {'tile': '4'}: TypeError"),
        (Candidate("cuda", {}, "other"), "cuda is not among softmax's kernels to tune: numba.planted"),
        (Candidate("gone", {}, "older"), "gone is not among softmax's kernels to tune: numba.planted"),
    ],
)
def test_an_imported_one_that_breaks_the_limits_is_refused(add, candidate, reason):
    add()
    found, left_out = collect(SOFTMAX, ("numba.planted",), [candidate])
    refused = [m for m in left_out if m.status == "refused"]
    assert candidate not in found and [m.candidate for m in refused] == [candidate] and reason in refused[0].reason


def test_an_imported_one_of_a_kernel_that_cannot_run_is_refused_with_it():
    brought = Candidate("cuda", {"x": 1}, "nvidia_h100")
    assert brought in [m.candidate for m in collect(SOFTMAX, ("cuda",), [brought])[1]]


def test_a_config_of_a_larger_device_is_filtered_by_shared_memory(monkeypatch):
    """The largest tile that an H100 has room for does not fit a card with 99 KiB a block."""
    monkeypatch.setattr(candidates, "_machine", lambda op, call: H200)
    problem = Problem("matmul", "cuda:0", case(m=4096, n=4096, k=4096, dtype="bf16"))
    with device.pretend("sm_90"):
        large = Candidate("triton", fitting_an_h100(call_for(MATMUL, problem.case)), "nvidia_h100")
        found, _ = collect(problem, ("triton",), [large])
        assert large.config in [c.config for c in found]
    with device.pretend("sm_89"):
        found, left_out = collect(problem, ("triton",), [large])
    assert large not in found
    why = next(m.reason for m in left_out if m.candidate == large)
    assert "bytes of shared memory, a block has 101376" in why


def fitting_an_h100(call):
    """128 × 256 × 64 in four stages: 192 KiB."""
    config = MATMUL.kernel("triton").default(call)
    sizes = {"block_m": 128, "block_n": 256, "block_k": 64, "num_warps": 8, "num_stages": 4}
    return dataclasses.asdict(dataclasses.replace(config, **sizes))


def test_a_bad_problem_is_an_error():
    with pytest.raises(BadInput, match="dtype must be one of"):
        collect(Problem("softmax", "cpu", case(m=4, n=4, dtype="int4")), ("numba",))


def test_specs_of_a_saved_call_keep_strides_and_alignment(tmp_path):
    x = torch.randn(8, 100)[:, 1:65]
    torch.save((x,), tmp_path / "call.pt")
    (spec,) = candidates.specs_of(Problem("softmax", "cuda:3", saved=str(tmp_path / "call.pt")))
    expected = TensorSpec((8, 64), (100, 1), torch.float32, torch.device("cuda:3"), False)
    assert spec == expected and candidates.dtype_of((spec,)) == "fp32"


# The model, held against what was measured on an H200


def modelled(m, n, k, block_m, block_n, least_ms=0.0):
    kernel, call = MATMUL.kernel("triton"), call_for(MATMUL, case(m=m, n=n, k=k, dtype="bf16"))
    with device.pretend("h200"):
        sizes = {"block_m": block_m, "block_n": block_n, "block_k": 64, "num_warps": 4, "num_stages": 3}
        work = kernel.estimate(call, dataclasses.replace(kernel.default(call), **sizes))
    return modelled_ms(work, dataclasses.replace(H200, least_ms=least_ms))


def test_a_large_product_is_modelled_near_what_was_measured():
    assert modelled(4096, 4096, 4096, 128, 128) == pytest.approx(0.201, rel=0.1)
    assert modelled(4096, 4096, 4096, 128, 256) == pytest.approx(0.263, rel=0.5)
    assert modelled(4096, 4096, 4096, 16, 64) > 2 * modelled(4096, 4096, 4096, 128, 128)


def test_few_rows_keep_the_widths_that_were_measured_alike():
    """16 × 4096 × 4096 took 22.4 µs in columns of 32, 18.6 of 64 and 19.3 of 128."""
    roof = 16 * 4096 * 4096 * 2 / 16 / 4.3e12 * 1e3
    widths = [modelled(16, 4096, 4096, 64, width, roof) for width in (32, 64, 128)]
    assert max(widths) < 2 * min(widths) < modelled(16, 4096, 4096, 64, 512, roof)


def test_waves_are_whole():
    full, one_more = (modelled_ms(Work(blocks, 10**9, 0), H200) for blocks in (132, 133))
    assert one_more == 2 * full and modelled_ms(Work(0, 10**9, 0), H200) == 0.0


@pytest.mark.parametrize("kernel", [k for k in MATMUL.kernels if k not in ("numba", "vendor")])
def test_every_tiled_matmul_estimates_its_work(kernel):
    if why := candidates.policy.languages.missing(kernel):
        pytest.skip(why)
    call = call_for(MATMUL, case(m=512, n=26880, k=256, dtype="bf16"))  # 26880: a multiple of every width of a tile
    cost = MATMUL.cost(call)
    with device.pretend("sm_90"):
        made = MATMUL.kernel(kernel)
        for config in made.configs(call):
            work = made.estimate(call, config)
            assert work.blocks * work.flops == cost.flops  # these tiles divide the problem
            assert work.blocks * work.bytes >= cost.bytes
