import pytest
from fakes.synthetic_run import write_run


@pytest.fixture(scope="session")
def synthetic_run(tmp_path_factory):
    """A finished run with every kind of event; tests must not write to it."""
    folder = tmp_path_factory.mktemp("runs") / "lora"
    return write_run(folder, steps=120, total_steps=120, every=10, samples_every=60)
