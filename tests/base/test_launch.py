"""Launches as data: views of arguments, scalars that are transformed, what a call's values make of them."""

from typing import Any, NamedTuple

import pytest
import torch

from tilery.base.launch import Argument, Host, Scalar, fill, resolve, resolver
from tilery.base.spec import TensorSpec


class Strided(NamedTuple):
    """As kernels group their arguments."""

    ptr: Any
    stride: Any


def argument(shape=(4, 8), dtype=torch.float32, slot=0):
    return Argument.at_slot(TensorSpec.contiguous(shape, dtype, "cpu"), slot)


def values(*more):
    return torch.arange(32, dtype=torch.float32).view(4, 8), *more


def address(x):
    """How a language of pointers is given a tensor."""
    return x.address


# Arguments


def test_an_argument_is_a_spec_that_knows_its_place():
    x = argument(slot=1)
    other = torch.ones(4, 8)
    assert TensorSpec(*x) == TensorSpec.of(other) and x.nbytes == 128 and not x.is_view
    assert x.tensor((None, other)) is other and x.address((None, other)) == other.data_ptr()


def test_a_view_shows_the_same_memory_with_other_sizes():
    given = values()
    column = argument().view((4,), (8,), start=3)
    assert column.is_view and (column.shape, column.strides, column.slot) == ((4,), (8,), 0)
    assert column.tensor(given).tolist() == given[0][:, 3].tolist()
    assert column.address(given) == given[0].data_ptr() + 3 * 4 == column.tensor(given).data_ptr()
    column.tensor(given).zero_()
    assert not given[0][:, 3].any() and given[0][0, 4]


def test_views_of_views_add_up():
    given = values()
    rest = argument().at(8).at(2)
    assert rest.offset == 40 and rest.shape == (4, 8) and rest.address(given) == given[0].data_ptr() + 40
    assert rest.view((2,), (1,), start=6).tensor(given).tolist() == [16.0, 17.0]


@pytest.mark.parametrize(
    ("start", "dtype", "aligned"),
    [(4, torch.float32, True), (4, torch.float16, False), (8, torch.float16, True), (0, torch.float16, True)],
)
def test_a_view_is_aligned_where_it_starts_on_16_bytes(start, dtype, aligned):
    assert argument(dtype=dtype).at(start).aligned is aligned
    slice_ = Argument.at_slot(argument(dtype=dtype)._replace(aligned=False), 0)
    assert not slice_.at(start).aligned, "what does not start so itself never does"


def test_a_view_of_another_dtype_counts_in_its_own_elements():
    given = values()
    halves = argument()._replace(dtype=torch.int16, shape=(4, 16), strides=(16, 1))
    assert halves.tensor(given).dtype == torch.int16 and halves.tensor(given).shape == (4, 16)
    assert halves.at(2).offset == 4 and halves.at(2).address(given) == given[0].data_ptr() + 4
    assert halves.view((2,), (1,), 2).tensor(given).view(torch.float32).tolist() == [1.0]


def test_a_view_begins_where_the_tensor_does():
    """A tensor may itself be a slice of a storage."""
    storage = torch.arange(40, dtype=torch.float32)
    assert argument().view((2,), (8,), 1).tensor((storage[8:].view(4, 8),)).tolist() == [9.0, 17.0]


# Scalars


def test_a_scalar_is_of_its_kind_whatever_number_came():
    eps = Scalar(1, float)
    assert eps.value((None, 3)) == 3.0 and type(eps.value((None, 3))) is float
    assert type(eps.example) is float and type(Scalar(0, int).example) is int


def test_what_becomes_of_a_scalar_is_applied_in_order():
    made = Scalar(0, float).then(lambda p: 1 - p).then(lambda kept: int(kept * 100))
    assert made.value((0.25,)) == 75 and made.value((0,)) == 100
    assert made.example == int((1 - 3.0) * 100)
    assert Scalar(0, float).then(abs).value((-2.0,)) == 2.0


def test_a_scalar_that_was_left_out_is_none_until_something_becomes_of_it():
    scale = Scalar(0, float)
    assert scale.value((None,)) is None
    assert [scale.then(lambda s: 0.25 if s is None else s).value((given,)) for given in (None, 2)] == [0.25, 2.0]


# Together


def test_the_resolver_fills_in_what_a_call_brings_and_keeps_the_rest():
    given = values(0.5)
    find = resolver((7, argument(), Scalar(1, float).then(lambda v: 2 * v), "tag", argument().at(1)), address)
    start = given[0].data_ptr()
    assert find(given) == [7, start, 1.0, "tag", start + 4]
    other = torch.zeros(4, 8), 2.0
    assert find(other) == [7, other[0].data_ptr(), 4.0, "tag", other[0].data_ptr() + 4]


def test_the_resolver_gives_every_call_a_list_of_its_own():
    """Two threads may call at once, and a launcher may keep what it was given."""
    find = resolver((7, argument()), address)
    given, other = values(), values()
    first, second = find(given), find(other)
    assert (first[1], second[1]) == (given[0].data_ptr(), other[0].data_ptr())


def test_groups_keep_their_kind_at_any_depth():
    given = values(0.5)
    fixed, named = (1, 2), Strided(argument(), 8)
    nested = (Scalar(1, float), (named, 3), Strided((argument().at(2),), None))
    found = resolver((fixed, named, nested), address)(given)
    start = given[0].data_ptr()
    assert found == [fixed, Strided(start, 8), (0.5, (Strided(start, 8), 3), Strided((start + 8,), None))]
    assert found[0] is fixed and isinstance(found[1], Strided) and type(found[2]) is tuple
    assert isinstance(found[2][1][0], Strided) and found[1].ptr == start


def test_what_a_language_binds_itself_is_asked_at_every_call():
    class Descriptor:
        def bound(self, values):
            return "map", values[0].data_ptr()

    given = values()
    assert resolver((Descriptor(), (Descriptor(), 1)), address)(given) == [
        ("map", given[0].data_ptr()),
        (("map", given[0].data_ptr()), 1),
    ]


def test_resolving_gives_tensors_numbers_and_groups_of_them():
    given = values(3)
    assert resolve(argument(), given) is given[0] and resolve(Scalar(1, float), given) == 3.0
    assert resolve("plain", given) == "plain"
    found = resolve((Strided(argument(), Scalar(1, int)), 5), given)
    assert isinstance(found[0], Strided) and found[0].ptr is given[0] and found[0].stride == 3 and found[1] == 5


# Launches by torch


def test_the_host_runs_a_function_of_what_the_call_brings():
    given, seen = values(0.5), []
    group = Strided(argument().view((8,), (1,), 8), 2)
    Host(lambda *args: seen.append(args), (argument(), Scalar(1, float), group, "x")).run(given)
    ((x, number, found, word),) = seen
    assert x is given[0] and (number, word) == (0.5, "x")
    assert isinstance(found, Strided) and found.ptr.data_ptr() == given[0].data_ptr() + 32


def test_fill_sets_all_elements_and_no_others():
    given = values()
    fill(argument().view((4, 2), (8, 1), 6), 9.0).run(given)
    assert given[0][:, 6:].tolist() == [[9.0, 9.0]] * 4 and given[0][:, :6].tolist() == values()[0][:, :6].tolist()
