"""Print the lowest version of each package that pyproject.toml admits, as constraints: for `make test-lowest`.

python lowest_versions.py [PIN ...]      a PIN, such as torch==2.13.0, replaces the lowest version of its package
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]


def floors(*extras: str) -> Iterator[tuple[str, str]]:
    """Yield each package of these extras and its lowest version; without extras, those of all of pyproject.toml."""
    optional = PROJECT["optional-dependencies"]
    groups = [optional[extra] for extra in extras] or [PROJECT["dependencies"], *optional.values()]
    for requirement in (text for group in groups for text in group if not text.startswith("tigon[")):
        name, floor = re.match(r"([\w-]+)>=([\w.]+)", requirement).groups()
        yield name, floor


if __name__ == "__main__":
    pins = {name: f"{name}=={floor}" for name, floor in floors()}
    pins |= {pin.partition("==")[0]: pin for pin in sys.argv[1:]}
    print(*pins.values(), sep="\n")
