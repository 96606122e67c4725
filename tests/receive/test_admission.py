"""Room for requests: bounded for each tenant, given in order of arrival, and refused after the wait."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.patience import until

from stallscope.errors import Overloaded
from stallscope.receive.admission import SharedLimit


def waiting(limit: SharedLimit) -> int:
    return sum(len(waiters) for waiters in limit._waiting.values())


def test_a_tenant_never_holds_all_the_room():
    limit = SharedLimit(8, "requests")
    for _ in range(6):
        limit.take("a")
    with pytest.raises(Overloaded, match="no room for more requests"):
        limit.take("a")
    limit.take("b")
    limit.take("b")
    with pytest.raises(Overloaded):
        limit.take("c")
    assert limit.n_held == 8


def test_a_request_larger_than_the_room_is_admitted_alone():
    limit = SharedLimit(10, "bytes")
    with limit.held("a", 50), pytest.raises(Overloaded):
        limit.take("b", 1)
    limit.take("b", 1)


def test_waiting_requests_get_room_in_order_of_arrival_and_tenants_in_turn():
    limit, order = SharedLimit(4, "messages"), []
    for _ in range(3):
        limit.take("a")
    limit.take("b")

    def wait(tenant: str, number: int) -> None:
        limit.take(tenant, patience_s=60.0)
        order.append((tenant, number))

    with ThreadPoolExecutor(4) as threads:
        for n_before, (tenant, number) in enumerate([("a", 1), ("a", 2), ("b", 1)]):
            threads.submit(wait, tenant, number)
            until(lambda n=n_before: waiting(limit) == n + 1)
        for n_done, tenant in enumerate(["a", "b", "a"], 1):
            limit.give(tenant)
            until(lambda n=n_done: len(order) == n)
    assert order == [("a", 1), ("b", 1), ("a", 2)]
    assert limit.n_held == 4


def test_tenants_that_always_wait_do_not_starve_another_tenant():
    limit, order = SharedLimit(4, "messages"), []
    for tenant in "aaab":
        limit.take(tenant)

    def wait(tenant: str) -> None:
        limit.take(tenant, patience_s=60.0)
        order.append(tenant)

    with ThreadPoolExecutor(9) as threads:
        for n_before, tenant in enumerate("aaabbbccc"):
            threads.submit(wait, tenant)
            until(lambda n=n_before: waiting(limit) == n + 1)
        holders = ["a", "a", "a", "b"]
        for n_done in range(1, 10):
            limit.give(holders.pop(0))
            until(lambda n=n_done: len(order) == n)
            holders.append(order[-1])
    assert order == ["a", "b", "c"] * 3


def test_a_request_that_waited_too_long_is_refused_and_leaves_its_place():
    limit = SharedLimit(1, "messages")
    limit.take("a")
    with pytest.raises(Overloaded):
        limit.take("b", patience_s=0.01)
    assert waiting(limit) == 0
    limit.give("a")
    limit.take("b")


def test_no_room_is_lost_when_requests_give_up_while_room_is_given():
    limit = SharedLimit(4, "messages")
    n_refused = threading.Semaphore(0)

    def request(number: int) -> None:
        try:
            with limit.held(f"t{number % 3}", patience_s=0.0005 * (number % 5)):
                pass
        except Overloaded:
            n_refused.release()

    with ThreadPoolExecutor(32) as threads:
        list(threads.map(request, range(2_000)))
    assert limit.n_held == 0 and waiting(limit) == 0


def test_a_request_in_an_event_loop_waits_without_blocking_the_loop():
    async def in_order() -> list[str]:
        limit, order = SharedLimit(1, "messages"), []
        limit.take("a")

        async def wait(name: str) -> None:
            await limit.take_in_loop("a", patience_s=60.0)
            order.append(name)
            limit.give("a")

        first, gone, last = (asyncio.create_task(wait(name)) for name in ("first", "gone", "last"))
        await asyncio.sleep(0)
        assert waiting(limit) == 3
        gone.cancel()
        limit.give("a")
        await asyncio.gather(first, last)
        assert limit.n_held == 0 and gone.cancelled()
        return order

    assert asyncio.run(in_order()) == ["first", "last"]


def test_a_request_in_an_event_loop_that_gets_no_room_in_time_is_refused():
    async def wait(limit: SharedLimit) -> None:
        with pytest.raises(Overloaded, match="no room for more messages"):
            await limit.take_in_loop("a", patience_s=0.0)

    limit = SharedLimit(1, "messages")
    limit.take("a")
    asyncio.run(wait(limit))
    assert waiting(limit) == 0 and limit.n_held == 1


def test_a_request_cancelled_after_it_got_room_gives_the_room_back():
    async def cancelled() -> SharedLimit:
        limit = SharedLimit(1, "messages")
        limit.take("a")
        task = asyncio.create_task(limit.take_in_loop("a", patience_s=60.0))
        await asyncio.sleep(0)
        limit.give("a")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return limit

    assert asyncio.run(cancelled()).n_held == 0
