import pytest

pytest.importorskip("peft")

from tests.systems.docs import assert_page_runs


@pytest.mark.parametrize("page", ["transformers", "peft"])
def test_page(page, tmp_path):
    assert_page_runs(page, tmp_path)
