"""Contracts for the recorded mistakes of bounds, overflow and promises: their numbers become symbols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import z3
from mistakes import bounds, overflow, promises
from triton_loom.prove import Buffer, Contract, cdiv, symbol
from triton_loom.prove.compiling import ttir_of

Problem = tuple[Any, Contract]  # a kernel or its TTIR, and the contract of its launches
LAUNCHES: dict[str, Callable[[bool], Problem]] = {}

rows, cols, batch, stride = symbol("rows", 1, 2**20), symbol("cols", 1), symbol("batch"), symbol("stride")


def launch(function: Callable[[bool], Problem]) -> Callable[[bool], Problem]:
    """Register a contract under the name of its mistake."""
    LAUNCHES[function.__name__] = function
    return function


def f32(extent: Any, **more: Any) -> Buffer:
    return Buffer("f32", extent, **more)


def view(sizes: tuple[Any, ...], strides: tuple[Any, ...], element: str = "f32") -> Buffer:
    return Buffer.strided(element, sizes, strides)


def problem(
    kernel: Any,
    grid: tuple[Any, ...],
    constants: dict[str, Any],
    sizes: tuple[Any, ...] = (),
    assuming: tuple[Any, ...] = (),
    **arguments: Any,
) -> Problem:
    return kernel, Contract.of(
        grid=grid, arguments=arguments, constants=constants, sizes=sizes, assumptions=assuming
    )


# ---- bounds ------------------------------------------------------------------------------------------------------


@launch
def store_mask_transposed(fixed: bool) -> Problem:
    m, n = symbol("m", 1, 16), symbol("n", 1, 32)
    return problem(bounds.double_tile, (1,), {"FIXED": fixed}, x_ptr=f32(m * n), y_ptr=f32(m * n), M=m, N=n)


@launch
def dropped_tokens_counted(fixed: bool) -> Problem:
    experts = symbol("experts", 1, 1000)
    expert = Buffer("i32", 16, values=lambda v: z3.And(v >= -1, v < experts))
    return problem(
        bounds.count_experts, (1,), {"FIXED": fixed}, expert_ptr=expert, count_ptr=Buffer("i32", experts)
    )


def multiply(**masked: bool) -> Problem:
    m, n, k = (symbol(name, 1, 2**15) for name in "mnk")
    buffers = {"a_ptr": f32(m * k), "b_ptr": f32(k * n), "c_ptr": f32(m * n)}
    return problem(bounds.matmul, (cdiv(m, 16), cdiv(n, 16)), masked, **buffers, M=m, N=n, K=k)


@launch
def gemm_reads_rows_past_a(fixed: bool) -> Problem:
    return multiply(A_MASKED=fixed)


@launch
def gemm_reads_past_k_of_b(fixed: bool) -> Problem:
    return multiply(B_MASKED=fixed)


@launch
def gemm_stores_rows_past_c(fixed: bool) -> Problem:
    return multiply(C_MASKED=fixed)


@launch
def descriptor_of_the_padded_shape(fixed: bool) -> Problem:
    m = symbol("m", 1, 15)
    declared = m if fixed else 16
    buffers = {"x_ptr": f32(16 * m), "y_ptr": f32(16 * m)}
    return problem(bounds.double_by_descriptor, (1,), {}, **buffers, x_rows=declared, y_rows=m)


@launch
def lanes_past_the_row_are_summed(fixed: bool) -> Problem:
    n = symbol("n", 1, 32)
    arguments = {"x_ptr": f32(rows * n), "total_ptr": f32(rows), "N": n}
    return problem(bounds.sum_rows, (rows,), {"FIXED": fixed}, **arguments)


@launch
def weight_read_to_the_power_of_two(fixed: bool) -> Problem:
    n = symbol("n", 1, 1024)
    arguments = {"x_ptr": f32(rows * n), "weight_ptr": f32(n), "y_ptr": f32(rows * n), "N": n}
    return problem(bounds.layer_norm, (rows,), {"FIXED": fixed}, **arguments)


def losses(check: str, labels: Callable[..., Any] | None) -> Problem:
    vocabulary = symbol("vocabulary", 1, 64)
    label = Buffer("i64", rows, values=labels and (lambda v: labels(v, vocabulary)))
    arguments = {"logits_ptr": f32(rows * vocabulary), "label_ptr": label, "loss_ptr": f32(rows)}
    return problem(bounds.cross_entropy, (rows,), {"CHECK": check}, **arguments, VOCAB=vocabulary)


@launch
def ignored_label_as_an_index(fixed: bool) -> Problem:
    return losses("range" if fixed else "nothing", lambda v, most: z3.Or(v == -100, z3.And(v >= 0, v < most)))


@launch
def label_past_the_vocabulary(fixed: bool) -> Problem:
    return losses("range" if fixed else "ignored", None)


def offsets_of(extent: Any, tokens: Any) -> Buffer:
    return Buffer("i64", extent, values=lambda v: z3.And(v >= 0, v <= tokens), ascending=True)


@launch
def starts_without_the_last_end(fixed: bool) -> Problem:
    tokens, sequences = symbol("tokens", 1, 2**40), symbol("sequences", 1, 2**20)
    starts = offsets_of(sequences + 1 if fixed else sequences, tokens)
    arguments = {"x_ptr": f32(tokens), "start_ptr": starts, "total_ptr": f32(sequences)}
    return problem(bounds.sum_sequences, (sequences,), {}, **arguments)


@launch
def first_group_after_the_one_before(fixed: bool) -> Problem:
    tokens, groups = symbol("tokens", 1, 2**40), symbol("groups", 1, 2**20)
    arguments = {"x_ptr": f32(tokens), "end_ptr": offsets_of(groups, tokens), "total_ptr": f32(groups)}
    return problem(bounds.sum_groups, (groups,), {"FIXED": fixed}, **arguments)


@launch
def no_tokens_at_all(fixed: bool) -> Problem:
    tokens = symbol("tokens", 0, 2**20)
    order = Buffer("i64", tokens, values=lambda v: z3.And(v >= 0, v < tokens))
    arguments = {"x_ptr": f32(16 * tokens), "order_ptr": order, "y_ptr": f32(16 * tokens), "tokens": tokens}
    return problem(bounds.gather_rows, (1,), {"FIXED": fixed}, **arguments)


@launch
def grid_past_the_rows(fixed: bool) -> Problem:
    arguments = {"x_ptr": f32(16 * rows), "y_ptr": f32(16 * rows), "M": rows}
    return problem(bounds.double_rows, (cdiv(rows, 4),), {"FIXED": fixed}, **arguments)


@launch
def more_programs_than_rows(fixed: bool) -> Problem:
    programs = symbol("programs", 1, 1000)
    arguments = {"x_ptr": f32(16 * rows), "part_ptr": f32(16 * programs), "M": rows}
    per_program = cdiv(rows, programs)
    return problem(bounds.partial_sums, (programs,), {"FIXED": fixed}, **arguments, PER_PROGRAM=per_program)


@launch
def floored_scales_under_a_ceiled_grid(fixed: bool) -> Problem:
    scales = cdiv(rows, 16) if fixed else rows / 16
    arguments = {"x_ptr": f32(16 * rows), "scale_ptr": f32(scales), "M": rows}
    return problem(bounds.block_amax, (cdiv(rows, 16),), {}, **arguments)


@launch
def unmasked_step_over_the_row(fixed: bool) -> Problem:
    n = symbol("n", 1, 2**31 - 1024)
    return problem(bounds.double_row, (1,), {"FIXED": fixed}, x_ptr=f32(n), y_ptr=f32(n), N=n)


@launch
def batch_tail_between_batches(fixed: bool) -> Problem:
    length, batches, apart = symbol("length", 1, 1000), symbol("batches", 1, 1000), symbol("apart", 4, 2**20)
    y = view((batches, 4 * length), (apart, 1))
    arguments = {"x_ptr": f32(batches * length * 4), "y_ptr": y, "L": length, "rows": batches * length}
    grid = (cdiv(length, 8), batches)
    assuming = (apart >= 4 * length,)
    return problem(
        bounds.double_batches, grid, {"FIXED": fixed}, assuming=assuming, **arguments, y_batch_stride=apart
    )


@launch
def partial_rotation_of_the_whole_head(fixed: bool) -> Problem:
    apart = symbol("apart", 8, 1000)
    arguments = {"x_ptr": view((rows, 8), (apart, 1)), "cos_ptr": f32(8 * rows), "sin_ptr": f32(8 * rows)}
    return problem(
        bounds.rotate, (rows,), {"HALF": 4 if fixed else 8}, **arguments, y_ptr=f32(16 * rows), x_stride=apart
    )


@launch
def rows_beside_a_narrowed_view(fixed: bool) -> Problem:
    m = symbol("m", 1, 8)
    return problem(bounds.sum_columns, (1,), {"FIXED": fixed}, x_ptr=f32(16 * m), total_ptr=f32(16), M=m)


@launch
def gap_between_padded_rows(fixed: bool) -> Problem:
    n, apart = symbol("n", 1, 32), symbol("apart", 1, 1000)
    arguments = {"x_ptr": view((rows, n), (apart, 1)), "total_ptr": f32(rows), "N": n, "stride": apart}
    return problem(bounds.sum_strided_rows, (rows,), {"FIXED": fixed}, assuming=(apart >= n,), **arguments)


@launch
def padded_gradient_read_as_dense(fixed: bool) -> Problem:
    n, apart = symbol("n", 1, 32), symbol("apart", 1, 1000)
    arguments = {"dy_ptr": view((rows, n), (apart, 1)), "dx_ptr": f32(rows * n), "N": n}
    strides = {"row_stride": apart if fixed else n, "col_stride": 1}
    return problem(bounds.halve_gradient, (rows,), {}, assuming=(apart >= n,), **arguments, **strides)


@launch
def expanded_gradient_read_as_dense(fixed: bool) -> Problem:
    n = symbol("n", 1, 32)
    arguments = {"dy_ptr": f32(1), "dx_ptr": f32(rows * n), "N": n}
    return problem(
        bounds.halve_gradient,
        (rows,),
        {},
        **arguments,
        row_stride=0 if fixed else n,
        col_stride=0 if fixed else 1,
    )


# ---- overflow ----------------------------------------------------------------------------------------------------


@launch
def rows_past_two_to_the_31(fixed: bool) -> Problem:
    m = symbol("m", 1, 2**24)
    arguments = {"x_ptr": f32(256 * m), "y_ptr": f32(256 * m), "x_stride": 256, "y_stride": 256}
    return problem(overflow.double_rows, (m,), {"FIXED": fixed, "COLS": 256}, **arguments)


@launch
def few_rows_far_apart(fixed: bool) -> Problem:
    apart = symbol("apart", 16, 2**26)
    arguments = {
        "x_ptr": view((70, 16), (apart, 1)),
        "y_ptr": f32(70 * 16),
        "x_stride": apart,
        "y_stride": 16,
    }
    return problem(overflow.double_rows, (70,), {"FIXED": fixed, "COLS": 16}, **arguments)


@launch
def last_rows_of_the_last_tile(fixed: bool) -> Problem:
    m = symbol("m", 1, 2**24)
    return problem(
        overflow.double_tiles, (cdiv(m, 16),), {"FIXED": fixed}, x_ptr=f32(256 * m), y_ptr=f32(256 * m), M=m
    )


@launch
def backward_in_32_bits(fixed: bool) -> Problem:
    programs = symbol("programs", 1, 2**22)
    arguments = {"dy_ptr": f32(1024 * programs), "part_ptr": f32(256 * programs)}
    return problem(overflow.weight_gradient, (programs,), {"FIXED": fixed}, **arguments)


@launch
def heads_of_long_sequences(fixed: bool) -> Problem:
    tokens = symbol("tokens", 1, 2**17)
    arguments = {"x_ptr": f32(5 * 64 * 128 * tokens), "y_ptr": f32(5 * 64 * 128), "HEADS": 64, "T": tokens}
    return problem(overflow.last_tokens, (64, 5), {"FIXED": fixed}, **arguments)


@launch
def flattened_index(fixed: bool) -> Problem:
    n = symbol("n", 1, 2**32)
    i8 = Buffer("i8", n)
    return problem(overflow.double_flat, (cdiv(n, 1024),), {"FIXED": fixed}, x_ptr=i8, y_ptr=i8, n=n)


@launch
def weights_of_many_experts(fixed: bool) -> Problem:
    apart = symbol("apart", 64, 2**24)
    arguments = {"weight_ptr": f32(256 * apart), "y_ptr": f32(256 * 64), "stride": apart}
    return problem(overflow.first_rows, (256,), {"FIXED": fixed}, **arguments)


def in_turn(fixed: bool, masked: bool, min_tiles: int = 1) -> Problem:
    tiles = symbol("tiles", min_tiles, 2**21 - 1)
    i8 = Buffer("i8", 1024 * tiles)
    constants = {"FIXED": fixed, "MASKED": masked}
    return problem(overflow.double_in_turn, (tiles,), constants, x_ptr=i8, y_ptr=i8, n=1024 * tiles)


@launch
def a_loop_that_goes_on(fixed: bool) -> Problem:
    return in_turn(fixed, masked=False)


@launch
def a_loop_that_goes_on_within_bounds(fixed: bool) -> Problem:
    return in_turn(fixed, masked=True)


@launch
def a_loop_that_hardly_ends(fixed: bool) -> Problem:
    return in_turn(fixed, masked=True, min_tiles=2**21 - 1)


@launch
def a_loop_that_begins_at_a_row(fixed: bool) -> Problem:
    apart = symbol("apart", 256, 2**26)
    x, y = view((70, 256), (apart, 1), "i32"), Buffer("i32", 70)
    return problem(overflow.sum_rows, (70,), {"FIXED": fixed}, x_ptr=x, y_ptr=y, stride=apart)


# ---- promises ----------------------------------------------------------------------------------------------------


@launch
def rows_of_odd_stride_called_aligned(fixed: bool) -> Problem:
    apart = symbol("apart", 32, 2**20)
    x, assuming = view((4, 32), (apart, 1)), (apart % 16 == 0,) if fixed else ()
    return problem(
        promises.double_rows, (4,), {}, assuming=assuming, x_ptr=x, y_ptr=f32(4 * 32), stride=apart
    )


@launch
def rows_that_wrap_called_contiguous(fixed: bool) -> Problem:
    m = symbol("m", 1, 2**20)
    assuming = (m % 16 == 0,) if fixed else ()
    arguments = {"a_ptr": f32(16 * m), "b_ptr": f32(256), "c_ptr": f32(16 * m), "M": m}
    return problem(promises.matmul_wrapping, (cdiv(m, 16),), {}, assuming=assuming, **arguments)


@launch
def gathered_pages_called_contiguous(fixed: bool) -> Problem:
    first = symbol("first", 0, 48)
    anywhere, in_order = (lambda v: z3.And(v >= 0, v < 64)), (lambda v, i: v == first + i)
    index = Buffer("i64", 16, values=in_order if fixed else anywhere)
    return problem(promises.gather, (1,), {}, sizes=(first,), x_ptr=f32(64), index_ptr=index, y_ptr=f32(16))


@launch
def groups_called_longer_than_they_are(fixed: bool) -> Problem:
    group = symbol("group", 1, 64)
    assuming = (group % 16 == 0,) if fixed else ()
    arguments = {"x_ptr": f32(64), "scale_ptr": f32(cdiv(64, group)), "y_ptr": f32(64), "GROUP": group}
    return problem(promises.dequantize, (1,), {}, assuming=assuming, **arguments)


def doubled(**other: Any) -> Problem:
    """Compile for an aligned pointer, a length divisible by 16 and a stride of 1; launch with other arguments."""
    defaults = {"x_ptr": f32(64), "y_ptr": f32(64), "n": 64, "stride": 1}
    _, contract = problem(promises.double, (1,), {"BLOCK": 64}, **defaults)
    ttir = ttir_of(promises.double, contract)
    sizes = tuple(value for value in other.values() if z3.is_const(value))
    assuming = other.pop("assuming", ())
    contract_ = Contract.of(
        grid=(1,),
        arguments={**defaults, **other},
        constants={"BLOCK": 64, "stride": 1},
        sizes=other.pop("sizes", sizes),
        assumptions=assuming,
    )
    return ttir, contract_


@launch
def pointer_of_another_alignment(fixed: bool) -> Problem:
    return doubled(x_ptr=f32(64, align=16 if fixed else 4))


@launch
def length_of_another_divisibility(fixed: bool) -> Problem:
    n = symbol("n", 16, 64)
    return doubled(n=n, assuming=(n % 16 == 0,) if fixed else ())


@launch
def stride_of_another_value(fixed: bool) -> Problem:
    apart = symbol("apart", 1, 1 if fixed else 2)
    return doubled(stride=apart)
