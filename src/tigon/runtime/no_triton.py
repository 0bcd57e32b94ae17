"""Stand-ins for the names of Triton that files of kernels use when they are imported, for machines without Triton.

macOS and Windows have no Triton. Files of kernels can still be imported there, their configurations can be computed,
and `tigon plan` can count the launches of their kernels. No kernel can run: `tigon.runtime.device.runs_kernels` returns
False for every tensor with memory, so each op runs its reference in torch.
"""

import inspect
from collections.abc import Callable
from typing import Any, NoReturn


class JITFunction:
    """A kernel that cannot run. It has the attributes of a kernel of Triton that Tigon reads."""

    def __init__(self, fn: Callable) -> None:
        self.fn, self.__name__, self.__doc__, self.__module__ = fn, fn.__name__, fn.__doc__, fn.__module__
        self.arg_names = list(inspect.signature(fn).parameters)

    def __getitem__(self, grid: tuple) -> NoReturn:
        raise RuntimeError(f"tigon: the kernel {self.__name__} needs triton, which is not installed")


class _Name:
    """A stand-in for a name of `triton.language`. Kernels use such names, but their code never runs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._name}.{name}")

    def __repr__(self) -> str:
        return self._name


class _Language(_Name):
    """A stand-in for `triton.language`."""

    class constexpr:
        """The annotation of a parameter whose value is known when a kernel is compiled, or such a value."""

        def __init__(self, value: Any) -> None:
            self.value = value


class _Triton:
    """A stand-in for the module `triton`."""

    __version__ = "not installed"
    language = _Language("tl")

    @staticmethod
    def jit(function: Callable | None = None, **options: Any) -> Any:
        return JITFunction if function is None else JITFunction(function)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << max(0, n - 1).bit_length()

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


triton: Any = _Triton()
tl: Any = triton.language
