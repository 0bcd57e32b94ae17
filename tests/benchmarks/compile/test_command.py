"""`benchmarks.compile` compiles kernels for a chip, prints their resources, and fails if they need too much."""

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.compile import command as resources
from benchmarks.compile.command import compile_case
from benchmarks.compile.steps import STEPS
from benchmarks.ops.cases import CASES, OPS
from benchmarks.workloads import WORKLOADS
from tigon.cli.main import INTERRUPTED


@pytest.fixture
def run(monkeypatch):
    """Return a function that runs the command and returns its exit code and its output on one line."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def call(*arguments):
        result = CliRunner().invoke(app(), ["resources", *arguments])
        return result.exit_code, " ".join(result.output.replace("│", " ").split())

    return call


def test_the_kernels_of_a_case_are_compiled_for_a_chip():
    usages = compile_case("swiglu 14336", "sm_90")
    assert [usage["kernel"] for usage in usages] == [f"activation_kernels._{x}_kernel" for x in ("forward", "backward")]
    for usage in usages:
        assert (usage["case"], usage["chip"], usage["spilled"], usage["problem"]) == ("swiglu 14336", "sm_90", 0, "")
        assert 32 <= usage["threads"] <= 1024
        assert 8 <= usage["registers"] <= 255


def test_kernels_are_compiled_at_the_shapes_of_the_benchmark():
    """All sizes but the batch and the number of rows or tokens are the same."""
    for case in (case for case in CASES if "roofline" in case.tags):
        workload = OPS[case.op]
        options = {**case.options, **workload.bench_options}
        variants = WORKLOADS[workload.function or workload.name].compile_variants
        first = workload.rows_axis + 1
        compiled_shapes = [(variant.sizes[first:], dict(variant.options)) for variant in variants]
        if case.op in ("kl_div", "jsd"):
            # How a loss is summed and the weight of each side change no kernel.
            assert case.shape[first:] in [sizes for sizes, _ in compiled_shapes], case.name
        else:
            assert (case.shape[first:], options) in compiled_shapes, case.name


@pytest.mark.parametrize(("change", "problem"), [
    ({"spilled": 24}, "spills"), ({"threads": 2048}, "more than 1024 threads"),
    ({"shared": 10**6}, "more than 232448 bytes of shared memory"),
    ({"spilled": 24, "threads": 2048}, "spills, more than 1024 threads"),
    (ValueError("no such\ninstruction"), "does not compile: ValueError: no such\ninstruction"),
])  # fmt: skip
def test_the_reason_why_a_kernel_must_not_ship_is_named(monkeypatch, change, problem):
    def resources_of(launch, chip):
        if isinstance(change, Exception):
            raise change
        return {"kernel": "k", "threads": 128, "registers": 32, "spilled": 0, "shared": 64} | change

    monkeypatch.setattr("benchmarks.compile.targets.resources", resources_of)
    usages = compile_case("swiglu 14336", "sm_90")
    assert [usage["problem"] for usage in usages] == [problem] * 2
    assert usages[0]["kernel"] == "activation_kernels._forward_kernel"


def test_an_op_that_raises_is_a_line_of_the_table(monkeypatch):
    def raising():
        raise ValueError("not for this chip")

    monkeypatch.setitem(STEPS, "swiglu 14336", raising)
    (usage,) = compile_case("swiglu 14336", "sm_90")
    assert usage["problem"] == "does not run: ValueError: not for this chip"


def test_a_problem_fails_the_command(run, monkeypatch):
    place = {"kernel": "rms_norm._forward_kernel", "case": "rms_norm 4096"}
    numbers = {"threads": 256, "registers": 512, "spilled": 12, "shared": 64}
    usages = [{**place, "chip": "gfx90a", **numbers, "problem": "spills"}, {**place, "chip": "sm_80", "problem": "E"}]
    monkeypatch.setattr(resources, "_compile_all", lambda work: (list(usages), False))
    code, output = run()
    assert code == 1
    assert "kernel case chip threads registers spilled shared" in output
    rows = ("sm_80 - - - -", "gfx90a 256 512 12 64")
    assert all(f"rms_norm._forward_kernel rms_norm 4096 {row}" in output for row in rows)
    assert output.index(rows[0]) < output.index(rows[1])
    assert "rms_norm._forward_kernel, rms_norm 4096, gfx90a: spills" in output
    assert "2 kernels compiled, 2 with a problem." in output


def test_ctrl_c_ends_the_command_with_its_exit_code(run, monkeypatch):
    monkeypatch.setattr(resources, "_compile_all", lambda work: ([], True))
    assert run()[0] == INTERRUPTED


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--ops", "rms_norm,sofmax"], "--ops: must be among rms_norm"), (["--ops", "sofmax"], "got 'sofmax'")],
)
def test_bad_options_are_refused(run, arguments, message):
    code, output = run(*arguments)
    assert code == 2
    assert message in output


def test_the_interpreter_is_refused(run, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    code, output = run()
    assert code == 2
    assert "resources: TRITON_INTERPRET must not be set" in output
