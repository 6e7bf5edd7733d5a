"""Tests of the program in the paper's figure 2, in which only the import was changed."""

from pathlib import Path

import pytest

from tests.scripts import RunScript

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "figure2.py"


PRINTED = "(Array([3., 5.], dtype=float32), Array([2., 4.], dtype=float32))"


def test_figure_2_prints_what_the_paper_says(run_script: RunScript):
    assert run_script(SCRIPT, islands="1x1x8").check().stdout.strip() == PRINTED


@pytest.mark.thorough
def test_it_does_so_without_the_tracer_too(run_script: RunScript, tmp_path: Path):
    plain = tmp_path / "plain.py"
    text = SCRIPT.read_text()
    assert "@pw.program" in text
    plain.write_text(text.replace("@pw.program", "#"))
    assert run_script(plain, islands="1x1x8").check().stdout.strip() == PRINTED
