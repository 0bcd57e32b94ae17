"""Imports run one way, few families of ops import another family, and files and functions are small."""

import ast
import functools
from pathlib import Path

import pytest

import tigon

PACKAGE = Path(tigon.__file__).parent

# Each folder may import those before it. The folders up to `ops` need neither transformers nor a GPU.
LAYERS = ("runtime", "memory", "ops", "losses", "recognition", "graphs", "hf", "integrations", "cli")

# The families of ops that may import another one, and the reasons.
FAMILIES = {
    ("head", "logits"): "the head computes the losses of logits chunk by chunk",
    ("fp8", "mlps"): "a gated MLP in FP8 has the activations of an MLP",
    ("experts", "fp8"): "the products of experts may run in FP8",
    ("experts", "mlps"): "an expert is an MLP and has the same activations",
    ("mixers", "mlps"): "the gate of the state space dual is that of an MLP",
    ("mixers", "norms"): "the partial gradients of parameters are summed as those of norms",
    ("rotary", "norms"): "qk_norm_rope is a norm and a rotation in one kernel",
    ("adapters", "experts"): "experts with adapters are experts, with the same routing, products and activations",
    ("adapters", "fp8"): "the product of a frozen weight may run in FP8",
    ("adapters", "mlps"): "a projection with an adapter is a projection",
    ("adapters", "norms"): "a norm may come before a projection with an adapter",
}

# These files are in the package itself and in none of its folders: the public names and the accuracy check.
# `python -m tigon.as_liger` fixes the place of `as_liger`.
ROOT_FILES = {"__init__", "as_liger", "testing"}


IMPORTS = ast.Import | ast.ImportFrom


@functools.cache
def _nodes_of(file: Path) -> tuple[list[ast.stmt], list[ast.stmt], list[ast.stmt]]:
    """Return all import statements of a file, those outside of functions and blocks, and its functions."""
    tree = ast.parse(file.read_text("utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, IMPORTS | ast.FunctionDef)]
    imports = [node for node in nodes if isinstance(node, IMPORTS)]
    at_top = [node for node in tree.body if isinstance(node, IMPORTS)]
    return imports, at_top, [node for node in nodes if isinstance(node, ast.FunctionDef)]


def _imports_of(file: Path, within_functions: bool = True) -> list[tuple[int, str]]:
    """Return the names that a file imports from Tigon, with their lines."""
    imports = []
    for node in _nodes_of(file)[0 if within_functions else 1]:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "tigon":
            # `from tigon.cli import environment` may name a module.
            imports += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names if alias.name.partition(".")[0] == "tigon"]
    return imports


@pytest.mark.parametrize("layer", LAYERS)
def test_a_file_imports_only_from_its_own_and_lower_folders(layer):
    for file in sorted((PACKAGE / layer).rglob("*.py")):
        check_imports_of(file)


def check_imports_of(file: Path) -> None:
    layer, *rest = file.relative_to(PACKAGE).with_suffix("").parts
    for line, name in _imports_of(file):
        parts = name.split(".")[1:]
        # The other names are public names of `tigon`, or `tigon.testing`.
        if not parts or parts[0] not in LAYERS:
            continue
        assert LAYERS.index(parts[0]) <= LAYERS.index(layer), f"{file}: line {line}: {layer} imports {name}"
        if layer == parts[0] == "ops" and len(rest) > 1 and len(parts) > 1 and parts[1] != rest[0]:
            assert (rest[0], parts[1]) in FAMILIES, f"{file}: line {line}: ops/{rest[0]} imports {name}"


@pytest.mark.parametrize("layer", LAYERS[: LAYERS.index("cli")])
def test_only_the_command_line_imports_the_public_names(layer):
    """A file of the package that imports `tigon` itself would be part of an import circle."""
    for file in (PACKAGE / layer).rglob("*.py"):
        public = [line for line, name in _imports_of(file) if name.count(".") == 0 or not _is_module(name)]
        assert not public, f"{file}: line {public[0]}"


def _is_module(name: str) -> bool:
    """Return whether a name belongs to a file in a folder of the package."""
    return name.split(".")[1] in LAYERS


def test_imports_at_the_top_of_files_form_no_circle():
    modules = {}
    for file in PACKAGE.rglob("*.py"):
        parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file

    def module_of(name: str) -> str:
        """Return the module that has an imported name. The name may itself be that of a module."""
        return name if name in modules else name.rpartition(".")[0]

    graph = {name: {module_of(x) for _, x in _imports_of(file, False)} - {name} for name, file in modules.items()}
    visited_modules, path = set(), []

    def visit(name: str) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name in visited_modules or name not in graph:
            return
        path.append(name)
        for other in sorted(graph[name]):
            visit(other)
        visited_modules.add(path.pop())

    for name in sorted(graph):
        visit(name)


def test_the_package_has_no_other_folders_and_files():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(LAYERS)
    assert {path.stem for path in PACKAGE.glob("*.py")} <= ROOT_FILES


@pytest.mark.parametrize("layer", LAYERS[: LAYERS.index("hf")])
def test_nothing_below_hf_imports_transformers(layer):
    for file in (PACKAGE / layer).rglob("*.py"):
        for node in _nodes_of(file)[0]:
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] == "transformers" for name in names), f"{file}:{node.lineno}"


ROOT = PACKAGE.parents[1]
# A kernel may have more parameters, because a launch passes numbers and pointers one by one.
MOST_LINES, MOST_LINES_OF_FUNCTION, MOST_POSITIONAL_PARAMETERS = 400, 100, 8
# The parameters for which a caller writes no argument.
IMPLICIT = "self", "cls", "ctx"

# The functions that are larger, and the reasons.
LARGER = {
    ("src/tigon/integrations/liger/rare.py", "__init__"): "the signature is that of a module of Liger Kernel",
    ("src/tigon/integrations/trl_head.py", "apply"): "the signature is that of a function of TRL",
    ("src/tigon/ops/logits/distillation.py", "_distillation_kernel"): "one kernel has all divergences and both losses",
}


def _is_too_large(function: ast.FunctionDef) -> bool:
    first = function.body[0]
    docstring = 0 if ast.get_docstring(function) is None else first.end_lineno - first.lineno + 1
    lines = function.end_lineno - function.lineno + 1 - docstring
    is_kernel = any(ast.unparse(x).startswith(("triton.jit", "gluon.jit")) for x in function.decorator_list)
    parameters = [x.arg for x in (*function.args.posonlyargs, *function.args.args) if x.arg not in IMPLICIT]
    has_many = len(parameters) > MOST_POSITIONAL_PARAMETERS and not is_kernel
    return lines > MOST_LINES_OF_FUNCTION or has_many


def test_files_and_functions_are_small():
    larger = set()
    for file in (*PACKAGE.rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")):
        assert file.read_text("utf-8").count("\n") <= MOST_LINES, file
        larger |= {(file.relative_to(ROOT).as_posix(), node.name) for node in _nodes_of(file)[2] if _is_too_large(node)}
    assert larger == LARGER.keys()
