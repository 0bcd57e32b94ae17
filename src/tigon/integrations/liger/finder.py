"""The import finder that serves `liger_kernel` and answers `importlib.metadata` for the distribution liger-kernel."""

import dis
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from tigon.integrations.liger.names import LIGER_VERSION, MODULES, NOT_SERVED, NOT_SERVED_MODULES

ROOT = "liger_kernel"
_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def _missing_name(module: str, attribute: str) -> Exception:
    """Return the error of a name that is not served. Its message says what to use. Python replaces an AttributeError in
    `from module import name` by a sentence of its own, but not an ImportError. `hasattr`, which needs an
    AttributeError, never runs that instruction."""
    default = (
        f"the served names of Liger Kernel {LIGER_VERSION} are tigon.integrations.liger.names.MODULES[{module!r}]; use "
        "the op of tigon that computes it"
    )
    advice = NOT_SERVED.get(attribute) or NOT_SERVED_MODULES.get(f"{module}.{attribute}".removeprefix(f"{ROOT}."))
    message = f"{module}.{attribute} is not served by Tigon" + (f": {advice}" if advice else f"; {default}")
    # The caller of `refuse`, the `__getattr__` of the module.
    caller = sys._getframe(2)
    if caller.f_lasti >= 0 and caller.f_code.co_code[caller.f_lasti] == _IMPORT_FROM:
        return ImportError(message, name=module)
    return AttributeError(message)


class _Distribution(Distribution):
    """The metadata of the version of Liger whose names are served."""

    def read_text(self, filename: str) -> str | None:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: liger-kernel\nVersion: {LIGER_VERSION}\nSummary: served by Tigon\n"

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _Loader(Loader):
    """Fills a module with Tigon's objects, and with a `__getattr__` for the names that are not served."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        def refuse(attribute: str) -> NoReturn:
            raise _missing_name(module.__name__, attribute)

        table = MODULES[module.__name__]
        vars(module).update(table, __version__=LIGER_VERSION, __getattr__=refuse, __all__=sorted(table))
        module.__doc__ = f"Tigon under the name {module.__name__}."


class _Finder(DistributionFinder):
    """Finds the served modules and the metadata of liger-kernel."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            for prefix, advice in NOT_SERVED_MODULES.items():
                if f"{fullname}.".startswith(f"{ROOT}.{prefix}."):
                    raise ModuleNotFoundError(f"{fullname} is not served by Tigon: {advice}", name=fullname)
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, _Loader(), origin="tigon", is_package=is_package)

    def find_distributions(self, context: Any = None) -> Iterator[Distribution]:
        name = getattr(context, "name", None)
        if name is None or name.lower().replace("_", "-") == "liger-kernel":
            yield _Distribution()


_finder = _Finder()
# Modules of the real package that `force=True` has moved out of `sys.modules`.
_real_modules: dict[str, ModuleType] = {}


def _pop_modules() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == ROOT or name.startswith(f"{ROOT}.")]
    return {name: sys.modules.pop(name) for name in names}


def _forget_answers() -> None:
    """Let transformers look for `liger_kernel` again. It caches whether the package is available."""
    utils = sys.modules.get("transformers.utils.import_utils")
    getattr(getattr(utils, "is_liger_kernel_available", None), "cache_clear", lambda: None)()


def install_as_liger_kernel(force: bool = False) -> None:
    """Serve `import liger_kernel` from Tigon in this process, until `tigon.integrations.liger.uninstall()`.

    A second call changes nothing. `importlib.util.find_spec` and `importlib.metadata.version` answer too, with the
    version of Liger Kernel whose names are served. Source: the public interface of liger-kernel 0.8.5.

    Args:
        force: Serve Tigon although the real package is installed. Code that has already imported names from the real
            package keeps them.

    Raises:
        RuntimeError: The real package is importable and `force` is False.
        TypeError: `force` is not a bool.

    Example:
        >>> tigon.install_as_liger_kernel(force=True)
        >>> from liger_kernel.transformers import LigerRMSNorm
        >>> LigerRMSNorm(8)(torch.ones(2, 8)).shape
        torch.Size([2, 8])
        >>> tigon.integrations.liger.uninstall()
    """
    if not isinstance(force, bool):
        raise TypeError(f"install_as_liger_kernel: force must be True or False, got {force!r}")
    if _finder in sys.meta_path:
        return
    is_real = ROOT in sys.modules or PathFinder.find_spec(ROOT) is not None
    if is_real and not force:
        raise RuntimeError(
            "install_as_liger_kernel: the real package liger_kernel is importable; uninstall it (pip uninstall "
            "liger-kernel) or pass force=True"
        )
    _real_modules.update(_pop_modules())
    sys.meta_path.insert(0, _finder)
    _forget_answers()


def uninstall() -> None:
    """Stop serving `liger_kernel`, and put back the modules of the real package that `force=True` replaced.

    Models that are built from now on are stock, also after `apply_liger_kernel_to_<type>()`.
    """
    if _finder not in sys.meta_path:
        return
    if (functions := sys.modules.get("tigon.integrations.liger.apply")) is not None:
        functions.restore_types()
    sys.meta_path.remove(_finder)
    _pop_modules()
    sys.modules.update(_real_modules)
    _real_modules.clear()
    _forget_answers()
