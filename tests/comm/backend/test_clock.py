"""A sleep that is not taken for a hang."""

from refimpl.comm.backend.clock import now, sleep_until
from refimpl.ranks import signs


def test_who_sleeps_goes_on(monkeypatch):
    monkeypatch.setattr(signs, "_record", None)
    record = signs.set_own_record(bytearray(signs.RECORD))
    sleep_until(now() - 1)
    assert not any(record), "the moment has passed: nobody sleeps"
    moment = now() + 0.12
    sleep_until(moment)
    beats, = signs.BEATS.unpack(record[-signs.BEATS.size:])
    assert now() >= moment and 1 <= beats <= 5
