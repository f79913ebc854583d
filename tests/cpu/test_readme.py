"""The README quotes the result files, and nothing else."""

import re

from benchmarks.readme import BEGIN, ROOT, _load, rendered, table


def test_the_table_is_that_of_the_result_files():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert rendered(readme) == readme, "run python -m benchmarks.readme"


def test_what_is_missed_is_said():
    """A suite with targets has its misses in its row, and no row is so long that nobody reads it."""
    for line in table().splitlines()[2:]:
        summaries = [_load(suite)["summary"] for suite in re.findall(r"results/([\w-]+)\.json", line)]
        for summary in (s for s in summaries if "not_measured" in s):
            assert f"{len(summary['missed']) + len(summary['not_measured'])} missed" in line
        assert len(re.sub(r"\]\([^)]*\)", "]", line)) < 320, line


def test_an_edited_number_is_noticed():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    head, tail = readme.split(BEGIN)
    edited = head + BEGIN + tail.replace(" ms |", "0 ms |", 1)
    assert edited != readme and rendered(edited) == readme
