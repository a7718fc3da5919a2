"""The directory's pure parts: membership, announcements, the event log, and a replica that follows it."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvstore.directory.event_log import EventLog, split
from kvstore.directory.replica_state import ReplicaState
from kvstore.directory.state import DirectoryState
from kvstore.errors import InternalError, InvalidError, StaleError
from kvstore.messages import (
    MAX_BATCH_KEYS,
    Announce,
    Forgotten,
    Joined,
    KeysChanged,
    NodeBeat,
    NodeId,
    NodeInfo,
    WatchBatch,
    WatchEvent,
)
from kvstore.rpc import MAX_MESSAGE_NBYTES
from kvstore.transfer.segment import Peer, Segment


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def info(name: str, epoch: int = 1, num_slots: int = 1000) -> NodeInfo:
    segment = Segment(Peer(epoch, "host", []), name, 100 * num_slots)
    return NodeInfo(name, epoch, "127.0.0.1:1", "host", segment, num_slots, 100)


def announce(
    state: DirectoryState,
    name: str,
    sequence: int,
    added=(),
    removed=(),
    on_ssd=(),
    epoch: int = 1,
    now: float = 0.0,
) -> bool:
    news = Announce(name, epoch, sequence, list(added), list(removed), 0, list(on_ssd))
    return state.announce(news, now)


def holders(state: DirectoryState, *numbers: int) -> list[set[str]]:
    reply = state.lookup(keys(*numbers))
    return [{reply.nodes[replica.node].name for replica in some} for some in reply.holders]


def test_lookup_names_every_holder():
    state = DirectoryState(3.0)
    for name in ("a", "b"):
        state.register(info(name), 0.0)
    assert announce(state, "a", 1, keys(1, 2))
    assert announce(state, "b", 1, keys(2, 3))
    assert holders(state, 1, 2, 3, 4) == [{"a"}, {"a", "b"}, {"b"}, set()]
    assert announce(state, "a", 2, keys(4), keys(2))
    assert holders(state, 1, 2, 3, 4) == [{"a"}, {"b"}, {"b"}, {"a"}]


def test_lookup_names_the_tier_and_both_tiers_bound_what_a_node_may_hold():
    state = DirectoryState(3.0)
    state.register(msgspec.structs.replace(info("a", num_slots=2), num_ssd_slots=1), 0.0)
    assert announce(state, "a", 1, keys(1, 2), on_ssd=keys(3))
    tiers = [[replica.tier for replica in some] for some in state.lookup(keys(1, 2, 3, 4)).holders]
    assert tiers == [["dram"], ["dram"], ["ssd"], []]
    with pytest.raises(InvalidError, match="more keys than its 3 slots"):
        announce(state, "a", 2, on_ssd=keys(4))
    with pytest.raises(InvalidError, match="twice"):
        announce(state, "a", 2, added=keys(3), on_ssd=keys(3))
    assert announce(state, "a", 2, added=keys(3), removed=keys(1), on_ssd=keys(2))
    assert [some[0].tier for some in state.lookup(keys(2, 3)).holders] == ["ssd", "dram"]


def test_a_silent_node_is_forgotten_with_its_keys():
    state = DirectoryState(3.0)
    state.register(info("a"), 0.0)
    state.register(info("b"), 0.0)
    announce(state, "a", 1, keys(1))
    announce(state, "b", 1, keys(1))
    assert state.heartbeat(NodeBeat("a", 1, 5), 2.0)
    assert state.expire(3.0) == []
    assert state.expire(3.1) == ["b"]
    assert holders(state, 1) == [{"a"}]
    assert not state.heartbeat(NodeBeat("b", 1, 5), 3.2)
    assert not announce(state, "b", 2, keys(2))
    assert [load.num_free for load in state.nodes()] == [5]


def test_a_new_epoch_replaces_the_old_one_for_good():
    state = DirectoryState(3.0)
    state.register(info("a", epoch=1), 0.0)
    announce(state, "a", 1, keys(1))
    state.register(info("a", epoch=2), 0.5)
    assert holders(state, 1) == [set()]
    assert not announce(state, "a", 2, keys(2), epoch=1)
    assert not state.heartbeat(NodeBeat("a", 1, 0), 0.6)
    with pytest.raises(StaleError, match="replaced"):
        state.register(info("a", epoch=1), 0.7)
    state.leave(NodeId("a", 1))
    assert announce(state, "a", 1, keys(3), epoch=2)
    assert holders(state, 3) == [{"a"}]


def test_announcements_are_taken_once_and_in_order():
    state = DirectoryState(3.0)
    state.register(info("a"), 0.0)
    assert announce(state, "a", 1, keys(1))
    events = state.log.sequence
    assert announce(state, "a", 1, keys(1))
    assert state.log.sequence == events
    assert not announce(state, "a", 3, keys(3))
    assert holders(state, 1, 3) == [{"a"}, set()]


def test_bad_announcements_are_refused_whole():
    state = DirectoryState(3.0)
    state.register(info("a", num_slots=2), 0.0)
    with pytest.raises(InvalidError, match="more keys than its 2 slots"):
        announce(state, "a", 1, keys(1, 2, 3))
    with pytest.raises(InvalidError, match="twice"):
        announce(state, "a", 1, keys(1), keys(1))
    assert holders(state, 1) == [set()]
    assert announce(state, "a", 1, keys(1, 2))
    with pytest.raises(InvalidError, match="more keys than its 2 slots"):
        announce(state, "a", 2, keys(3, 4), keys(1))
    assert holders(state, 1, 2, 3) == [{"a"}, {"a"}, set()]
    assert announce(state, "a", 2, keys(3), keys(1))
    assert holders(state, 1, 2, 3) == [set(), {"a"}, {"a"}]
    with pytest.raises(InvalidError, match="do not hold 3 slots"):
        state.register(msgspec.structs.replace(info("b", num_slots=2), num_slots=3), 0.0)


def test_a_reader_of_the_log_goes_on_where_it_was_until_it_fell_off():
    log = EventLog(capacity=10)
    for number in range(4):
        log.append(KeysChanged("a", keys(number), []))
    assert log.since(2) == [KeysChanged("a", keys(2), []), KeysChanged("a", keys(3), [])]
    assert log.since(4) == []
    assert log.since(5) is None
    for number in range(4, 8):
        log.append(KeysChanged("a", keys(number), []))
    assert log.since(2) is None
    assert log.since(3) is not None


def test_every_batch_fits_into_a_message():
    rng = random.Random(1)
    events: list[WatchEvent] = [
        KeysChanged("n" * 80, [rng.randbytes(16) for _ in range(MAX_BATCH_KEYS)], []) for _ in range(30)
    ]
    big = Segment(Peer(1, "h" * 500, [("r" * 500, 1)] * 8), "s" * 500, 10**9, "l" * 500, "p" * 500)
    events += [Joined(msgspec.structs.replace(info(f"n{i}"), segment=big)) for i in range(2000)]
    batches = list(split(events))
    assert [event for batch in batches for event in batch] == events
    assert max(len(msgspec.msgpack.encode(WatchBatch(1, 1, "more", b))) for b in batches) < MAX_MESSAGE_NBYTES


def follow(state: DirectoryState, replica: ReplicaState, epoch: int = 7) -> list[WatchEvent]:
    """What the watch stream would deliver next."""
    at = replica.position.sequence if replica.position.epoch == epoch else -1
    events = state.log.since(at)
    if events is not None:
        return replica.apply(WatchBatch(epoch, at + len(events), "", events))
    changes = []
    for batch in split(state.snapshot()):
        changes += replica.apply(WatchBatch(epoch, state.log.sequence, "more", batch))
    return changes + replica.apply(WatchBatch(epoch, state.log.sequence, "last", []))


def batched(numbers: list[int]) -> list[list[int]]:
    return [numbers[:2], numbers[2:4], numbers[4:]]


def test_a_replica_follows_through_joins_gaps_and_a_new_directory():
    rng = random.Random(3)
    replica, heard = ReplicaState(), ReplicaState()
    epoch = 100
    state, sequences = DirectoryState(3.0, log_capacity=60), {}
    for step in range(400):
        name = rng.choice("abc")
        action = rng.random()
        if action < 0.02:
            state, sequences, epoch = DirectoryState(3.0, log_capacity=60), {}, epoch + 1
        elif name not in sequences or action < 0.08:
            state.register(info(name, epoch=step + 1), 0.0)
            sequences[name] = (step + 1, 0)
        elif action < 0.12:
            state.leave(NodeId(name, sequences.pop(name)[0]))
        else:
            node_epoch, sequence = sequences[name]
            added, removed, on_ssd = (keys(*part) for part in batched(rng.sample(range(30), 6)))
            assert announce(state, name, sequence + 1, added, removed, on_ssd, epoch=node_epoch)
            sequences[name] = (node_epoch, sequence + 1)
        if rng.random() < 0.3:
            while True:
                events = follow(state, replica, epoch)
                for event in events:
                    heard._apply(event)
                if replica.position.sequence == state.log.sequence and replica.position.epoch == epoch:
                    break
            everything = keys(*range(30))
            expected = [state._index.replicas(key) for key in everything]
            for mirror in (replica, heard):
                assert [mirror.index.replicas(key) for key in everything] == expected
                assert mirror.nodes == {load.info.name: load.info for load in state.nodes()}


def test_a_gap_in_the_stream_asks_for_a_snapshot():
    replica = ReplicaState()
    replica.apply(WatchBatch(1, 5, "last", [Joined(info("a"))]))
    with pytest.raises(InternalError, match="gap"):
        replica.apply(WatchBatch(1, 7, "", [Forgotten("a")]))
    assert replica.position.epoch == 0
    assert list(replica.nodes) == ["a"]


def test_a_repeated_snapshot_changes_nothing():
    replica = ReplicaState()
    snapshot = [Joined(info("a")), KeysChanged("a", keys(1), [])]
    assert replica.apply(WatchBatch(1, 5, "last", snapshot)) == snapshot
    assert replica.apply(WatchBatch(1, 9, "last", snapshot)) == []
    changed = [Joined(info("a")), KeysChanged("a", keys(3), [])]
    assert replica.apply(WatchBatch(1, 12, "last", changed)) == [KeysChanged("a", keys(3), keys(1))]
