"""Event order, NICs, block caches: against arithmetic and plain sets."""

import random

import pytest

from kvstore.errors import InvalidError
from mooncake_jax.simulation import Workload
from mooncake_jax.simulation.caches import Caches, RandomOrder, lru_hit_rate
from mooncake_jax.simulation.events import EventLoop
from mooncake_jax.simulation.network import Network
from mooncake_jax.trace import Trace, TraceRequest


def test_events_come_in_the_order_of_their_times():
    loop, seen = EventLoop(), []
    loop.at(2.0, seen.append, "b")
    loop.at(1.0, seen.append, "a")
    loop.at(2.0, seen.append, "c")

    def arrive(index):
        seen.append((index, loop.now))
        loop.at(loop.now + 0.25, seen.append, f"after {index}")

    loop.run([1.5, 3.0], arrive)
    assert seen == ["a", (0, 1.5), "after 0", "b", "c", (1, 3.0), "after 1"]
    assert loop.now == 3.25


def test_a_nic_serves_one_after_the_other_at_both_ends():
    network = Network([100.0, 100.0, 50.0], 0.0)
    assert network.send(0, 1, 100.0, 0.0) == 1.0
    assert network.send(0, 1, 100.0, 0.0) == 2.0  # the sender is busy
    assert network.send(2, 1, 50.0, 1.5) == 2.5  # the receiver is: its bytes begin at 2
    assert network.send(1, 0, 100.0, 0.0) == 1.0  # the other way is free
    assert network.send(0, 2, 100.0, 10.0) == 12.0  # the slower end counts
    assert network.sent_nbytes == 450.0


def test_a_sender_whose_receiver_is_busy_goes_on():
    network = Network([1.0, 1.0, 1.0], 0.0)
    network.send(0, 2, 10.0, 0.0)
    assert network.send(1, 2, 1.0, 0.0) == 11.0
    assert network.send(1, 0, 1.0, 0.0) == 2.0


def test_blocks_count_for_their_node_at_once_and_for_others_when_computed():
    caches = Caches(3, 100)
    caches.use(1, [1, 2, 3], 0)
    local, best, holder = caches.match([1, 2, 3, 4], 0.5)
    assert (local.tolist(), best, holder) == ([0, 3, 0], 0, -1)
    caches.computed(1, [1, 2, 3])
    caches.use(1, [1, 2, 3, 4], 3)
    assert caches.match([1, 2, 3, 4], 0.5)[1:] == (3, 1)
    assert caches.contents() == [set(), {1, 2, 3, 4}, set()]
    caches.forget(1)
    assert caches.match([1, 2], 0.5)[1:] == (0, -1)


def test_equal_holders_are_drawn():
    caches = Caches(4, 100)
    for node in (0, 2, 3):
        caches.use(node, [1, 2], 0)
        caches.computed(node, [1, 2])
    assert {caches.match([1, 2], draw)[2] for draw in (0.0, 0.2, 0.4, 0.6, 0.8, 0.99)} == {0, 2, 3}


@pytest.mark.parametrize("num_nodes", [3, 130])
def test_matches_agree_with_plain_sets(num_nodes):
    rng = random.Random(num_nodes)
    caches, held = Caches(num_nodes, 10**6), [set() for _ in range(num_nodes)]
    for _ in range(300):
        node, chain = (
            rng.randrange(num_nodes),
            [rng.choice([0, 100]) + block for block in range(rng.randint(1, 9))],
        )
        keys = chain if rng.random() < 0.5 else list(range(rng.randint(1, 9)))
        local, best, holder = caches.match(keys, rng.random())

        def length(node, keys=keys):
            return next((index for index, key in enumerate(keys) if key not in held[node]), len(keys))

        assert local.tolist() == [length(node) for node in range(num_nodes)]
        assert best == max(local)
        assert best == 0 or length(holder) == best
        caches.use(node, keys, int(local[node]))
        caches.computed(node, keys)
        held[node].update(keys)


def test_the_deepest_block_of_the_oldest_chain_goes_first():
    caches = Caches(1, 4)
    caches.use(0, [1, 2, 3], 0)
    caches.use(0, [1, 7, 8], 1)
    assert [caches.index.holds("p0", key) for key in (1, 2, 3, 7, 8)] == [True, True, False, True, True]


def test_a_random_order_gives_up_what_it_holds():
    order = RandomOrder(0)
    order.put_chain([1, 2, 3, 4], 1)
    order.discard(2)
    order.discard(9)
    victims = order.pop_oldest(2)
    assert len(order) == 1
    assert len({*victims, *order.pop_oldest(5)} & {1, 3, 4}) == 3


def test_the_hit_rate_of_one_cache():
    chains, tokens = [[1, 2], [1, 3], [1, 2]], [1024, 1024, 1025]
    assert lru_hit_rate(chains, tokens, 100, 512) == pytest.approx((0 + 512 + 1024) / 3073)
    assert lru_hit_rate(chains, tokens, 2, 512) == pytest.approx((0 + 512 + 512) / 3073)
    assert lru_hit_rate(chains, tokens, 0, 512) == 0.0


def test_a_workload_has_full_blocks_and_a_rate():
    trace = Trace("t", [TraceRequest(0, 600, 3, [0, 1]), TraceRequest(4000, 1024, 5, [0, 2])])
    workload = Workload.of(trace, rate=2.0)
    assert workload.arrivals == [0.0, 2.0]
    assert workload.chains == [[0], [0, 2]]
    assert workload.with_one_output().num_outputs == [1, 1]
    with pytest.raises(InvalidError, match="rate"):
        Workload.of(trace, rate=0.0)
