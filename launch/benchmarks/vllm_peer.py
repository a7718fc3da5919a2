"""vLLM as a peer: run by *its* Python (`PEERS/vllm/bin/python vllm_peer.py MODEL_DIR`), driven by JSON lines.

Reads `{"ids": [[token ids], …], "max_tokens": n}` per line, answers `{"seconds": s}`; prints `{"ready": true}` first.
Prefix caching is on, as a server would have it: send fresh ids to measure a cold prompt.
"""

import json
import os
import sys
import time

os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")


def main() -> None:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.inputs import TokensPrompt  # pyright: ignore[reportMissingImports]

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = LLM(sys.argv[1], dtype="bfloat16", max_model_len=8192, enable_prefix_caching=True)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        params = SamplingParams(max_tokens=job["max_tokens"], temperature=0, ignore_eos=True)
        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in job["ids"]]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - start}), file=answers, flush=True)


if __name__ == "__main__":
    main()
