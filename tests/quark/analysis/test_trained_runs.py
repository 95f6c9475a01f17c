"""Small trainings that are really run: some explode at once or collapse, and sound twins."""

from itertools import pairwise

import pytest

import quark

torch = pytest.importorskip("torch")

STEPS = 150


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors this small are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def network(*sizes, activation=torch.nn.ReLU):
    parts = []
    for before, after in pairwise(sizes):
        parts += [torch.nn.Linear(before, after), activation()]
    return torch.nn.Sequential(*parts[:-1])


def classes():
    """Ten clouds of points, and a loss of a model on a batch of them."""
    torch.manual_seed(0)
    labels = torch.randint(0, 10, (512,))
    points = 1.2 * torch.randn(10, 16)[labels] + torch.randn(512, 16)

    def measure(model):
        chosen = torch.randint(0, 512, (64,))
        return torch.nn.functional.cross_entropy(model(points[chosen]), labels[chosen])

    return network(16, 64, 64, 10), measure


def regression():
    torch.manual_seed(1)
    points = torch.randn(512, 8)
    targets = torch.tanh(points @ torch.randn(8, 1)) + 0.1 * torch.randn(512, 1)

    def measure(model):
        chosen = torch.randint(0, 512, (64,))
        return torch.nn.functional.mse_loss(model(points[chosen]), targets[chosen])

    return network(8, 32, 32, 1, activation=torch.nn.Tanh), measure


def twins(stops):
    """Two views of a point that have to agree; without stopped gradients all points do."""
    torch.manual_seed(2)
    points = torch.randn(10, 16)[torch.randint(0, 10, (1024,))] + torch.randn(1024, 16)
    encoder, predictor = network(16, 64, 32), network(32, 16, 32)

    def measure(model):
        chosen = points[torch.randint(0, 1024, (128,))]
        one, other = (model[0](chosen + 0.3 * torch.randn(128, 16)) for _ in range(2))
        aims = (one.detach(), other.detach()) if stops else (one, other)
        compare = torch.nn.functional.cosine_similarity
        return -0.5 * (
            compare(model[1](one), aims[1]).mean() + compare(model[1](other), aims[0]).mean()
        )

    return torch.nn.Sequential(encoder, predictor), measure


def run(folder, model, measure, optimizer, watched=False):
    """Train, and return the rules that warn."""
    with quark.start_run(project="p", storage_dir=folder) as session:
        metrics = quark.MetricsLogger(session)
        schedule = quark.HookScheduleConfig(every_n_steps=5)
        hooks = None
        if watched:
            config = quark.HookEngineConfig(schedule=schedule)
            hooks = quark.HookEngine(session, model, optimizer, config=config)
        for step in range(STEPS):
            if hooks is not None:
                hooks.begin_step(step)
            optimizer.zero_grad()
            loss = measure(model)
            loss.backward()
            optimizer.step()
            if hooks is not None:
                hooks.end_step()
            metrics.log("train/loss", loss.item(), step=step)
        if hooks is not None:
            hooks.close()
    alerts = quark.AnalyzerEngine(session).analyze().alerts
    return {alert.rule_id for alert in alerts if alert.severity != "info"}


@pytest.mark.sampled
@pytest.mark.parametrize(("rate", "warns"), [(3.0, True), (3e-3, False)])
@pytest.mark.parametrize("make", [classes, regression])
def test_a_rate_a_thousand_times_too_high_is_seen_in_the_loss_alone(tmp_path, make, rate, warns):
    model, measure = make()
    rules = run(tmp_path, model, measure, torch.optim.Adam(model.parameters(), lr=rate))
    assert ("divergence" in rules) is warns
    assert "exploding_gradients" not in rules  # nothing of gradients was recorded
    assert bool(rules) is warns


@pytest.mark.sampled
@pytest.mark.parametrize(("stops", "warns"), [(False, True), (True, False)])
def test_a_representation_that_collapses_in_its_first_steps(tmp_path, stops, warns):
    model, measure = twins(stops)
    rate = 0.02 if stops else 0.3
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    assert (
        "activation_collapse" in run(tmp_path, model, measure, optimizer, watched=True)
    ) is warns
