"""An unknown option is refused, and the message lists the known ones."""

import pytest

from refimpl.common.keyword_options import check_options


def test_known_options_pass():
    check_options({}, (), "f")
    check_options({"b": 1}, ("a", "b"), "f")


@pytest.mark.parametrize(("known", "expected"), [(("a", "b"), "a, b"), ((), "none")])
def test_an_unknown_option_is_refused(known, expected):
    with pytest.raises(TypeError, match=f"^f has no option 'c': expected {expected}$"):
        check_options({"c": 1}, known, "f")
