"""`QTensor` in modules, files, gradients, compiled functions and FSDP shards."""

from __future__ import annotations

import copy
import importlib
import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from triton_loom.testing import results_of

import weft
from tests.quant import ranks_fsdp
from weft import QTensor

FORMATS = ["1x128", "128x128", "mx", "e2m1:mx:te", "nvfp4", "nvfp4_16x16", "tensor", "row", "int8:row:vllm"]
FORMATS += ["e2m1:nvfp4:te:hadamard-columnwise"]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def parts_of(q: QTensor) -> list[Tensor]:
    copies = [c for c in (q.rowwise, q.columnwise) if c is not None]
    return [part for c in copies for part in c[:3] if part is not None]


def bytes_of(part: Tensor) -> Tensor:
    return part.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_codes(got: Any, wanted: QTensor) -> None:
    """Assert that two QTensors have the same format, copies and bytes."""
    assert isinstance(got, QTensor)
    assert (got.spec, got.shape) == (wanted.spec, wanted.shape)
    assert got.rowwise is None or got.rowwise.format == got.spec
    assert got.columnwise is None or got.columnwise.format == got.format.transposed.spec
    assert (got.rowwise is None, got.columnwise is None) == (
        wanted.rowwise is None,
        wanted.columnwise is None,
    )
    for mine, its in zip(parts_of(got), parts_of(wanted), strict=True):
        assert mine.dtype == its.dtype
        assert torch.equal(bytes_of(mine), bytes_of(its))


class Holder(nn.Module):
    def __init__(self, weight: Tensor, kind: str = "parameter") -> None:
        super().__init__()
        if kind == "buffer":
            self.register_buffer("weight", weight)
        else:
            self.weight = nn.Parameter(weight, requires_grad=kind == "parameter")


KINDS = ["parameter", "frozen", "buffer"]

# ---- conversions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_conversion_declares_another_dtype(dtype: torch.dtype) -> None:
    q = weft.quantize(draw(64, 256), "1x128", columnwise=True)
    converted = q.to(dtype)
    assert_codes(converted, q)
    assert converted.dtype == dtype
    assert torch.equal(converted.dequantize(), q.dequantize(dtype))
    assert converted.rowwise.data.data_ptr() != q.rowwise.data.data_ptr()  # a conversion shares no memory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "convert", [nn.Module.bfloat16, nn.Module.half, partial(nn.Module.to, dtype=torch.bfloat16)]
)
def test_modules_convert_qtensors(convert: Callable[..., Any], kind: str) -> None:
    q = weft.quantize(draw(64, 256), "1x128", columnwise=True)
    module = Holder(q.clone(), kind)
    before = module.weight
    convert(module)
    weight = module.weight
    assert_codes(weight, q)
    assert weight.dtype in (torch.bfloat16, torch.float16)
    assert weight.dequantize().dtype == weight.dtype
    assert weight.data_ptr() == 0  # no dense storage behind it
    assert weight.requires_grad == (kind == "parameter")
    assert kind == "buffer" or (isinstance(weight, nn.Parameter) and weight is before)
    module.float()
    assert torch.equal(module.weight, q)


@pytest.mark.parametrize("kind", KINDS)
def test_meta_device_and_to_empty(kind: str) -> None:
    """A QTensor moves to the meta device in another dtype and back to uninitialized memory."""
    q = weft.quantize(draw(64, 256), "128x128", columnwise=True)
    module = Holder(q.clone(), kind).to("meta", torch.bfloat16)
    assert isinstance(module.weight, QTensor)
    assert all(part.is_meta for part in (module.weight, *parts_of(module.weight)))
    assert module.weight.dtype == torch.bfloat16
    module.to_empty(device="cpu")
    assert not any(part.is_meta for part in parts_of(module.weight))
    module.load_state_dict(Holder(q, kind).state_dict())
    assert_codes(module.weight, q)
    assert all(part.is_shared() for part in parts_of(module.share_memory().weight))


def test_unsupported_declared_dtypes() -> None:
    q = weft.quantize(draw(64, 256), "1x128")
    assert type(q.to(torch.int32)) is Tensor
    with pytest.raises(TypeError, match="cannot assign a plain tensor"):
        Holder(q).to(torch.float8_e4m3fn)
    with pytest.raises(TypeError, match="cannot assign a plain tensor"):
        nn.Parameter(q).data = draw(64, 256)
    parameter, other = nn.Parameter(q.clone()), weft.quantize(draw(64, 256), "mx")
    parameter.data = other
    assert_codes(parameter, other)


# ---- saving, loading, copying ---------------------------------------------------------------------------


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("duplicate", [saved, pickled, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("format", FORMATS)
def test_saved_and_copied(format: str, duplicate: Callable[[Any], Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        q = weft.quantize(draw(3, 30, 100, dtype=dtype), format, columnwise=True)
        assert_codes(duplicate(q), q)
        assert duplicate(q).dtype == dtype
        assert torch.equal(duplicate(q), q)
        for requires_grad in (True, False):
            parameter = duplicate(nn.Parameter(q, requires_grad))
            assert_codes(parameter, q)
            assert isinstance(parameter, nn.Parameter)
            assert parameter.requires_grad == requires_grad
            assert duplicate(q.detach().requires_grad_(requires_grad)).requires_grad == requires_grad


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_load_state_dict(kind: str, format: str) -> None:
    make = partial(weft.quantize, format=format, columnwise=True)
    q, zeros = make(draw(96, 256)), torch.zeros(96, 256)
    for assign in (True, False):
        module = Holder(make(zeros), kind)
        address = module.weight.rowwise.data.data_ptr()
        module.load_state_dict(saved(Holder(q, kind).state_dict()), assign=assign)
        assert_codes(module.weight, q)
        assert (module.weight.rowwise.data.data_ptr() == address) is not assign
        assert module.weight.requires_grad == (kind == "parameter")
    plain = Holder(zeros.bfloat16(), kind)
    plain.load_state_dict(Holder(q, kind).state_dict())
    assert torch.equal(plain.weight, q.dequantize(torch.bfloat16))
    # Loading plain tensors into codes is ambiguous; the message names the option to set.
    module = Holder(make(zeros), kind)
    with pytest.raises(RuntimeError, match="assign=True"):
        module.load_state_dict(Holder(draw(96, 256), kind).state_dict())
    with pytest.raises(RuntimeError, match="assign=True"):
        module.load_state_dict(Holder(weft.quantize(draw(96, 256), "e5m2:1x128:te"), kind).state_dict())
    assert not module.weight.dequantize().any()
    module.load_state_dict(Holder(draw(96, 256), kind).state_dict(), assign=True)
    assert not isinstance(module.weight, QTensor)


def test_load_into_fewer_copies() -> None:
    """A single copy can be loaded from a tensor that has both, but a missing copy cannot."""
    both, one = (weft.quantize(draw(64, 256), "1x128", columnwise=c) for c in (True, False))
    with pytest.raises(RuntimeError, match="assign=True"):
        both.copy_(one)
    assert_codes(one.copy_(both), QTensor(both.shape, both.dtype, both.format, both.rowwise))


# ---- rows, and writing ----------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_views(format: str) -> None:
    """Slices that cut no block are views of both copies; other slices are decoded."""
    x = draw(4, 128, 192)
    q = weft.quantize(x, format, columnwise=True)
    dense = q.dequantize()
    sides = [
        QTensor(q.shape, q.dtype, q.format, *copies) for copies in ((q.rowwise, None), (None, q.columnwise))
    ]
    for side in (q, *sides):
        values = side.dequantize()
        for chunk, wanted in zip(side.chunk(2), values.chunk(2), strict=True):
            assert isinstance(chunk, QTensor)
            assert torch.equal(chunk.dequantize(), wanted)
            assert {part.untyped_storage().data_ptr() for part in parts_of(chunk)} == {
                part.untyped_storage().data_ptr() for part in parts_of(side)
            }
        assert isinstance(side[1:], QTensor)
        assert torch.equal(side[1:].dequantize(), values[1:])
        assert torch.equal(torch.cat(side.split([1, 3])), values)
        for shape in ((-1,), (1, -1), (128, -1), (8, 64, 192)):
            reshaped = side.view(-1).view(shape)
            assert isinstance(reshaped, QTensor) is (shape in ((-1,), (8, 64, 192)))
            assert torch.equal(reshaped, values.reshape(shape))
    flat = q.view(512, 192)
    for index in (slice(1, 77), slice(0, 400, 3), slice(-5, None), slice(4, 2)):
        assert torch.equal(flat[index], dense.view(512, 192)[index])
    assert torch.equal(q[:, 3:5, 7:], dense[:, 3:5, 7:])


def test_in_place_writes_raise() -> None:
    """Writing to a QTensor raises for single tensors, lists and `out=`: a dequantized copy would lose the write."""
    q = weft.quantize(draw(64, 256), "1x128")
    before = q.dequantize()
    for write in (
        lambda: q.mul_(2.0),
        lambda: q.add_(1.0),
        lambda: torch._foreach_mul_([draw(3), q], 2.0),
        lambda: torch.add(before, before, out=q),
    ):
        with pytest.raises(RuntimeError, match="would change a QTensor in place"):
            write()
    assert torch.equal(q, before)
    for make in (
        torch.zeros_like,
        torch.ones_like,
        lambda t: t.new_zeros(3),
        lambda t: t.new_full((2, 3), 4.0),
    ):
        assert type(make(q)) is Tensor
        assert torch.equal(make(q), make(before))


# ---- gradients that are QTensors ------------------------------------------------------------------------


def quantized_loss(x: Tensor, dy: Tensor) -> Tensor:
    return (weft.glu(x, quantize_grad="1x128") * dy).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantized_gradients_accumulate(dtype: torch.dtype) -> None:
    """Quantized gradients accumulate over backward passes, and with plain gradients in either order."""
    x = draw(64, 512, dtype=dtype).requires_grad_()
    dys = [draw(64, 256, dtype=dtype) for _ in range(3)]
    alone = []
    for dy in dys:
        x.grad = None
        quantized_loss(x, dy).backward()
        assert isinstance(x.grad, QTensor)
        alone.append(x.grad.dequantize())
    x.grad = None
    wanted = None
    for i, dy in enumerate(dys):
        quantized_loss(x, dy).backward()
        wanted = alone[i] if wanted is None else wanted + alone[i]
        assert torch.equal(x.grad, wanted)
    assert not isinstance(x.grad, QTensor)
    x.sum().backward()
    assert torch.equal(x.grad, wanted + 1)
    for first, second in (
        (x.sum, lambda: quantized_loss(x, dys[0])),
        (lambda: quantized_loss(x, dys[0]), x.sum),
    ):
        x.grad = None
        first().backward()
        second().backward()
        assert torch.equal(x.grad, alone[0] + 1)
    x.grad = None
    (quantized_loss(x, dys[0]) + quantized_loss(x, dys[1])).backward()
    assert torch.equal(x.grad, alone[0] + alone[1])


def test_accumulated_gradient_is_used() -> None:
    """Consumers use an accumulated gradient, in place or not, and storing it gives a plain tensor."""
    x = draw(64, 512).requires_grad_()
    dy = draw(64, 256)
    for _ in range(2):
        quantized_loss(x, dy).backward()
    grad = x.grad
    dense = grad.clone()
    assert type(dense) is Tensor
    before = x.detach().clone()
    for foreach in (False, True):
        torch.optim.SGD([x], lr=0.5, foreach=foreach).step()
    assert torch.equal(x, before - 0.5 * dense - 0.5 * dense)
    norm = torch.nn.utils.clip_grad_norm_([x], 1.0)
    assert torch.equal(norm, torch.linalg.vector_norm(dense))
    dense *= (1.0 / (norm + 1e-6)).clamp(max=1.0)
    assert x.grad is grad
    assert torch.equal(grad, dense)
    assert torch.equal(weft.grad_norm([grad]), weft.grad_norm([dense]))
    for store in (saved, pickled, copy.copy, copy.deepcopy):
        assert type(store(grad)) is Tensor
        assert torch.equal(store(grad), dense)
    assert torch.equal(copy.deepcopy(x).grad, dense)
    torch.optim.SGD([x]).zero_grad(set_to_none=False)
    assert not x.grad.any()


# ---- compiled functions that return a QTensor -----------------------------------------------------------


def normed(x: Tensor, weight: Tensor) -> tuple[QTensor, Tensor]:
    q = weft.rms_norm(x, weight, quantize="1x128", columnwise=True)
    return q, (q.dequantize() * 2.0).sum() + x.square().sum()


USES: dict[str, Callable[[QTensor, Tensor], Tensor]] = {
    "loss": lambda q, loss: loss,
    "QTensor": lambda q, loss: q.dequantize().square().sum(),
    "QTensor in torch": lambda q, loss: (q * q).sum(),
    "QTensor in weft": lambda q, loss: weft.glu(q).square().sum(),
    "both": lambda q, loss: loss + (q * 3.0).sum(),
}


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_results(backend: str, dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(normed, fullgraph=True, backend=backend, dynamic=dynamic)
    inputs = [draw(48, 256), draw(256)]
    for use in USES.values():
        results = []
        for function in (normed, compiled):
            leaves = [t.clone().requires_grad_() for t in inputs]
            q, loss = function(*leaves)
            results.append((q.detach(), loss, torch.autograd.grad(use(q, loss), leaves)))
        assert_codes(results[1][0], results[0][0])
        if backend == "aot_eager":  # Inductor sums in another order
            assert torch.equal(results[1][1], results[0][1])
        for got, wanted in zip(results[1][2], results[0][2], strict=True):
            assert type(got) is Tensor
            assert torch.equal(got, wanted)


def test_compiled_result_with_a_quantized_gradient() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(normed, fullgraph=True, backend="aot_eager")
    x, weight, grad = draw(48, 256), draw(256), weft.quantize(draw(48, 256), "1x128")
    results = []
    for function in (normed, compiled):
        leaf = x.clone().requires_grad_()
        results.append(torch.autograd.grad(function(leaf, weight)[0], leaf, grad)[0])
    assert torch.equal(results[0], results[1])


# ---- FSDP2 ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of both ranks."""
    return results_of(Path(ranks_fsdp.__file__), tmp_path_factory)(2)


@pytest.mark.parametrize("name", ranks_fsdp.CASES)
def test_fsdp_matches_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    """Results and gradients of two steps match one process bit for bit, and so do gathered codes and scales."""
    case = ranks_fsdp.CASES[name]
    torch.set_num_threads(1)  # as the ranks do: products are summed in the same order
    alone = ranks_fsdp.run_alone(case)
    gradients = {key for key in alone if key.startswith("d")}
    assert ("d0.weight" in gradients) is case.trained
    loaded = ranks_fsdp.build_model(case, 2)[0].weight
    for rank, results in enumerate(ranks):
        got = results[name]
        for step in ("y0", "y1"):
            assert torch.equal(got[step], alone[step][rank])
        assert {key for key in got if key.startswith("d")} == gradients
        for key in gradients:
            assert torch.equal(got[key], alone[key])
        assert_codes(got["shard"], alone["weight"].chunk(2)[rank])
        assert torch.equal(got["full_tensor"], alone["weight"].dequantize())
        # Weights of another checkpoint, loaded into the shards.
        assert_codes(got["loaded"], loaded)
        assert got["loaded"].dtype == (case.param_dtype or torch.float32)
        for mine, its in zip(parts_of(got["loaded"]), parts_of(loaded), strict=True):
            assert mine.stride() == its.stride()


@pytest.mark.parametrize("name", ranks_fsdp.CASES)
def test_fsdp_moves_codes_and_scales(name: str, ranks: list[dict[str, Any]]) -> None:
    case = ranks_fsdp.CASES[name]
    block = ranks_fsdp.build_model(case, 1)[0]
    width = 4 if case.param_dtype is None else case.param_dtype.itemsize
    wanted = sum(p.numel() * width for layer in (block.first, block.last) for p in layer.parameters())
    f = block.weight.format
    for copy_, columnwise in ((block.weight.rowwise, False), (block.weight.columnwise, True)):
        if copy_ is not None:
            every_rank_has_it = (f.group if columnwise else f.block_rows) == 0  # a scale of all rows
            wanted += copy_.data.nbytes + (0 if every_rank_has_it else copy_.scale.nbytes)
    for results in ranks:
        assert results[name]["moved"]
        assert set(results[name]["moved"]) == {wanted}


def test_fsdp_raises_for_unsupported_shards(ranks: list[dict[str, Any]]) -> None:
    """Every rank raises an error that says what to do."""
    for results in ranks:
        assert "Pad the rows to a multiple of 128 on each rank" in results["a block on two ranks"]
        assert "5 is not divisible by 2 ranks" in results["uneven"]


@pytest.mark.parametrize("make", [weft.quantize, weft.rms_norm, weft.glu], ids=lambda f: f.__name__)
def test_compiled_without_a_gradient(make: Callable[..., Any]) -> None:
    """A graph creates, reads and returns a QTensor, as in inference."""

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        q = make(x, format="1x128") if make is weft.quantize else make(x, quantize="1x128")
        return q, q.dequantize()

    x = torch.randn(8, 256).bfloat16()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, wanted in zip(compiled(x), call(x), strict=True):
        assert torch.equal(weft.dequantize(got) if isinstance(got, QTensor) else got, wanted.to(x.dtype))


def test_inference_mode_keeps_codes() -> None:
    """QTensor decomposes composite ops in inference mode, where PyTorch does not."""
    x, weight = torch.randn(32, 256), weft.quantize(torch.randn(64, 256), "128x128")
    rows = weft.quantize(x, "1x128")
    wanted = torch.nn.functional.linear(rows, weight)
    with torch.inference_mode():
        for copied in (weight.to("cpu", copy=True), weight.to(torch.device("cpu", 0)), weight.clone()):
            assert isinstance(copied, QTensor)
            assert torch.equal(copied.rowwise.data.view(torch.uint8), weight.rowwise.data.view(torch.uint8))
        assert torch.equal(torch.nn.functional.linear(rows, weight), wanted), "another product"


# ---- views that have no codes of their own --------------------------------------------------------------

WRITES: dict[str, Callable[[QTensor], Any]] = {
    "q[0] = 0": lambda q: q.__setitem__(0, 0),
    "q[:, 3:5] = 0": lambda q: q.__setitem__((slice(None), slice(3, 5)), 0),
    "q[q > 0] = 0": lambda q: q.__setitem__(q > 0, 0),
    "q[0] += 1": lambda q: q[0].add_(1),
    "q[0, 0].fill_(1)": lambda q: q[0, 0].fill_(1),
    "q[0][1:].zero_()": lambda q: q[0][1:].zero_(),
    "q[0].detach().zero_()": lambda q: q[0].detach().zero_(),
    "q[0].data.zero_()": lambda q: q[0].data.zero_(),
    "q.detach()[0].zero_()": lambda q: q.detach()[0].zero_(),
    "q.T[0].zero_()": lambda q: q.T[0].zero_(),
    "q.view(8, 128).zero_()": lambda q: q.view(8, 128).zero_(),
    "q.flatten()[3:5].zero_()": lambda q: q.flatten()[3:5].zero_(),
    "q.diagonal().zero_()": lambda q: q.diagonal().zero_(),
    "q.unsqueeze(0).zero_()": lambda q: q.unsqueeze(0).zero_(),
    "q.chunk(2, 1)[0].zero_()": lambda q: q.chunk(2, 1)[0].zero_(),
    "for row in q: row.zero_()": lambda q: [row.zero_() for row in q],
    "q[0].copy_(...)": lambda q: q[0].copy_(torch.ones(256)),
    "out=q[1]": lambda q: torch.add(q[0], 1, out=q[1]),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_to_views_raise(write: str, mode: Callable[[], Any]) -> None:
    """Such writes used to go to decoded copies and vanish."""
    q = weft.quantize(torch.ones(4, 256), "row")
    with mode(), pytest.raises(RuntimeError, match=r"would (write to a view of|change) a QTensor"):
        WRITES[write](q)
    assert q.sum() == 1024


def test_views_are_read_like_tensors() -> None:
    q = weft.quantize(torch.ones(4, 256), "row")
    assert q[0].tolist() == [1.0] * 256
    assert f"{q[0, 0]:.2f}" == "1.00"
    assert q[0].numpy().sum() == 256
    with pytest.raises(ValueError, match="read-only"):
        q[0].numpy()[0] = 0
    for mine in (q[0].clone(), q[0] + 0, copy.deepcopy(q[0])):
        assert type(mine) is Tensor
        mine.zero_()
    assert q.requires_grad_()[3].sum().backward() is None
    assert q.grad.sum() == 256  # type: ignore[union-attr]
    compiled = torch.compile(lambda q: q[3] * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q.detach()), torch.full((256,), 2.0))


@pytest.mark.parametrize(
    "copies", [{}, {"columnwise": True}, {"rowwise": False, "columnwise": True}], ids=str
)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_cut_blocks_are_decoded_alone(format: str, copies: dict[str, bool]) -> None:
    """Selecting a row decodes only the blocks that contain it, not the whole tensor."""
    for shape in ((384, 256), (3, 64, 256), (5, 7, 128)):
        q = weft.quantize(draw(*shape), format, **copies)
        wanted = q.dequantize()
        for index in (0, 1, -1, slice(0, 1), slice(1, 3), slice(2, None), slice(3, 3), slice(-2, -1)):
            got = q[index]
            assert torch.equal(got.dequantize() if isinstance(got, QTensor) else got + 0, wanted[index])
    decoded = weft.quantize(draw(4096, 128), format)
    decoded_rows: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        module = importlib.import_module("weft.quant.qtensor")
        ops = module._ops
        recording = lambda codes, *rest: decoded_rows.append(len(codes.data)) or ops.decode(codes, *rest)  # noqa: E731
        patch.setattr(module, "_ops", ops._replace(decode=recording))
        decoded[7]
    assert decoded_rows
    assert max(decoded_rows) <= 128


@pytest.mark.parametrize(
    "view", [lambda q: q.T, lambda q: q[:2], lambda q: q.view(2, 2, 256), lambda q: q[0]]
)
def test_inference_mode_views_tensors_from_outside(view: Callable[[Any], Any]) -> None:
    """A frozen weight is created outside and read in inference mode, where every view of it used to raise."""
    q = weft.quantize(draw(4, 256), "row", columnwise=True)
    wanted = view(q.dequantize())
    with torch.inference_mode():
        got = view(q)
        got = got.dequantize() if isinstance(got, QTensor) else got + 0
    assert torch.allclose(got, wanted, rtol=0.1, atol=0.2)
