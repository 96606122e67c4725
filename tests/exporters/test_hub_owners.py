"""The choice of the hub: only permitted hosts, and no connection is closed while a request uses it."""

import pytest

from stallscope.exporters.hub_owners import HubChoice, host_of, is_permitted


class Line:
    def __init__(self, address: str):
        self.address, self.is_closed = address, False

    def close(self) -> None:
        self.is_closed = True


class Lines:
    """A choice with its connections, and a clock of the test."""

    def __init__(self, *hosts: str):
        self.now_s = 100.0
        self.opened: list[Line] = []
        self.home = Line("hub.example:4317")
        self.choice = HubChoice(self.home, self._open, hosts=hosts, clock_s=lambda: self.now_s)

    def _open(self, address: str) -> Line:
        self.opened.append(Line(address))
        return self.opened[-1]

    def current(self) -> str:
        line = self.choice.take()
        self.choice.give(line)
        return line.address


@pytest.mark.parametrize(
    ("address", "is_expected"),
    [
        ("hub.example:4317", True),
        ("HUB.example:9", True),
        ("a.hubs.example:4317", True),
        ("a.b.hubs.example:4317", False),
        ("hubs.example:4317", False),
        ("10.0.0.7:4317", True),
        ("[fd00::1]:4317", True),
        ("evil.example:4317", False),
        ("hub.example.evil:4317", False),
        ("hub.example:4317@evil:1", False),
        ("evil:1/hub.example:4317", False),
        ("hub.example", False),
        ("hub.example:0", False),
        ("hub.example:65536", False),
        ("unix:hub.example:4317", False),
        ("hub.example:4317\n", False),
        ("", False),
    ],
)
def test_permitted_hosts(address: str, is_expected: bool):
    hosts = ("hub.example", "*.hubs.example", "10.0.0.7", "[fd00::1]", "")
    assert is_permitted(address, hosts) is is_expected
    assert host_of("fd00::1:4317") is None


def test_a_replaced_connection_is_closed_after_its_last_request():
    lines = Lines("*.hubs")
    lines.choice.follow("a.hubs:1")
    first, second = lines.choice.take(), lines.choice.take()
    lines.now_s += 10
    lines.choice.follow("b.hubs:1")
    assert lines.current() == "b.hubs:1" and not first.is_closed
    lines.choice.give(first)
    assert not first.is_closed
    lines.choice.give(second)
    assert first.is_closed and not lines.home.is_closed
    lines.choice.close()
    assert lines.home.is_closed and all(line.is_closed for line in lines.opened)


def test_hubs_that_name_different_owners_do_not_move_an_agent_for_ever():
    lines = Lines("*.hubs")
    for n in range(50):
        lines.now_s += 0.1
        lines.choice.follow(f"{'ab'[n % 2]}.hubs:1")
    assert len(lines.opened) <= 2


def test_an_owner_that_failed_is_left_alone_for_a_while():
    lines = Lines("*.hubs")
    lines.choice.follow("a.hubs:1")
    failed = lines.choice.take()
    assert lines.choice.has_failed(failed) and lines.current() == "hub.example:4317"
    lines.choice.give(failed)
    assert failed.is_closed
    lines.now_s += 20
    lines.choice.follow("a.hubs:1")
    assert lines.current() == "hub.example:4317"
    lines.now_s += 20
    lines.choice.follow("a.hubs:1")
    assert lines.current() == "a.hubs:1"
    lines.now_s += 10
    lines.choice.follow("hub.example:4317")
    assert lines.current() == "hub.example:4317" and len(lines.opened) == 2
    assert not lines.choice.has_failed(lines.home)
