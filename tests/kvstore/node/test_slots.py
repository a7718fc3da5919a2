"""The slot state machine: examples, then random histories against a model that recomputes everything."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.errors import InvalidError, StaleError
from kvstore.node.slots import Block, SlotPool


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


@pytest.fixture
def pool():
    pool = SlotPool(np.zeros(4, np.uint64), 100)
    yield pool
    pool.validate()


def put(pool: SlotPool, handle: int, *numbers: int) -> None:
    outcome = pool.reserve(handle, keys(*numbers), 100, 50)
    for index, block in enumerate(outcome.blocks):
        assert block is not None
        commit(pool, handle, index, (1, 2))


def commit(pool: SlotPool, handle: int, index: int, crcs: tuple[int, ...]) -> Block:
    pool.seal(pool.pending(handle, index))
    return pool.commit(handle, index, crcs)


def held(pool: SlotPool) -> set[int]:
    visible = pool.keys()
    return {int.from_bytes(k, "big") for k in visible}


def test_a_key_is_visible_from_commit_on(pool: SlotPool):
    pool.reserve(1, keys(7), 100, 50)
    assert pool.exists(keys(7)) == [False]
    assert pool.lease(2, keys(7)) == [None]
    block = commit(pool, 1, 0, (1, 2))
    assert pool.exists(keys(7)) == [True]
    assert block.crcs == (1, 2)


def test_generations_are_odd_under_write_and_never_repeat():
    generations = np.zeros(1, np.uint64)
    pool = SlotPool(generations, 100)
    seen = []
    for handle in range(3):
        pool.reserve(handle, keys(handle), 100, 100)
        seen.append(int(generations[0]))
        commit(pool, handle, 0, (0,))
        seen.append(int(generations[0]))
    assert seen == [1, 2, 3, 4, 5, 6]
    pool.reserve(9, keys(9), 100, 100)
    pool.abort(9)
    pool.reserve(10, keys(10), 100, 100)
    assert int(generations[0]) == 9


def test_second_writer_and_repeated_key_are_refused(pool: SlotPool):
    first = pool.reserve(1, keys(1, 1), 100, 50)
    second = pool.reserve(2, keys(1, 2), 100, 50)
    assert first.refusals == ["", "writing"]
    assert second.refusals == ["writing", ""]
    commit(pool, 1, 0, (0, 0))
    assert pool.reserve(3, keys(1), 100, 50).refusals == ["present"]


def test_least_recently_used_goes_first_and_a_lease_is_a_use(pool: SlotPool):
    for number in range(4):
        put(pool, number, number)
    pool.lease(10, keys(0))
    pool.release(10)
    assert pool.reserve(11, keys(8, 9), 100, 50).evicted == keys(1, 2)


def test_asking_is_not_a_use(pool: SlotPool):
    for number in range(4):
        put(pool, number, number)
    assert pool.exists(keys(0)) == [True]
    assert pool.reserve(11, keys(9), 100, 50).evicted == keys(0)


def test_a_chain_is_given_up_from_its_end(pool: SlotPool):
    put(pool, 1, 10, 11, 12, 13)
    assert pool.reserve(2, keys(20, 21), 100, 50).evicted == keys(13, 12)
    pool.abort(2)
    pool.lease(3, keys(10, 11))
    pool.release(3)
    assert pool.reserve(4, keys(30, 31, 32), 100, 50).evicted == keys(11)


def test_a_batch_never_evicts_its_own_keys(pool: SlotPool):
    put(pool, 1, 1, 2, 3, 4)
    outcome = pool.reserve(2, keys(1, 2, 3, 4, 5), 100, 50)
    assert outcome.refusals == ["present"] * 4 + ["no_room"]
    assert outcome.evicted == []


def test_leased_slots_are_never_evicted(pool: SlotPool):
    put(pool, 1, 1, 2, 3, 4)
    pool.lease(2, keys(1, 2, 3, 4))
    assert pool.reserve(3, keys(5, 6), 100, 50).refusals == ["no_room", "no_room"]
    pool.release(2)
    assert pool.reserve(4, keys(5), 100, 50).refusals == [""]


def test_an_object_larger_than_a_slot_is_refused_at_once(pool: SlotPool):
    put(pool, 1, 1)
    outcome = pool.reserve(2, keys(1, 2), 101, 50)
    assert outcome.refusals == ["too_large", "too_large"]
    assert outcome.evicted == []
    assert held(pool) == {1}


def test_removing_a_leased_key_hides_it_and_keeps_its_slot(pool: SlotPool):
    put(pool, 1, 1)
    (block,) = pool.lease(2, keys(1))
    assert block is not None
    assert pool.remove(key(1))
    assert pool.exists(keys(1)) == [False]
    assert not pool.remove(key(1))
    put(pool, 3, 1)
    pool.validate()
    assert pool.stats()["free"] == 2
    pool.release(2)
    assert pool.stats()["free"] == 3
    assert pool.exists(keys(1)) == [True]


def test_a_dead_writers_key_and_slot_are_free_after_its_lease(pool: SlotPool):
    pool.reserve(1, keys(1), 100, 50, expires=10.0)
    pool.expire(9.9)
    assert pool.reserve(2, keys(1), 100, 50).refusals == ["writing"]
    pool.expire(10.0)
    assert pool.reserve(3, keys(1, 2, 3, 4), 100, 50).refusals == [""] * 4
    with pytest.raises(StaleError, match="not under write"):
        pool.commit(1, 0, (0, 0))


def test_a_slot_drains_while_a_write_into_it_is_arriving(pool: SlotPool):
    outcome = pool.reserve(1, keys(1, 2), 80, 50, expires=10.0)
    slots = [block.slot for block in outcome.blocks if block is not None]
    writes, until = pool.begin_writes(1, [(slots[0], 80), (slots[0], 40)])
    assert until == 10.0
    pool.expire(10.0)
    assert (pool.stats()["reserved"], pool.stats()["draining"], pool.stats()["free"]) == (0, 1, 3)
    pool.validate()
    assert pool.reserve(2, keys(1, 2, 3, 4), 100, 50).refusals == ["", "", "", "no_room"]
    pool.end_writes(writes[:1])
    assert pool.stats()["draining"] == 1
    pool.end_writes(writes[1:])
    assert (pool.stats()["draining"], pool.stats()["free"]) == (0, 1)
    assert pool.reserve(3, keys(4), 100, 50).refusals == [""]


def test_a_write_is_let_in_by_a_live_reservation_into_its_own_slots_only(pool: SlotPool):
    slot, other = (pool.reserve(h, keys(h), 80, 50, expires=10.0).blocks[0].slot for h in (1, 2))
    for handle, writes in (
        (1, [(other, 80)]),
        (1, [(slot, 80), (other, 80)]),
        (1, [(99, 1)]),
        (3, [(slot, 80)]),
    ):
        with pytest.raises(StaleError, match="reservation"):
            pool.begin_writes(handle, writes)
    with pytest.raises(InvalidError, match="ends at 81"):
        pool.begin_writes(1, [(slot, 80), (slot, 81)])
    pool.abort(1)
    again = pool.reserve(4, keys(1, 5, 6), 80, 50)
    assert slot in [block.slot for block in again.blocks]
    with pytest.raises(StaleError, match="is over"):
        pool.begin_writes(1, [(slot, 80)])
    assert pool.stats()["draining"] == 0


def test_no_write_begins_once_the_bytes_are_being_checked(pool: SlotPool):
    block = pool.reserve(1, keys(1, 2), 100, 50).blocks[0]
    writes, _ = pool.begin_writes(1, [(block.slot, 100)])
    with pytest.raises(InvalidError, match="arriving"):
        pool.seal(block)
    pool.end_writes(writes)
    pool.seal(block)
    with pytest.raises(StaleError, match="another call"):
        pool.seal(block)
    with pytest.raises(StaleError, match="not under write"):
        pool.begin_writes(1, [(block.slot, 100)])
    pool.commit(1, 0, (1, 2))
    with pytest.raises(StaleError, match="not under write"):
        pool.begin_writes(1, [(block.slot, 100)])


def test_a_lease_ends_in_its_time(pool: SlotPool):
    put(pool, 1, 1, 2, 3, 4)
    pool.lease(2, keys(1, 2, 3, 4), expires=5.0)
    pool.expire(4.9)
    assert pool.reserve(3, keys(5), 100, 50).refusals == ["no_room"]
    pool.expire(5.0)
    assert pool.reserve(4, keys(5), 100, 50).refusals == [""]
    assert not pool.release(2)


@dataclass(eq=False)
class _Object:
    """The model's idea of one object: everything else is computed from the list of them."""

    key: bytes
    handle: int
    index: int
    writing_until: float
    stamp: tuple[int, int] = (0, 0)
    committed: bool = False
    removed: bool = False
    num_writes: int = 0
    draining: bool = False
    leases: dict[int, float] = field(default_factory=dict)


class SlotModel(RuleBasedStateMachine):
    """Random calls on a pool of 4 slots; the model keeps a flat list of objects and computes all from it."""

    NUM_SLOTS = 4

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(np.zeros(self.NUM_SLOTS, np.uint64), 100)
        self.objects: list[_Object] = []
        self.now = 0.0
        self.uses = 0
        self.handles = 0
        self.commit_uses: dict[int, int] = {}
        self.writes: list[tuple[_Object, list[Block]]] = []
        self.evicted = 0

    def _visible(self, k: bytes) -> _Object | None:
        found = [o for o in self.objects if o.key == k and o.committed and not o.removed]
        assert len(found) <= 1
        return found[0] if found else None

    def _written(self, k: bytes) -> bool:
        return any(o.key == k and not o.committed and not o.draining for o in self.objects)

    def _pending(self, handle: int, index: int) -> list[_Object]:
        return [
            o
            for o in self.objects
            if (o.handle, o.index) == (handle, index) and not o.committed and not o.draining
        ]

    def _give_up(self, o: _Object) -> None:
        if o.num_writes:
            o.draining = True
        else:
            self.objects.remove(o)

    def _new_handle(self) -> int:
        self.handles += 1
        return self.handles

    @rule(
        numbers=st.lists(st.integers(0, 6), max_size=5),
        nbytes=st.sampled_from([50, 100, 101]),
        lease=st.sampled_from([2.0, 5.0, math.inf]),
    )
    def reserve(self, numbers: list[int], nbytes: int, lease: float) -> None:
        handle = self._new_handle()
        self.uses += 1
        refusals, evicted = [], []
        for index, k in enumerate(keys(*numbers)):
            present = self._visible(k)
            if nbytes > 100:
                refusals.append("too_large")
            elif present:
                present.stamp = (self.uses, -index)
                refusals.append("present")
            elif self._written(k):
                refusals.append("writing")
            else:
                if len(self.objects) == self.NUM_SLOTS:
                    victims = [
                        o for o in self.objects if o.committed and not o.leases and o.stamp[0] != self.uses
                    ]
                    if not victims:
                        refusals.append("no_room")
                        continue
                    victim = min(victims, key=lambda o: o.stamp)
                    evicted.append(victim.key)
                    self.objects.remove(victim)
                self.objects.append(_Object(k, handle, index, self.now + lease))
                refusals.append("")
        self.evicted += len(evicted)
        outcome = self.pool.reserve(handle, keys(*numbers), nbytes, 50, self.now + lease)
        assert outcome.refusals == refusals
        assert outcome.evicted == evicted
        assert [b is not None for b in outcome.blocks] == [not r for r in refusals]

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        if not self.handles:
            return
        handle = data.draw(st.integers(1, self.handles))
        index = data.draw(st.integers(0, 4))
        mine = self._pending(handle, index)
        if not mine:
            with pytest.raises(StaleError):
                self.pool.commit(handle, index, (1,))
            return
        if mine[0].num_writes:
            with pytest.raises(InvalidError):
                self.pool.seal(self.pool.pending(handle, index))
            return
        if handle not in self.commit_uses:
            self.uses += 1
            self.commit_uses[handle] = self.uses
        mine[0].committed = True
        mine[0].stamp = (self.commit_uses[handle], -index)
        commit(self.pool, handle, index, (1,))

    @rule(data=st.data())
    def begin_write(self, data: st.DataObject) -> None:
        """Into a slot of the pool, with the handle of any reservation there has been."""
        if not self.handles:
            return
        handle = data.draw(st.integers(1, self.handles))
        index = data.draw(st.integers(0, 4))
        mine = self._pending(handle, index)
        if mine:
            slot = self.pool.pending(handle, index).slot
            blocks, until = self.pool.begin_writes(handle, [(slot, 50)])
            assert until == mine[0].writing_until
            mine[0].num_writes += 1
            self.writes.append((mine[0], blocks))
        elif not any(self._pending(handle, i) for i in range(5)):
            for slot in range(self.NUM_SLOTS):
                with pytest.raises(StaleError):
                    self.pool.begin_writes(handle, [(slot, 50)])

    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        if not self.writes:
            return
        o, blocks = self.writes.pop(data.draw(st.integers(0, len(self.writes) - 1)))
        o.num_writes -= 1
        if o.draining and not o.num_writes:
            self.objects.remove(o)
        self.pool.end_writes(blocks)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if not self.handles:
            return
        handle = data.draw(st.integers(1, self.handles))
        mine = [o for o in self.objects if o.handle == handle and not o.committed and not o.draining]
        for o in mine:
            self._give_up(o)
        assert self.pool.abort(handle) == bool(mine)

    @rule(numbers=st.lists(st.integers(0, 6), max_size=4), lease=st.sampled_from([2.0, 5.0, math.inf]))
    def lease(self, numbers: list[int], lease: float) -> None:
        handle = self._new_handle()
        self.uses += 1
        expected = []
        for index, k in enumerate(keys(*numbers)):
            found = self._visible(k)
            expected.append(found is not None)
            if found:
                found.stamp = (self.uses, -index)
                found.leases[handle] = self.now + lease
        assert [b is not None for b in self.pool.lease(handle, keys(*numbers), self.now + lease)] == expected

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if not self.handles:
            return
        handle = data.draw(st.integers(1, self.handles))
        mine = [o for o in self.objects if handle in o.leases]
        for o in mine:
            del o.leases[handle]
        assert self.pool.release(handle) == bool(mine)
        self._drop_removed()

    @rule(number=st.integers(0, 6))
    def remove(self, number: int) -> None:
        found = self._visible(key(number))
        if found:
            found.removed = True
        assert self.pool.remove(key(number)) == (found is not None)
        self._drop_removed()

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for o in self.objects:
            o.leases = {handle: until for handle, until in o.leases.items() if until > self.now}
        for o in list(self.objects):
            if not o.committed and not o.draining and o.writing_until <= self.now:
                self._give_up(o)
        self._drop_removed()
        self.pool.expire(self.now)

    def _drop_removed(self) -> None:
        self.objects = [o for o in self.objects if not o.removed or o.leases]

    @invariant()
    def agrees(self) -> None:
        self.pool.validate()
        visible = {o.key for o in self.objects if o.committed and not o.removed}
        assert set(self.pool.keys()) == visible
        stats = self.pool.stats()
        assert stats["free"] == self.NUM_SLOTS - len(self.objects)
        assert stats["draining"] == sum(1 for o in self.objects if o.draining)
        assert stats["reserved"] == sum(1 for o in self.objects if not o.committed and not o.draining)
        assert stats["leased"] == sum(1 for o in self.objects if o.leases)
        assert stats["evicted"] == self.evicted


TestSlotModel = SlotModel.TestCase
TestSlotModel.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
