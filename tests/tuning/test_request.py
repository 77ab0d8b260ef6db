"""What a tune is asked for: a model's cases, budgets, and requests that make no sense."""

import pytest

import tilery
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.tuning import request


def test_a_models_cases_come_most_valuable_first():
    from tilery.models.plan import cases

    wanted = request.request(request.work(None, None, None, "llama-8b", 1), None, "10m")
    worth = cases("llama-8b")
    assert [(p.op, p.case) for p in wanted.problems] == [(w.op, w.case) for w in worth]
    assert [p.weight for p in wanted.problems] == sorted((w.ms for w in worth), reverse=True)
    some = request.request(request.work("rms_norm", None, None, "llama-8b", 1), None, "10m")
    assert {p.op for p in some.problems} == {"rms_norm"}


def test_a_models_fp8_products_are_tuned_though_its_weights_are_wide():
    wanted = request.request(request.work("fp8_matmul", None, None, "Qwen3-4B", 1), None, "10m").problems
    assert {p.op for p in wanted} == {"fp8_matmul"} and len(wanted) == 18 * 4
    assert [p.weight for p in wanted] == sorted((p.weight for p in wanted), reverse=True)
    some = request.request(request.work(["fp8_matmul", "matmul"], None, None, "qwen3-4b", 1, (1, 16)), None, "10m")
    assert {(p.op, p.case.params["m"]) for p in some.problems} == {
        (op, m) for op in ("matmul", "fp8_matmul") for m in (1, 16)
    }
    with pytest.raises(BadInput, match="rows are those of a model's products, got them without a model"):
        request.work("matmul", None, None, None, 1, (1,))


@pytest.mark.parametrize(
    ("text", "value"),
    [("90", 90), (90, 90), ("90s", 90), ("10m", 600), ("1h30m", 5400), ("1.5h", 5400), (" 2m5s ", 125)],
)
def test_budgets(text, value):
    assert request.seconds(text) == value


@pytest.mark.parametrize("text", ["0", 0, "0m", "-5s", "", "soon", "10 minutes", "m", None, float("nan"), True, "1s1h"])
def test_a_budget_that_is_none_is_named(text):
    with pytest.raises(BadInput, match="budget must be a time above zero such as 90s, 10m or 1h30m, got"):
        tilery.tune("softmax", budget=text)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({}, "an op or a model must be named"),
        ({"op": "warp"}, "op must be one of .*, got 'warp'"),
        ({"op": "softmax", "backend": "warp"}, "backend must be one of .*, got 'warp'"),
        ({"op": "softmax", "shapes": "quick", "model": "llama-8b"}, "exclude each other"),
        ({"op": "matmul", "shapes": "random:5:1", "budget": 0}, "judged by, so nothing is tuned on it"),
        ({"op": ["softmax", "argmax"], "cases": [case(m=8, n=256, dtype="fp32")]}, "cases are those of one op, got 2"),
        ({"op": "softmax", "search": "luck"}, "search must be one of halving, exhaustive, got 'luck'"),
        ({"op": "softmax", "bits": "luck"}, "bits must be one of any, stable, got 'luck'"),
        ({"op": "softmax", "cases": []}, "there must be a case to tune"),
        ({"op": "softmax", "backend": "numba", "gpus": [0]}, "gpus must be given for kernels that run on one"),
        ({"op": "softmax", "gpus": [0], "num_gpus": 2}, "exclude each other"),
    ],
)
def test_nonsense_is_named(how, message):
    with pytest.raises(BadInput, match=message):
        tilery.tune(**how)
