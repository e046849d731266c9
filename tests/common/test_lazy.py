"""Names that a package loads when they are asked for."""

import sys

import pytest

from refimpl.common.lazy import lazily


def test_a_name_is_loaded_when_it_is_asked_for(tmp_path, monkeypatch):
    package = tmp_path / "lazy_package"
    package.mkdir()
    (package / "__init__.py").write_text("from refimpl.common.lazy import lazily\n"
                                         "__getattr__, __dir__ = lazily(__name__, {'.picture': 'drawn'})\n"
                                         "__all__ = ['drawn']")
    (package / "picture.py").write_text("drawn = 'a picture'")
    monkeypatch.syspath_prepend(tmp_path)
    import lazy_package

    assert "lazy_package.picture" not in sys.modules and {"drawn", "lazily"} < set(dir(lazy_package))
    from lazy_package import drawn

    assert drawn == "a picture" == lazy_package.drawn and "lazy_package.picture" in sys.modules


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'a.package' has no attribute 'less'"):
        lazily("a.package", {".picture": "drawn more"})[0]("less")
