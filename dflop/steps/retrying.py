"""Doing again what the cluster did to a job, never what the job did to itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from dflop.errors import InfrastructureError, Interrupted
from dflop.units import seconds

RETRIES, RETRY_DELAY_S = 2, 5.0

T = TypeVar("T")


async def with_retries(work: Callable[[], Awaitable[T]], say: Callable[[str], None]) -> T:
    """What `work` returns, done up to `RETRIES` times again after a lost node, a preemption or a lost job.

    What it had finished stays finished: profiles are kept by shard, training goes on from its checkpoint.

    Raises:
        DflopError: of the last time, or at once what the job did to itself.
    """
    for num_left in range(RETRIES, -1, -1):
        try:
            return await work()
        except InfrastructureError as error:
            if not num_left:
                raise
            times = "once more" if num_left == 1 else f"{num_left} more times"
            say(f"{error.what.splitlines()[0]}; tried again in {seconds(RETRY_DELAY_S)}, {times} if need be")
            await asyncio.sleep(RETRY_DELAY_S)
    raise AssertionError("unreachable")


async def while_it_gets_on(work: Callable[[], Awaitable[T]], steps: Callable[[], int], say: Callable[[str], None]) -> T:
    """What `work` returns, called again each time it was told to stop, for sites that do not requeue jobs.

    As often as it takes, as long as every time brings it further; `RETRIES` more times where it does not.

    Args:
        work: Trains from the newest checkpoint.
        steps: How far the newest checkpoint is.
        say: Told when it is done again.

    Raises:
        Interrupted: it gets nowhere.
        DflopError: what else happens.
    """
    num_fruitless = 0
    while True:
        before = steps()
        try:
            return await work()
        except Interrupted as error:
            num_fruitless = 0 if steps() > before else num_fruitless + 1
            if num_fruitless > RETRIES:
                raise
            say(f"{error.what.splitlines()[0]}; goes on from step {steps()} in another job")
            await asyncio.sleep(RETRY_DELAY_S)
