"""Compile reports of the cases that a run asks for: all of them at once, and others when they are read."""

from benchmarks.compiler.processes import compile_cases


class Reports(dict):
    """{name: Compiled} of {name: Case}. Made of the `name`s of the tests of a file that run, in one process."""

    def __init__(self, cases, request):
        self._cases = cases
        asked = [item.callspec.params["name"] for item in request.session.items
                 if item.path == request.path and "name" in getattr(getattr(item, "callspec", None), "params", ())]
        names = [name for name in dict.fromkeys(asked) if name in cases]
        super().__init__(zip(names, compile_cases(cases[name] for name in names), strict=True))

    def __missing__(self, name):
        (self[name],) = compile_cases([self._cases[name]])
        return self[name]
