"""Patches against PyTorch: orders, layouts, tokens, gradients, quantized results, and a convolution."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
import triton_loom
from torch import Tensor
from triton_loom.testing import EPS32, check, words

import weft
from tests.support.covering import covering
from weft.lab.compiled.offline import compile_all
from weft.runtime import TARGETS, choosing_for, recording

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def image(*shape: int, layout: str = "nhwc") -> Tensor:
    """Return a random image [B, H, W, C] in one of the layouts."""
    x = torch.randint(0, 256, shape, dtype=torch.uint8)
    return x if layout == "nhwc" else x.permute(0, 3, 1, 2).contiguous()


def cut(x: Tensor, height: int, width: int, order: str, merge: int) -> Tensor:
    """Return the patches of images [B, H, W, C], cut one by one."""
    _, h, w, _ = x.shape
    patches = []
    for top, left in itertools.product(range(0, h, merge * height), range(0, w, merge * width)):
        for i, j in itertools.product(range(merge), range(merge)):
            y, z = top + i * height, left + j * width
            p = x[:, y : y + height, z : z + width]
            patches.append((p if order == "yxc" else p.permute(0, 3, 1, 2)).flatten(1))
    return torch.stack(patches, 1)


@pytest.mark.parametrize(
    ("layout", "order", "merge", "patch"),
    covering(("nhwc", "nchw"), ("yxc", "cyx"), (1, 2, 3), (1, (2, 3), (4, 16))),
)
def test_patches_in_any_order(layout: str, order: str, merge: int, patch: int | tuple[int, int]) -> None:
    height, width = patch if isinstance(patch, tuple) else (patch, patch)
    x = image(2, 2 * height * merge, 3 * width * merge, 3, layout=layout)
    with triton_loom.sanitize():
        y = weft.patchify(x, patch, layout=layout, order=order, merge=merge, rescale=1.0)
    wanted = cut(x if layout == "nhwc" else x.permute(0, 2, 3, 1), height, width, order, merge)
    assert torch.equal(y, wanted.bfloat16())  # integers up to 255 are exact


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("channels", [1, 3, 8, 700])
def test_patches_longer_than_a_tile(channels: int, target: str) -> None:
    x = torch.randn(2, 8, 6, channels).bfloat16()
    with choosing_for(target), triton_loom.sanitize():
        y = weft.patchify(x, (4, 2))
    assert torch.equal(y, cut(x, 4, 2, "yxc", 1))


def test_normalization_is_one_product_and_one_sum() -> None:
    x = image(2, 28, 28, 3)
    y = weft.patchify(x, 14, mean=MEAN, std=STD, out_dtype=torch.float32)
    std, mean = torch.tensor(STD, dtype=torch.float64), torch.tensor(MEAN, dtype=torch.float64)
    scale, shift = (1 / (255 * std)).float().double(), (-mean / std).float().double()
    truth = cut(x.double() * scale + shift, 14, 14, "yxc", 1)
    check(y, truth, 2 * EPS32 * truth.abs().max().item() * 2)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(weft.patchify(x, 14, mean=MEAN, std=STD, out_dtype=dtype), y.to(dtype))
    conventional = cut((x.double() / 255 - mean) / std, 14, 14, "yxc", 1)
    check(y, conventional, 8 * EPS32 * truth.abs().max().item())


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_views_of_any_strides(layout: str) -> None:
    """Crops, flips of dimensions, every other column, and images that share memory."""
    whole = image(3, 40, 44, 5, layout=layout)
    y, x = (1, 2) if layout == "nhwc" else (2, 3)
    crop = whole.narrow(y, 3, 16).narrow(x, 5, 24)
    for view in (crop, crop[:1].expand(3, -1, -1, -1), whole.narrow(y, 0, 32)[::2], crop.transpose(y, x)):
        got = weft.patchify(view, (8, 4), layout=layout, rescale=1.0)
        plain = weft.patchify(view.contiguous(), (8, 4), layout=layout, rescale=1.0)
        wanted = cut(view if layout == "nhwc" else view.permute(0, 2, 3, 1), 8, 4, "yxc", 1)
        assert torch.equal(got, wanted.bfloat16())
        assert torch.equal(got, plain)


def test_gradients_are_checked_at_the_ops_own_boundary() -> None:
    from weft.ops.vision.patchify import PatchifyBackwardArgs, patchify_backward_op

    a = PatchifyBackwardArgs(torch.randn(1, 4, 12), None, [1, 4, 4, 3], torch.float32, False, 2, 2, 1, False)
    assert patchify_backward_op(a).image.shape == (1, 4, 4, 3)
    for wrong, message in (
        (a._replace(dy=torch.randn(1, 3, 12)), "for each pixel"),
        (a._replace(height=3), "of 3"),
    ):
        with pytest.raises(ValueError, match=message):
            patchify_backward_op(wrong)


def test_runs_end_where_strides_do() -> None:
    """What a launch promises of contiguous runs, for each layout, holds under the sanitizer of an H100's launches."""
    wide = torch.randn(2, 8, 40, 32)
    for x in (
        wide[..., :16],  # pixels that are apart
        torch.randn(2, 8, 16, 24)[..., :8],
        torch.randn(2, 8, 16, 64)[..., ::2],
        torch.randn(2 * 8 * 16 * 16 + 64).as_strided(
            (2, 8, 16, 16), (2049, 256, 16, 1)
        ),  # images at odd places
        torch.randn(2, 8, 17, 16)[:, :, :16],
        torch.randn(2 * 8 * 257).as_strided((2, 8, 16, 16), (8 * 257, 257, 16, 1)),  # rows at odd places
    ):
        for order, layout in itertools.product(("yxc", "cyx"), ("nhwc", "nchw")):
            with choosing_for("sm_90"), triton_loom.sanitize():
                y = weft.patchify(x, (2, 4) if layout == "nhwc" else (4, 8), layout=layout, order=order)
            grid = x if layout == "nhwc" else x.permute(0, 2, 3, 1)
            assert torch.equal(y, cut(grid, *((2, 4) if layout == "nhwc" else (4, 8)), order, 1))


def test_tokens_are_merged() -> None:
    """2 x 2 tokens of a grid become one, in the order of Qwen-VL: of images whose patches lie in blocks, by a view."""
    tokens = torch.randn(2, 6 * 8, 16, requires_grad=True)
    merged = weft.patchify(tokens.unflatten(1, (6, 8)), 2)
    grid = tokens.detach().view(2, 3, 2, 4, 2, 16)
    assert torch.equal(merged, grid.transpose(2, 3).reshape(2, 12, 64))
    (gradient,) = torch.autograd.grad(merged, tokens, merged.detach())
    assert torch.equal(gradient, tokens)
    x = image(2, 24, 32, 3)
    in_blocks, in_rows = (weft.patchify(x, 4, merge=merge) for merge in (2, 1))
    by_view = in_blocks.unflatten(1, (-1, 4)).flatten(2)
    assert torch.equal(by_view, weft.patchify(in_rows.unflatten(1, (6, 8)), 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("layout", "order"), [*itertools.product(("nhwc", "nchw"), ("yxc", "cyx"))])
def test_gradients(layout: str, order: str, dtype: torch.dtype) -> None:
    x = torch.randn(2, 12, 20, 3).to(dtype)
    x = (x if layout == "nhwc" else x.permute(0, 3, 1, 2).contiguous()).requires_grad_()
    y = weft.patchify(x, (3, 5), layout=layout, order=order, merge=2, mean=MEAN, std=STD)
    exact = x.detach().double().requires_grad_()
    truth = weft.patchify(exact, (3, 5), layout=layout, order=order, merge=2, mean=MEAN, std=STD)
    for dy in (torch.randn_like(y), torch.randn(1, 1, y.shape[2]).to(dtype).expand_as(y)):
        with triton_loom.sanitize():
            (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        (wanted,) = torch.autograd.grad(truth, exact, dy.double(), retain_graph=True)
        assert dx.is_contiguous()
        eps = torch.finfo(dtype).eps
        assert ((dx.double() - wanted).abs() <= (eps + 2 * EPS32) * wanted.abs()).all()


def test_gradients_are_slopes() -> None:
    x = torch.randn(1, 4, 6, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: weft.patchify(x, 2, order="cyx", mean=0.3, std=0.7), (x,))


@pytest.mark.parametrize("spec", ["row", "tensor", "1x128", "128x128", "mx", "nvfp4", "int8:row"])
def test_quantized_patches_are_those_of_the_fp32_result(spec: str) -> None:
    x = image(3, 42, 42, 3)
    columnwise = "row" not in spec
    for merge in (1, 3):
        got = weft.patchify(x, 14, merge=merge, mean=MEAN, std=STD, quantize=spec, columnwise=columnwise)
        y = weft.patchify(x, 14, merge=merge, mean=MEAN, std=STD, out_dtype=torch.float32)
        wanted = weft.quantize(y.flatten(0, 1), spec, columnwise=columnwise)
        assert got.shape == (3, 9, 588)
        for mine, theirs in ((got.rowwise, wanted.rowwise), (got.columnwise, wanted.columnwise)):
            if theirs is not None:
                assert torch.equal(words(mine.data), words(theirs.data))
                assert torch.equal(words(mine.scale), words(theirs.scale))


def test_rows_longer_than_a_tile_have_one_scale() -> None:
    x = torch.randn(1, 32, 32, 24)
    got = weft.patchify(x, 32, quantize="row")
    wanted = weft.quantize(weft.patchify(x, 32).flatten(0, 1), "row")
    assert torch.equal(got.rowwise.data, wanted.rowwise.data)
    assert torch.equal(got.rowwise.scale, wanted.rowwise.scale)


@pytest.mark.parametrize("spec", [None, "tensor"])
def test_an_embedding_is_a_convolution(spec: str | None) -> None:
    """Patches, product, bias and positions, against Conv2d with stride = patch in float64."""
    x, width = image(2, 56, 56, 3), 64
    conv = torch.nn.Conv2d(3, width, 14, stride=14, dtype=torch.float64)
    positions = torch.randn(16, width, dtype=torch.float64)
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (MEAN, STD))
    pixels = (x.permute(0, 3, 1, 2).double() / 255 - mean) / std
    truth = conv(pixels).flatten(2).transpose(1, 2) + positions
    patches = weft.patchify(
        x, 14, order="cyx", mean=MEAN, std=STD, out_dtype=None if spec else torch.float32, quantize=spec
    )
    weight = conv.weight.detach().flatten(1)
    weight = weft.quantize(weight.bfloat16(), spec) if spec else weight.float()
    y = weft.matmul(
        patches,
        weight.t(),
        bias=conv.bias.detach().float(),
        residual=positions.float().expand(2, -1, -1),
        out_dtype=torch.float32,
    )
    assert y.shape == (2, 16, width)
    error = (y.double() - truth.detach()).square().mean().sqrt() / truth.detach().square().mean().sqrt()
    assert error < (0.03 if spec else 1e-5)  # e4m3 has steps of 1/8 to 1/16; bf16 would be wrong by 0.002


def test_compiled_and_captured() -> None:
    x = image(2, 28, 28, 3)

    def run(x: Tensor) -> Tensor:
        return weft.patchify(x, 14, mean=MEAN, std=STD)

    eager = run(x)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), eager)
    replay = weft.capture(run, x)
    other = image(2, 28, 28, 3)
    assert torch.equal(replay(other), run(other))
    leaf = torch.randn(2, 28, 28, 3, requires_grad=True)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    (mine,) = torch.autograd.grad(compiled(leaf).sum(), leaf)
    (wanted,) = torch.autograd.grad(run(leaf).sum(), leaf)
    assert torch.equal(mine, wanted)


def test_images_that_are_empty() -> None:
    for shape in ((0, 28, 28, 3), (2, 0, 28, 3), (2, 28, 28, 0)):
        for spec in (None, "1x128"):
            y = weft.patchify(torch.zeros(shape, dtype=torch.uint8), 14, quantize=spec)
            assert y.shape == (shape[0], shape[1] // 14 * 2, 196 * shape[3])


def test_factors_are_checked_at_the_ops_own_boundary() -> None:
    from weft.ops.common.results import plain_result
    from weft.ops.vision.patchify import PatchifyArgs, patchify_op

    x = torch.randn(1, 4, 4, 3)
    a = PatchifyArgs(x, torch.ones(3), None, 2, 2, 1, False, plain_result(torch.float32))
    assert patchify_op(a).result.y.shape == (1, 4, 12)
    for wrong, message in (
        (a._replace(scale=torch.ones(2)), "scale must be contiguous fp32"),
        (a._replace(shift=torch.ones(3).half()), "shift must be contiguous fp32"),
        (a._replace(height=3), "not a multiple of patches of 3"),
        (a._replace(merge=0), "not a multiple"),
    ):
        with pytest.raises(ValueError, match=message):
            patchify_op(wrong)


def test_offsets_have_64_bits() -> None:
    """Images, rows and columns so far apart that offsets need more than 32 bits, though the strides fit into 32. The
    memory between them is never touched."""
    far, values = 2**30 - 64, torch.arange(64).view(4, 4, 4, 1)
    storage = torch.UntypedStorage(4 * far)
    for strides in ((far, 4, 1, 1), (4, far, 1, 1), (4, 1, far, 1)):
        x = torch.tensor([], dtype=torch.uint8).set_(storage, 0, (4, 4, 4, 1), strides)
        x.copy_(values)
        assert torch.equal(weft.patchify(x, 4, rescale=1.0), values.view(4, 1, 16).bfloat16())


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[] if t == "sm_90" else pytest.mark.slow) for t in TARGETS]
)
def test_compiled_for_gpus_without_spills(target: str) -> None:
    from tests.support.binaries import flaws

    with recording(target) as recorded:
        for shape, dtype in (((3, 224, 224, 3), torch.uint8), ((4, 32, 32, 1152), torch.bfloat16)):
            x = torch.empty(shape, dtype=dtype, device="meta")
            patch = 14 if dtype is torch.uint8 else 2
            for spec in (None, "tensor", "row", "1x128", "128x128", "mx", "nvfp4"):
                weft.patchify(x, patch, mean=0.5, std=0.5, quantize=spec)
        x = torch.empty((2, 224, 224, 3), device="meta", requires_grad=True)
        y = weft.patchify(x, 14, order="cyx", merge=2, std=0.5)
        torch.autograd.grad(y, x, torch.empty_like(y))
    jobs = [(v, target) for v in dict.fromkeys(recorded) if "patchify" in v.kernel]
    assert len(jobs) >= 12
    for (variant, _), binary in zip(jobs, compile_all(jobs, timeout=600), strict=True):
        assert not flaws(target, binary), variant


def test_convolution_weight_has_the_order_of_patches() -> None:
    x, weight = torch.randn(1, 3, 8, 8), torch.randn(5, 3, 4, 4)
    y = weft.patchify(x, 4, layout="nchw", order="cyx") @ weight.flatten(1).t()
    torch.testing.assert_close(y.transpose(1, 2).view(1, 5, 2, 2), F.conv2d(x, weight, stride=4))
