"""Whether a head that holds a device is there is told by the end of its lease."""

from __future__ import annotations

from flowspec.core.cluster.holder import Holder


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
