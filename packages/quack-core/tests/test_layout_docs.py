"""The examples of the page on layouts give what the page says."""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "concepts" / "layouts.md"


def test_the_examples_of_the_page():
    if not PAGE.exists() and not (ROOT / "noxfile.py").exists():
        pytest.skip("the documentation is not part of an installed package")
    source = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", source, re.MULTILINE | re.DOTALL)
    examples = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, PAGE.name, PAGE.name, 0)
    assert len(examples.examples) > 30
    report = []
    runner = doctest.DocTestRunner()
    failed = runner.run(examples, out=report.append).failed
    assert failed == 0, "".join(report)
