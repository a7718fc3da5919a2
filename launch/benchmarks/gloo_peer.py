"""Gloo as a peer, through JAX's collectives on CPUs: two processes of one device each, joined by `jax.distributed`.

    python gloo_peer.py RANK COORDINATOR

Rank 1 receives. Both read jobs as JSON lines `{"piece": nbytes, "num": pieces, "times": n}` and answer
`{"seconds": s}`: how long `times` programs took, each of which sends `num` pieces from rank 0 to rank 1.
"""

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rank, coordinator = int(sys.argv[1]), sys.argv[2]
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(coordinator, num_processes=2, process_id=rank)
    import numpy as np
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("rank",))
    sharding = NamedSharding(mesh, P("rank"))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        piece, num = job["piece"], job["num"]
        pieces = [
            jax.make_array_from_process_local_data(
                sharding, np.full((1, piece), rank + 1, np.uint8), (2, piece)
            )
            for _ in range(num)
        ]

        def send(pieces):
            return [jax.lax.ppermute(one, "rank", [(0, 1)]) for one in pieces]

        step = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=(P("rank"),), out_specs=P("rank")))
        moved = jax.block_until_ready(step(pieces))  # compiles, connects
        if rank and any(int(one.addressable_shards[0].data[0, -1]) != 1 for one in moved):
            raise AssertionError("a piece did not arrive")
        start = time.perf_counter()
        for _ in range(job["times"]):
            moved = jax.block_until_ready(step(pieces))
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
