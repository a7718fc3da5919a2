"""Several sources as one stream: everything arrives, and whatever ends it ends them all."""

import asyncio
from contextlib import aclosing

import pytest

from mooncake_jax.frontend.merging import merge


class Source:
    def __init__(self, items, *, error=None, hangs=False):
        self.items, self.error, self.hangs, self.closed = items, error, hangs, False

    async def events(self):
        try:
            for item in self.items:
                await asyncio.sleep(0)
                yield item
            if self.error:
                raise self.error
            if self.hangs:
                await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.closed = True


async def collect(sources, most=1000):
    got = []
    async with aclosing(merge([source.events() for source in sources])) as items:
        async for item in items:
            got.append(item)
            if len(got) == most:
                break
    return got


def test_every_item_of_every_source_in_its_order():
    sources = [Source(range(n)) for n in (3, 0, 50)]
    got = asyncio.run(collect(sources))
    for index, source in enumerate(sources):
        assert [item for where, item in got if where == index] == list(source.items)
        assert source.closed


def test_an_error_is_raised_and_closes_the_others():
    sources = [Source(range(2), hangs=True), Source([], error=KeyError("lost")), Source(range(1000))]
    with pytest.raises(KeyError, match="lost"):
        asyncio.run(collect(sources))
    assert all(source.closed for source in sources if source.error or source.hangs)


def test_leaving_closes_all_also_while_they_wait_for_a_reader():
    sources = [Source(range(1000)), Source([1], hangs=True)]
    assert len(asyncio.run(collect(sources, most=2))) == 2
    assert all(source.closed for source in sources)


def test_a_slow_reader_is_waited_for():
    source = Source(range(10_000))
    produced = 0

    async def counted():
        nonlocal produced
        async for item in source.events():
            produced += 1
            yield item

    async def read_one():
        async with aclosing(merge([counted()])) as items:
            await anext(items)
            for _ in range(500):
                await asyncio.sleep(0)
            return produced

    assert asyncio.run(read_one()) < 50
