"""Keys of an answer's blocks, and their way to the home node."""

import functools
import threading

import numpy as np
import pytest
from fakes.engine import FORMAT

from kvstore import Node, NodeConfig, chain_keys, root_key
from kvstore.transfer import TransferEngine
from mooncake_jax.decode.answers import AnswerKeys, AnswerSaver

Z = FORMAT.block_tokens
ROOT = root_key(b"fingerprint")


@pytest.mark.parametrize("length", [1, Z - 1, Z, Z + 1, 3 * Z])
def test_keys_are_those_of_the_whole_text(length):
    text = [(7 * i) % 50 for i in range(length + 3 * Z)]
    keys = AnswerKeys(ROOT, text[:length], Z)
    found = [keys.feed(token) for token in text[length:]]
    expected = chain_keys(ROOT, text, Z)[length // Z :]
    assert [key for key in found if key is not None] == expected
    assert [i for i, key in enumerate(found, length + 1) if key is not None] == list(
        range(length // Z * Z + Z, len(text) + 1, Z)
    )


@pytest.fixture
def home():
    engine = TransferEngine(host_id="here")
    node = Node(NodeConfig("home", "here", 2 * 4096, FORMAT.nbytes), engine)
    yield node
    node.validate()
    node.close()
    engine.close()


def block(fill: int) -> np.ndarray:
    return np.full(FORMAT.shape, fill, FORMAT.item_dtype)


def test_blocks_come_home(home):
    saver = AnswerSaver(home, FORMAT, max_blocks=8)
    keys = chain_keys(ROOT, range(3 * Z), Z)
    for i, key in enumerate([*keys, keys[0]]):
        saver.save(key, functools.partial(block, i))
    saver.close()
    assert (saver.num_pending, saver.num_dropped) == (0, 0)
    with home.lease(keys) as lease:
        assert lease.held == [True] * 3
        assert [int(np.frombuffer(lease.view(i), "<u2")[-1]) for i in range(3)] == [0, 1, 2]
        assert len(lease.crcs(0)) == FORMAT.num_groups


def test_too_many_waiting_blocks_are_dropped_and_counted(home):
    held, go = threading.Event(), threading.Event()
    reserve = home.reserve

    def slow(*args):
        held.set()
        assert go.wait(10)
        return reserve(*args)

    home.reserve = slow
    saver = AnswerSaver(home, FORMAT, max_blocks=2)
    keys = chain_keys(ROOT, range(4 * Z), Z)
    saver.save(keys[0], lambda: block(0))
    assert held.wait(10)
    saver.save(keys[1], lambda: block(1))
    saver.save(keys[2], lambda: pytest.fail("extracted in vain"))
    assert (saver.num_pending, saver.num_dropped) == (2, 1)
    go.set()
    saver.close()
    assert home.exists(keys) == [True, True, False, False]


def test_a_full_home_drops_too(home):
    keys = chain_keys(ROOT, range(4 * Z), Z)
    num_slots = home.stats()["slots"]
    with home.reserve([bytes([i]) * 16 for i in range(num_slots)], FORMAT.nbytes, FORMAT.group_nbytes):
        saver = AnswerSaver(home, FORMAT, max_blocks=8)
        saver.save(keys[0], lambda: block(0))
        saver.close()
    assert saver.num_dropped == 1
