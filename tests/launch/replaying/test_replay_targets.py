"""A replay in open loop, over HTTP and straight to a Conductor."""

import asyncio
import time

from aiohttp import web
from e2e.cluster import LocalCluster
from fakes.engine import FORMAT

from launch.replaying.prompts import Line
from launch.replaying.targets import ConductorTarget, OpenAITarget, replay


def ignore(outcome):
    pass


def test_requests_go_out_at_their_times_whatever_became_of_the_others():
    """The first answer comes only when the last request has arrived."""
    arrived, all_here = [], asyncio.Event()

    async def completions(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        arrived.append(time.monotonic())
        if len(arrived) == 4:
            all_here.set()
        await asyncio.wait_for(all_here.wait(), 60)
        if body["prompt"] == [2]:
            return web.Response(status=429, headers={"Retry-After": "3"}, text="busy")
        if body["prompt"] == [3]:
            return web.Response(status=500, text="broken")
        response = web.StreamResponse()
        await response.prepare(request)
        for text in ("a", "b"):
            await response.write(b'data: {"choices": [{"text": "%s"}]}\n\n' % text.encode())
        usage = b'{"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 7}}'
        await response.write(b'data: {"choices": [], "usage": %s}\n\ndata: [DONE]\n\n' % usage)
        return response

    async def run():
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        target = OpenAITarget(f"http://127.0.0.1:{port}/", "m")
        try:
            return await replay(target, [Line(i, 0.02 * i, [i], 2) for i in range(4)], ignore)
        finally:
            await runner.cleanup()

    got = asyncio.run(run())
    assert [one.status for one in got] == ["ok", "ok", "rejected", "failed"]
    assert (got[0].output_tokens, got[0].cached_tokens) == (2, 7)
    assert got[0].ttft_seconds >= arrived[-1] - arrived[0]
    assert got[2].retry_after_seconds == 3.0
    assert "500" in got[3].error
    assert all(one.lag_seconds >= 0.0 for one in got)
    assert arrived[3] - arrived[0] > 0.03


class Stalling:
    """Holds up the whole client while it sends its first line."""

    async def start(self):
        pass

    async def close(self):
        pass

    async def send(self, line, outcome):
        if line.index == 0:
            time.sleep(0.3)
        return outcome


def test_a_client_that_is_late_says_so():
    got = asyncio.run(replay(Stalling(), [Line(i, 0.001 * i, [i], 1) for i in range(3)], ignore))
    assert [one.index for one in got] == [0, 1, 2]
    assert min(got[1].lag_seconds, got[2].lag_seconds) > 0.2


def test_a_stream_that_breaks_off_is_no_answer():
    async def completions(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        if (await request.json())["prompt"] == [1]:
            await response.write(b"data: {}" + b" " * (1 << 20) + b"\n\ndata: [DONE]\n\n")
        return response

    async def run():
        app = web.Application()
        app.router.add_post("/v1/completions", completions)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        target = OpenAITarget(f"http://127.0.0.1:{runner.addresses[0][1]}", "m")
        try:
            return await replay(target, [Line(i, 0.0, [i], 2) for i in range(2)], ignore)
        finally:
            await runner.cleanup()

    broken, endless_line = asyncio.run(run())
    assert (broken.status, broken.error) == ("failed", "the stream broke off")
    assert endless_line.status == "failed"


def test_a_conductor_serves_a_replay_and_tells_what_was_reused():
    Z = FORMAT.block_tokens
    prefix = list(range(4 * Z))
    with LocalCluster(num_prefill=1, num_decode=1) as cluster:
        target = ConductorTarget(cluster.conductor.address)
        (first,) = asyncio.run(replay(target, [Line(0, 0.0, [*prefix, 1], 3)], ignore))
        cluster.wait_held("prefill-0", prefix, range(4))
        target = ConductorTarget(cluster.conductor.address)
        lines = [Line(1, 0.0, [*prefix, 2], 3), Line(2, 0.0, [1] * 1000, 3)]
        second, too_long = asyncio.run(replay(target, lines, ignore))
    assert (first.status, first.output_tokens, first.cached_tokens) == ("ok", 3, 0)
    assert (second.status, second.cached_tokens, second.prefill) == ("ok", 4 * Z, "prefill-0")
    assert too_long.status == "failed"
    assert "1000 tokens" in too_long.error
