import warnings

import pytest


@pytest.fixture(scope="session")
def geoopt():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # geoopt 0.5.1 compiles with the deprecated torch.jit when imported
        return pytest.importorskip("geoopt")
