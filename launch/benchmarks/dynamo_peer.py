"""Dynamo's KV router (Rust radix tree, block hashes) as a peer: run by *its* Python, driven by JSON lines on stdin.

    dynamo/bin/python dynamo_peer.py

- `{"op": "store", "chains": [[block ids], …], "num_workers": n}`: chain i is held by worker i % n → `{"seconds": s}`
- `{"op": "find"}`: find each of those chains once → `{"seconds": s}`
- `{"op": "hash", "tokens": [ids], "block_tokens": z, "count": n}` → `{"seconds": s}` for all n
"""

import json
import os
import sys
import time

from dynamo.llm import RadixTree, compute_block_hash_for_seq  # pyright: ignore[reportMissingImports]


def stored(event_id: int, chain: list[int]) -> bytes:
    blocks = [{"block_hash": block, "tokens_hash": block} for block in chain]
    return json.dumps(
        {"event_id": event_id, "data": {"stored": {"parent_hash": None, "blocks": blocks}}}
    ).encode()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    tree, chains = RadixTree(), []
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if job["op"] == "store":
            chains = job["chains"]
            events = [stored(i, chain) for i, chain in enumerate(chains)]
            start = time.perf_counter()
            for i, event in enumerate(events):
                tree.apply_event(i % job["num_workers"], event)
        elif job["op"] == "find":
            start = time.perf_counter()
            for chain in chains:
                scores = tree.find_matches(chain).scores
                if not scores:
                    sys.exit("a chain that was stored is not found")
        else:
            tokens, size = job["tokens"], job["block_tokens"]
            start = time.perf_counter()
            for _ in range(job["count"]):
                compute_block_hash_for_seq(tokens, size)
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
