"""Results about a class, a function or a code object are cached until it is freed."""

import gc
import types
import weakref

from tigon.runtime.weak_cache import cached_weakly


def make_class():
    return type("Made", (), {})


def test_a_result_lives_as_long_as_its_owner():
    calls = []

    @cached_weakly
    def count(owner, *args):
        calls.append(args)
        return len(calls)

    code = compile("def f(): return 1", "made", "exec")
    owners, other = [make_class(), types.FunctionType(code.co_consts[0], {}), code], make_class()
    for owner in owners:
        calls.clear()
        assert [count(owner), count(owner), count(owner, (1, other)), count(owner, (1, other))] == [1, 1, 2, 2]
        assert calls == [(), ((1, other),)]
    alive, other_alive = [weakref.ref(owner) for owner in owners], weakref.ref(other)
    # The key refers to the other class weakly too.
    calls.clear()
    del other
    gc.collect()
    assert other_alive() is None
    del owner, code
    owners.clear()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


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
