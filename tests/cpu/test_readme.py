"""The README quotes the result files, and nothing else."""

from benchmarks.readme import BEGIN, ROOT, rendered


def test_the_table_is_that_of_the_result_files():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert rendered(readme) == readme, "run python -m benchmarks.readme"


def test_an_edited_number_is_noticed():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    head, tail = readme.split(BEGIN)
    edited = head + BEGIN + tail.replace(" ms |", "0 ms |", 1)
    assert edited != readme and rendered(edited) == readme
