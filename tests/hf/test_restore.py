"""A restored patch leaves nothing behind, and its report says that it was undone."""

import pytest
from torch import nn

import tigon

transformers = pytest.importorskip("transformers")


# --- the report ----------------------------------------------------------------------------------


def assert_restored(report, count=14):
    assert not report
    assert len(report) == 0
    assert report.entries == report.replaced == report.left_alone == []
    assert str(report).splitlines()[0].endswith(f": restored, {count} modules patched before")
    assert "restored" in repr(report)
    rich = pytest.importorskip("rich.console").Console(width=200, record=True)
    rich.print(report)
    assert "restored" in rich.export_text()


@pytest.mark.parametrize("memory", ["default", "lean", "checkpoint"])
def test_a_restored_report_is_false_and_empty(make_model, memory):
    model = make_model()
    report = tigon.patch(model, memory=memory)
    assert len(report) == 14
    assert "restored" not in str(report)
    for _ in range(2):
        report.restore()
        assert_restored(report)
        assert report.notes == []
    assert "before restore(): replaced: " in report.why("model.norm")


def test_a_patch_after_a_restored_one_has_its_own_report(make_model):
    model = make_model()
    reports = [tigon.patch(model)]
    reports[0].restore()
    reports.append(tigon.patch(model))
    assert_restored(reports[0])
    assert len(reports[1]) == 14
    # The first patch is undone already, so this does not undo the second one.
    reports[0].restore()
    assert "forward" in vars(model)
    reports[1].restore()
    assert "forward" not in vars(model)


def test_a_block_ends_with_a_restored_report(make_model):
    with tigon.patched(make_model()) as report:
        assert report
    assert_restored(report)


def test_an_interrupted_restore_is_neither_done_nor_undone(make_model):
    model = make_model()
    report = tigon.patch(model)
    causes = [RuntimeError("busy")]

    def fail():
        if causes:
            raise causes.pop()

    report.undo.insert(len(report.undo) // 2, fail)
    with pytest.raises(RuntimeError, match="busy"):
        report.restore()
    assert report
    assert "restore() stopped at an error: call it again" in str(report)
    report.restore()
    assert_restored(report)
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_report_of_a_patch_that_changed_nothing_is_restored_too():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="nothing was recognised"):
        report = tigon.patch(model)
    report.restore()
    assert_restored(report, count=0)


def test_the_report_of_a_restored_type_says_which_models_stay_patched(make_model):
    with tigon.patched("llama") as report:
        model = make_model()
        assert len(report) == 14
    assert_restored(report)
    assert report.notes == ["models that were built before stay patched"]
    assert "forward" in vars(model)
    second = tigon.patch("llama")
    try:
        assert not tigon.patch("llama").undo
        make_model()
        assert len(second) == 14
        assert_restored(report)
    finally:
        second.restore()


def test_a_report_of_weights_gathered_in_fp8_has_the_same_states():
    from tigon.hf.report import Report

    report = Report("Tiny", counted="weights gathered in FP8", undo=[lambda: None], patched=lambda: None)
    report.add("fp8_gather", "Linear", True, "rowwise", "a")
    report.restore()
    assert str(report) == "Tiny: restored, 1 weights gathered in FP8 before"


# --- the state of the process --------------------------------------------------------------------
