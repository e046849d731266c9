"""The script's name of an object: who refers to it is asked, then who refers to these, until one has a name.

Names are variables of modules and of functions, and attributes in front of a container: of an agent whose memory has
the object, `Agent.memory` says enough. Python's collector answers for all that Python sees.
"""

import gc
import os
import sys
from collections import deque
from pathlib import Path
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from ...memory.tracking.lines import INNER, kind_of

UNSEEN = "something that Python's collector cannot see, as C++ or a NumPy array"
CYCLE = "objects that refer to each other, until Python's collector finds them (gc.collect())"
LEVELS, WIDTH = 32, 300  # how far it is asked, and how many objects of a level
OF_MODULES = ("_parameters", "_buffers", "_modules")
_OURS = tuple(f"{Path(__file__).resolve().parents[2] / name}{os.sep}" for name in ("explain", "guard"))
_HOLE = "\0"  # where the name of what comes next on the way goes


class _Way(NamedTuple):
    """An object between a tensor and a name. `key`: of what it holds, while a dict may be an instance's, and the cell
    in a closure. `attribute`: its name as an attribute that has a container."""

    thing: Any
    words: str
    key: Any = None
    attribute: str = ""

    @property
    def whole(self):
        """Return the words where a dict is no instance's: a container."""
        return _item(self.words) if isinstance(self.key, str) else self.words

    def called(self, name):
        """Return the words with a name in the hole."""
        return self.words.replace(_HOLE, name)


def _item(words):
    return words if f"{_HOLE}[…]" in words else words.replace(_HOLE, f"{_HOLE}[…]")


class Names:
    """Names objects: `of(thing)`, in words. References from the objects `ignored` do not count.

    `is_full(thing)` tells, of what has been named, whether a deque or a cache holds it that drops one for each new one.
    """

    def __init__(self, ignored):
        self._found, self._full, self._variables = {}, set(), {}
        self._ignored = {id(each) for each in (*ignored, self._found)}
        for frame in _running():
            where = frame.f_locals
            if where is not frame.f_globals:
                self._ignored |= {id(where), id(frame)}
                for name, value in where.items():
                    self._variables.setdefault(id(value), (name, f" of {frame.f_code.co_name}()"))
        self._modules = {id(vars(module)): f"{name}." for name, module in list(sys.modules.items())
                         if type(module) is ModuleType}
        self._modules[id(vars(sys.modules["__main__"]))] = ""

    def of(self, thing):
        """Name an object; the answer is remembered."""
        if id(thing) not in self._found:
            self._found[id(thing)] = self._asked(thing)
        return self._found[id(thing)]

    def is_full(self, thing):
        """Tell whether what holds an object that was named is full."""
        return id(thing) in self._full

    def _asked(self, thing):
        ways, met, attribute = {id(thing): _Way(thing, f"`{_HOLE}`")}, {id(thing)}, ""
        for _ in range(LEVELS):
            root = next((each for each in map(self._variable, ways.values()) if each), None)
            things, further, held = [way.thing for way in ways.values()], {}, set()
            for holder in gc.get_referrers(*things) if root is None else ():
                if id(holder) in self._ignored or holder is things or type(holder) is _Way:
                    continue
                of_these = [id(each) for each in gc.get_referents(holder) if id(each) in ways]
                held.update(of_these)
                if id(holder) in met or not of_these:
                    continue
                met.add(id(holder))
                step = self._step(holder, ways[of_these[0]])
                if _is_full(holder):
                    self._full.add(id(thing))
                if isinstance(step, str):
                    root = root or step
                elif len(further) < WIDTH:
                    further[id(holder)] = step
                    attribute = attribute if "[…]" in attribute else step.attribute or attribute
            if root:
                return attribute if "[…]" in attribute else root
            if len(held) < len(ways):  # C++ holds the rest
                return attribute or UNSEEN
            if not further:
                return CYCLE
            ways = further
        return attribute or UNSEEN

    def _variable(self, way):
        name, where = self._variables.get(id(way.thing), (None, None))
        return name and way.whole.replace(_HOLE, name) + where

    def _step(self, holder, way):
        """Return the name that `holder` gives what it holds, or the way on from it."""
        child = way.thing
        if isinstance(holder, dict):
            key = next((key for key, value in holder.items() if value is child), None)
            if id(holder) in self._modules:
                return way.whole.replace(_HOLE, f"{self._modules[id(holder)]}{key}")
            return _Way(holder, way.whole, key) if type(key) is str else _Way(holder, _item(way.whole))
        if isinstance(holder, (list, tuple, set, frozenset, deque)):
            if isinstance(child, CellType):
                return _Way(holder, way.words, child)
            return _Way(holder, _item(way.whole))
        if isinstance(holder, FunctionType) and holder.__closure__ is child:
            cells = map(id, child)
            name = dict(zip(cells, holder.__code__.co_freevars, strict=True))[id(way.key)]
            return f"{way.called(name)} in the closure of {holder.__qualname__}()"
        if isinstance(holder, FrameType):  # of a function that ended, or that has yielded
            name = next((name for name, value in holder.f_locals.items() if value is child), "?")
            return _Way(holder, f"{way.whole.replace(_HOLE, name)} of {holder.f_code.co_name}(), in `{_HOLE}`")
        if type(holder).__name__ == "_lru_cache_wrapper":
            return f"the cache of {holder.__qualname__}()"
        return self._through(holder, way)

    def _through(self, holder, way):
        """Go through an instance's attribute, or whatever else refers to an object."""
        if isinstance(holder, type) and isinstance(way.key, str):
            return way.called(f"{holder.__name__}.{way.key}")
        if way.key is not None and _attributes(holder) is way.thing:
            attribute, words = way.key, way.words
        else:
            attribute, words = _attribute_of(holder, way.thing), way.whole
        if attribute is None:
            return _Way(holder, words)
        if attribute in OF_MODULES and isinstance(holder, nn.Module):
            return _Way(holder, words.replace(f"{_HOLE}[…]", _HOLE))
        name = words.replace(_HOLE, f"{type(holder).__name__}.{attribute}")
        return _Way(holder, words.replace(_HOLE, f"{_HOLE}.{attribute}"), attribute=name)


def _is_full(holder):
    if isinstance(holder, deque):
        return len(holder) == holder.maxlen
    return type(holder).__name__ == "_lru_cache_wrapper" and holder.cache_info().currsize == holder.cache_info().maxsize


def _running():
    """List the frames of the program that run, on all threads, innermost first."""
    found = []
    for frame in sys._current_frames().values():
        while frame is not None:
            path = frame.f_code.co_filename
            if kind_of(path) != INNER and not path.startswith(_OURS):
                found.append(frame)
            frame = frame.f_back
    return found


def _attributes(thing):
    """Return the dict of an instance's attributes, without a question to its class."""
    try:
        return object.__getattribute__(thing, "__dict__")
    except (AttributeError, TypeError):
        return None


def _attribute_of(thing, value):
    """Return the name of the attribute that is `value`: in the instance itself, or in a slot; None if none is."""
    for name, each in (_attributes(thing) or {}).items():
        if each is value:
            return name
    for kind in type(thing).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            descriptor = kind.__dict__.get(name)
            try:
                if type(descriptor).__name__ == "member_descriptor" and descriptor.__get__(thing) is value:
                    return name
            except AttributeError:
                pass  # a slot that is empty
    return None
