"""Who holds a device, and whether that head is there: one pipeline at a time, the later one of the same head
before the earlier."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flowspec.core.cluster.holder import Holder
from flowspec.core.cluster.incarnation import (
    GENERATION_BITS,
    SESSION_BITS,
    SESSIONS_MAX,
    Lease,
    incarnation_of,
)
from flowspec.core.protocol import limits

FIRST, SECOND, OTHER = incarnation_of(7, 1), incarnation_of(7, 2), incarnation_of(8, 1)


def test_numbers_fit_into_messages_and_grow_with_the_generation() -> None:
    assert incarnation_of((1 << SESSION_BITS) - 1, (1 << GENERATION_BITS) - 1) <= limits.ID_MAX
    assert SECOND > FIRST


def test_silence_ends_a_lease_and_a_word_renews_it() -> None:
    lease = Lease(5.0)
    assert not lease.is_over(100.0)
    lease.take(FIRST, 0.0)
    lease.renew(3.0)
    assert not lease.is_over(8.0)
    assert lease.is_over(8.1)


@given(st.lists(st.integers(0, 3 * SESSIONS_MAX), max_size=3 * SESSIONS_MAX))
def test_no_number_of_heads_makes_a_device_remember_more_than_its_limit(sessions: list[int]) -> None:
    lease = Lease(5.0)
    for session in sessions:
        lease.take(incarnation_of(session, 1), 0.0)
        lease.release()
    assert len(lease._newest) <= SESSIONS_MAX


def test_a_head_that_renews_its_lease_is_there() -> None:
    holder = Holder()
    assert not holder.is_there(4.2, 10.0), "it is not known yet"
    assert holder.is_there(4.1, 11.1)


def test_a_head_that_died_is_not_whatever_the_answers_take() -> None:
    holder = Holder()
    asked = [(4.9, 10.0), (3.9, 11.4), (2.7, 12.1), (1.7, 13.4), (0.5, 14.8), (0.5, 15.0)]
    assert not any(holder.is_there(lease_s, now_s) for lease_s, now_s in asked)


def test_one_that_took_the_device_meanwhile_is_there() -> None:
    holder = Holder()
    assert not holder.is_there(0.5, 10.0)
    assert holder.is_there(4.9, 11.1)
