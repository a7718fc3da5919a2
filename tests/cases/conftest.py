"""A frontend over real engines, for whichever case wants one."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from cases.judge import Judge
from cases.served import Served
from e2e.http_frontend import http_frontend
from e2e.real import CFG, local_cluster

from launch.model_source import byte_tokenizer


@pytest.fixture
def serve(engines, oracle):
    """`serve(tokenizer, decode_config)`; at the end the canary sings, and all is free."""
    with ExitStack() as stack:

        def start(tokenizer=None, **fields) -> Served:
            cluster = stack.enter_context(local_cluster(engines, 1, "tcp", **fields))
            tokenizer = tokenizer or byte_tokenizer()
            frontend = stack.enter_context(http_frontend(cluster, tokenizer, CFG.vocab_size))
            served = Served(cluster, frontend, Judge(oracle), tokenizer)
            stack.callback(served.canary)
            return served

        yield start
