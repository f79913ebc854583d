import pytest

pytest.importorskip("diffusers")

from tests.systems.docs import assert_page_runs


def test_page(tmp_path):
    assert_page_runs("diffusers", tmp_path)
