"""The LRU order against a sort: whatever order stamps come in, the oldest goes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.node.eviction import LeastRecent, Stamp

KEYS = st.integers(0, 12)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("chain"), st.lists(KEYS, min_size=1, max_size=4, unique=True)),
        st.tuples(st.just("late"), KEYS),
        st.tuples(st.just("discard"), KEYS),
        st.tuples(st.just("pop"), st.integers(1, 3)),
    ),
    max_size=40,
)


@given(STEPS)
def test_it_is_a_sort_by_stamp(steps):
    order, model, use = LeastRecent(), {}, 1
    for what, argument in steps:
        use += 2
        if what == "chain":
            order.put_chain(argument, use)
            model.update({key: Stamp(use, -index) for index, key in enumerate(argument)})
        elif what == "late":  # older than the newest
            order.put(argument, Stamp(use // 2, -argument - 100))
            model[argument] = Stamp(use // 2, -argument - 100)
        elif what == "discard":
            order.discard(argument)
            model.pop(argument, None)
        else:
            victims = sorted(model, key=lambda key: model[key])[:argument]
            assert order.pop_oldest(argument) == victims
            for key in victims:
                del model[key]
        assert order.stamps() == model
        assert len(order) == len(model)
        oldest = min(((stamp, key) for key, stamp in model.items()), default=None)
        assert order.oldest() == oldest


def test_the_deepest_block_of_a_call_goes_first():
    order = LeastRecent()
    order.put_chain(["root", "middle", "leaf"], 1)
    order.put_chain(["root", "other"], 2)
    assert order.pop_oldest(9) == ["leaf", "middle", "other", "root"]


@pytest.mark.parametrize("count", [0, 3])
def test_an_empty_order_has_no_victim(count):
    assert LeastRecent().oldest() is None
    assert LeastRecent().pop_oldest(count) == []
