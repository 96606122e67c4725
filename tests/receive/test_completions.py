"""Results of other threads in an event loop."""

import asyncio
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest

from stallscope.errors import StorageFailed
from stallscope.receive.completions import Completions


def test_results_and_errors_of_other_threads_arrive_in_the_loop():
    async def results() -> list[object]:
        completions = Completions(asyncio.get_running_loop())
        futures: list[Future[int]] = [Future() for _ in range(300)]
        waiting = [asyncio.create_task(completions.result(future)) for future in futures]
        with ThreadPoolExecutor(3) as threads:
            for number, future in enumerate(futures[1:], 1):
                threads.submit(future.set_result, number)
            threads.submit(futures[0].set_exception, StorageFailed("no space"))
            return await asyncio.gather(*waiting, return_exceptions=True)

    error, *numbers = asyncio.run(results())
    assert isinstance(error, StorageFailed) and numbers == list(range(1, 300))


def test_a_cancelled_request_does_not_hold_up_the_others():
    async def result() -> int:
        completions = Completions(asyncio.get_running_loop())
        gone, kept = Future[int](), Future[int]()
        waiting = [asyncio.create_task(completions.result(future)) for future in (gone, kept)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        gone.set_result(1)
        kept.set_result(2)
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        return await waiting[1]

    assert asyncio.run(result()) == 2


def test_a_cancelled_future_does_not_hold_up_the_others():
    async def results() -> list[object]:
        completions = Completions(asyncio.get_running_loop())
        given_up, kept = Future[int](), Future[int]()
        waiting = [asyncio.create_task(completions.result(future)) for future in (given_up, kept)]
        await asyncio.sleep(0)
        given_up.cancel()
        kept.set_result(2)
        async with asyncio.timeout(20):
            return await asyncio.gather(*waiting, return_exceptions=True)

    error, number = asyncio.run(results())
    assert isinstance(error, CancelledError) and number == 2
