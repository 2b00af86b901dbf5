"""Patches of images and of grids of tokens, normalized.

    y[b, n, k] = round(x[b, Y, X, c] * scale[c] + shift[c])
    scale[c] = fp32(rescale / std[c])          shift[c] = fp32(-mean[c] / std[c])

Row n of a result is the patch (n // across, n % across), or with `merge` the n-th patch when blocks of merge x merge
patches follow each other. Column k is the position (dy, dx, c) or (c, dy, dx) within the patch. Product and sum are
one fused operation in fp32, and y is rounded once, to its dtype or to codes. (x * rescale - mean) / std, computed in
fp32, can differ from this in its last bits. The gradient moves back, dx = round(dy * scale[c]); patches do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...quant import Format
from ...runtime import LATER, Backward, Gradients, Op, Present, Sharding
from ..common.checks import FLOATS, check_input, checked_once, real, whole
from ..common.results import Result, ResultOptions, allocate_result, result_options, result_reference
from ..common.rows import compute_dtype

LAYOUTS, ORDERS = ("nhwc", "nchw"), ("yxc", "cyx")


class PatchifyArgs(NamedTuple):
    image: Tensor  # [B, H, W, C]
    scale: Tensor | None  # fp32 [C]
    shift: Tensor | None  # fp32 [C]
    height: int  # of a patch
    width: int
    merge: int
    channels_first: bool  # in a patch
    result: ResultOptions


class PatchifyOutputs(NamedTuple):
    result: Result


class PatchifyBackwardArgs(NamedTuple):
    dy: Tensor  # [B, N, K]
    scale: Tensor | None
    shape: list[int]  # of the image
    dtype: torch.dtype  # of the image
    planes: bool  # the gradient has the memory order [B, C, H, W]
    height: int
    width: int
    merge: int
    channels_first: bool


class PatchifyGradient(NamedTuple):
    image: Tensor


def _grid(shape: Sequence[int], a: PatchifyArgs | PatchifyBackwardArgs) -> tuple[int, ...]:
    """Return the sizes of an image's dimensions, taken apart: B, Y, merge, height, X, merge, width, C."""
    b, h, w, c = shape
    m = a.merge
    return b, h // (a.height * m), m, a.height, w // (a.width * m), m, a.width, c


def _order(a: PatchifyArgs | PatchifyBackwardArgs) -> tuple[int, ...]:
    """Return these dimensions in the order of patches: B, Y, X, merge, merge, then those of a patch."""
    return (0, 1, 4, 2, 5, 7, 3, 6) if a.channels_first else (0, 1, 4, 2, 5, 3, 6, 7)


def _check_grid(shape: Sequence[int], a: PatchifyArgs | PatchifyBackwardArgs) -> None:
    """Raise an error unless patches, and blocks of them, divide the image."""
    for name, size, patch in (("height", shape[1], a.height), ("width", shape[2], a.width)):
        if min(patch, a.merge) < 1 or size % (patch * a.merge):
            blocks = f" in blocks of {a.merge}" if a.merge != 1 else ""
            raise ValueError(
                f"the {name} {size} of the image is not a multiple of patches of {patch}{blocks}: pad or crop it"
            )


def _shape_of(a: PatchifyArgs) -> tuple[int, int, int]:
    b, h, w, c = a.image.shape
    return b, (h // a.height) * (w // a.width), a.height * a.width * c


def patchify_reference(a: PatchifyArgs) -> PatchifyOutputs:
    x = a.image.to(compute_dtype(a.image))
    if a.scale is not None or a.shift is not None:
        # In float64 the product is exact, as in the fused operation of the kernel.
        wide = x.double() if a.scale is None else x.double() * a.scale
        x = (wide if a.shift is None else wide + a.shift).to(x.dtype)
    shape = _shape_of(a)
    y = x.reshape(_grid(x.shape, a)).permute(_order(a)).reshape(shape[0] * shape[1], shape[2])
    return PatchifyOutputs(result_reference(a.result, y, shape, a.image))


def patchify_backward_reference(a: PatchifyBackwardArgs) -> PatchifyGradient:
    grid, order = _grid(a.shape, a), _order(a)
    dy = a.dy.to(compute_dtype(a.dy)).reshape([grid[i] for i in order])
    dx = dy.permute([order.index(i) for i in range(len(order))]).reshape(a.shape)
    out = _empty_gradient(a)
    return PatchifyGradient(out.copy_(dx if a.scale is None else dx * a.scale))


def _empty_gradient(a: PatchifyBackwardArgs) -> Tensor:
    b, h, w, c = a.shape
    if a.planes:
        return torch.empty((b, c, h, w), dtype=a.dtype, device=a.dy.device).permute(0, 2, 3, 1)
    return torch.empty(a.shape, dtype=a.dtype, device=a.dy.device)


# 48: pointers aligned or not, three alignments of patches and three of runs, sizes below 2^30 or not.
class PatchifyBackwardOp(Op[PatchifyBackwardArgs, PatchifyGradient], name="patchify_backward", variants=48):
    reference = staticmethod(patchify_backward_reference)

    def validate(self, a: PatchifyBackwardArgs) -> None:
        _check_grid(a.shape, a)
        b, h, w, c = a.shape
        if a.dy.numel() != b * h * w * c:
            raise ValueError(
                f"dy {tuple(a.dy.shape)} must have an element for each pixel of {tuple(a.shape)}"
            )

    def allocate(self, a: PatchifyBackwardArgs) -> PatchifyGradient:
        return PatchifyGradient(_empty_gradient(a))

    def launch(self, o: PatchifyGradient, a: PatchifyBackwardArgs) -> None:
        from .launch import PatchLaunch

        call = PatchLaunch(o.image, (a.height, a.width), a.merge, a.channels_first, a.scale)
        call.run(None, a.dy.contiguous())


class PatchifyOp(Op[PatchifyArgs, PatchifyOutputs], name="patchify", variants=48):
    reference = staticmethod(patchify_reference)

    def validate(self, a: PatchifyArgs) -> None:
        _check_grid(a.image.shape, a)
        c = a.image.shape[3]
        for name, t in (("scale", a.scale), ("shift", a.shift)):
            if t is not None and (t.shape != (c,) or t.dtype is not torch.float32 or not t.is_contiguous()):
                raise ValueError(f"{name} must be contiguous fp32 [{c}]; got {t.dtype} {tuple(t.shape)}")

    def allocate(self, a: PatchifyArgs) -> PatchifyOutputs:
        return PatchifyOutputs(allocate_result(a.result, a.image, _shape_of(a)))

    def present(self, a: PatchifyArgs) -> Present:
        return (a.result.present(),)

    def launch(self, o: PatchifyOutputs, a: PatchifyArgs) -> None:
        from .launch import PatchLaunch

        patch = (a.height, a.width)
        PatchLaunch(a.image, patch, a.merge, a.channels_first, a.scale, a.shift, a.result.format).fill(
            o.result, a.result
        )

    def keep(self, a: PatchifyArgs, o: PatchifyOutputs) -> PatchifyBackwardArgs:
        image = a.image
        planes = image.stride(3) > image.stride(2)
        return PatchifyBackwardArgs(
            LATER,
            a.scale,
            list(image.shape),
            image.dtype,
            planes,
            a.height,
            a.width,
            a.merge,
            a.channels_first,
        )

    def backward(self, b: Backward) -> Gradients:
        """Round straight through."""
        return {"image": patchify_backward_op(b.kept._replace(dy=b.grads.result.y)).image}

    def shard(self, a: PatchifyArgs) -> Sharding:
        """Images may be sharded, unless their patches are quantized."""
        whole = dict.fromkeys("hwc", "a patch has pixels and channels of several ranks")
        if a.result.format is not None:
            whole["b"] = (
                "a block of the quantized result may have patches of two images. Quantize each rank's shard by itself "
                "with x.to_local()"
            )
        return Sharding({"image": "b h w c", "scale": "c", "shift": "c"}, {"result_y": "b n k"}, whole)


patchify_backward_op = PatchifyBackwardOp()
patchify_op = PatchifyOp()


def patchify(
    x: Tensor,
    patch: int | tuple[int, int],
    *,
    layout: str = "nhwc",
    order: str = "yxc",
    merge: int = 1,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    rescale: float | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: Format | str | None = None,
    rowwise: bool = True,
    columnwise: bool = False,
    quant_scale: Tensor | None = None,
) -> Tensor:
    """Cut images into patches [B, patches, elements], normalized as `(x * rescale - mean) / std`.

    Grids of tokens are images, too: `patchify(tokens.unflatten(1, (H, W)), 2)` merges 2 x 2 tokens of [B, H*W, C] into
    one of 4C elements.

    - `x`: [B, H, W, C] or [B, C, H, W], uint8 or floats, of any strides.
    - `patch`: height and width of a patch, or one number for both. They divide H and W.
    - `layout`: "nhwc" or "nchw".
    - `order`: of the elements of a patch, "yxc" or "cyx". The weight of a `Conv2d`, flattened, has the order "cyx".
    - `merge`: the patches of a block of merge x merge follow each other, as in Qwen-VL, so that a view merges them:
      `y.unflatten(1, (-1, merge**2)).flatten(2)`.
    - `mean`, `std`: of each channel, or one number for all; 0 and 1 if they are None.
    - `rescale`: 1/255 for uint8 and 1 for floats by default, so that mean and std are those of images in [0, 1].
    - `out_dtype`: dtype of the patches; x's by default, and bf16 for uint8.
    - `quantize`, `rowwise`, `columnwise`, `quant_scale`: the result is a `QTensor`, as in `weft.glu`.

    >>> import torch, weft
    >>> image = torch.tensor([[[0, 255], [255, 0]]], dtype=torch.uint8)[..., None]
    >>> weft.patchify(image, 2, mean=0.5, std=0.5)
    tensor([[[-1.,  1.,  1., -1.]]], dtype=torch.bfloat16)
    """
    check_input("x", x, (torch.uint8, *FLOATS))
    if layout not in LAYOUTS or order not in ORDERS:
        raise ValueError(
            f"layout must be 'nhwc' or 'nchw', and order 'yxc' or 'cyx'; got {layout!r} and {order!r}"
        )
    if x.dim() != 4:
        advice = " Tokens [B, H*W, C] become images by x.unflatten(1, (H, W))" if x.dim() == 3 else ""
        raise ValueError(f"x must have four dimensions, {layout}; got {tuple(x.shape)}.{advice}")
    image = x if layout == "nhwc" else x.permute(0, 2, 3, 1)
    height, width = patch if isinstance(patch, tuple) and len(patch) == 2 else (patch, patch)
    is_uint8 = x.dtype is torch.uint8
    if rescale is None:
        rescale = 1 / 255 if is_uint8 else 1.0
    scale, shift = _factors(
        image.shape[3], _numbers("mean", mean), _numbers("std", std), real("rescale", rescale), x.device
    )
    options = result_options(
        x,
        quantize,
        rowwise=rowwise,
        columnwise=columnwise,
        quant_scale=quant_scale,
        out_dtype=out_dtype,
        dtype=torch.bfloat16 if is_uint8 else None,
    )
    a = PatchifyArgs(
        image,
        scale,
        shift,
        whole("patch", height, 1),
        whole("patch", width, 1),
        whole("merge", merge, 1),
        order == "cyx",
        options,
    )
    return patchify_op(a).result.value(options)


def _numbers(name: str, value: float | Sequence[float] | None) -> float | tuple[float, ...] | None:
    if value is None:
        return None
    if isinstance(value, (list, tuple)):
        return tuple(real(name, each) for each in value)
    return real(name, value)  # type: ignore[arg-type]


@checked_once
def _factors(
    channels: int,
    mean: float | tuple[float, ...] | None,
    std: float | tuple[float, ...] | None,
    rescale: float,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """Return scale and shift of each channel; None where they change nothing. They are copied to the device once."""
    for name, value in (("mean", mean), ("std", std)):
        if isinstance(value, tuple) and len(value) != channels:
            raise ValueError(f"{name} must have a number for each of {channels} channels; got {len(value)}")
    means, stds = (
        value if isinstance(value, tuple) else (default if value is None else value,) * channels
        for value, default in ((mean, 0.0), (std, 1.0))
    )
    if 0.0 in stds:
        raise ValueError("std must not be 0")
    scales = [rescale / s for s in stds]
    shifts = [-m / s for m, s in zip(means, stds, strict=True)]
    return tuple(
        torch.tensor(values, dtype=torch.float32, device=device) if any(v != same for v in values) else None
        for values, same in ((scales, 1.0), (shifts, 0.0))
    )  # type: ignore[return-value]
