"""A run for each test, and small ways to probe a model in it."""

import pytest

import quark
from quark import EventLogger, HookEngine, HookEngineConfig, LayerFilterConfig


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as opened:
        yield opened


@pytest.fixture
def strict_session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path, strict_mode=True) as opened:
        yield opened


@pytest.fixture
def engine(session):
    """Make a HookEngine, which is closed after the test; options are those of its config."""
    made = []

    def make(model, optimizer=None, *, filters=None, **options):
        config = (
            HookEngineConfig(
                filters=LayerFilterConfig(**(filters or {})), raise_on_error=True, **options
            )
            if "raise_on_error" not in options
            else HookEngineConfig(filters=LayerFilterConfig(**(filters or {})), **options)
        )
        made.append(HookEngine(session, model, optimizer, config=config))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def events(session):
    """Read the run's events of a type."""
    return lambda event_type: EventLogger(session).read(event_type=event_type)


@pytest.fixture
def expect():
    """Hold a record against statistics made directly, in float64."""

    def check(record, tensor, **others):
        wide = tensor.detach().double()
        assert record.element_count == wide.numel()
        assert record.tensor_shape == tuple(wide.shape)
        assert record.mean == pytest.approx(wide.mean().item(), rel=1e-5, abs=1e-7)
        assert record.variance == pytest.approx(wide.var(correction=0).item(), rel=1e-5, abs=1e-9)
        assert record.std == pytest.approx(wide.std(correction=0).item(), rel=1e-5, abs=1e-7)
        assert record.norm == pytest.approx(wide.norm().item(), rel=1e-5)
        assert record.minimum == pytest.approx(wide.min().item())
        assert record.maximum == pytest.approx(wide.max().item())
        assert (record.nan_count, record.inf_count) == (0, 0)
        for name, value in others.items():
            assert getattr(record, name) == value, name

    return check
