"""Rows of one process take turns: many side by side, or one alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Turns:
    """One that asks to be alone waits until the process is empty, and holds back those that come after it."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._running = 0
        self._alone = 0  # running alone, or waiting for it

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        async with self._turn(lambda: not self._alone):
            yield

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        self._alone += 1
        try:
            async with self._turn(lambda: not self._running):
                yield
        finally:
            self._alone -= 1
            await self._tell()

    @asynccontextmanager
    async def _turn(self, comes: Callable[[], bool]) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(comes)
            self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()
