"""What a function sees of its thread when it is run again later."""

from refimpl.memory import rerun


def test_every_registered_context_is_kept_and_the_last_registered_is_outermost(monkeypatch):
    monkeypatch.setattr(rerun, "_keepers", [])
    assert rerun.keep_state(abs) is abs
    seen, now = [], {"one": 1, "two": 1}

    def keeper(name):
        def keep(function):
            then = now[name]

            def later(*args):
                seen.append((name, then))
                return function(*args)

            return later

        return keep

    one = keeper("one")
    assert rerun.register(one) is one
    rerun.register(keeper("two"))
    kept = rerun.keep_state(abs)
    now["one"] = 2
    assert kept(-3) == 3
    assert seen == [("two", 1), ("one", 1)]
