"""Many side by side, or one alone."""

from __future__ import annotations

import asyncio

from pipeline.turns import Turns


def test_one_alone_waits_for_the_others_and_holds_back_the_next() -> None:
    log: list[str] = []

    async def together(turns: Turns, name: str) -> None:
        async with turns.together():
            log.append(f"+{name}")
            await asyncio.sleep(0.01)
            log.append(f"-{name}")

    async def alone(turns: Turns, name: str) -> None:
        async with turns.alone():
            log.append(f"+{name}")
            await asyncio.sleep(0.01)
            log.append(f"-{name}")

    async def run() -> None:
        turns = Turns()
        await asyncio.gather(
            together(turns, "a"), together(turns, "b"), alone(turns, "S"), alone(turns, "T"), together(turns, "c")
        )
        await together(turns, "d")

    asyncio.run(run())
    assert log == ["+a", "+b", "-a", "-b", "+S", "-S", "+T", "-T", "+c", "-c", "+d", "-d"]


def test_a_row_that_fails_gives_its_turn_back() -> None:
    async def fails(turns: Turns) -> None:
        async with turns.alone():
            raise ValueError

    async def run() -> bool:
        turns = Turns()
        await asyncio.gather(fails(turns), return_exceptions=True)
        async with turns.together():
            return True

    assert asyncio.run(asyncio.wait_for(run(), 5))
