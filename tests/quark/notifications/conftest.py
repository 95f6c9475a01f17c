import pytest
from receivers import Receiver

SECRET = "a secret that both have"


@pytest.fixture
def receive(monkeypatch):
    """Make receivers that are closed at the end; `receive(500, 200)` answers so in turn."""
    monkeypatch.setenv("QUARK_NOTIFY_SECRET", SECRET)
    made = []

    def make(*statuses):
        made.append(Receiver(statuses or (200,)))
        return made[-1]

    yield make
    for receiver in made:
        receiver.close()
