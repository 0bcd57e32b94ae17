"""Results about a class, a function or a code object are cached until it is freed."""

import gc
import types
import weakref

import pytest

from tigon.runtime.weak_cache import cached_weakly


def make_class():
    return type("Made", (), {})


def make_function():
    return types.FunctionType(compile("def f(): return 1", "made", "exec").co_consts[0], {})


def make_code():
    return compile("x = 1", "made", "exec")


@pytest.mark.parametrize("make", [make_class, make_function, make_code])
def test_a_result_lives_as_long_as_its_owner(make):
    calls = []

    @cached_weakly
    def count(owner, *args):
        calls.append(args)
        return len(calls)

    owner, other = make(), make_class()
    assert [count(owner), count(owner), count(owner, (1, other)), count(owner, (1, other))] == [1, 1, 2, 2]
    assert calls == [(), ((1, other),)]
    alive = [weakref.ref(owner), weakref.ref(other)]
    # The key refers to the other class weakly too.
    calls.clear()
    del other
    gc.collect()
    assert alive[1]() is None
    del owner
    gc.collect()
    assert alive[0]() is None


def test_equal_arguments_of_other_types_are_equal_as_in_a_dict():
    count = cached_weakly(lambda owner, *args: [args])
    assert count(int, 1) is count(int, 1)
    assert count(int, 1) is not count(bool, 1)
    assert count(int, (int, 2)) is not count(int, (bool, 2))


def test_the_cache_can_be_cleared():
    count = cached_weakly(lambda owner: object())
    before = count(int)
    assert count(int) is before
    count.cache_clear()
    assert count(int) is not before
