"""Mutants of the attention kernels, in the format of `tests.ops.norm.mutants`."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any

FILE = "ops/attention/kernels.py"
LAUNCH = "ops/attention/launch.py"
TILES = "ops/attention/pieces.py"
WHERE = "ops/attention/sequences.py"
MASKS = "ops/attention/masks.py"
TERMS = "ops/attention/pair_terms.py"
VALUES_FILE = "ops/attention/values.py"
R = "ops/attention/test.py::"

CAUSAL, LOWER, UPPER, FEWER_KEYS = (
    f"{R}test_lengths_and_alignments[{case}]"
    for case in ("100-100-lower_right", "37-129-lower_right", "37-129-upper_left", "129-37-lower_right")
)
WINDOW, LEFT = f"{R}test_windows[window2]", f"{R}test_windows[window4]"  # (16, 3) and (7, None)
VAIN, VAIN_WINDOW = (f"{R}test_flops_match_the_visible_blocks[{mask}]" for mask in ("causal", "window"))
PACKED = f"{R}test_packed_sequences_match_separate_ones[dtype0]"
EMPTY = f"{R}test_sequences_without_queries_or_keys"  # with sinks and pads
HIDDEN, HIDDEN_CAUSAL = (f"{R}test_kv_lengths_hide_keys[options{i}]" for i in range(2))
NOTHING = f"{R}test_rows_without_keys_give_zeros"
SINKS = f"{R}test_sinks_that_are_infinite"
SOFTCAP = f"{R}test_softcap"
LARGEST = f"{R}test_return_max"
GROUPS = f"{R}test_groups_of_heads[5]"  # in bf16
PIECES, PART = (f"{R}test_widths_of_heads[{dims}]" for dims in ("64-192", "33-17"))
BATCH = f"{R}test_batch_heads_and_masked_keys_change_no_bit"
CODES = f"{R}test_quantized_results_equal_quantize[128-1x128]"

AT = "(sequence.batch * heads.q + head) * lengths.q + sequence.q_start + row"
MASKED = "hides = (start < all_begin) | (start + N > all_end)"
KEYS = "for start in range(begin // STEP * STEP, end, STEP):"

L = "ops/attention/test_limits.py::"
PREFIX, PREFIX_WINDOW, LIMIT, LIMITED_CAUSAL = (
    f"{L}{test}"
    for test in (
        "test_prefixes[37-129-lower]",
        "test_prefixes[150-150-window]",
        "test_limits_of_queries[150-150-full]",
        "test_limits_of_queries[37-129-lower]",
    )
)
LIMITED_PACKED, VAIN_LIMIT = f"{L}test_packed_sequences", f"{L}test_flops_match_the_visible_blocks[window]"

P = "ops/attention/test_masks.py::"
PAIRS, PAIRS_LOWER, PAIRS_WINDOW = (
    f"{P}test_masks[{case}]" for case in ("150-150-full", "37-192-lower", "150-150-window")
)
OF_PAIRS, OF_HEADS, OF_KEYS, OF_QUERIES = (
    f"{P}test_masks_and_biases_that_broadcast[of-{what}]" for what in ("pairs", "heads", "keys", "queries")
)
BIAS, SLOPES = (
    f"{P}test_biases[37-129-full]",
    f"{P}test_alibi[full-2]",
)
NAN_PAIRS = f"{P}test_keys_and_queries_outside_all_pairs_may_hold_anything"
VAIN_MASK, VAIN_MASK_CAUSAL = (
    f"{P}test_flops_match_the_visible_blocks[4-{mask}]" for mask in ("full", "causal")
)
ALL_TERMS, ALONE = f"{P}test_with_all_other_options[dtype0]", f"{P}test_bits_depend_on_no_other_sequence"

E = "ops/attention/test_eight_bits.py::"
EIGHT_BITS, EIGHT_BITS_PACKED = f"{E}test_scores_are_those_of_the_codes[cpu-int8]", f"{E}test_packed"
VALUES, VALUES_24, VALUES_192 = (
    f"{E}test_values_are_those_of_the_codes[{queries}-cpu]" for queries in (150, 70, 65)
)
SEQUENCES, RAISED = (
    f"{E}test_values_of_sequences",
    f"{E}test_weights_are_scaled_before_they_are_rounded[8]",
)
DECODE = "ops/attention/decode/kernels.py"
PLANS = "ops/attention/decode/launch.py"
D = "ops/attention/test_decode.py::"
PLAIN_CACHE, TOKEN, PER_HEAD, PER_TENSOR, INT8 = (
    f"{D}test_caches[{coded}]" for coded in ("plain", "e4m3-token", "e4m3-head", "e4m3-tensor", "int8-token")
)
DECODE_WINDOW, DECODE_WINDOW_1 = f"{D}test_windows[70]", f"{D}test_windows[1]"
WIDE_WINDOW = (
    f"{D}test_windows[300]"  # wider than a tile of keys, so that one tile contains only its beginning
)
SMALL_PAGES, LARGE_PAGES = f"{D}test_pages_of_any_size[24]", f"{D}test_pages_of_any_size[256]"
SEVERAL, LATENT, TWO_PIECES = (
    f"{D}test_groups_of_heads[8-1-7]",
    f"{D}test_latents",
    f"{D}test_widths_of_heads[192-128]",
)

I = "ops/attention/test_indices.py::"  # noqa: E741
ANY_STARTS = tuple(f"{I}test_starts_of_any_content[{i}]" for i in (4, 16, 20, 60, 68))
UNSOUND = f"{I}test_a_sequence_out_of_range_is_nan_and_its_neighbors_are_not[2147483647-False]"
EARLY = f"{I}test_tokens_before_the_first_sequence_belong_to_none[False]"
NO_PAGES = f"{I}test_pages_that_do_not_exist[16-lengths1-plain]"
GONE_PAGES = f"{I}test_pages_before_the_window_may_be_gone[1100-16]"
NAN_SINK = f"{R}test_a_nan_sink_is_not_swallowed[auto]"
UNSEEN = f"{E}test_keys_that_no_query_sees_change_no_bit[both, packed-e4m3-e4m3]"
DECODE_CAP = f"{D}test_softcap_and_scale"
FAR_QUERIES = f"{D}test_queries_of_any_size[1000000.0]"
SHORT = f"{D}test_more_queries_than_tokens"

N = "ops/attention/test_int8_values.py::"
EXACT, EMULATED, EMULATED_192, EMULATED_64 = (
    f"{N}test_integer_sums_are_exact",
    *(f"{N}test_results_equal_an_integer_emulation[{keys}]" for keys in (150, 130, 64)),
)
BLOCKS, NO_WRAP, INT8_SINKS = (
    f"{N}test_sequences_have_the_bits_that_they_have_alone",
    f"{N}test_large_scores_do_not_wrap",
    f"{N}test_masks_and_widths[int8-cpu]",
)
UNSEEN_INT8 = f"{E}test_keys_that_no_query_sees_change_no_bit[after the last query's, packed-mxfp8-int8]"
X = "ops/attention/test_mx_scores.py::"
GROUPED, GROUPED_80, GROUPED_PACKED = (
    f"{X}test_scores_are_those_of_the_codes[128-cpu]",
    f"{X}test_scores_are_those_of_the_codes[80-sm_120]",
    f"{X}test_qtensors_are_multiplied_as_they_are[packed-e4m3:mx:te]",
)

LINES: dict[str, list[tuple[Any, ...]]] = {
    "attention_kernel": [
        ("weights in int8 against the running maximum", "attention_kernel", "(m_tile - LOG2_P_SCALE_INT8)", "(m_safe - LOG2_P_SCALE_INT8)", (EMULATED,)),
        ("sums of a tile in int8 not rescaled", "attention_kernel", "beta = tl.exp2(row_max - m_safe)", "beta = tl.exp2((row_max - m_safe) * 0.0)", (EMULATED,)),
        ("sums before a tile in int8 not rescaled", f"{TILES}:add_coded_product", "times(total, alpha)", "times(total, 1.0)", (EMULATED,)),
        ("total before a tile in int8 not rescaled", "attention_kernel", "beta * tl.sum(p, axis=1) + alpha * l_i", "beta * tl.sum(p, axis=1) + l_i", (EMULATED,)),
        ("total of a tile in int8 not rescaled", "attention_kernel", "beta * tl.sum(p, axis=1) + alpha * l_i", "tl.sum(p, axis=1) + alpha * l_i", (EMULATED,)),
        ("weights in int8 rounded down", f"{TILES}:add_coded_product", "(tl.minimum(weights, 127.0) + 12582912.0)", "(tl.minimum(weights, 127.0) - 0.25 + 12582912.0)", (EXACT,)),
        ("weights above 127 wrap", f"{TILES}:add_coded_product", "(tl.minimum(weights, 127.0) + 12582912.0)", "(weights + 12582912.0)", (EXACT,)),
        ("scales of blocks left out", f"{TILES}:add_coded_product", "times_columns(product, scale_ptr, WIDTH)", "product", (EMULATED_64,)),
        ("scales of the first block", "attention_kernel", "tokens // BLOCK + sequence.number + start // BLOCK", "tokens // BLOCK + sequence.number", (EMULATED,)),
        ("scales of blocks of the first sequence", "attention_kernel", "tokens // BLOCK + sequence.number + start // BLOCK", "tokens // BLOCK + start // BLOCK", (BLOCKS,)),
        ("scales of blocks of the first head", "attention_kernel", "(block * (heads.q // heads.group) + key_head)", "(block * (heads.q // heads.group))", (INT8_SINKS,)),
        ("sink in int8 not scaled", "attention_kernel", "l_i *= P_SCALE_INT8 if", "l_i *= 1.0 if", (INT8_SINKS,)),
        ("sum in int8 stays scaled", "attention_kernel", "l_i *= 1.0 / P_SCALE_INT8", "l_i *= 1.0", (EMULATED_64,)),
        ("scales of groups of queries left out", f"{TILES}:across_groups", "a.first, a_scale.first,", "a.first, a_scale.first * 0 + 127,", (GROUPED,)),
        ("scales of groups of keys left out", f"{TILES}:across_groups", "b_scale.first,", "b_scale.first * 0 + 127,", (GROUPED,)),
        ("first piece of groups left out", f"{TILES}:across_groups", "b_scale.second, \"e4m3\", total", "b_scale.second, \"e4m3\", tl.zeros_like(total)", (GROUPED_80,)),
        ("sums of groups not from zero", "attention_kernel", "scores.scale * 0.0", "scores.scale * 100.0", (GROUPED,)),
        ("scales of groups of the first queries", "attention_kernel", "query_scale.at.token, sequence.first, limit", "query_scale.at.token, 0 * sequence.first, limit", (GROUPED_80,)),
        ("scales of groups of the first keys", "attention_kernel", "key_scale.at.token, start, sequence.k", "key_scale.at.token, 0 * start, sequence.k", (GROUPED_80,)),
        ("scales of groups of the first packed queries", "attention_kernel", "first_token(query_scale, sequence.batch, sequence.q_start", "first_token(query_scale, sequence.batch, 0 * sequence.q_start", (GROUPED_PACKED,)),
        ("scales of groups of the first packed keys", "attention_kernel", "first_token(key_scale, sequence.batch, sequence.k_start", "first_token(key_scale, sequence.batch, 0 * sequence.k_start", (GROUPED_PACKED,)),
        ("scales of queries left out", "attention_kernel", "qk.to(tl.float32) * row_scale[:, None]", "qk.to(tl.float32)", (EIGHT_BITS,)),
        ("scales of keys left out", "attention_kernel", "row_scale[:, None] * col_scale[None, :]", "row_scale[:, None]", (EIGHT_BITS,)),
        ("weights not scaled", "attention_kernel", "m_safe - LOG2_P_SCALE", "m_safe - 0.0 * LOG2_P_SCALE", (RAISED,)),
        ("sink not scaled", "attention_kernel", "l_i *= P_SCALE_INT8 if IN_INT8 else P_SCALE", "l_i *= P_SCALE_INT8 if IN_INT8 else 1.0", (VALUES_192,)),
        ("sum stays scaled", "attention_kernel", "l_i *= 1.0 / P_SCALE\n", "l_i *= 1.0\n", (VALUES_192,)),
        ("scales of values left out", "attention_kernel", "out = times_columns(out, value_codes.scale + scale_row * V.dim, V)", "out = times(out, 1.0)", (VALUES,)),
        ("scales of values of the first head", "attention_kernel", "scale_row = sequence.number * (heads.q // heads.group) + key_head", "scale_row = sequence.number * (heads.q // heads.group) + key_head * 0", (VALUES,)),
        ("scales of values of the first sequence", "attention_kernel", "scale_row = sequence.number *", "scale_row = 0 * sequence.number *", (SEQUENCES,)),
        ("codes of values of the first sample", "attention_kernel", "tokens = sequence.batch * lengths.k + sequence.k_start", "tokens = sequence.k_start", (SEQUENCES,)),
        ("codes of values of the first packed sequence", "attention_kernel", "tokens = sequence.batch * lengths.k + sequence.k_start", "tokens = sequence.batch * lengths.k", (SEQUENCES,)),
        ("last codes of values left out", f"{TILES}:_columns_of", "tl.cdiv(limit, ALIGN) * ALIGN", "limit // ALIGN * ALIGN", (VALUES,)),
        ("first piece of codes twice", f"{TILES}:load_transposed", "ROWS, FIRST, SECOND, WIDTH", "ROWS, 0, SECOND, WIDTH", (VALUES_192,)),
        ("first piece of scales twice", f"{TILES}:times_columns", "number = FIRST + tl.arange(0, SECOND)", "number = tl.arange(0, SECOND)", (VALUES_192,)),
        ("weighted codes of the last block alone", f"{TILES}:add_product", "return plus(total, product)", "return product", (VALUES,)),
        ("scales of the first sequence", "_scales", "(start + row) * place.at.token", "row * place.at.token", (EIGHT_BITS_PACKED,)),
        ("sums not rescaled", "attention_kernel", "times(acc, alpha[:, None])", "times(acc, 1.0 + 0.0 * alpha[:, None])", (CAUSAL,)),
        ("total not rescaled", "attention_kernel", "l_i = l_i * alpha + tl.sum(p, axis=1)", "l_i = l_i + tl.sum(p, axis=1)", (CAUSAL,)),
        ("rounded weights summed", "attention_kernel", "tl.sum(p, axis=1)", "tl.sum(p.to(value.ptr.dtype.element_ty).to(tl.float32), axis=1)", (GROUPS,), 2, 2),
        ("largest of the last block alone", "attention_kernel", "m_new = tl.maximum(m_i, row_max)", "m_new = tl.maximum(row_max, row_max)", (LOWER,)),
        ("a row that has seen nothing against -inf", "attention_kernel", "tl.where(m_new == MINUS_INFINITY, 0.0, m_new)", "m_new", (NOTHING,)),
        ("0 / 0 where nothing is seen", "attention_kernel", "1.0 / tl.where(empty, 1.0, l_i)", "1.0 / l_i", (NOTHING,)),
        ("lse in base 2", "attention_kernel", "(m_i + tl.log2(l_i)) * LN2", "(m_i + tl.log2(l_i))", (CAUSAL,)),
        ("lse at the first sequence's place", "attention_kernel", "(sequence.batch * heads.q + head)", "(sequence.batch * 0 + head)", (HIDDEN_CAUSAL,)),
        ("aligned to the upper left", f"{WHERE}:sequence_at", "(k - q) * band.lower", "(k - q) * (band.lower * 0)", (LOWER,)),
        ("aligned to the lower right", f"{WHERE}:sequence_at", "(k - q) * band.lower", "(k - q) * (band.lower * 0 + 1)", (UPPER,)),
        ("last key left out", f"{WHERE}:sees", "seen = key < sequence.k", "seen = key < sequence.k - 1", (CAUSAL,)),
        ("own key left out", f"{WHERE}:sees", "key <= own + band.right", "key < own + band.right", (WINDOW,)),
        ("one key before the window", f"{WHERE}:sees", "key >= own - band.left", "key >= own - band.left - 1", (WINDOW,)),
        ("blocks past the last seen key", f"{WHERE}:keys_seen", "end = tl.minimum(last + band.right + 1, sequence.k)", "end = sequence.k", (VAIN,)),
        ("blocks before the window", f"{WHERE}:keys_seen", "tl.maximum(first - band.left, 0)", "tl.maximum(first - band.left, 0) * 0", (VAIN_WINDOW,)),
        ("block at the window's begin not masked", f"{WHERE}:keys_seen", "last - band.left,", "first - band.left,", (LEFT,)),
        ("block at the own keys not masked", f"{WHERE}:keys_seen", "tl.minimum(first + band.right + 1, sequence.k)", "tl.minimum(last + band.right + 1, sequence.k)", (CAUSAL,)),
        ("a window without a bound ends", f"{LAUNCH}:Counts.band", "far = self.q + self.k", "far = self.q", (LOWER,)),
        ("prefix of the first sequence for all", f"{WHERE}:_prefix", "lengths.prefix_lengths + number", "lengths.prefix_lengths + number * 0", (PREFIX,)),
        ("prefixes longer than the keys", f"{WHERE}:_prefix", "tl.minimum(tl.maximum(tl.load(lengths.prefix_lengths + number), 0), k)", "tl.maximum(tl.load(lengths.prefix_lengths + number), 0)", (PREFIX, PREFIX_WINDOW)),
        ("queries before all keys in the prefix", f"{WHERE}:bounds_of", "(own >= 0) & (own < sequence.prefix)", "(own < sequence.prefix)", (f"{L}test_prefixes[129-37-lower]",)),
        ("queries after the prefix in it", f"{WHERE}:bounds_of", "own < sequence.prefix", "own <= sequence.prefix", (PREFIX, PREFIX_WINDOW)),
        ("window of the prefix kept", f"{WHERE}:bounds_of", "tl.where(inside, 0, begin)", "tl.where(inside, begin, begin)", (PREFIX_WINDOW,)),
        ("keys after the prefix hidden", f"{WHERE}:bounds_of", "tl.maximum(end, sequence.prefix)", "sequence.prefix", (PREFIX_WINDOW,)),
        ("limits of the first sequence", f"{WHERE}:bounds_of", "sequence.batch * lengths.q + sequence.q_start + query", "sequence.q_start + query", (LIMIT,)),
        ("limits of the first tokens", f"{WHERE}:bounds_of", "sequence.batch * lengths.q + sequence.q_start + query", "sequence.batch * lengths.q + query", (LIMITED_PACKED,)),
        ("limits instead of the mask", f"{WHERE}:bounds_of", "end = tl.minimum(end, tl.minimum(tl.maximum(limit, 0), sequence.k).to(tl.int32))", "end = tl.minimum(tl.maximum(limit, 0), sequence.k).to(tl.int32)", (LIMITED_CAUSAL,)),
        ("begin of the last query for all", f"{WHERE}:keys_between", "tl.min(tl.where(end > begin, begin, k), axis=0)", "tl.max(begin, axis=0)", (PREFIX_WINDOW,)),
        ("end of the first query for all", f"{WHERE}:keys_between", "first, tl.max(end, axis=0)", "first, tl.min(end, axis=0)", (LIMIT,)),
        ("no block masked", f"{WHERE}:keys_between", "tl.max(begin, axis=0), tl.min(end, axis=0)", "tl.min(begin, axis=0), tl.max(end, axis=0)", (LIMIT,)),
        ("kv_lengths ignored", f"{WHERE}:_used", "tl.minimum(tl.maximum(length, 0), keys)", "tl.maximum(tl.maximum(length, 0), keys)", (HIDDEN,)),
        ("the first of kv_lengths for all", f"{WHERE}:_used", "lengths.kv_lengths + number", "lengths.kv_lengths + number * 0", (HIDDEN,)),
        ("kv_lengths in 32 bits", f"{WHERE}:_used", "length = tl.load(lengths.kv_lengths + number).to(tl.int64)", "length = tl.load(lengths.kv_lengths + number).to(tl.int32).to(tl.int64)", (f"{I}test_kv_lengths_out_of_range[dtype1]",)),
        ("more keys than there are", f"{WHERE}:_used", "length <= keys", "length == length", (f"{I}test_kv_lengths_out_of_range[dtype0]",)),
        ("pads see the last sequence", f"{WHERE}:sequence_at", "tl.where(in_sequence, q, 0), tl.where(in_sequence, keys, 0)", "tl.where(in_sequence, q, q), tl.where(in_sequence, keys, keys)", (PACKED,)),
        ("starts beyond the tokens", f"{WHERE}:_clamped", "tl.minimum(tl.maximum(start.to(tl.int64), 0), tokens)", "tl.maximum(start.to(tl.int64), 0)", ANY_STARTS),
        ("keys beyond the tokens", f"{WHERE}:_count", "tl.minimum(tl.maximum(_clamped(end, tokens) - begin, 0), tokens - begin)", "tl.maximum(end.to(tl.int64) - begin, 0)", ANY_STARTS),
        ("starts of the keys that descend", f"{WHERE}:_span", "begin = tl.maximum(begin, tl.max(_clamped(start, tokens), axis=0))", "begin = tl.max(tl.where(index == number, _clamped(start, tokens), 0), axis=0)", ANY_STARTS),
        ("starts of the queries that descend", f"{WHERE}:_tile_span", "tl.where(exists & (group < following), start, 0)", "tl.where(exists & (group == following - 1), start, 0)", (*ANY_STARTS, UNSOUND)),
        ("a sequence out of range looks right", f"{WHERE}:or_nan", "tl.where(sequence.sound, x, float(\"nan\"))", "tl.where(sequence.sound, x, x)", (UNSOUND,)),
        ("starts of the keys out of range look right", f"{WHERE}:_span", "(start == begin) & (end == begin + count)", "start == start", ANY_STARTS),
        ("starts of the queries out of range look right", f"{WHERE}:_tile_span", "sound = (start == begin) & (end == begin + count)", "sound = start == start", ANY_STARTS),
        ("largest score of a sequence out of range", "attention_kernel", "row_max = or_nan(tl.max(seen, axis=0) * LN2, sequence, lengths)", "row_max = tl.max(seen, axis=0) * LN2", (UNSOUND,)),
        ("tokens before the first sequence are its own", f"{WHERE}:sequence_at", "in_sequence = (number >= 0) & (number < lengths.number)", "in_sequence = number < lengths.number", (EARLY,)),
        ("a NaN sink swallowed", "attention_kernel", "tl.where(sink == sink, 1.0, sink)", "tl.where(sink == sink, 1.0, 1.0)", (NAN_SINK,)),
        ("pads see a NaN sink", "attention_kernel", "l_i += tl.where(row < sequence.q, weight, 0.0)", "l_i += weight", (NAN_SINK,)),
        ("pads see an infinite sink", "attention_kernel", "(row < sequence.q) & (sink == float(\"inf\"))", "sink == float(\"inf\")", (f"{R}test_pads_see_no_sink",)),
        ("keys of the sequence before", f"{WHERE}:sequence_at", "_span(number, lengths.k_starts, lengths.k)", "_span(tl.maximum(number - 1, 0), lengths.k_starts, lengths.k)", (PACKED,)),
        ("sink without weight", "attention_kernel", "weight = tl.where(sink == MINUS_INFINITY, 0.0, ", "weight = 0.0 * tl.where(sink == MINUS_INFINITY, 0.0, ", (SINKS,)),
        ("sink left out of lse", "attention_kernel", "(sink == float(\"inf\")), sink, lse)", "(sink == float(\"inf\")), sink, lse + tl.log(1.0 - tl.exp(sink - lse)))", (SINKS,)),
        ("sink in base 2", "attention_kernel", "tl.minimum(sink * LOG2E, LARGEST)", "tl.minimum(sink, LARGEST)", (SINKS,)),
        ("infinite sink subtracted from itself", "attention_kernel", "tl.minimum(sink * LOG2E, LARGEST)", "sink * LOG2E", (SINKS,)),
        ("sink of the first head", "attention_kernel", "sinks_ptr + head", "sinks_ptr + head * 0", (SINKS,)),
        ("hidden pairs seen", "attention_kernel", "seen = seen & (bits != 0)", "seen = seen & (bits == bits)", (PAIRS,)),
        ("a mask instead of the bounds", "attention_kernel", "seen = seen & (bits != 0)", "seen = bits != 0", (PAIRS_LOWER,)),
        ("NaN of values that no query sees", "attention_kernel", "start, sequence.k, N, V, ALIGN, used)", "start, sequence.k, N, V, ALIGN)", (NAN_PAIRS,)),
        ("scores with a bias scaled twice", "attention_kernel", "unit = 1.0 if ADDED else factor", "unit = factor", (BIAS,)),
        ("bias in base e", f"{MASKS}:added", "bias.to(tl.float32) * LOG2E", "bias.to(tl.float32)", (BIAS,)),
        ("slopes in base e", f"{MASKS}:added", "tl.load(terms.slopes + head * 2) * LOG2E", "tl.load(terms.slopes + head * 2)", (SLOPES,)),
        ("slopes of the first head", f"{MASKS}:added", "terms.slopes + head * 2 + 1", "terms.slopes + 1", (SLOPES,)),
        ("later keys raised", f"{MASKS}:added", "distance * -after", "distance * after", (SLOPES,)),
        ("one slope for both sides", f"{MASKS}:added", "distance * -after", "distance * -before", (SLOPES,)),
        ("distances from the first key", f"{MASKS}:distances", "key - query - sequence.offset", "key - query", (SLOPES,)),
        ("pairs of the first sequence", f"{MASKS}:_address", "batch.to(tl.int64) * pairs.batch", "batch.to(tl.int64) * 0 * pairs.batch", (BIAS,)),
        ("pairs of the first head", f"{MASKS}:_address", "head.to(tl.int64) * pairs.head", "head.to(tl.int64) * 0 * pairs.head", (BIAS,)),
        ("pairs of the first query", f"{MASKS}:_address", "query.to(tl.int64) * tl.multiple_of", "query.to(tl.int64) * 0 * tl.multiple_of", (BIAS,)),
        ("strides that broadcast taken for 1", f"{TERMS}:pair_form", "PairForm(0, 1)", "PairForm(1, 1)", (OF_QUERIES,)),
        ("alignment of the sizes alone", f"{TERMS}:pair_form", "align_of(keys, *strides[:3], least=16 // itemsize)", "align_of(keys // 16 * 16, *strides[:3], least=16 // itemsize)", (f"{P}test_masks_and_biases_that_broadcast[of-keys-alone]",)),
        ("lists of the first sequence", f"{MASKS}:visits_of", "batch.to(tl.int64) * blocks.per_batch * lists", "batch.to(tl.int64) * 0 * blocks.per_batch * lists", (PAIRS,)),
        ("lists of the first head", f"{MASKS}:visits_of", "head * blocks.per_head) * tiles", "head * 0 * blocks.per_head) * tiles", (PAIRS,)),
        ("lists of the first tile", f"{MASKS}:visits_of", "* tiles + tile", "* tiles + tile * 0", (PAIRS,)),
        ("the first entry for all", f"{MASKS}:visit", "tl.load(visits.entries + step)", "tl.load(visits.entries + step * 0)", (PAIRS,)),
        ("partial blocks taken for full ones", f"{MASKS}:visit", "(entry & 1) != 0", "(entry & 1) > 1", (PAIRS,)),
        ("softcap of what is not scaled", f"{TILES}:capped", "scores.scale / scores.softcap", "1.0 / scores.softcap", (SOFTCAP,)),
        ("tanh times the scale", f"{TILES}:factor_of", "return scores.softcap * LOG2E", "return scores.scale * LOG2E", (SOFTCAP,)),
        ("largest score of the last block alone", "attention_kernel", "tile_max = tl.maximum(tile_max, row_max)", "tile_max = tl.maximum(row_max, row_max)", (LARGEST,)),
        ("largest score of rows that do not exist", "attention_kernel", "tl.where(row < limit, tile_max, MINUS_INFINITY)", "tile_max", (LARGEST,)),
        ("heads of keys one after another", "attention_kernel", "key_head = head // heads.group", "key_head = head % (heads.q // heads.group)", (GROUPS,)),
        ("first piece of scores left out", f"{TILES}:across", "total = dot(a.second, tl.trans(b.second), total)", "total = dot(a.second, tl.trans(b.second), None)", (PART, f"{R}test_widths_of_heads[192-128]")),
        ("a number past the width", f"{TILES}:addresses", "(number < WIDTH.dim)", "(number <= WIDTH.dim)", (PART,)),
        ("all heads in the first one's columns", "attention_kernel", "head * V.dim,", "head * 0,", (CODES,)),
        ("codes of what is not rounded", "attention_kernel", "rounded(out.first, y.ptr).to(tl.float32)", "out.first", (CODES,)),
    ],
    "blocks_kernel": [
        ("bounds of the band ignored", f"{MASKS}:blocks_kernel", "seen = seen & sees(q, k, sequence, band, BANDED)", "seen = seen & sees(q, k, sequence, band, False)", (VAIN_MASK_CAUSAL,)),
        ("the mask ignored", f"{MASKS}:blocks_kernel", "lengths, TILE.mask) != 0", "lengths, TILE.mask) >= 0", (PAIRS,)),
        ("bounds of queries ignored", f"{MASKS}:blocks_kernel", "seen = seen & (k >= begin) & (k < end)", "seen = seen & (k >= begin)", (ALL_TERMS,)),
        ("all blocks visited", f"{MASKS}:blocks_kernel", "visited = tl.max(in_pair, axis=0)", "visited = tl.max(in_pair, axis=0) * 0 + 1", (VAIN_MASK,)),
        ("blocks of one column", f"{MASKS}:blocks_kernel", "visited = tl.max(in_pair, axis=0)", "visited = tl.min(in_pair, axis=0)", (PAIRS,)),
        ("no block full", f"{MASKS}:blocks_kernel", "block * 2 + hidden", "block * 2 + 1 + 0 * hidden", (f"{P}test_full_blocks_read_no_mask[256]",)),
        ("every block full", f"{MASKS}:blocks_kernel", "block * 2 + hidden", "block * 2 + 0 * hidden", (PAIRS,)),
        ("queries that do not exist hide pairs", f"{MASKS}:blocks_kernel", "(exists & (seen == 0))", "(seen == 0)", (f"{P}test_full_blocks_read_no_mask[200]",)),
        ("every token used", f"{MASKS}:blocks_kernel", "in_pair.to(tl.uint8)", "(in_pair * 0 + 1).to(tl.uint8)", (NAN_PAIRS,)),
        ("used tokens of all heads in one place", f"{MASKS}:blocks_kernel", "each.to(tl.int64) * tokens + other", "each.to(tl.int64) * 0 * tokens + other", (NAN_PAIRS, PAIRS)),
        ("skipped blocks counted", f"{MASKS}:blocks_kernel", "count += visited", "count += 1", (PAIRS,)),
        ("the first head for all", f"{MASKS}:blocks_kernel", "number % lists * heads_each + each", "number % lists * 0 * heads_each + each", (PAIRS,)),
        ("the first sequence for all", f"{MASKS}:blocks_kernel", "sequence_at(tile, number // lists,", "sequence_at(tile, number // lists * 0,", (PAIRS,)),
        ("one head of a tile of keys", f"{MASKS}:blocks_kernel", "range(heads_each * per_head)", "range(per_head)", (OF_HEADS,)),
        ("lists shared by sequences of other lengths", f"{TERMS}:Lists.of", "int(terms.mask[0] != 0 or terms.own_bounds)", "int(terms.mask[0] != 0)", (ALL_TERMS,)),
    ],
    "value_block_kernel": [
        ("blocks of a sequence in one place", f"{VALUES_FILE}:value_block_kernel", "sequence.number + sequence.first // BLOCK", "sequence.number", (EMULATED,)),
        ("blocks of overlapping sequences", f"{VALUES_FILE}:value_block_kernel", "token // BLOCK + sequence.number + sequence", "token // BLOCK + sequence", (BLOCKS,)),
        ("codes of all samples in one place", f"{VALUES_FILE}:value_block_kernel", "token = sequence.batch * lengths.k + sequence.k_start", "token = sequence.k_start", (BLOCKS,)),
        ("codes of all packed sequences in one place", f"{VALUES_FILE}:value_block_kernel", "token = sequence.batch * lengths.k + sequence.k_start", "token = sequence.batch * lengths.k", (BLOCKS,)),
        ("values of the first sample", f"{VALUES_FILE}:value_block_kernel", "first_token(value, sequence.batch,", "first_token(value, sequence.batch * 0,", (BLOCKS,)),
        ("values of the first packed sequence", f"{VALUES_FILE}:value_block_kernel", "sequence.k_start, key_head, ALIGN) + lane", "sequence.k_start * 0, key_head, ALIGN) + lane", (BLOCKS,)),
        ("values of the first head", f"{VALUES_FILE}:value_block_kernel", "sequence.k_start, key_head, ALIGN) + lane", "sequence.k_start, key_head * 0, ALIGN) + lane", (INT8_SINKS,)),
        ("scales of the first head", f"{VALUES_FILE}:value_block_kernel", "(block * key_heads + key_head) * V.dim", "(block * key_heads) * V.dim", (INT8_SINKS,)),
        ("codes of the first block", f"{VALUES_FILE}:value_block_kernel", "tl.multiple_of(sequence.first, BLOCK)", "tl.multiple_of(sequence.first * 0, BLOCK)", (EMULATED,)),
        ("values that no query sees", f"{VALUES_FILE}:value_block_kernel", "keys_seen_by_any(sequence, band, TILE.banded)", "keys_seen_by_any(sequence, band, False)", (UNSEEN_INT8,)),
        ("a key too few is seen", f"{WHERE}:keys_seen_by_any", "sequence.q + sequence.offset + band.right", "sequence.q + sequence.offset + band.right - 1", (f"{E}test_keys_that_no_query_sees_change_no_bit[keys after the last query's-mxfp8-int8]", INT8_SINKS)),
        ("every part the first", f"{VALUES_FILE}:value_block_kernel", "lane = part * M", "lane = part * 0", (EMULATED_192,)),
        ("a number past the width", f"{VALUES_FILE}:value_block_kernel", "exists = lane < V.dim", "exists = lane <= V.dim", (BLOCKS,)),
        ("codes of what is not scaled", f"{VALUES_FILE}:value_block_kernel", "encode(scaled(x, factor[None, :], FORMAT)", "encode(scaled(x, 1.0 + 0.0 * factor[None, :], FORMAT)", (EMULATED_64,)),
        ("the factor for the scale", f"{VALUES_FILE}:value_block_kernel", "+ lane, scale, mask=stored)", "+ lane, factor, mask=stored)", (EMULATED_64,)),
        ("kv_lengths ignored", f"{WHERE}:_used", "tl.minimum(tl.maximum(length, 0), keys)", "tl.maximum(tl.maximum(length, 0), keys)", (BLOCKS,)),
    ],
    "value_kernel": [
        ("scales of the first head", f"{VALUES_FILE}:value_kernel", "(number * key_heads + key_head) * V.dim", "(number * key_heads) * V.dim", (VALUES,)),
        ("scales of the first sequence", f"{VALUES_FILE}:value_kernel", "(number * key_heads + key_head) * V.dim", "key_head * V.dim", (SEQUENCES,)),
        ("largest of the last keys alone", f"{VALUES_FILE}:value_kernel", "larger(v_amax, amax(", "larger(v_amax * 0.0, amax(", (VALUES,)),
        ("kv_lengths ignored", f"{WHERE}:_used", "tl.minimum(tl.maximum(length, 0), keys)", "tl.maximum(tl.maximum(length, 0), keys)", (SEQUENCES,)),
        ("the first of kv_lengths for all", f"{WHERE}:_used", "lengths.kv_lengths + number", "lengths.kv_lengths + number * 0", (SEQUENCES,)),
        ("values that no query sees", f"{VALUES_FILE}:value_kernel", "keys_seen_by_any(sequence, band, TILE.banded)", "keys_seen_by_any(sequence, band, False)", (UNSEEN,)),
        ("values before those that are seen", f"{VALUES_FILE}:_in_range", "(row >= begin) & (row < end)", "row < end", (UNSEEN,)),
        ("codes of overlapping sequences", f"{WHERE}:_span", "begin = tl.maximum(begin, tl.max(_clamped(start, tokens), axis=0))", "begin = tl.max(tl.where(index == number, _clamped(start, tokens), 0), axis=0)", (f"{I}test_starts_lead_to_no_other_codes_of_values",)),
        ("values of the first sample", f"{VALUES_FILE}:value_kernel", "first_token(value, batch, start", "first_token(value, batch * 0, start", (SEQUENCES,)),
        ("values of the first packed sequence", f"{VALUES_FILE}:value_kernel", "first_token(value, batch, start", "first_token(value, batch, start * 0", (SEQUENCES,)),
        ("last keys left out", f"{VALUES_FILE}:value_kernel", "for first in range(0, end, N)", "for first in range(0, end - N, N)", (VALUES,)),
        ("nothing after the last key", f"{VALUES_FILE}:value_kernel", "tl.maximum(tl.minimum(tl.cdiv(sequence.k, COLUMNS), room), 0).to(tl.int32) * COLUMNS", "sequence.k", (SEQUENCES,)),
        ("every part the first", f"{VALUES_FILE}:value_kernel", "lane = part * M", "lane = part * 0", (VALUES_192,)),
        ("a number past the width", f"{VALUES_FILE}:value_kernel", "exists = lane < V.dim", "exists = lane <= V.dim", (SEQUENCES, VALUES_24)),
        ("codes of what is not scaled", f"{VALUES_FILE}:value_kernel", "encode(scaled(x, factor[None, :], FORMAT)", "encode(scaled(x, 1.0 + 0.0 * factor[None, :], FORMAT)", (VALUES,)),
        ("the factor for the scale", f"{VALUES_FILE}:value_kernel", "+ lane, scale, mask=exists)", "+ lane, factor, mask=exists)", (VALUES,)),
        ("sequences without room between them", f"{VALUES_FILE}:codes_ptr", "(token // UNIT + number) * UNIT", "(token // UNIT) * UNIT", (SEQUENCES,)),
        ("codes of all samples in one place", f"{VALUES_FILE}:value_kernel", "token = batch * lengths.k + start", "token = start", (SEQUENCES,)),
        ("heads in one another's rows", f"{VALUES_FILE}:codes_ptr", "key_head.to(tl.int64) * V.dim *", "key_head.to(tl.int64) * (V.dim - 1) *", (VALUES,)),
        ("too few columns", f"{LAUNCH}:Forms.value_columns", "+ (self.sequences or counts.batch)", "+ 0 * (self.sequences or counts.batch)", (SEQUENCES,)),
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
        ("gradient of sinks with the wrong sign", "delta_kernel", "-tl.sum(dsink, axis=0)", "tl.sum(dsink, axis=0)", (SINKS,)),
        ("share of the sink in base 2", "delta_kernel", "(sink - lse) * LOG2E", "(sink - lse)", (SINKS,)),
        ("share of an infinite sink is NaN", "delta_kernel", "tl.where(lse == sink, 1.0,", "tl.where(lse != lse, 1.0,", (SINKS,)),
        ("sink of the first head", "delta_kernel", "sinks_ptr + head", "sinks_ptr + head * 0", (SINKS,)),
        ("pads in the gradient of sinks", "delta_kernel", "(lse != MINUS_INFINITY) &", "(lse == lse) &", (EMPTY,)),
        ("a NaN sink without a gradient", "delta_kernel", "(sink != MINUS_INFINITY)", "(sink > MINUS_INFINITY)", (NAN_SINK,)),
        ("gradient of sinks of the last tile alone", f"{LAUNCH}:launch_attention_backward", "sum_partials(sums, o.sinks)", "sum_partials(sums[-1:].contiguous(), o.sinks)", (SINKS,)),
    ],
    "query_gradient_kernel": [
        ("hidden pairs seen", "query_gradient_kernel", "seen = seen & (bits != 0)", "seen = seen & (bits == bits)", (PAIRS,)),
        ("NaN of keys that no query sees", "query_gradient_kernel", "start, sequence.k, N, QK, ALIGN, used)", "start, sequence.k, N, QK, ALIGN)", (NAN_PAIRS,)),
        ("NaN of values that no query sees", "query_gradient_kernel", "tl.where(p == 0.0, 0.0, ds)", "ds", (NAN_PAIRS,)),
        ("gradient of the bias with the slope of the cap", "query_gradient_kernel", "dterm = ds * sound", "dterm = ds * sound * (slope if CAPPED else 1.0)", (ALL_TERMS,)),
        ("gradient of slopes on one side", "query_gradient_kernel", "dafter -= tl.sum(ds * tl.maximum(distance, 0.0), axis=1)", "dafter -= tl.sum(ds * distance, axis=1)", (SLOPES,)),
        ("gradient of slopes of the last block alone", "query_gradient_kernel", "dbefore += tl.sum(", "dbefore = tl.sum(", (SLOPES,)),
        ("gradient of slopes with the wrong sign", "query_gradient_kernel", "dafter -= tl.sum(", "dafter += tl.sum(", (SLOPES,)),
        ("gradients of slopes of all heads in one place", "query_gradient_kernel", "* heads.q + head) * 2", "* heads.q) * 2", (SLOPES,)),
        ("gradients of all sequences in one place", "query_gradient_kernel", "store_pairs(dterm, dbias, sequence.batch, head", "store_pairs(dterm, dbias, sequence.batch * 0, head", (BIAS,)),
        ("gradients of skipped pairs not zeroed", f"{TERMS}:score_gradients", "pairs if all_visited else pairs.zero_()", "pairs", (f"{P}test_biases[37-129-window]", f"{P}test_biases[150-150-lower]")),
        ("gradients summed over one dimension", f"{TERMS}:sum_pairs", "last = dim == summed[-1]", "last = dim == summed[0]", (OF_KEYS,)),
        ("not scaled", "query_gradient_kernel", "or_nan(scores.scale, sequence, lengths)", "or_nan(1.0, sequence, lengths)", (CAUSAL,)),
        ("a sequence out of range looks right", "query_gradient_kernel", "or_nan(scores.scale, sequence, lengths)", "scores.scale", ANY_STARTS),
        ("slope of the cap left out", "query_gradient_kernel", "ds = ds * slope", "ds = ds + 0.0 * slope", (SOFTCAP,)),
        ("slope of the cap is tanh", f"{TILES}:capped", "return t, 1.0 - t * t", "return t, 1.0 - t", (SOFTCAP,)),
        ("delta left out", "query_gradient_kernel", "across(dout, v) - delta[:, None]", "across(dout, v) - 0.0 * delta[:, None]", (CAUSAL,)),
        ("lse in base e", "query_gradient_kernel", "_lse_in_base_2(tl.load(lse_ptr + at, mask=row < limit, other=0.0))", "tl.load(lse_ptr + at, mask=row < limit, other=0.0)", (CAUSAL,)),
        ("-inf subtracted from -inf", "_lse_in_base_2", "tl.where(lse == MINUS_INFINITY, 0.0, lse * LOG2E)", "lse * LOG2E", (NOTHING,)),
        ("masked at both ends or not at all", "query_gradient_kernel", MASKED, MASKED.replace("|", "&"), (CAUSAL,)),
        ("first block of keys left out", "query_gradient_kernel", KEYS, KEYS.replace("STEP * STEP", "STEP * STEP + STEP"), (CAUSAL,)),
        ("last block of keys left out", "query_gradient_kernel", KEYS, KEYS.replace("end", "end - N"), (CAUSAL,)),
        ("blocks before the window", "query_gradient_kernel", KEYS, KEYS.replace("begin // STEP * STEP", "0"), (VAIN_WINDOW,)),
        ("the last block alone", "query_gradient_kernel", "add_product(acc, ds", "add_product(times(acc, 0.0), ds", (CAUSAL,)),
        ("keys of the first head", "query_gradient_kernel", "k_ptr = _base(key, sequence.batch, sequence.k_start, key_head, ALIGN)", "k_ptr = _base(key, sequence.batch, sequence.k_start, key_head * 0, ALIGN)", (CAUSAL,)),
        ("heads of keys one after another", "query_gradient_kernel", "key_head = head // heads.group", "key_head = head % (heads.q // heads.group)", (GROUPS,)),
        ("values for keys", "query_gradient_kernel", "ds.to(k.first.dtype), k)", "ds.to(k.first.dtype), v)", (CAUSAL,)),
        ("lse and delta of the first sequence", "query_gradient_kernel", AT, AT.replace("sequence.q_start", "sequence.q_start * 0"), (PACKED,)),
        ("keys past kv_lengths are loaded", "query_gradient_kernel", "v = load_heads(v_ptr, value.at.token, start, sequence.k, N", "v = load_heads(v_ptr, value.at.token, start, start + N, N", (HIDDEN,)),
    ],
    "key_gradient_kernel": [
        ("hidden pairs seen", "key_gradient_kernel", "seen = seen & (bits != 0)", "seen = seen & (bits == bits)", (PAIRS,)),
        ("NaN of queries that see nothing", "key_gradient_kernel", "sequence.q, M, QK, ALIGN, used)", "sequence.q, M, QK, ALIGN)", (NAN_PAIRS,)),
        ("NaN of gradients of queries that see nothing", "key_gradient_kernel", "sequence.q, M, V, ALIGN, used)", "sequence.q, M, V, ALIGN)", (NAN_PAIRS,)),
        ("NaN of values that no query sees", "key_gradient_kernel", "tl.where(p == 0.0, 0.0, ds)", "ds", (NAN_PAIRS,)),
        ("one head of a list", "key_gradient_kernel", "tl.minimum(step // per_head + each, heads.group - 1)", "tl.minimum(step // per_head, heads.group - 1)", (OF_HEADS,)),
        ("used queries of the first head", "key_gradient_kernel", "each.to(tl.int64) * lengths.q", "each.to(tl.int64) * 0 * lengths.q", (PAIRS,)),
        ("heads of a shared list left out", "key_gradient_kernel", "visits.count, heads.group // heads_each", "visits.count, 1 + 0 * heads_each", (OF_PAIRS,)),
        ("blocks of all heads the first one's", "key_gradient_kernel", "block % q_blocks * M", "block * M", (PAIRS,)),
        ("scores with a bias scaled twice", "key_gradient_kernel", "unit = 1.0 if ADDED else factor", "unit = factor", (BIAS,)),
        ("queries of the prefix left out", f"{WHERE}:queries_seeing", "tl.where(inside, tl.minimum(begin, tl.maximum(-sequence.offset, 0)), begin)", "begin", (f"{L}test_prefixes[150-150-lower]",)),
        ("queries after the band left out", f"{WHERE}:queries_seeing", "tl.where(inside, tl.maximum(end, last_inside), end)", "end", (PREFIX_WINDOW,)),
        ("queries that see nothing visited", f"{WHERE}:queries_between", "seeing = (key < key_end)", "seeing = (key < key_end + 1000)", (VAIN_LIMIT,)),
        ("queries that see later keys visited", f"{WHERE}:queries_between", "(key < sequence.first + ROWS) & (key_end > sequence.first)", "(key_end > sequence.first)", (VAIN_LIMIT,)),
        ("last query left out", f"{WHERE}:queries_between", "tl.where(seeing, query + 1, begin)", "tl.where(seeing, query, begin)", (f"{L}test_limits_of_queries[1-70-full]",)),
        ("bounds of queries ignored", "key_gradient_kernel", "(col[:, None] >= row_begin[None, :]) & (col[:, None] < row_end[None, :])", "(col[:, None] >= row_begin[None, :])", (LIMIT,)),
        ("dK not scaled", "key_gradient_kernel", "or_nan(scores.scale, sequence, lengths)", "or_nan(1.0, sequence, lengths)", (CAUSAL,)),
        ("dV scaled", "key_gradient_kernel", "or_nan(1.0, sequence, lengths)", "or_nan(scores.scale, sequence, lengths)", (CAUSAL,)),
        ("dK of a sequence out of range looks right", "key_gradient_kernel", "times(dk, or_nan(scores.scale, sequence, lengths))", "times(dk, scores.scale)", ANY_STARTS),
        ("dV of a sequence out of range looks right", "key_gradient_kernel", "times(dv, or_nan(1.0, sequence, lengths))", "dv", ANY_STARTS),
        ("slope of the cap left out", "key_gradient_kernel", "ds = ds * slope", "ds = ds + 0.0 * slope", (SOFTCAP,)),
        ("delta left out", "key_gradient_kernel", "across(v, dout) - delta[None, :]", "across(v, dout) - 0.0 * delta[None, :]", (CAUSAL,)),
        ("first head of a group alone", "key_gradient_kernel", "range(blocks * repeats)", "range(blocks)", (GROUPS,)),
        ("last head of a group left out", "key_gradient_kernel", "range(blocks * repeats)", "range(blocks * (repeats - 1))", (GROUPS,)),
        ("heads of another group", "key_gradient_kernel", "key_head * heads.group + tl.minimum(step // per_head, heads.group - 1)", "key_head + step // per_head * (heads.q // heads.group)", (GROUPS,)),
        ("last block of queries left out", "key_gradient_kernel", "tl.cdiv(tl.maximum(end - begin, 0), M)", "(tl.maximum(end - begin, 0) // M)", (CAUSAL,)),
        ("every block the first", "key_gradient_kernel", "begin + step % per_head * M", "begin + step % per_head * 0", (CAUSAL,)),
        ("keys past kv_lengths are not hidden", "key_gradient_kernel", "hidden = sequence.first + N > sequence.k", "hidden = sequence.first > sequence.k + N", (HIDDEN,)),
        ("values past kv_lengths are loaded", "key_gradient_kernel", "value.at.token, sequence.first, sequence.k,", "value.at.token, sequence.first, limit,", (HIDDEN,)),
        ("dK of the last block alone", "key_gradient_kernel", "dk = add_product(dk,", "dk = add_product(times(dk, 0.0),", (CAUSAL,)),
        ("dV of scores without a mask", "key_gradient_kernel", "dv = add_product(dv, p.to", "dv = add_product(dv, tl.exp2(across(k, q) * factor - lse[None, :]).to", (CAUSAL,)),
        ("block at the own keys not masked", f"{WHERE}:queries_seeing", "last - band.right,", "first - band.right,", (CAUSAL,)),
        ("block at the window's begin not masked", f"{WHERE}:queries_seeing", "first + band.left + 1", "last + band.left + 1", (LEFT,)),
        ("queries before the own ones", f"{WHERE}:queries_seeing", "tl.maximum(first - band.right, 0)", "tl.maximum(first - band.right, 0) * 0", (VAIN,)),
        ("queries past the window", f"{WHERE}:queries_seeing", "end = tl.minimum(last + band.left + 1, sequence.q)", "end = sequence.q", (VAIN_WINDOW,)),
        ("the own query on the other side", f"{WHERE}:queries_seeing", "first = sequence.first - sequence.offset", "first = sequence.first + sequence.offset", (LOWER, FEWER_KEYS)),
        ("lse and delta of the first sequence", "key_gradient_kernel", AT, AT.replace("sequence.q_start", "sequence.q_start * 0"), (PACKED,)),
        ("last tiles of packed keys left out", f"{LAUNCH}:Forms.tiles", "self.sequences + 1 if self.sequences else 0", "0", (PACKED,)),
    ],
    "decode_kernel": [
        ("queries see keys after their own", f"{DECODE}:decode_kernel", "token[None, :] <= own_key[:, None]", "token[None, :] <= own_key[:, None] + 1", (PLAIN_CACHE,)),
        ("own key left out", f"{DECODE}:decode_kernel", "token[None, :] <= own_key[:, None]", "token[None, :] < own_key[:, None]", (PLAIN_CACHE,)),
        ("one key before the window", f"{DECODE}:decode_kernel", "own_key[:, None] - counts.left", "own_key[:, None] - counts.left - 1", (DECODE_WINDOW,)),
        ("blocks at the window's begin not masked", f"{DECODE}:decode_kernel", "| (start < own + counts.queries - 1 - counts.left)", "| (start < 0)", (WIDE_WINDOW,)),
        ("blocks at the own keys not masked", f"{DECODE}:decode_kernel", "(start + N > own + 1) |", "(start < 0) |", (PLAIN_CACHE,)),
        ("keys before the window's block", f"{DECODE}:_bounds", "tl.maximum(own - counts.left.to(tl.int32), 0)", "tl.maximum(own - counts.left.to(tl.int32) + 64, 0)", (DECODE_WINDOW_1,)),
        ("own key of the first query for all", f"{DECODE}:decode_kernel", "own_key = own + rows.query", "own_key = own + rows.query * 0", (SEVERAL,)),
        ("pages in their order in memory", f"{DECODE}:_slots", "tl.load(row + token // pages.size, mask=token < end, other=0).to(tl.int64)", "(token // pages.size).to(tl.int64)", (PLAIN_CACHE,)),
        ("pages of the first sequence", f"{DECODE}:_slots", "pages.table + sequence * pages.stride", "pages.table + sequence * 0", (PLAIN_CACHE,)),
        ("places in pages that go on", f"{DECODE}:_slots", "(token % pages.size).to(tl.int64)", "token.to(tl.int64)", (PLAIN_CACHE,)),
        ("one page for a block of whole pages", f"{DECODE}:_slots", "row + start // pages.size", "row + start // (pages.size * 2)", (LARGE_PAGES,)),
        ("small pages taken for whole ones", f"{PLANS}:_planned", "whole_pages=page % n == 0", "whole_pages=page >= 0", (SMALL_PAGES,)),
        ("scales of keys left out", f"{DECODE}:decode_kernel", "s *= key_scale[None, :]", "s *= 1.0", (TOKEN,)),
        ("scales of values left out", f"{DECODE}:decode_kernel", "p *= _scales(v, key_head, page, slot, exists)[None, :]", "p *= 1.0", (INT8,)),
        ("scales of values from those of keys", f"{DECODE}:decode_kernel", "_scales(v, key_head", "_scales(k, key_head", (TOKEN,)),
        ("one scale of values left out", f"{DECODE}:decode_kernel", "out = times(out, tl.load(v.scale + key_head * v.at.scale_head))", "out = times(out, 1.0)", (PER_TENSOR,)),
        ("the first head's scale for all", f"{DECODE}:decode_kernel", "q_scale *= tl.load(k.scale + key_head * k.at.scale_head)", "q_scale *= tl.load(k.scale)", (PER_HEAD,)),
        ("sums not rescaled", f"{DECODE}:decode_kernel", "times(acc, alpha[:, None])", "times(acc, 1.0 + 0.0 * alpha[:, None])", (PLAIN_CACHE,)),
        ("total not rescaled", f"{DECODE}:decode_kernel", "l_i * alpha + tl.sum", "l_i + tl.sum", (PLAIN_CACHE,)),
        ("sink counted in every part", f"{DECODE}:decode_kernel", "if TILE.direct:\n            if sinks_ptr", "if TILE.part:\n            if sinks_ptr", (PLAIN_CACHE,)),
        ("heads of keys one after another", f"{DECODE}:_rows", "key_head * counts.group + row % counts.group", "key_head + row % counts.group * (counts.heads // counts.group)", (PLAIN_CACHE,)),
        ("the cap left out", f"{DECODE}:decode_kernel", "s, _ = capped(s * scale[:, None], Scores(1.0, scores.softcap), True)", "s = s * scale[:, None] / scores.softcap", (DECODE_CAP,)),
        ("scales of latent values left out", f"{DECODE}:decode_kernel", "p *= key_scale[None, :]", "p *= 1.0", (LATENT,)),
        ("the scale of latent values left out", f"{DECODE}:decode_kernel", "out = times(out, tl.load(k.scale + key_head * k.at.scale_head))", "out = times(out, 1.0)", (LATENT,)),
        ("an infinite sink as it is", f"{DECODE}:_with_sink", "tl.maximum(lse, tl.minimum(sink, LARGEST))", "tl.maximum(lse, sink)", (f"{D}test_sinks_that_are_infinite",)),
        ("keys for latent values", f"{DECODE}:decode_kernel", "values = Pieces(keys.first, None)", "values = Pieces(keys.first * 2.0, None)", (LATENT,)),
        ("second piece of keys left out", f"{TILES}:load_at", "number = FIRST + tl.arange(0, SECOND)", "number = tl.arange(0, SECOND)", (TWO_PIECES,)),
        ("pages beyond the cache are read", f"{DECODE}:_exists", "(page >= 0) & (page < pages.number)", "page >= 0", (NO_PAGES,)),
        ("pages before the cache are read", f"{DECODE}:_exists", "(page >= 0) & (page < pages.number)", "page < pages.number", (NO_PAGES,)),
        ("pages that do not exist look right", f"{DECODE}:decode_kernel", "tl.max(missing.to(tl.int32), axis=0)) == 0", "tl.max(missing.to(tl.int32), axis=0)) >= 0", (NO_PAGES,)),
        ("pages before the window count", f"{DECODE}:_slots", "tl.maximum(start + tl.arange(0, N), first)", "start + tl.arange(0, N)", (GONE_PAGES,)),
        ("pages that do not exist are read", f"{DECODE}:_slots", "tl.where(page_exists, page, 0)", "page", (NO_PAGES,)),
        ("lengths beyond the room of the table", f"{DECODE}:_bounds", "tl.minimum(tl.maximum(stored, 0), room)", "tl.maximum(stored, 0)", (f"{I}test_lengths_out_of_range[3-dtype0]",)),
        ("lengths in 32 bits", f"{DECODE}:_bounds", "tl.load(pages.lengths + sequence).to(tl.int64)", "tl.load(pages.lengths + sequence).to(tl.int32).to(tl.int64)", (f"{I}test_lengths_out_of_range[3-dtype1]",)),
        ("a length beyond the room looks right", f"{DECODE}:_bounds", "stored <= room", "stored == stored", (f"{I}test_lengths_out_of_range[3-dtype0]",)),
        ("pages of a cache that has none", f"{DECODE}:_bounds", "tl.where(pages.number > 0, (pages.width * pages.size).to(tl.int64), 0)", "(pages.width * pages.size).to(tl.int64)", (f"{I}test_a_cache_without_pages[3]",)),
        ("large queries in fp16 as they are", f"{DECODE}:_scaled_queries", "(q_scale > 1e-30) & (q_scale < 1e30)", "(q_scale > 1e30)", (FAR_QUERIES,)),
    ],
    "join_kernel": [
        ("more tokens than there is room for", f"{DECODE}:join_kernel", "l_i = tl.where(sound, tl.zeros((M,), tl.float32), float(\"nan\"))", "l_i = tl.zeros((M,), tl.float32)", (f"{I}test_a_cache_without_pages[40]",)),
        ("parts weighed alike", f"{DECODE}:join_kernel", "weight = tl.exp2((lse - m_safe) * LOG2E)", "weight = tl.exp2((lse - lse) * LOG2E)", (PLAIN_CACHE,)),
        ("weights in base 2", f"{DECODE}:join_kernel", "tl.exp2((lse - m_safe) * LOG2E)", "tl.exp2(lse - m_safe)", (PLAIN_CACHE,)),
        ("last part left out", f"{DECODE}:join_kernel", "tl.cdiv(length, PART)", "(length // PART)", (PLAIN_CACHE,)),
        ("parts that nobody wrote", f"{DECODE}:join_kernel", "begin // N * N // PART, tl.cdiv(length, PART)", "begin * 0, tl.cdiv(length, PART)", (DECODE_WINDOW_1,)),
        ("not divided by the total", f"{DECODE}:join_kernel", "(1.0 / tl.where(empty, 1.0, l_i))[:, None]", "(1.0 + 0.0 * l_i)[:, None]", (PLAIN_CACHE,)),
        ("0 / 0 where nothing is seen", f"{DECODE}:join_kernel", "1.0 / tl.where(empty, 1.0, l_i)", "1.0 / l_i", (PLAIN_CACHE,)),
        ("-inf subtracted from -inf", f"{DECODE}:join_kernel", "m_safe = tl.where(m_i == MINUS_INFINITY, 0.0, m_i)", "m_safe = m_i", (SHORT,)),
        ("lse of the largest part", f"{DECODE}:join_kernel", "m_i + tl.log2(tl.where(empty, 1.0, l_i)) * LN2", "m_i", (PLAIN_CACHE,)),
        ("sink of the first head", f"{DECODE}:join_kernel", "tl.load(sinks_ptr + head, mask", "tl.load(sinks_ptr + head * 0, mask", (PLAIN_CACHE,)),
        ("sink without a share", f"{DECODE}:_with_sink", "total = weight + sink_weight", "total = weight + sink_weight * 0.0", (PLAIN_CACHE,)),
        ("the first part for all", f"{DECODE}:join_kernel", "at = part * part_stride + row", "at = first * part_stride + row", (PLAIN_CACHE,)),
        ("lengths of the first sequence", f"{DECODE}:join_kernel", "sequence = query // counts.queries", "sequence = query * 0", (PLAIN_CACHE,)),
        ("parts of one sequence", f"{DECODE}:_rows_per_part", "counts.sequences.to(tl.int64) * counts.queries * counts.heads", "counts.sequences.to(tl.int64) * 0 + counts.queries * counts.heads", (PLAIN_CACHE,)),
    ],
}  # fmt: skip
