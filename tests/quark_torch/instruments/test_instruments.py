"""Instruments of `quark.watch(extras=…)`: routers, attention, and one's own."""

import copy
import gc
import logging
import math
import pickle
import weakref

import pytest
import torch
from small_models import TinyExperts, TinyMoe, TinyTransformer, train
from torch import nn
from torch.utils.checkpoint import checkpoint

import quark


@pytest.fixture
def session(tmp_path):
    with quark.start_run(project="p", storage_dir=tmp_path) as session:
        yield session


def watch(session, model, *extras, every=1):
    return quark.watch(
        session, model, every_n_steps=every, layers=False, parameters=False, telemetry=False,
        extras=extras,
    )  # fmt: skip


def read(session, prefix):
    rows = quark.MetricsLogger(session).read()
    found = {}
    for row in rows:
        name = quark_name(row.metric_key)
        if name.startswith(prefix):
            found.setdefault(name, []).append((row.step, row.value))
    return found


def quark_name(key):
    from quark_core.records.names import decode_name

    return decode_name(key)


def list_notices(session, event_type="instrument_not_measured"):
    return [
        row.payload["message"] for row in quark.EventLogger(session).read(event_type=event_type)
    ]


def test_the_load_of_experts_is_what_a_hand_computes(session):
    model = TinyMoe()
    by_hand = {}

    def compute(step, tokens):
        pass

    original = model.block.forward

    def forward(x):
        logits = model.block.gate.weight.detach() @ x.detach().reshape(-1, 8).T
        chosen = logits.T.topk(2, -1).indices.flatten()
        counts = torch.bincount(chosen, minlength=4).double()
        by_hand[len(by_hand)] = (counts / counts.sum()).tolist()
        return original(x)

    model.block.forward = forward
    with watch(session, model, quark.RouterLoad()) as watched:
        train(watched, model, 4, after=compute)
    found = read(session, "router/block.gate/")
    for step, share in by_hand.items():
        loads = [dict(found[f"router/block.gate/load/{expert}"])[step] for expert in range(4)]
        assert loads == pytest.approx(share)
        entropy = -sum(each * math.log(each) for each in share if each) / math.log(4)
        assert dict(found["router/block.gate/load_entropy"])[step] == pytest.approx(
            entropy, abs=1e-6
        )
        assert dict(found["router/block.gate/load_max"])[step] == pytest.approx(4 * max(share))
        assert dict(found["router/block.gate/idle"])[step] == pytest.approx(share.count(0) / 4)
    assert "router/block.gate/dropped" not in found
    assert all(0 <= value <= 1 for _, value in found["router/block.gate/token_entropy"])


def test_a_router_of_indexes_tells_what_is_dropped(session):
    class Indexes(nn.Module):
        def forward(self, x):
            return torch.tensor([[0, 0], [0, 1], [-1, 0], [2, 3]]), torch.ones(4, 2)

    model = nn.ModuleDict({"router": Indexes()})
    with watch(session, model, quark.RouterLoad(experts=4)) as watched:
        watched.step(0)
        model["router"](torch.ones(1))
    found = read(session, "router/router/")
    loads = [found[f"router/router/load/{expert}"][0][1] for expert in range(4)]
    assert loads == pytest.approx([4 / 7, 1 / 7, 1 / 7, 1 / 7])
    assert found["router/router/dropped"][0][1] == pytest.approx(1 / 8)


def test_what_is_beyond_the_capacity_is_dropped(session):
    router = quark.RouterLoad(capacity_factor=1.0, top_k=1)
    logits = torch.tensor([[9.0, 0], [9, 0], [9, 0], [0, 9]])
    found = router.measure("gate", nn.Identity(), (), {}, logits)
    # Two slots for each expert: one of three is too much.
    assert float(found["dropped"]) == pytest.approx(0.25)


def test_a_read_function_and_tuples_of_logits_and_indexes_are_understood():
    router = quark.RouterLoad(read=lambda out: quark.Routing(None, out["picked"]), experts=2)
    found = router.measure("r", nn.Identity(), (), {}, {"picked": torch.tensor([[0], [1]])})
    assert found["load"].tolist() == [0.5, 0.5]
    both = (torch.randn(5, 4), torch.rand(5, 2), torch.randint(0, 4, (5, 2)))
    found = quark.RouterLoad().measure("r", nn.Identity(), (), {}, both)
    expected = torch.bincount(both[2].flatten(), minlength=4) / 10
    assert found["load"].tolist() == pytest.approx(expected.tolist())
    with pytest.raises(ValueError, match=r"RouterLoad\(experts=…\)"):
        quark.RouterLoad().measure("r", nn.Identity(), (), {}, torch.tensor([[0], [1]]))


def test_entropy_of_attention_is_what_a_hand_computes(session):
    model = TinyTransformer()
    by_hand = {}

    def compute(step, _):
        weights = model.seen.detach().double()
        entropy = -(weights * weights.log()).sum(-1)
        by_hand[step] = (entropy.mean().item(), entropy.mean((0, 2)).tolist())

    with watch(session, model, quark.AttentionEntropy()) as watched:
        train(watched, model, 3, after=compute)
    found = read(session, "attention/attention/")
    for step, (mean, heads) in by_hand.items():
        assert dict(found["attention/attention/entropy"])[step] == pytest.approx(mean, rel=1e-4)
        share = dict(found["attention/attention/entropy_share"])[step]
        assert share == pytest.approx(mean / math.log(6), rel=1e-4)
        for head in range(2):
            told = dict(found[f"attention/attention/head/{head}"])[step]
            assert told == pytest.approx(heads[head], rel=1e-4)


def test_masked_and_padded_queries_do_not_count():
    weights = torch.tensor([[[[1.0, 0, 0], [0.5, 0.5, 0], [0, 0, 0]]]])
    weights = torch.cat([weights, torch.full((1, 1, 3, 3), torch.nan)])
    found = quark.AttentionEntropy().measure("a", nn.Identity(), (), {}, (None, weights))
    assert float(found["entropy"]) == pytest.approx(math.log(2) / 2)
    assert float(found["entropy_share"]) == pytest.approx(0.5)


def test_a_layer_without_weights_says_so_once_or_is_asked_for_them(session):
    torch.manual_seed(0)
    plain = TinyTransformer(need_weights=False)
    asked = copy.deepcopy(plain)
    with watch(session, plain, quark.AttentionEntropy()) as watched:
        train(watched, plain, 5)
    (notice,) = list_notices(session)
    assert "Fused kernels" in notice
    assert read(session, "attention/") == {}
    with watch(
        session, asked, quark.AttentionEntropy(ask_for_weights=True, name="asked")
    ) as second:
        train(second, asked, 2)
    assert len(read(session, "asked/")["asked/attention/entropy"]) == 2
    assert asked.seen is not None


@pytest.mark.sampled
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_transformers_model_gives_its_weights(session, dropout):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, attn_implementation="eager", attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    model = transformers.BertModel(config)
    with watch(session, model, quark.AttentionEntropy()) as watched:
        watched.step(0)
        out = model(torch.randint(0, 16, (2, 5)), output_attentions=True)
    found = read(session, "attention/")
    weights = out.attentions[1].double()
    weights = weights / weights.sum(-1, keepdim=True)
    counts = weights.sum(-1) > 0
    expected = -(weights * weights.log()).nan_to_num().sum(-1)[counts].mean().item()
    (key,) = [key for key in found if ".1." in key and key.endswith("/entropy")]
    assert found[key] == [(0, pytest.approx(expected, rel=1e-4))]


class Broken(quark.Instrument):
    name = "broken"

    def __init__(self):
        self.calls = 0

    def select(self, name, module):
        return isinstance(module, nn.Linear)

    def measure(self, name, module, args, kwargs, output):
        self.calls += 1
        raise RuntimeError("cannot measure")


class Own(quark.Instrument):
    def select(self, name, module):
        return name == "head"

    def measure(self, name, module, args, kwargs, output):
        assert not torch.is_grad_enabled()
        return {"mean": output.mean(), "rows": output.reshape(-1, 16).mean(-1)[:3], "one": 1}


def test_an_instrument_of_ones_own_measures_in_probed_steps_only(session):
    model = TinyMoe()
    with watch(session, model, Own(), every=2) as watched:
        train(watched, model, 5)
        assert not model.head._forward_hooks or watched is not None
    assert not model.head._forward_hooks
    found = read(session, "Own/head/")
    assert sorted(found) == [
        "Own/head/mean", "Own/head/one", "Own/head/rows/0", "Own/head/rows/1", "Own/head/rows/2",
    ]  # fmt: skip
    assert [step for step, _ in found["Own/head/mean"]] == [0, 2, 4]


def test_one_that_raises_costs_one_warning_and_is_switched_off(session, caplog):
    model, broken = TinyMoe(), Broken()
    caplog.set_level(logging.WARNING, "quark.torch")
    with watch(session, model, broken, quark.RouterLoad()) as watched:
        train(watched, model, 4)
    assert broken.calls == 1
    assert caplog.text.count("cannot measure") == 1
    assert len(quark.EventLogger(session).read(event_type="instrumentation_failed")) == 1
    assert len(read(session, "router/")["router/block.gate/idle"]) == 4


def test_a_router_that_raises_in_training_leaves_no_hook(session):
    model = TinyMoe()

    def fail(*_):
        raise RuntimeError("router broke")

    model.block.experts[0].register_forward_hook(fail)
    watched = watch(session, model, quark.RouterLoad())
    with pytest.raises(RuntimeError, match="router broke"), watched:
        train(watched, model, 1)
    assert not model.block.gate._forward_hooks


def test_no_graph_and_no_output_is_kept(session):
    model = TinyMoe()
    kept = []
    model.block.gate.register_forward_hook(lambda *call: kept.append(weakref.ref(call[2])))
    with watch(session, model, quark.RouterLoad()) as watched:
        watched.step(0)
        model(torch.randint(0, 16, (1, 4))).sum().backward()
        gc.collect()
        assert kept[0]() is None


def test_training_goes_the_same_way_with_instruments(session):
    results = []
    for extras in ((), (quark.RouterLoad(), Own())):
        torch.manual_seed(3)
        model = TinyMoe()
        with watch(session, model, *extras) as watched:
            train(watched, model, 5)
        results.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_autocast_checkpointing_and_micro_batches(session):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = TinyExperts()

        def forward(self, x):
            return checkpoint(self.block, x, use_reentrant=False)

    calls = []

    class Counting(quark.RouterLoad):
        def measure(self, *call):
            calls.append(call[-1].dtype)
            return super().measure(*call)

    model = Checkpointed()
    with watch(session, model, Counting()) as watched:
        watched.step(0)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, 8, requires_grad=True)).sum()
            loss.backward()
    assert calls == [torch.bfloat16] * 3
    loads = [read(session, f"router/block.gate/load/{e}").popitem()[1][0][1] for e in range(4)]
    assert sum(loads) == pytest.approx(1.0)


@pytest.mark.long
def test_a_compiled_model_is_told_of_and_trains(session):
    model = TinyMoe()
    compiled = torch.compile(model, backend="eager")
    with watch(session, compiled, quark.RouterLoad()) as watched:
        train(watched, compiled, 3)
    (notice,) = list_notices(session)
    assert "compiled by torch.compile" in notice
    assert read(session, "router/") == {}


def test_names_of_wrapped_models_are_those_without_the_wrapper(session):
    model = nn.DataParallel(TinyMoe())
    with watch(session, model, quark.RouterLoad()) as watched:
        watched.step(0)
        model.module(torch.randint(0, 16, (1, 4)))
    assert "router/block.gate/idle" in read(session, "router/")


def test_where_no_module_fits_it_is_said(session):
    with watch(session, nn.Linear(2, 2), quark.RouterLoad()) as watched:
        watched.step(0)
    (notice,) = list_notices(session)
    assert "no module of the model" in notice


def test_a_copy_of_a_model_in_a_probed_step_has_inert_hooks(session):
    model = TinyMoe()
    with watch(session, model, quark.RouterLoad()) as watched:
        watched.step(0)
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        twin(torch.randint(0, 16, (1, 4)))
        again(torch.randint(0, 16, (1, 4)))
    assert read(session, "router/") == {}


@pytest.mark.parametrize(
    ("extras", "named"),
    [
        ([quark.RouterLoad], "instances of quark.Instrument, .* not RouterLoad"),
        (quark.RouterLoad(), "extras must be a list"),
        (["router"], "not str"),
        ([quark.RouterLoad(), quark.RouterLoad()], "two instruments"),
    ],
)
def test_what_is_no_instrument_is_refused(session, extras, named):
    with pytest.raises(quark.SchemaValidationError, match=named):
        quark.watch(session, nn.Linear(2, 2), extras=extras)


def test_bad_arguments_of_instruments_are_named():
    with pytest.raises(quark.SchemaValidationError, match="regular expression"):
        quark.RouterLoad("(")
    with pytest.raises(quark.SchemaValidationError, match="capacity_factor"):
        quark.RouterLoad(capacity_factor=-1)
    with pytest.raises(quark.SchemaValidationError, match="top_k"):
        quark.RouterLoad(top_k=0)


def test_very_many_experts_are_bounded(session):
    model = nn.ModuleDict({f"router{n}": nn.Linear(2, 1000) for n in range(3)})
    with watch(session, model, quark.RouterLoad(r"router\d")) as watched:
        watched.step(0)
        for router in model.values():
            router(torch.randn(4, 2))
    found = read(session, "router/")
    assert len([key for key in found if "/load/" in key]) == 1000
    assert "router/router2/load_entropy" in found
    (notice,) = list_notices(session, "instrument_bounded")
    assert "2000 values are omitted" in notice


def test_flops_of_a_step_are_counted_once_from_the_model(session):
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 8)
    by_hand = 2 * 32 * (8 * 16 + 16 * 4) * 2 + 2 * 32 * 16 * 4
    assert quark.count_flops(lambda: model(batch).sum().backward()) == by_hand
    with quark.watch(
        session, model, optimizer, every_n_steps=2, flops_per_step="model", tokens_per_step=32,
        peak_flops_per_s=1e15, layers=False, parameters=False,
    ) as watched:  # fmt: skip
        for step in range(7):
            watched.step(step)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    flops, tokens = (
        dict(read(session, f"system/runtime/{name}_per_s")[f"system/runtime/{name}_per_s"])
        for name in ("flops", "tokens")
    )
    assert flops[6] / tokens[6] == pytest.approx(by_hand / 32)
    assert "system/runtime/mfu_percent" in read(session, "system/runtime/mfu")


@pytest.mark.sampled
@pytest.mark.parametrize("layers", [False, True])
def test_flops_are_counted_also_where_every_step_is_probed(session, layers):
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(32, 8)
    with quark.watch(
        session, model, optimizer, every_n_steps=1, flops_per_step="model", tokens_per_step=1,
        layers=layers, parameters=layers,
    ) as watched:  # fmt: skip
        for step in range(12):
            watched.step(step)
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
    flops, tokens = (
        dict(read(session, f"system/runtime/{name}_per_s")[f"system/runtime/{name}_per_s"])
        for name in ("flops", "tokens")
    )
    assert min(flops) >= 2
    by_hand = 2 * 32 * (8 * 16 + 16 * 4) * 2 + 2 * 32 * 16 * 4
    assert flops[11] / tokens[11] == pytest.approx(by_hand)


def test_flops_of_a_compiled_model_are_not_counted_and_that_is_said(session):
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    with quark.watch(session, model, flops_per_step="model", layers=False, parameters=False):
        pass
    (notice,) = list_notices(session, "flops_not_counted")
    assert "compiled" in notice


def test_a_model_under_ddp_is_measured_by_its_own_names(session, tmp_path):
    distributed = torch.distributed
    store = distributed.FileStore(str(tmp_path / "meeting"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(TinyMoe())
        with watch(session, model, quark.RouterLoad()) as watched:
            train(watched, model, 2)
    finally:
        distributed.destroy_process_group()
    assert len(read(session, "router/")["router/block.gate/idle"]) == 2
