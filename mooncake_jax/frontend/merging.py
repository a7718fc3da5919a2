"""Several answers at once, as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")
_MAX_WAITING = 16  # items of all sources that a slow reader leaves lying; then the sources wait


async def merge(
    sources: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items of all `sources` as they come, each with the index of its source.

    The first error of any of them is raised, once; it, and closing this generator, closes them all.
    """
    queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(_MAX_WAITING)

    async def pump(index: int, source: AsyncGenerator[Item, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await queue.put((index, item))
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    try:
        left = len(tasks)
        while left:
            told = await queue.get()
            if isinstance(told, Exception):
                raise told
            if told is None:
                left -= 1
            else:
                yield told
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
