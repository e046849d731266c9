"""Names of a package that are loaded when somebody asks for them: pictures, which load matplotlib."""

import importlib


def lazily(package, **modules):
    """Return the `__getattr__` of a package: `lazily(__name__, draw=".drawing")`; {name: module that has it}."""
    def of_package(name):
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name], package), name)

    return of_package
