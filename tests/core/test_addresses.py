"""When a name is looked up, and which address is used meanwhile."""

from __future__ import annotations

import pytest

from flowspec.core.cluster.addresses import AddressBook, Lookup, LookupTimeouts, is_good_for
from flowspec.core.protocol.checks import is_numeric

FORMING_TIMEOUTS = LookupTimeouts(limit_s=3.0, fresh_s=30.0, again_s=2.0)


@pytest.fixture
def book() -> AddressBook:
    return AddressBook(FORMING_TIMEOUTS)


def test_a_name_is_looked_up_once_and_waited_for_no_longer_than_the_limit(book: AddressBook) -> None:
    assert book.ask("pi", 0.0) == Lookup(is_wanted=True)
    assert book.ask("pi", 2.9) == Lookup()
    assert book.ask("nano", 2.9) == Lookup(is_wanted=True), "each name for itself"
    assert book.ask("pi", 3.0) == Lookup(trouble="no name service answered within 3 s")
    assert book.ask("pi", 60.0).is_wanted is False, "the look-up that hangs is not joined by others"
    book.found("pi", "10.0.0.2", 61.0)
    assert book.ask("pi", 61.0) == Lookup(address="10.0.0.2")


def test_an_address_is_used_while_it_is_looked_up_again_and_when_that_fails(book: AddressBook) -> None:
    book.ask("pi", 0.0)
    book.found("pi", "10.0.0.2", 0.5)
    assert book.ask("pi", 30.0) == Lookup(address="10.0.0.2"), "it is fresh"
    assert book.ask("pi", 30.5) == Lookup(address="10.0.0.2", is_wanted=True)
    assert book.ask("pi", 50.0) == Lookup(address="10.0.0.2"), "a look-up that hangs changes nothing"
    book.failed("pi", "no such name", 51.0)
    assert book.ask("pi", 52.0) == Lookup(address="10.0.0.2")
    assert book.ask("pi", 53.0) == Lookup(address="10.0.0.2", is_wanted=True), (
        "sooner than one that was found"
    )
    book.found("pi", "10.0.0.7", 54.0)
    assert book.ask("pi", 54.0) == Lookup(address="10.0.0.7"), "a device that moved is found"


def test_a_name_that_is_none_is_told_for_a_while_and_then_asked_again(book: AddressBook) -> None:
    book.ask("pi", 0.0)
    book.failed("pi", "no such name", 0.5)
    assert book.ask("pi", 2.4) == Lookup(trouble="no such name")
    assert book.ask("pi", 2.5) == Lookup(is_wanted=True)


def test_loopback_is_told_only_to_who_is_on_loopback() -> None:
    assert is_good_for("10.0.0.2", "10.0.0.3")
    assert is_good_for("127.0.0.1", "127.0.1.1")
    assert not is_good_for("127.0.1.1", "10.0.0.3")
    assert all(is_numeric(host) for host in ("10.0.0.2", "::1", "fe80::1%eth0"))
    assert not any(is_numeric(host) for host in ("pi", "", "localhost"))
