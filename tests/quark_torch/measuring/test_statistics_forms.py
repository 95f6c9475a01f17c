"""Statistics of tensors in every form: strides, subclasses, layouts, modes."""

import math
import threading
import warnings

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from statistics_reference import check, check_values
from tiers import count_examples
from torch import nn

from quark_torch.measuring.measures import measure, measure_histogram, measure_update
from quark_torch.measuring.tensor_statistics import Wanted

pytestmark = pytest.mark.usefixtures("way")
WANTED = Wanted(0.1, (-1.0, 1.0))


@st.composite
def views(draw):
    """A tensor of some dtype, cut, turned and expanded."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32]
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    if draw(st.booleans()):
        shape[0] = draw(st.integers(1, 900))
    torch.manual_seed(draw(st.integers(0, 1000)))
    tensor = torch.randn(shape).mul(3).to(draw(st.sampled_from(dtypes)))
    for _ in range(draw(st.integers(0, 4))):
        dim = draw(st.integers(0, tensor.dim() - 1))
        match draw(
            st.sampled_from(["permute", "slice", "expand", "narrow", "squeeze", "diagonal"])
        ):
            case "permute":
                tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
            case "slice":
                tensor = tensor[(slice(None),) * dim + (slice(None, None, 2),)]
            case "expand":
                tensor = tensor.unsqueeze(dim).expand(
                    *tensor.shape[:dim], draw(st.integers(1, 5)), *tensor.shape[dim:]
                )
            case "narrow":
                size = draw(st.integers(0, tensor.shape[dim]))
                tensor = tensor.narrow(dim, 0, size)
            case "squeeze":
                tensor = tensor.unsqueeze(dim)
            case "diagonal" if tensor.dim() > 1:
                tensor = tensor.diagonal(dim1=0, dim2=1)
    return tensor


@settings(deadline=None, max_examples=count_examples(120), suppress_health_check=list(HealthCheck))
@given(views(), st.data())
def test_views(tensor, data):
    units = data.draw(st.none() | st.integers(0, tensor.dim() - 1))
    wanted = WANTED._replace(units=units)
    check(measure(tensor, wanted), tensor, wanted)


@pytest.mark.long
def test_large_views():
    torch.manual_seed(0)
    base = torch.randn(600, 700)
    for view in (
        base.t(),
        base[::3, 1::2],
        base[:, :1].expand(600, 900),
        base.reshape(60, 7, 10, 100).permute(3, 1, 0, 2),
        base.flatten().unfold(0, 1000, 400),
    ):
        wanted = WANTED._replace(units=1)
        check(measure(view, wanted), view, wanted)


def test_a_tensor_that_stands_for_the_negative_of_its_memory():
    negative = torch.randn(50, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    check(measure(negative, WANTED), negative, WANTED)
    conjugate = torch.randn(50, dtype=torch.complex64).conj()
    check(measure(conjugate), conjugate)
    assert measure_update(torch.zeros(50), negative).update.mean == pytest.approx(
        negative.double().mean().item(), abs=1e-7
    )


def test_nothing_of_autograd_is_touched():
    parameter = nn.Parameter(torch.randn(40, 30))
    output = parameter * 2
    transposed = output.t()
    versions = [tensor._version for tensor in (parameter, output, transposed)]
    for tensor in (parameter, output, transposed):
        check(measure(tensor, WANTED), tensor, WANTED)
        measure_histogram(tensor, 4, 100)
        measure_update(tensor, tensor)
    assert [tensor._version for tensor in (parameter, output, transposed)] == versions
    assert torch.is_grad_enabled()
    output.sum().backward()
    assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))
    with torch.no_grad():
        measure(output[::2])
        assert not torch.is_grad_enabled()


def test_inference_tensors():
    with torch.inference_mode():
        tensor = torch.randn(30, 20)
        check(measure(tensor.t()[1:], WANTED), tensor.t()[1:], WANTED)
        assert torch.is_inference_mode_enabled()
    for each in (tensor, tensor[:, ::2]):
        statistics = measure(each, WANTED)
        check(statistics, each.clone(), WANTED)


def test_autocast_and_default_dtype_change_nothing():
    tensor = torch.randn(500) + 1000
    expected = measure(tensor[::2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert measure(tensor[::2]) == expected
    torch.set_default_dtype(torch.float64)
    try:
        assert measure(tensor[::2]) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors():
    indices = torch.tensor([[0, 0, 2], [1, 1, 3]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 4.0]), (3, 4))
    statistics = measure(sparse, WANTED)
    assert (statistics.element_count, statistics.finite_count) == (12, 2)
    assert statistics.norm == 5.0
    assert statistics.density == 2 / 12
    assert statistics.notes == ("sparse: of the stored values",)
    assert not sparse.is_coalesced()
    dense = torch.tensor([[0.0, 3.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, 0.0, 4.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compressed = [dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((1, 2))]
    for each, density in zip(compressed, (2 / 12, 2 / 12, 4 / 12), strict=True):
        statistics = measure(each)
        assert (statistics.norm, statistics.density) == (5.0, density)
    empty = measure(torch.zeros(3, 4).to_sparse())
    assert (empty.element_count, empty.finite_count, empty.density) == (12, 0, 0.0)


def test_a_sparse_gradient():
    embedding = nn.Embedding(10, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    statistics = measure(embedding.weight.grad)
    assert (statistics.element_count, statistics.finite_count, statistics.maximum) == (30, 6, 2.0)


@pytest.mark.filterwarnings("ignore")
def test_nested_tensors():
    parts = [torch.randn(3, 4), torch.randn(5, 4)]
    values = torch.cat(parts).numpy().astype(np.float64)
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor(parts, layout=layout)
        check_values(measure(nested, WANTED), values.reshape(-1), WANTED)


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors():
    quantize = getattr(torch, "quantize_per_tensor", None)
    if quantize is None:
        pytest.skip("this PyTorch has no quantized tensors")
    quantized = quantize(torch.randn(40, 5), 0.1, 3, torch.qint8)
    expected = quantized.dequantize()
    statistics = measure(quantized, WANTED)
    check(statistics, expected, WANTED)
    assert statistics.notes == ("quantized: of dequantized values",)


def test_what_has_no_elements_gives_none():
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert measure(torch.empty(3, device="meta")) is None
    with FakeTensorMode() as mode:
        fake = torch.randn(3)
    assert measure(fake) is None
    assert mode is not None
    freed = torch.randn(1000)
    freed.untyped_storage().resize_(0)
    assert measure(freed) is None
    assert measure_update(freed, freed) is None
    assert measure(nn.UninitializedParameter()) is None
    for each in (fake, freed, torch.empty(3, device="meta"), torch.zeros(0)):
        assert measure_histogram(each, 4, 100) is None


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_inside_of_transforms_nothing_is_measured():
    found = []

    def function(x):
        found.append(measure(x))
        return (x * x).sum()

    torch.vmap(function)(torch.randn(3, 4))
    torch.func.grad(function)(torch.randn(4))
    torch.func.jvp(function, (torch.randn(4),), (torch.randn(4),))
    assert found == [None] * 3


def test_what_is_no_tensor_gives_none():
    assert measure(None) is None
    assert measure([1.0]) is None
    assert measure_update(torch.zeros(3), torch.zeros(4)) is None
    assert measure_update(torch.zeros(3), None) is None


def test_subclasses():
    class Marked(torch.Tensor):
        pass

    tensor = torch.randn(20).as_subclass(Marked)
    check(measure(tensor, WANTED), tensor.as_subclass(torch.Tensor), WANTED)
    check(measure(nn.Parameter(tensor), WANTED), tensor.as_subclass(torch.Tensor), WANTED)

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise RuntimeError("no")

    assert measure(torch.randn(20).as_subclass(Refusing)) is None


def test_a_distributed_tensor_gives_its_local_shard():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        tensor = torch.randn(20, 3)
        sharded = distribute_tensor(tensor, mesh, [Shard(0)])
        assert isinstance(sharded, DTensor)
        for each in (sharded, nn.Parameter(sharded)):
            statistics = measure(each, WANTED)
            check(statistics, tensor, WANTED)
            assert statistics.notes == ("scope: local_shard",)
        whole = measure(distribute_tensor(tensor, mesh, [Replicate()]))
        check(whole, tensor)
        assert whole.notes == ()
        update = measure_update(sharded, sharded + 1)
        assert update.update.mean == pytest.approx(1.0)
        assert update.update.notes == ("scope: local_shard",)
    finally:
        dist.destroy_process_group()


def agree(one, other):
    """Equal, but for the order of summation, which depends on a thread's own settings."""
    names = ("mean", "variance", "norm")
    sums = [[getattr(each, name) for name in names] for each in (one, other)]
    rounded = [msgspec.structs.replace(each, **dict.fromkeys(names)) for each in (one, other)]
    return rounded[0] == rounded[1] and sums[0] == pytest.approx(sums[1], rel=1e-12)


def test_many_threads_at_once():
    tensors = [torch.randn(5000 + 17 * size) + size for size in range(8)]
    expected = [measure(tensor, WANTED) for tensor in tensors]
    wrong = []

    def work(index):
        found = [measure(tensors[index], WANTED) for _ in range(100)]
        wrong.extend(statistics for statistics in found if not agree(statistics, expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@settings(deadline=None, max_examples=count_examples(80), suppress_health_check=list(HealthCheck))
@given(
    st.integers(0, 9000),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.sampled_from([0.0, 1e-12, 1e-3, 1.0]),
    st.sampled_from([None, math.nan, math.inf, 1e38, 1e300]),
    st.sampled_from(["dense", "transposed", "mixed", "cut"]),
)
def test_updates(count, dtype, scale, special, form):
    torch.manual_seed(count)
    count -= count % 6
    before = torch.randn(count, dtype=torch.float64).to(dtype)
    after = (before.double() + scale * torch.randn(count, dtype=torch.float64)).to(dtype)
    if special is not None and count:
        after[count // 2] = torch.tensor(special, dtype=torch.float64).to(dtype)
        before[count // 3] = torch.tensor(-special, dtype=torch.float64).to(dtype)
    match form:
        case "transposed":
            before, after = before.view(-1, 6).t(), after.view(-1, 6).t()
        case "mixed":
            before = before.view(-1, 6)
            after = after.view(6, -1).t()
        case "cut":
            before, after = before[::2], after[::2]
    found = measure_update(before, after, WANTED)
    check(found.after, after, WANTED)
    # As one subtracts numbers of that dtype, widened to float32 at least.
    wide = torch.promote_types(dtype, torch.float32)
    check(found.update, after.to(wide) - before.to(wide), WANTED)
    finite = before.double()[before.isfinite()]
    if len(finite) and special != 1e300:
        assert found.before_norm == pytest.approx(finite.norm().item(), rel=1e-6)


def test_an_update_of_extremes():
    for value in (1e300, 1e-300):
        before = torch.full((4,), value, dtype=torch.float64)
        found = measure_update(before, before * 2)
        assert found.before_norm == pytest.approx(2 * value)
        assert found.update.norm == pytest.approx(2 * value)
        assert found.after.norm == pytest.approx(4 * value)
    zero = measure_update(torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64))
    assert (zero.before_norm, zero.update.mean) == (0.0, 1.0)
