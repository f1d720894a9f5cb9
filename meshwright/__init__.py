"""Meshwright plans, trains and proves large models across many GPUs.

    run = meshwright.load("run.toml", "steps=50")            a run file and overrides → Run
    meshwright.price(run, "64xh100").price.seconds           one plan: seconds, MFU, ledger
    meshwright.search("llama3-8b", "64xh100")                plans for a model, best first
    for step in meshwright.train(run): ...                   one process, or each rank of torchrun
    meshwright.report("runs/mine")                           what a run did beside the prediction
    meshwright.parity(make_model, batches, loss, plans)      a module of one's own under plans

Names are imported when they are first used; torch comes with the first step of `train` or a call of `parity`.
"""

import sys

TYPE_CHECKING = False  # type checkers take it for True, and need not import typing for it
if TYPE_CHECKING:
    from meshwright.api import load as load
    from meshwright.api import parity as parity
    from meshwright.api import price as price
    from meshwright.api import report as report
    from meshwright.api import search as search
    from meshwright.api import train as train
    from meshwright.config.run import Run as Run
    from meshwright.hardware.cluster import Cluster as Cluster
    from meshwright.spec.arch import Arch as Arch
    from meshwright.spec.plan import Plan as Plan

__version__ = "0.1.0"
__all__ = ["Arch", "Cluster", "Plan", "Run", "load", "parity", "price", "report", "search", "train"]

_HOMES = {"Arch": "spec.arch", "Plan": "spec.plan", "Run": "config.run", "Cluster": "hardware.cluster"}
_CALLED = ("report", "search", "train")  # functions that are also packages


def __getattr__(name: str) -> object:
    """A name of `__all__`, by its first use (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name in _CALLED:
        return import_module(f"meshwright.{name}")
    return getattr(import_module(f"meshwright.{_HOMES.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_Module = type(sys)


class _CallableModule(_Module):
    """A package that can be called, as the function of `meshwright.api` that has its name."""

    def __call__(self, *args: object, **kwargs: object) -> object:
        from meshwright import api

        return getattr(api, self.__name__.rpartition(".")[2])(*args, **kwargs)


class _Package(_Module):
    """This package. Importing `meshwright.train` sets that name here, whatever it was: it stays callable."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in _CALLED and type(value) is _Module:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package  # docs/decisions/0012-front-door.md
