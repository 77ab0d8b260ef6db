"""The signature of a kernel, read from its CUDA C++: templates, parameters, structs, and what is said of a mismatch."""

import ctypes

import pytest

from tilery.languages.cuda_signature import TENSOR_MAP, Struct, find

SOURCE = """
#include "common.cuh"
// __global__ void scale(int commented_out) is not it
struct Rows {
    const float *x;  // where they are
    i64 stride;
    int m, n;
};
struct Pair { float *first, *second; bool wide; };

template <typename T>
__device__ T widen(T x, int by) { return x * by; }  /* template <int NOT_ITS> */

template <typename T, int WIDTH = 4, bool LOG = false>
__global__ void __launch_bounds__(256, 2) scale(
    const T *__restrict__ x, T* y, float eps, /* a comment, with a comma */ int n, const i64 stride) {
    scale_more(x);
}

__global__ void scale_more(Rows rows, const __grid_constant__ Pair pair, unsigned count, double exact) {}

template <int N>
__global__ void mapped(const __grid_constant__ TensorMap a, long long size, bool flag) {}

__global__ void nothing() {}
"""


def types(name):
    return [(p.name, p.type) for p in find(SOURCE, name).parameters]


def test_parameters_are_read_with_their_types():
    pointer, number = ctypes.c_void_p, ctypes.c_longlong
    assert types("scale") == [
        ("x", pointer), ("y", pointer), ("eps", ctypes.c_float), ("n", ctypes.c_int), ("stride", number),
    ]  # fmt: skip
    assert types("mapped") == [("a", TENSOR_MAP), ("size", number), ("flag", ctypes.c_bool)]
    assert types("nothing") == []


def test_a_name_is_not_that_of_a_longer_one():
    assert [name for name, _ in types("scale_more")] == ["rows", "pair", "count", "exact"]


def test_template_parameters_are_those_of_the_kernel_alone():
    assert find(SOURCE, "scale").template == ("T", "WIDTH", "LOG")
    assert find(SOURCE, "mapped").template == ("N",)
    assert find(SOURCE, "scale_more").template == find(SOURCE, "nothing").template == ()


def test_structs_are_laid_out_as_c_lays_them_out():
    (rows, pair, *_), pointer = types("scale_more"), ctypes.c_void_p
    assert isinstance(rows[1], Struct) and rows[1].name == "Rows"
    assert [(f.name, f.type) for f in rows[1].fields] == [
        ("x", pointer), ("stride", ctypes.c_longlong), ("m", ctypes.c_int), ("n", ctypes.c_int),
    ]  # fmt: skip
    assert [(f.name, f.type) for f in pair[1].fields] == [
        ("first", pointer), ("second", pointer), ("wide", ctypes.c_bool),
    ]  # fmt: skip
    assert ctypes.sizeof(rows[1].layout) == 24 and ctypes.sizeof(pair[1].layout) == 24  # the last byte, and padding
    made = rows[1].layout(1, 2, 3, 4)
    assert (made.x, made.stride, made.m, made.n) == (1, 2, 3, 4)


def test_a_struct_may_stand_in_a_header_and_be_a_template():
    header = "template <typename T> struct View { T *data; int size; };  // View of anything"
    found = find("__global__ void f(View<float> v, int n) {}", "f", header)
    assert [p.name for p in found.parameters] == ["v", "n"] and found.parameters[0].type.name == "View"
    assert found.ordered({"data": 1, "size": 2, "n": 3}) == ((1, 2), 3)


@pytest.mark.parametrize(
    ("kernel", "constants", "instance"),
    [
        ("scale", {"LOG": True, "T": "__half", "WIDTH": 8}, "scale<__half, 8, true>"),
        ("scale", {"T": "float", "WIDTH": 1, "LOG": False}, "scale<float, 1, false>"),
        ("nothing", {}, "nothing"),
    ],
)
def test_an_instance_is_named_as_nvrtc_names_it(kernel, constants, instance):
    assert find(SOURCE, kernel).instance(constants) == instance


def test_arguments_come_in_the_kernels_order_and_a_structs_together():
    assert find(SOURCE, "scale").ordered({"stride": 5, "n": 4, "eps": 3, "y": 2, "x": 1}) == (1, 2, 3, 4, 5)
    given = dict(zip(("exact", "count", "wide", "second", "first", "n", "m", "stride", "x"), range(9)))
    assert find(SOURCE, "scale_more").ordered(given) == ((8, 7, 6, 5), (4, 3, 2), 1, 0)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: find(SOURCE, "gone"), "no kernel gone in the source"),
        (lambda: find(SOURCE, "commented_out"), "no kernel commented_out in the source"),
        (lambda: find("__global__ void f(Shape s) {}", "f"), "the type Shape is neither known nor a struct"),
        (lambda: find("__global__ void f(int n", "f"), "brackets do not close"),
        (lambda: find(SOURCE, "scale").instance({"T": "float", "width": 4}),
         "scale has the template parameters T, WIDTH, LOG, got T, width"),
        (lambda: find(SOURCE, "scale").ordered({"x": 1, "y": 2, "eps": 3, "n": 4, "step": 5}),
         "scale takes x, y, eps, n, stride; the launch lacks stride and names step, which it does not take"),
        (lambda: find(SOURCE, "scale_more").ordered({"rows": 1, "pair": 2, "count": 3, "exact": 4}),
         "scale_more takes x, stride, m, n, first, second, wide, count, exact; the launch lacks .* names pair, rows"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(ask, message):
    with pytest.raises(AssertionError, match=message):
        ask()
