"""Random puts, gets, ranges, removals, evictions, damage, drops of nodes and of the directory, against a model.

What is stored under a key follows from the key: so every byte read can be judged, and a miss is always allowed but
where the model knows better.
"""

from __future__ import annotations

import os
import random
from contextlib import closing
from pathlib import Path

import pytest
from fakes.stores import Cluster, StoreNode, wait_until

from kvstore import Client

STEPS = int(os.environ.get("STORE_STEPS", "10000"))
NBYTES, PART = 3000, 700
NUM_KEYS = 60


def content(key: bytes) -> bytes:
    return random.Random(key).randbytes(NBYTES)


class Campaign:
    """Two nodes of 8 slots with SSD tiers of about 20, a client at home on each and one elsewhere."""

    def __init__(self, cluster: Cluster, folder: Path, seed: int):
        self.rng = random.Random(seed)
        self.cluster, self.folder = cluster, folder
        self.keys = [self.rng.randbytes(16) for _ in range(NUM_KEYS)]
        self.data = {key: content(key) for key in self.keys}
        self.removed: set[bytes] = set()  # from everywhere, and not put since
        self.num_got = self.num_missed = self.num_removed = self.num_not_removed = 0
        self.nodes: dict[str, StoreNode] = {}
        self.homes: dict[str, Client] = {}
        self.far = cluster.client()
        for name in ("a", "b"):
            self.start(name)

    def start(self, name: str) -> None:
        ssd = self.folder / name
        self.nodes[name] = self.cluster.node(
            name, num_slots=8, slot_nbytes=NBYTES, ssd=ssd, ssd_nbytes=220_000
        )
        self.homes[name] = self.cluster.client(self.nodes[name])

    def step(self) -> None:
        rng = self.rng
        some = rng.sample(self.keys, rng.choice((1, 1, 2, 5, 12)))
        client = rng.choice((self.far, *self.homes.values()))
        match rng.choices(range(8), (30, 40, 10, 8, 4, 4, 0.6, 0.2))[0]:
            case 0:
                results = client.put(some, [self.data[key] for key in some], PART)
                self.removed -= {k for k, r in zip(some, results, strict=True) if r != "no_room"}
                assert client is self.far or set(results) <= {"stored", "present", "no_room"}
                if len(some) == 1 and results == ["stored"] and client is not self.far:
                    assert client.get(some) == [self.data[some[0]]], "it was used last, and nobody else works"
            case 1:
                self.judge(some, client.get(some), 0, NBYTES)
            case 2:
                offset = rng.choice((0, PART, 2 * PART, 123))
                nbytes = rng.choice((PART, 77, NBYTES - 3 * PART))
                self.judge(some, client.get_ranges(some, [(offset, nbytes)]), offset, nbytes)
            case 3:
                client.remove(some)
                held = [store.node.exists(some) for store in self.nodes.values()]
                gone = {key for key, *here in zip(some, *held, strict=True) if not any(here)}
                self.removed |= gone
                self.num_removed += len(gone)
                self.num_not_removed += len(some) - len(gone)  # of a node that was not heard in time
            case 4:
                name = rng.choice(list(self.nodes))
                with self.nodes[name].node.lease(some) as lease:
                    self.judge(
                        some,
                        [bytes(lease.view(i)) if h else None for i, h in enumerate(lease.held)],
                        0,
                        NBYTES,
                    )
            case 5:
                self.nodes[rng.choice(list(self.nodes))].node.spill(20)
            case 6:
                self.restart(rng.choice(list(self.nodes)), is_damaged=rng.random() < 0.5)
            case _:
                self.cluster.restart_directory()
                self.wait_complete()

    def judge(self, some: list[bytes], got: list[bytes | None], offset: int, nbytes: int) -> None:
        for key, data in zip(some, got, strict=True):
            if data is None:
                self.num_missed += 1
                continue
            self.num_got += 1
            assert data == self.data[key][offset : offset + nbytes]
            assert key not in self.removed

    def restart(self, name: str, *, is_damaged: bool) -> None:
        """The node comes back with what its SSD holds; perhaps a byte of that has changed."""
        self.cluster.forget(self.homes.pop(name))
        store = self.nodes.pop(name)
        self.cluster.stop(store)
        if is_damaged:
            slots = self.folder / name / "slots"
            raw = bytearray(slots.read_bytes())
            if raw:
                raw[self.rng.randrange(len(raw))] ^= 1 << self.rng.randrange(8)
                slots.write_bytes(raw)
        self.start(name)
        self.wait_complete()

    def wait_complete(self) -> None:
        """Until every client knows of both nodes."""
        for client in (self.far, *self.homes.values()):
            wait_until(lambda c=client: c.replica.in_sync and len(c.replica.nodes()) == len(self.nodes))


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_every_byte_read_is_the_byte_put(tmp_path, seed):
    with closing(Cluster()) as cluster:
        campaign = Campaign(cluster, tmp_path, seed)
        for _ in range(-(-STEPS // 2)):
            campaign.step()
        promoted = sum(store.node.stats()["ssd_read"] for store in campaign.nodes.values())
    assert campaign.num_got > campaign.num_missed / 4 > 0
    assert promoted > 0
    assert campaign.num_removed > 20 * campaign.num_not_removed
