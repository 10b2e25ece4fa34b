"""The toy models that tests of this room run over."""

import pytest

from toys import MODELS


@pytest.fixture(params=MODELS)
def lm(request):
    return MODELS[request.param]()
