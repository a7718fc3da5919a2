"""CPP over every mesh of 8 devices, at chunks of 16 to 2,048 tokens and prefixes of no, one and many blocks."""

import os
import time

import numpy as np
import pytest
from e2e.pipelined import NUM_SLOTS, TOLERANCE, Request, Scene, Z

from models.sharding import MeshShape

pytestmark = pytest.mark.soak
SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
SIZES, CHUNKS = (64, 2048), (16, 64, 256, 2048)  # of programs, and of chunks
MOST_CACHED, MOST_NEW = 64, 2200
MESHES = [MeshShape(stage=x, tensor=t) for x in (1, 2, 4, 8) for t in (1, 2) if x * t <= 8]


@pytest.fixture(scope="module")
def scene():
    return Scene(num_layers=8, sizes=SIZES, max_tokens=MOST_CACHED * Z + 2304)


@pytest.mark.timeout(60 * SECONDS)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_every_mesh_equals_the_single_device(scene, shape):
    rng = np.random.default_rng(shape.stage * 10 + shape.tensor)
    began, tried = time.monotonic(), 0
    while tried < 2 or time.monotonic() - began < SECONDS / len(MESHES):
        requests = [
            Request(
                int(rng.choice([0, 1, MOST_CACHED])),
                int(rng.integers(1, int(rng.choice([32, 300, MOST_NEW])))),
                int(rng.choice(CHUNKS)),
            )
            for _ in range(NUM_SLOTS)
        ]
        worst = scene.worst(shape, int(rng.integers(1 << 30)), requests)
        assert worst <= TOLERANCE, requests
        tried += 1
    print(f"{shape}: {tried} queues")
