"""The ways in which the kernels of attention are broken; the lines are those of `mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/attention/kernels.py"
LAUNCH = "ops/attention/launch.py"
R = "ops/attention/test.py::"

CAUSAL, LOWER, UPPER, FEWER_KEYS = (
    f"{R}test_lengths_and_alignments[{case}]"
    for case in ("100-100-lower_right", "37-129-lower_right", "37-129-upper_left", "129-37-lower_right")
)
WINDOW, LEFT = f"{R}test_windows[window2]", f"{R}test_windows[window4]"  # (16, 3) and (7, None)
VAIN, VAIN_WINDOW = (f"{R}test_no_work_is_done_twice_or_in_vain[{mask}]" for mask in ("causal", "window"))
PACKED = f"{R}test_packed_sequences_are_sequences[dtype0]"
EMPTY = f"{R}test_sequences_without_queries_or_keys"  # with sinks and pads
HIDDEN, HIDDEN_CAUSAL = (f"{R}test_kv_lengths_hide_keys[options{i}]" for i in range(2))
NOTHING = f"{R}test_rows_that_see_nothing"
SINKS = f"{R}test_sinks_that_are_infinite"
SOFTCAP = f"{R}test_softcap"
LARGEST = f"{R}test_the_largest_score"
GROUPS = f"{R}test_groups_of_heads[5]"  # in bf16
PIECES, PART = (f"{R}test_widths_of_heads[{dims}]" for dims in ("64-192", "33-17"))
BATCH = f"{R}test_batch_heads_and_masked_keys_change_no_bit"
CODES = f"{R}test_quantised_results_are_those_of_quantize[128-1x128]"

AT = "(sequence.batch * heads.q + head) * lengths.q + sequence.q_start + row"
MASKED = "if (start < all_begin) | (start + N > all_end):"
KEYS = "for start in range(begin // N * N, end, N):"

LINES: dict[str, list[tuple[Any, ...]]] = {
    "attention_kernel": [
        ("sums not rescaled", "attention_kernel", "_times(sums, fade[:, None])", "_times(sums, 1.0 + 0.0 * fade[:, None])", (CAUSAL,)),
        ("total not rescaled", "attention_kernel", "total = total * fade + tl.sum(p, axis=1)", "total = total + tl.sum(p, axis=1)", (CAUSAL,)),
        ("rounded weights summed", "attention_kernel", "tl.sum(p, axis=1)", "tl.sum(p.to(value.ptr.dtype.element_ty).to(tl.float32), axis=1)", (GROUPS,)),
        ("largest of the last block alone", "attention_kernel", "joined = tl.maximum(largest, highest)", "joined = tl.maximum(highest, highest)", (LOWER,)),
        ("a row that has seen nothing against -inf", "attention_kernel", "tl.where(joined == MINUS_INFINITY, 0.0, joined)", "joined", (NOTHING,)),
        ("0 / 0 where nothing is seen", "attention_kernel", "1.0 / tl.where(empty, 1.0, total)", "1.0 / total", (NOTHING,)),
        ("lse in base 2", "attention_kernel", "(largest + tl.log2(total)) * LN2", "(largest + tl.log2(total))", (CAUSAL,)),
        ("lse at the first sequence's place", "attention_kernel", "(sequence.batch * heads.q + head)", "(sequence.batch * 0 + head)", (HIDDEN_CAUSAL,)),
        ("aligned to the upper left", "_sequence", "(k - q) * band.lower", "(k - q) * (band.lower * 0)", (LOWER,)),
        ("aligned to the lower right", "_sequence", "(k - q) * band.lower", "(k - q) * (band.lower * 0 + 1)", (UPPER,)),
        ("last key left out", "_sees", "seen = key < sequence.k", "seen = key < sequence.k - 1", (CAUSAL,)),
        ("own key left out", "_sees", "key <= own + band.right", "key < own + band.right", (WINDOW,)),
        ("one key before the window", "_sees", "key >= own - band.left", "key >= own - band.left - 1", (WINDOW,)),
        ("blocks past the last seen key", "_keys_seen", "end = tl.minimum(last + band.right + 1, sequence.k)", "end = sequence.k", (VAIN,)),
        ("blocks before the window", "_keys_seen", "tl.maximum(first - band.left, 0)", "tl.maximum(first - band.left, 0) * 0", (VAIN_WINDOW,)),
        ("block at the window's begin not masked", "_keys_seen", "last - band.left,", "first - band.left,", (LEFT,)),
        ("block at the own keys not masked", "_keys_seen", "tl.minimum(first + band.right + 1, sequence.k)", "tl.minimum(last + band.right + 1, sequence.k)", (CAUSAL,)),
        ("a window without a bound ends", f"{LAUNCH}:Counts.band", "far = self.q + self.k", "far = self.q", (LOWER,)),
        ("kv_lengths ignored", "_sequence", "tl.minimum(k, tl.load(lengths.kv_lengths", "tl.maximum(k, tl.load(lengths.kv_lengths", (HIDDEN,)),
        ("the first of kv_lengths for all", "_sequence", "lengths.kv_lengths + number", "lengths.kv_lengths + number * 0", (HIDDEN,)),
        ("pads see the last sequence", "_sequence", "tl.where(known, q, 0), tl.where(known, k, 0)", "tl.where(known, q, q), tl.where(known, k, k)", (PACKED,)),
        ("pads see the sink", "attention_kernel", "row < sequence.q, tl.where(sink", "row < limit, tl.where(sink", (EMPTY,)),
        ("keys of the sequence before", "_sequence", "tl.load(lengths.k_starts + number).to", "tl.load(lengths.k_starts + tl.maximum(number - 1, 0)).to", (PACKED,)),
        ("sink without weight", "attention_kernel", "tl.where(sink == MINUS_INFINITY, 0.0, 1.0)", "tl.where(sink == MINUS_INFINITY, 0.0, 0.0)", (SINKS,)),
        ("sink left out of lse", "attention_kernel", "tl.where(sink == float(\"inf\"), sink, lse)", "tl.where(sink == float(\"inf\"), sink, lse + tl.log(1.0 - tl.exp(sink - lse)))", (SINKS,)),
        ("sink in base 2", "attention_kernel", "tl.minimum(sink * LOG2E, LARGEST)", "tl.minimum(sink, LARGEST)", (SINKS,)),
        ("infinite sink subtracted from itself", "attention_kernel", "tl.minimum(sink * LOG2E, LARGEST)", "sink * LOG2E", (SINKS,)),
        ("sink of the first head", "attention_kernel", "sinks_ptr + head", "sinks_ptr + head * 0", (SINKS,)),
        ("softcap of what is not scaled", "_capped", "scores.scale / scores.softcap", "1.0 / scores.softcap", (SOFTCAP,)),
        ("tanh times the scale", "_factor", "return scores.softcap * LOG2E", "return scores.scale * LOG2E", (SOFTCAP,)),
        ("largest score of the last block alone", "attention_kernel", "top = tl.maximum(top, highest)", "top = tl.maximum(highest, highest)", (LARGEST,)),
        ("largest score of rows that do not exist", "attention_kernel", "tl.where(row < limit, top, MINUS_INFINITY)", "top", (LARGEST,)),
        ("heads of keys one after another", "attention_kernel", "key_head = head // heads.group", "key_head = head % (heads.q // heads.group)", (GROUPS,)),
        ("first piece of scores left out", "_across", "total = _dot(a.second, tl.trans(b.second), total)", "total = _dot(a.second, tl.trans(b.second), None)", (PART, f"{R}test_widths_of_heads[192-128]")),
        ("a number past the width", "_addresses", "(number < WIDTH.numbers)", "(number <= WIDTH.numbers)", (PART,)),
        ("all heads in the first one's columns", "attention_kernel", "head * V.numbers,", "head * 0,", (CODES,)),
        ("codes of what is not rounded", "attention_kernel", "_rounded(out.first, y.ptr).to(tl.float32)", "out.first", (CODES,)),
    ],
    "delta_kernel": [
        ("delta from the gradient alone", "delta_kernel", "a.first.to(tl.float32) * b.first.to(tl.float32)", "b.first.to(tl.float32) * b.first.to(tl.float32)", (CAUSAL,)),
        ("second piece left out", "delta_kernel", "delta += tl.sum(a.second", "delta += 0.0 * tl.sum(a.second", (PIECES,)),
        ("gradient of lse with the wrong sign", "delta_kernel", "delta -= tl.load(dlse_ptr", "delta += tl.load(dlse_ptr", (CAUSAL,)),
        ("gradient of lse left out", "delta_kernel", "delta -= tl.load(dlse_ptr", "delta -= 0.0 * tl.load(dlse_ptr", (CAUSAL,)),
        ("last query left out", "delta_kernel", "exists = row < lengths.q", "exists = row < lengths.q - 1", (SINKS,)),
        ("result of another head", "delta_kernel", "_base(y, batch, 0, head, ALIGN)", "_base(y, batch, 0, head // heads.group, ALIGN)", (CAUSAL,)),
        ("gradient of the first sequence", "delta_kernel", "_base(dy, batch, 0, head, ALIGN)", "_base(dy, batch * 0, 0, head, ALIGN)", (BATCH,)),
        ("delta at the first sequence's place", "delta_kernel", "(batch * heads.q + head) * lengths.q", "(batch * 0 + head) * lengths.q", (HIDDEN_CAUSAL,)),
        ("gradient of sinks with the wrong sign", "delta_kernel", "-tl.sum(lost, axis=0)", "tl.sum(lost, axis=0)", (SINKS,)),
        ("share of the sink in base 2", "delta_kernel", "(sink - lse) * LOG2E", "(sink - lse)", (SINKS,)),
        ("share of an infinite sink is NaN", "delta_kernel", "tl.where(lse == sink, 1.0,", "tl.where(lse != lse, 1.0,", (SINKS,)),
        ("sink of the first head", "delta_kernel", "sinks_ptr + head", "sinks_ptr + head * 0", (SINKS,)),
        ("pads in the gradient of sinks", "delta_kernel", "(lse > MINUS_INFINITY) &", "(lse == lse) &", (EMPTY,)),
        ("gradient of sinks of the last tile alone", f"{LAUNCH}:launch_attention_backward", "sum_partials(sums, o.sinks)", "sum_partials(sums[-1:].contiguous(), o.sinks)", (SINKS,)),
    ],
    "query_gradient_kernel": [
        ("not scaled", "query_gradient_kernel", "_times(sums, scores.scale)", "_times(sums, 1.0)", (CAUSAL,)),
        ("slope of the cap left out", "query_gradient_kernel", "ds = ds * slope", "ds = ds + 0.0 * slope", (SOFTCAP,)),
        ("slope of the cap is tanh", "_capped", "return t, 1.0 - t * t", "return t, 1.0 - t", (SOFTCAP,)),
        ("delta left out", "query_gradient_kernel", "_across(dout, v) - delta[:, None]", "_across(dout, v) - 0.0 * delta[:, None]", (CAUSAL,)),
        ("lse in base e", "query_gradient_kernel", "_base_two(tl.load(lse_ptr + at, mask=row < limit, other=0.0))", "tl.load(lse_ptr + at, mask=row < limit, other=0.0)", (CAUSAL,)),
        ("-inf subtracted from -inf", "_base_two", "tl.where(lse == MINUS_INFINITY, 0.0, lse * LOG2E)", "lse * LOG2E", (NOTHING,)),
        ("masked at both ends or not at all", "query_gradient_kernel", MASKED, MASKED.replace("|", "&"), (CAUSAL,)),
        ("first block of keys left out", "query_gradient_kernel", KEYS, KEYS.replace("N * N", "N * N + N"), (CAUSAL,)),
        ("last block of keys left out", "query_gradient_kernel", KEYS, KEYS.replace("end", "end - N"), (CAUSAL,)),
        ("blocks before the window", "query_gradient_kernel", KEYS, KEYS.replace("begin // N * N", "0"), (VAIN_WINDOW,)),
        ("the last block alone", "query_gradient_kernel", "_add_product(sums, ds", "_add_product(_times(sums, 0.0), ds", (CAUSAL,)),
        ("keys of the first head", "query_gradient_kernel", "k_ptr = _base(key, sequence.batch, sequence.k_start, key_head, ALIGN)", "k_ptr = _base(key, sequence.batch, sequence.k_start, key_head * 0, ALIGN)", (CAUSAL,)),
        ("heads of keys one after another", "query_gradient_kernel", "key_head = head // heads.group", "key_head = head % (heads.q // heads.group)", (GROUPS,)),
        ("values for keys", "query_gradient_kernel", "ds.to(k.first.dtype), k)", "ds.to(k.first.dtype), v)", (CAUSAL,)),
        ("lse and delta of the first sequence", "query_gradient_kernel", AT, AT.replace("sequence.q_start", "sequence.q_start * 0"), (PACKED,)),
        ("keys past kv_lengths are loaded", "query_gradient_kernel", "v = _load(v_ptr, value.at.token, start, sequence.k, N", "v = _load(v_ptr, value.at.token, start, start + N, N", (HIDDEN,)),
    ],
    "key_gradient_kernel": [
        ("dK not scaled", "key_gradient_kernel", "_times(dk, scores.scale)", "_times(dk, 1.0)", (CAUSAL,)),
        ("dV scaled", "key_gradient_kernel", "_store(dv, dv_ptr", "_store(_times(dv, scores.scale), dv_ptr", (CAUSAL,)),
        ("slope of the cap left out", "key_gradient_kernel", "ds = ds * slope", "ds = ds + 0.0 * slope", (SOFTCAP,)),
        ("delta left out", "key_gradient_kernel", "_across(v, dout) - delta[None, :]", "_across(v, dout) - 0.0 * delta[None, :]", (CAUSAL,)),
        ("first head of a group alone", "key_gradient_kernel", "range(blocks * heads.group)", "range(blocks)", (GROUPS,)),
        ("last head of a group left out", "key_gradient_kernel", "range(blocks * heads.group)", "range(blocks * (heads.group - 1))", (GROUPS,)),
        ("heads of another group", "key_gradient_kernel", "key_head * heads.group + step // blocks", "key_head + step // blocks * (heads.q // heads.group)", (GROUPS,)),
        ("last block of queries left out", "key_gradient_kernel", "tl.cdiv(end - begin, M)", "(end - begin) // M", (CAUSAL,)),
        ("every block the first", "key_gradient_kernel", "begin + step % blocks * M", "begin + step % blocks * 0", (CAUSAL,)),
        ("keys past kv_lengths are not hidden", "key_gradient_kernel", "hidden = sequence.first + N > sequence.k", "hidden = sequence.first > sequence.k + N", (HIDDEN,)),
        ("values past kv_lengths are loaded", "key_gradient_kernel", "value.at.token, sequence.first, sequence.k,", "value.at.token, sequence.first, limit,", (HIDDEN,)),
        ("dK of the last block alone", "key_gradient_kernel", "dk = _add_product(dk,", "dk = _add_product(_times(dk, 0.0),", (CAUSAL,)),
        ("dV of scores without a mask", "key_gradient_kernel", "dv = _add_product(dv, p.to", "dv = _add_product(dv, tl.exp2(_across(k, q) * factor - lse[None, :]).to", (CAUSAL,)),
        ("block at the own keys not masked", "_queries_seeing", "last - band.right,", "first - band.right,", (CAUSAL,)),
        ("block at the window's begin not masked", "_queries_seeing", "first + band.left + 1", "last + band.left + 1", (LEFT,)),
        ("queries before the own ones", "_queries_seeing", "tl.maximum(first - band.right, 0)", "tl.maximum(first - band.right, 0) * 0", (VAIN,)),
        ("queries past the window", "_queries_seeing", "end = tl.minimum(last + band.left + 1, sequence.q)", "end = sequence.q", (VAIN_WINDOW,)),
        ("the own query on the other side", "_queries_seeing", "first = sequence.first - sequence.offset", "first = sequence.first + sequence.offset", (LOWER, FEWER_KEYS)),
        ("lse and delta of the first sequence", "key_gradient_kernel", AT, AT.replace("sequence.q_start", "sequence.q_start * 0"), (PACKED,)),
        ("last tiles of packed keys left out", f"{LAUNCH}:_gradient", "(-(-counts.k // tile.n) + forms.sequences)", "-(-counts.k // tile.n)", (PACKED,)),
    ],
}  # fmt: skip
