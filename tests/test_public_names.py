"""`import tigon` is quick, because each public name is imported when it is first used."""

import ast
import inspect
import subprocess
import sys

import tigon


def test_importing_tigon_imports_no_op_and_no_other_package():
    code = "import sys, tigon; print(*(name for name in sys.modules if name.partition('.')[0] in sys.argv[1:]))"
    command = [sys.executable, "-c", code, "tigon", "torch", "triton", "transformers"]
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert loaded == {"tigon", "tigon.runtime", "tigon.runtime.requirements"}


def test_a_name_is_looked_up_once():
    assert tigon.rms_norm is tigon.rms_norm
    assert "rms_norm" in vars(tigon)


def test_type_checkers_see_the_module_from_which_each_name_is_imported():
    (block,) = (node for node in ast.parse(inspect.getsource(tigon)).body if isinstance(node, ast.If))
    imports = {(node.module, alias.name) for node in block.body for alias in node.names}
    lazy = {(module, name) for name, module in tigon._MODULES.items()}
    assert imports == lazy | {("tigon", name) for name in tigon._LAZY_MODULES}
    assert set(tigon._MODULES) == set(tigon.__all__)
