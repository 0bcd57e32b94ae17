"""Versions agree in the constraints, pyproject, README, the docs and the errors at import."""

import importlib
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import tigon
from lowest_versions import PROJECT, floors
from tigon.runtime.requirements import FLOORS, install_command, require

ROOT = Path(__file__).parents[2]
CONSTRAINTS = (ROOT / "constraints.txt").read_text()
PINS = dict(re.findall(r"^([\w-]+)==(\S+)$", CONSTRAINTS, re.MULTILINE))
# The requirements of the wheel of a pinned package. A build of the package that requires less would hide them.
PUBLISHED = re.findall(r"^# ([\w-]+) (\S+) \(Linux wheel\) requires: (.+)$", CONSTRAINTS, re.MULTILINE)
REQUIREMENTS = [
    Requirement(text)
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in group
    if not text.startswith("tigon[")
]


def test_constraints_contain_only_pins():
    lines = [line for line in CONSTRAINTS.splitlines() if line and not line.startswith("#")]
    assert len(lines) == len(PINS)


def test_constraints_record_the_triton_that_torch_requires():
    assert [(name, version) for name, version, _ in PUBLISHED] == [("torch", PINS["torch"])]


@pytest.mark.parametrize(("name", "version", "text"), PUBLISHED, ids=lambda value: value)
def test_pins_agree_with_published_requirements(name, version, text):
    required = Requirement(text)
    assert PINS[required.name] in required.specifier


def test_installed_torch_requires_the_recorded_triton():
    """CPU builds of torch may not require triton, so the test checks other builds only."""
    declared = [Requirement(text) for text in metadata.requires("torch") or ()]
    tritons = [r for r in declared if r.name == "triton" and (r.marker is None or r.marker.evaluate())]
    if not tritons or metadata.version("torch").partition("+")[0] != PINS["torch"]:
        pytest.skip("another version of torch, or a build that requires no triton")
    (recorded,) = [Requirement(text) for name, _, text in PUBLISHED if name == "torch"]
    assert tritons[0].specifier == recorded.specifier


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_every_requirement_is_pinned_within_its_bounds(requirement):
    assert PINS[requirement.name] in requirement.specifier


def test_floors_equal_those_of_pyproject():
    extras = [extra for extra in PROJECT["optional-dependencies"] if extra != "dev"]
    stated = {Requirement(text).name: _floor(text) for text in PROJECT["dependencies"]}
    assert stated | dict(floors(*extras)) == FLOORS


def _floor(text: str) -> str:
    (specifier,) = Requirement(text).specifier
    assert specifier.operator == ">="
    return specifier.version


def test_floors_of_a_package_agree_in_all_extras():
    assert len(set(floors())) == len(dict(floors()))


@pytest.mark.parametrize("package", FLOORS)
def test_page_on_versions_states_the_floors(package):
    page = (ROOT / "docs" / "compatibility.md").read_text()
    assert f"| {package} | {FLOORS[package]} |" in page


def test_floor_of_python_is_the_same_everywhere():
    (floor,) = SpecifierSet(PROJECT["requires-python"])
    assert floor.operator == ">="
    minor = int(floor.version.removeprefix("3."))
    classified = [int(n) for n in re.findall(r"Python :: 3\.(\d+)", " ".join(PROJECT["classifiers"]))]
    assert classified == list(range(minor, minor + len(classified)))
    assert len(classified) >= 3
    assert f"Python {floor.version} or later" in (ROOT / "README.md").read_text()
    assert f"Python {floor.version}" in (ROOT / "docs" / "compatibility.md").read_text()
    assert f'target-version = "py{floor.version.replace(".", "")}"' in (ROOT / "pyproject.toml").read_text()


def import_with(**versions: str | None) -> str:
    """Import tigon beside empty packages of these versions, or without them (None), and return the error message."""
    code = f"""
import sys, types
for name, version in {versions}.items():
    sys.modules[name] = None if version is None else types.ModuleType(name)
    vars(sys.modules[name] or types.ModuleType(name))["__version__"] = version
try:
    import tigon
except ImportError as error:
    assert type(error) is ImportError, error
    assert "tigon.ops" not in sys.modules
    print(error)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


OLD = "tigon needs torch 2.8 or later (2.7.1+cu126 is installed), triton 3.4 or later (3.3.1 is installed)"


@pytest.mark.parametrize(("versions", "message"), [
    ({"torch": "2.7.1+cu126", "triton": "3.3.1"}, f"{OLD}: pip install 'torch>=2.8' 'triton>=3.4'"),
    ({"torch": "2.6.0"}, "tigon needs torch 2.8 or later (2.6.0 is installed): pip install 'torch>=2.8'"),
    ({"triton": "3.2.0"}, "tigon needs triton 3.4 or later (3.2.0 is installed): pip install 'triton>=3.4'"),
    ({"triton": None}, "tigon needs triton: pip install 'triton>=3.4'"),
    ({"torch": None, "triton": None}, "tigon needs torch, triton: pip install 'torch>=2.8' 'triton>=3.4'"),
    ({"torch": "2.8.0a0+git1234567", "triton": "3.4.0"}, ""),  # A build from source counts as the release.
    ({"torch": "2.10.0", "triton": "3.10"}, ""),  # Numbers are not compared as text.
], ids=["both old", "old torch", "old triton", "no triton", "neither", "built from source", "two digits"])  # fmt: skip
def test_import_refuses_old_packages_in_one_error(versions, message):
    assert import_with(**versions) == message


OLD_TRANSFORMERS = re.escape(
    f" needs transformers {FLOORS['transformers']} or later (5.9.0 is installed): {install_command('hf')}"
)


@pytest.fixture
def old_transformers(monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers, "__version__", "5.9.0")
    return transformers


@pytest.mark.parametrize("call", [
    lambda: tigon.patch("llama"), lambda: tigon.AutoModelForCausalLM.from_config(None),
    lambda: tigon.AutoModelForSequenceClassification.from_config(None),
    lambda: tigon.AutoModelForCausalLM.from_pretrained("somewhere"),
], ids=["a type", "from_config", "classifier", "from_pretrained"])  # fmt: skip
def test_old_transformers_is_refused(old_transformers, call):
    with pytest.raises(ImportError, match=OLD_TRANSFORMERS):
        call()


def test_models_of_old_transformers_are_refused(old_transformers):
    import torch

    class Mine(old_transformers.PreTrainedModel):
        """A user's model, of which only the base class comes from transformers."""

    config = old_transformers.AutoConfig.for_model("llama", vocab_size=8, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(ImportError, match=r"tigon.patch\(Mine\)" + OLD_TRANSFORMERS):
        tigon.patch(Mine(config))
    # No class of this model comes from transformers.
    assert tigon.patch(torch.nn.Sequential(torch.nn.RMSNorm(4, eps=1e-6)))


@pytest.mark.parametrize("call", [
    lambda: tigon.patch("llama"), lambda: tigon.AutoModelForCausalLM.from_config(None),
    lambda: tigon.cli.inspect.build.find_config("Llama-3-8B"),
])  # fmt: skip
def test_error_without_transformers_names_the_extra(call, monkeypatch):
    importlib.import_module("tigon.cli.inspect.build")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r" needs transformers: pip install '.\[hf\]' in a checkout of Tigon$"):
        call()


def test_error_names_only_old_packages(monkeypatch):
    rich = pytest.importorskip("rich")
    monkeypatch.setattr(rich, "__version__", "12.9", raising=False)
    with pytest.raises(
        ImportError, match=r"^a test needs rich 13 or later \(12\.9 is .*: pip install '\.\[cli\]' in a"
    ):
        require("a test", "torch", "rich", extra="cli")


def test_import_loads_no_heavy_package():
    """`import tigon` loads Triton in addition to torch, and nothing else that takes long. Nor does a patch.

    Symbolic sizes do not import the compiler.
    """
    code = """
import sys, torch
before = {name.partition(".")[0] for name in sys.modules}, set(sys.modules)
import tigon
packages = {name.partition(".")[0] for name in sys.modules} - before[0] - set(sys.stdlib_module_names)
# sysconfig reads a file whose name begins with an underscore.
print(*sorted(name for name in packages if not name.startswith("_")))
print(*sorted({"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "sympy"} & set(sys.modules) - before[1]))
import tigon.hf
tigon.patch, tigon.patched
tigon.patch(torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.Linear(8, 8)))
assert "transformers" not in sys.modules
from tigon.recognition.probing.symbolic import find_size_use
inputs = (torch.zeros(2, 3, 4),)
decision = find_size_use(lambda x: x + 1 if x.shape[1] > 40 else x, lambda x: x + 1, inputs, any_width=False)
assert "size(1) > 40" in decision, decision
assert not {"networkx", "torch.export._trace", "torch._inductor.codecache"} & sys.modules.keys()
"""
    output = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    ).stdout
    packages, heavy_modules = output.split("\n")[:2]
    assert set(packages.split()) <= {"tigon", "triton"}
    assert heavy_modules == ""
