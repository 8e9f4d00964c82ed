"""Errors cross processes: workers raise them in actors and subprocesses."""

import pytest

from rdt_plan.testing import assert_carried, errors_of
from rdt_trainer import errors


@pytest.mark.parametrize("error", errors_of(errors), ids=lambda error: type(error).__name__)
def test_an_error_arrives_as_it_was(error):
    assert_carried(error)
