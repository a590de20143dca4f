"""Plant known bugs one at a time in a scratch copy of this repository and record which test catches each.

    python benchmarks/mutants.py                     every mutant, into benchmarks/results/mutants.jsonl
    python benchmarks/mutants.py --only causal-edge  the named mutants; lines of the others are kept
    python benchmarks/mutants.py --half              a random half, seeded by the commit; the seed is printed
    python benchmarks/mutants.py --half SEED         the half of a given seed, to repeat a run
    python benchmarks/mutants.py --check             only check that every mutant still fits the code

A mutant is a textual replacement whose old text must occur exactly once in its file; `--check` and
tests/hardening/test_mutants.py report the ones that no longer do. A mutant that no test catches is a missing test. The
tests chosen for a mutant must pass without it, which is checked first. Append new mutants at the end of `MUTANTS`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # The commit that is told must be that of the tree that is copied.
    sys.path.insert(0, str(ROOT / "src"))

from dilated_attention_pytorch.tools.bench.measure import facts, git_sha  # noqa: E402
from dilated_attention_pytorch.tools.html_page import write  # noqa: E402

PACKAGE = "src/dilated_attention_pytorch"
COPIED = ("src", "tests", "benchmarks", "pyproject.toml")
TIMEOUT = 130
"""Seconds of one try: two fit into what pytest-timeout gives a test."""
INTERPRETED = "tests/kernels/test_triton_interpreter.py::test_output_lse_and_gradients_match_the_oracle"
TOLERANCE = 2e-6
"""Of the trials in Triton's interpreter, which all run in float32 here."""


class Mutant(NamedTuple):
    """One bug."""

    name: str
    file: str
    """below the package"""
    old: str
    new: str
    what: str
    tests: tuple[str, ...]
    """test ids below tests/; for a Triton kernel, names of trials in tests/kernels/interpret_triton.py"""

    @property
    def path(self) -> str:
        return f"{PACKAGE}/{self.file}"

    @property
    def interpreted(self) -> bool:
        return ".py" not in self.tests[0]

    @property
    def native(self) -> bool:
        """Whether the C++ library must be built again."""
        return Path(self.file).name.startswith("native")


class Verdict(NamedTuple):
    """How a run of some tests ended."""

    failed: str | None
    """the first test that failed, None where all passed"""
    seconds: float


PROBLEMS = "ops/test_attention.py::test_every_problem_matches_the_oracle"
BIASES = "ops/test_bias.py::test_table_gradients_match_dense"
REPEATED = "ops/test_repeated_calls.py"
VIRTUAL = "distributed/test_virtual.py::test_every_problem_matches_the_oracle_on_every_layout"
PLANS = "hardening/test_patterns.py"
USERS = "plan/test_user_patterns.py"
GUARDS = "nn/test_adaptive_start.py::test_a_guard_compares_what_a_loop_counts"
MUTANTS = (
    Mutant("compiled-check", "ops/checks.py", "raise ValueError(message)", "pass",
           "a compiled module skips checks of values",
           ("nn/test_torch.py::test_checks_of_values_survive_the_compiler",)),
    Mutant("tuning-key", "nn/calibration.py", 'return f"{name}, torch {torch.__version__}"', "return name",
           "costs that another torch release had are taken",
           ("nn/test_factory.py::test_costs_of_another_torch_release_are_not_used",)),
    Mutant("causal-edge", "patterns/positions.py", "return k <= q", "return k < q", "a token does not see itself",
           (PLANS,)),
    Mutant("window-edge", "patterns/positions.py", "(k <= q + self.after)", "(k < q + self.after)",
           "the last key of a window is lost", (PLANS,)),
    Mutant("head-residue", "patterns/dilated.py", "return head % rate", "return (head + 1) % rate",
           "every head samples its neighbour's residue", (PLANS,)),
    Mutant("global-edge", "plan/closed_forms.py", "seen, unseen = k1 < tokens, k0 >= tokens",
           "seen, unseen = k0 < tokens, k0 >= tokens", "a tile that holds the last sink is met whole",
           (PLANS,)),
    Mutant("causal-tile", "plan/closed_forms.py", "return _verdict(k1 <= q0, k0 > q1)", "return _verdict(k0 <= q0, k0 > q1)",
           "tiles on the diagonal are met whole: the causal edge is missing", (PLANS,)),
    Mutant("last-block", "plan/builder.py", "(high - low + 1).clamp(min=0), layout", "(high - low).clamp(min=0), layout",
           "off by one: the last block of every stretch is dropped", (PLANS,)),
    Mutant("ragged-end", "plan/builder.py", "+ self.rate * (self.block_size - 1) >= self.axis.end",
           "+ self.rate * (self.block_size - 1) > self.axis.end", "a tile one element short counts as whole",
           (PLANS,)),
    Mutant("partial-shift", "plan/tile_lists.py", "[stored, stored, 0, stored_partial, stored_partial, 0]",
           "[stored, stored, 0, stored, stored, 0]", "partial lists of a second head class are looked for elsewhere",
           (PLANS,)),
    Mutant("head-class", "plan/closed_forms.py", "return head if self.pattern.by_head else None", "return None",
           "heads with lists of their own share the first one's", (PLANS,)),
    Mutant("packed-base", "plan/packed.py", "table[..., [FULL_BASE, PARTIAL_BASE]] += first_tile",
           "table[..., [FULL_BASE]] += first_tile", "partial tiles of a packed document lie in the first one",
           (PLANS,)),
    Mutant("counted-twice", "plan/terms.py", "exclude=term.exclude + earlier)", "exclude=term.exclude)",
           "a union counts a key once for each member that has it", (PLANS,)),
    Mutant("int32-pairs", "plan/builder.py", "    key = row * columns + column\n",
           "    key = (row * columns + column).int().long()\n",
           "int32 overflow: tile pairs of long sequences wrap around", (PLANS,)),
    Mutant("stale-plan", "plan/cache.py", "key = PlanKey(pattern, n, heads, block_size,",
           "key = PlanKey(pattern, n, 0, block_size,", "a cached plan is used for another number of heads",
           (PLANS,)),
    Mutant("global-maskkey", "plan/closed_forms.py", "columns = [tiles[2].clamp(max=self.pattern.tokens)]",
           "columns = [tiles[2].clamp(max=self.pattern.tokens - 1)]", "tiles behind the sinks share the mask of the last sink's",
           ("plan/test_plan.py::test_sinks_may_end_anywhere_in_a_tile",)),
    Mutant("density-floor", "plan/plan.py", "grid = -(-self.n // self.block_size)",
           "grid = max(1, self.n // self.block_size)", "a ragged last tile is not among those of dense attention",
           ("plan/test_plan.py::test_full_attention_has_density_one_at_any_length",)),
    Mutant("user-heads", "plan/closed_forms.py", "        return head\n", "        return None\n", "every head of a user's pattern has the pairs of head 0",
           (USERS,)),
    Mutant("packed-heads", "plan/closed_forms.py",
           "closed_form(self.pattern.document(length)).head_key(head) for", "None for", "every head of a packed pattern inside another has the pairs of head 0", (USERS,)),
    Mutant("lost-level", "plan/terms.py", "for level in range(1, pattern.max_multiplicity + 1))",
           "for level in range(1, pattern.max_multiplicity))", "the highest multiplicity counts once too few",
           (USERS,)),
    Mutant("packed-moves", "plan/terms.py", "case Packed(), _ if isinstance(pattern, And) and closed_form(right).is_shift_invariant:",
           "case Packed(), _ if isinstance(pattern, And):",
           "a condition on absolute positions starts again in each document", (USERS,)),
    Mutant("text-switch", "patterns/parse.py", "return switches[text.lower()]", "return True",
           "an option that is switched off in text is on",
           ("patterns/test_patterns.py::test_switches_in_text_mean_what_they_say",)),
    Mutant("cpu-group", "kernels/cpu/tiles.py", "group = head // (heads // call.key.shape[1])",
           "group = head % call.key.shape[1]", "query heads read the wrong key head", (PROBLEMS,)),
    Mutant("cpu-base", "kernels/cpu/tiles.py", "(before - shift).exp_()", "(before - shift).exp2_()",
           "earlier steps are scaled in base 2", (PROBLEMS,)),
    Mutant("cpu-scale", "kernels/cpu/tiles.py", "        grad_scores *= call.scale\n", "",
           "the gradient of the scores lacks the scale", (PROBLEMS,)),
    Mutant("cpu-filler", "kernels/cpu/tiles.py", " & listed[..., None]", "", "tiles that fill a short list up are counted",
           (PROBLEMS,)),
    Mutant("cpu-streams", "kernels/cpu/tiles.py", "[:, None, None, None] * heads + head", "[:, None, None, None] + head",
           "dropout of sample 1, head 0 is that of sample 0, head 1",
           ("kernels/test_cpu_backends.py::test_dropout_drops_what_the_definition_says",)),
    Mutant("reference-group", "kernels/reference.py", "group = head // (heads // call.key.shape[1])",
           "group = head % call.key.shape[1]", "query heads read the wrong key head", (PROBLEMS,)),
    Mutant("native-lse", "kernels/cpu/native.cpp", "w.top[i] + std::log(total)", "w.top[i] + std::log2(total)",
           "the LSE adds a sum in base 2", (PROBLEMS,)),
    Mutant("native-carry", "kernels/cpu/native.cpp", "w.total[i] = lse == -kInfinity<T> ? 0 : 1;",
           "w.total[i] = lse == -kInfinity<T> ? 0 : 2;", "a part resumes a row with twice its weight", (PROBLEMS,)),
    Mutant("native-split", "kernels/cpu/native.cpp", "item = s.first[head] + split;", "item = s.first[head];",
           "threads that share a key head add its gradient twice",
           ("kernels/test_native.py::test_any_number_of_threads_gives_the_same_result_twice",)),
    Mutant("native-stale", "kernels/cpu/native_tiles.h", "const bool same = slot.key == tile.key &&",
           "const bool same = slot.key != nullptr &&", "a copy of another tile's keys is used again",
           ("kernels/test_native.py::test_keys_or_values_that_share_memory_match_oracle",)),
    Mutant("native-value", "kernels/cpu/native_tiles.h", " && slot.value == tile.value", "",
           "a copy of another head's values is used where keys share memory",
           ("kernels/test_native.py::test_keys_or_values_that_share_memory_match_oracle",)),
    Mutant("native-rate", "kernels/cpu/native_tiles.h", " && slot.rate == rate;", ";",
           "a copy made with another pitch is used again",
           ("kernels/test_native.py::test_tiles_at_one_address_with_other_rates_are_copied_apart",)),
    Mutant("native-digest", "kernels/cpu/native.py", "platform.machine(), toolchain.processor_flags()", "platform.machine()",
           "a library for another processor is loaded",
           ("kernels/test_native.py::test_the_name_of_the_library_follows_what_it_was_built_for",)),
    Mutant("missing-elements", "plan/builder.py", "(allowed & exists).flatten(1).any(1)", "allowed.flatten(1).any(1)",
           "tile pairs are kept whose allowed elements do not exist", ("plan/test_cut.py",)),
    Mutant("native-count", "kernels/cpu/native_tiles.h", " && slot.count >= tile.count;", ";",
           "a copy of fewer keys is used where more are met", (PLANS,)),
    Mutant("native-group", "kernels/cpu/native_tiles.h", "head / (call.heads / call.key_heads), row",
           "head % call.key_heads, row", "query heads read the wrong key head", (PROBLEMS,)),
    Mutant("native-band", "kernels/cpu/native_tiles.h", "std::clamp<Index>(j - band[0] + 1, from, q.lanes)",
           "std::clamp<Index>(j - band[0], from, q.lanes)", "the last query of a band loses its key", (PROBLEMS,)),
    Mutant("triton-step", "kernels/triton/primitives.py", "first += o_sub * axis[3]", "first += o_sub",
           "the second half of a dilated tile starts too early", ("whole tiles in pieces, dilated",)),
    Mutant("triton-carry", "kernels/triton/forward_kernels.py", "b_m = b_past * LOG2E", "b_m = b_past",
           "a part resumes a natural LSE as one in base 2", ("dilated ladder",)),
    Mutant("triton-pieces", "kernels/triton/forward_kernels.py", "tl.math.exp2((b_lse - b_ref) * LOG2E)",
           "tl.math.exp2(b_lse - b_ref)", "pieces of a row merge in base 2 where the LSE is natural", ("split rows",)),
    Mutant("triton-group", "kernels/triton/forward_kernels.py", "p_v += batch * sv_b + (head // group) * sv_h",
           "p_v += batch * sv_b + (head % group) * sv_h", "query heads read the values of the wrong key head",
           ("grouped key heads",)),
    Mutant("triton-int32", "kernels/triton/primitives.py", "return tile.to(tl.int64) * BLOCK, length",
           "return tile * BLOCK, length", "int32 overflow: rows beyond 2^31 elements are read elsewhere",
           ("rows far apart",)),
    Mutant("triton-delta", "kernels/triton/backward_kernels.py", "b_delta -= tl.load(p_dlse", "b_delta += tl.load(p_dlse",
           "the gradient through the LSE has the wrong sign", ("causal window",)),
    Mutant("merge-top", "ops/merge.py", "safe.log() + top", "safe.log()", "a merged LSE lacks the maximum taken out",
           ("ops/test_merge_and_rows.py",)),
    Mutant("decode-edge", "plan/closed_forms.py", "return [range(max(0, t - self.pattern.before), t + 1)]",
           "return [range(max(0, t - self.pattern.before + 1), t + 1)]", "a decoded row loses the oldest key of its window",
           ("ops/test_decode.py",)),
    Mutant("decode-sinks", "plan/closed_forms.py", "positions - self.begin + self.sinks)", "positions - self.begin)",
           "a shortened cache is read where the sinks lie", ("ops/test_decode.py",)),
    Mutant("dropout-seed", "kernels/dropout.py", "(seed >> 32) & WORD\n    stream", "0 * seed\n    stream",
           "half of the seed does nothing", ("ops/test_dropout.py", "kernels/test_positions.py")),
    Mutant("exchange-swapped", "distributed/executor.py", "RowSource(shard.key, shard.value)",
           "RowSource(shard.value, shard.key)", "K and V change places on their way", (VIRTUAL,)),
    Mutant("exchange-head", "distributed/exchange.py", "send = codes // layout.n * layout.lengths[rank] + place",
           "send = place", "rows of the first key head are sent for every head", (VIRTUAL,)),
    Mutant("exchange-home", "distributed/executor.py", "total.key.add_(key)", "total.key.copy_(key)",
           "gradients that come home replace those found there", (VIRTUAL,)),
    Mutant("exchange-fold", "ops/merge.py", "weights = (logs - top).exp_()",
           "weights = (logs - top).exp2_()", "stages fold in base 2 where the LSE is natural",
           ("distributed/test_ways.py::test_every_way_matches_the_oracle",)),
    Mutant("stale-arena", "distributed/receive_buffers.py", "torch._C._storage_Use_Count(storage._cdata) == 2",
           "torch._C._storage_Use_Count(storage._cdata) >= 2", "a buffer still in use is given out again",
           ("distributed/test_recovery.py::test_arenas_are_used_again_when_nothing_lies_in_them",)),
    Mutant("rotary-sign", "nn/positional.py", "first * cos - second * sin", "first * cos + second * sin",
           "positions turn halves apart", ("nn/test_multihead.py",)),
    Mutant("eval-dropout", "nn/attention.py", "self.attention_dropout if self.training else 0.0", "self.attention_dropout",
           "weights are dropped outside training", ("nn/test_core.py",)),
    Mutant("module-scale", "nn/attention.py", "scale=self.softmax_scale,", "scale=None,", "a module ignores its scale",
           ("nn/test_core.py",)),
    Mutant("held-group", "distributed/recovery.py", "        _forget_frames(sys.exception())\n", "",
           "an error that is being handled keeps the connections of a broken group open",
           ("hardening/test_soak.py::test_no_rank_that_lives_is_left_behind",)),
    Mutant("unknown-backend", "distributed/attention.py", "            backend_named(call.backend)\n", "            pass\n",
           "a rank without tokens names a backend that does not exist",
           ("hardening/test_soak.py::test_a_backend_that_one_rank_alone_names_is_refused_by_all",)),
    Mutant("old-marker", "ops/streaming/sinks.py", "            self.marker.unlink(missing_ok=True)\n", "            pass\n",
           "a stream that was killed as it began leaves the marker of the one before", ("hardening/test_killed.py",)),
    Mutant("bench-ratio", "tools/bench/runner.py", "ours / theirs for ours, theirs in pairs",
           "theirs / ours for ours, theirs in pairs", "every ratio of the benchmark is inverted",
           ("tools/test_tools.py::test_ratio_is_our_rate_over_the_dense_rate_of_the_same_round",)),
    Mutant("simulate-memory", "tools/simulate.py", "memory_bytes=local + max(received)", "memory_bytes=local",
           "rows that a rank receives take no memory", ("tools/test_simulate.py::test_a_billion_tokens",)),
    Mutant("gate-loose", "tools/bench/gate.py", "SPREAD = 16.0", "SPREAD = 400.0",
           "a kernel that skips 1 % of its tiles passes the gate",
           ("tools/test_tools.py::test_gate_passes_fused_rounding_and_fails_skipped_tiles",)),
    Mutant("original-keys", "models/checkpoints.py", '{re.sub(r"(^|\\.)q_ln\\.', '{re.sub(r"(^|\\.)x_ln\\.',
           "norms of the original's second line are not known",
           ("models/test_checkpoints.py::test_original_state_dicts_load",)),
    Mutant("shifted-fill", "models/torchscale.py", "pitch = -(-width // rate) * rate", "pitch = width",
           "torchscale's fill between segments is forgotten",
           ("models/test_published.py::test_shifted_segments_are_torchscales",)),
    Mutant("prepared-strides", "ops/attention.py", "value.shape, query.stride(), key.stride(), value.stride())",
           "value.shape, query.stride(), key.stride(), key.stride())",
           "a launch prepared for other strides of the values is taken", (REPEATED,)),
    Mutant("prepared-place", "ops/attention.py", "(query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16",
           "(query.data_ptr() | key.data_ptr()) % 16", "a launch prepared for aligned values reads others",
           (REPEATED,)),
    Mutant("prepared-dtype", "ops/attention.py", "*(query.dtype, key.dtype, value.dtype, device,",
           "*(query.dtype, key.dtype, device,", "values are read as another dtype", (REPEATED,)),
    Mutant("prepared-gqa", "ops/attention.py", "given, options = (query, key, value), (is_causal, scale, enable_gqa, backend)",
           "given, options = (query, key, value), (is_causal, scale, backend)",
           "grouped heads without enable_gqa are taken after a call with it", (REPEATED,)),
    Mutant("budget-dropout", "ops/memory_budget.py", "call.query.dtype, call.dropout_p > 0, call.pattern",
           "call.query.dtype, call.pattern", "memory is estimated without the tokens of dropout",
           ("nn/test_memory_budget.py::test_dropout_counts_its_tokens_whichever_call_comes_first",)),
    Mutant("stream-filler", "ops/streaming/executor.py", "return gathered.masked_fill_(filler if rows.dim()",
           "return gathered if True else gathered.masked_fill_(filler if rows.dim()",
           "filler rows of a chunk weigh keys that it does not see",
           ("ops/test_streamed.py::test_short_chunks_have_the_gradients_of_the_whole",)),
    Mutant("hopper-strides", "kernels/hopper/backward.py",
           "strides = query.stride(), key.stride(), value.stride(), output.stride()", "strides = output.stride()",
           "a backward launch reads saved tensors with the strides of the forward",
           ("kernels/test_hopper_launch.py::test_backward_follows_the_strides_of_saved_tensors",)),
    Mutant("second-derivative", "ops/attention.py", "if torch.is_grad_enabled() and not torch.compiler.is_compiling():",
           "if False:", "a gradient penalty is lost", ("ops/test_derivatives.py::test_gradient_penalty_raises",)),
    Mutant("merge-nan", "ops/merge.py", "seen = total != 0", "seen = total > 0", "a merged LSE of NaN becomes -inf",
           ("ops/test_merge_and_rows.py",)),
    Mutant("mask-meaning", "nn/masks.py", "hidden = mask <= AS_GOOD_AS_INF", "hidden = mask == 0",
           "a float mask hides what it should show", ("nn/test_multihead.py",)),
    Mutant("triton-split-carry", "kernels/triton/forward_kernels.py", "b_past = tl.where(slot < 0, b_past, NO_KEY)",
           "b_past = b_past", "every piece of a split row adds the softmax of earlier parts",
           ("split rows of a dilated ladder",)),
    Mutant("triton-split-merge", "kernels/triton/forward_kernels.py", "b_l = tl.where(b_m != NO_KEY, 1.0, 0.0)",
           "b_l = tl.where(b_m != NO_KEY, 0.0, 0.0)", "merged pieces drop the softmax of earlier parts",
           ("split rows of a dilated ladder",)),
    Mutant("triton-split-sum", "kernels/triton/backward_kernels.py",
           "b_grad = load_rows(p_sum_tile, b_exist, o_d, D, DP, True)", "b_grad = b_grad",
           "summed pieces drop the gradient of earlier parts", ("split rows of a dilated ladder",)),
    Mutant("bias-sign", "kernels/call.py", "distance = key_at[..., axis] - at[..., axis]",
           "distance = at[..., axis] - key_at[..., axis]", "later keys take the bias of earlier ones", (BIASES,)),
    Mutant("bias-samples", "kernels/call.py", "grad_scores = grad_scores.sum(0, keepdim=True, dtype=total.dtype)",
           "grad_scores = grad_scores[:1]", "the table's gradient is that of the first sample", (BIASES,)),
    Mutant("bias-wide", "kernels/cpu/tiles.py", "torch.zeros_like(call.bias, dtype=torch.float64)",
           "torch.zeros_like(call.bias)", "the table's gradient is summed in float32",
           ("ops/test_bias.py::test_table_gradients_are_summed_wide",)),
    Mutant("bias-step", "ops/decode.py", "entry = (distance + radius)", "entry = (radius - distance)",
           "a decoded row takes the bias of later keys", ("ops/test_bias.py::test_steps_are_rows_of_the_whole",)),
    Mutant("bias-head", "kernels/cpu/tiles.py", "products += call.bias[self.head].flatten()[self.bias_index]",
           "products += call.bias[0].flatten()[self.bias_index]", "all heads take the bias of the first", (BIASES,)),
    Mutant("native-bias-far", "kernels/cpu/native_tiles.h", "+ b.pad, 0, b.width + b.pad)",
           "+ b.pad, 0, b.width)", "distances beyond the table take an entry inside it", (BIASES,)),
    Mutant("native-bias-pad", "kernels/cpu/native.py", "table[..., -1] += padded[..., -pad:].sum(-1)", "pass",
           "the outermost entry lacks the gradient of larger distances", (BIASES,)),
    Mutant("native-slope", "kernels/cpu/native.cpp", "if (call.softcap) apply_slopes(w, q, tile);", "",
           "gradients lack the derivative of the soft cap", ("ops/test_softcap.py",)),
    Mutant("native-tanh", "kernels/cpu/native_lanes.h", "size < T(0.625) ?", "size < T(0) ?",
           "small scores lose their precision below a soft cap",
           ("kernels/test_cpu_backends.py::test_any_softcap_keeps_single_precision",)),
    Mutant("t5-cache", "integrations/huggingface.py", "before = mask.first_query - mask.first_key + rows - 1",
           "before = rows - 1", "distances of a cached prefix count from 0",
           ("integrations/test_huggingface_models.py::test_t5_generation_matches_eager",)),
    Mutant("bounds-where", "plan/intervals.py", "torch.where(c.high > 0, torch.minimum(x.low, y.low), y.low)",
           "torch.where(c.high > 0, x.low, y.low)", "a choice between two values has the bound of one",
           ("plan/test_intervals.py::test_each_rule_contains_every_value",)),
    Mutant("bounds-wrap", "plan/intervals.py", "if drift and not bool(fits.all()):", "if False:",
           "values that wrap around count as functions of the distance",
           ("plan/test_intervals.py::test_each_rule_contains_every_value",)),
    Mutant("bounds-copy", "plan/intervals.py", "is_interval(tensor) or not tensor.numel() for",
           "is_interval(tensor) for", "the truth of a copy of positions is read",
           ("plan/test_intervals.py::test_reading_a_truth_value_has_no_trace",)),
    Mutant("bounds-caught", "plan/intervals.py", "            self.has_refused = True\n", "",
           "a function that catches errors is planned by its other branch",
           ("plan/test_intervals.py::test_functions_without_bounds_are_evaluated_pair_by_pair",)),
    Mutant("multiplicity-bound", "plan/closed_forms.py", "(low >= 1) & (high <= self.pattern.max_multiplicity)",
           "(low >= 1)", "tiles whose pairs all count too often are accepted",
           ("plan/test_user_patterns.py::test_multiplicities_above_their_bound_are_refused",)),
    Mutant("function-key-dead", "patterns/base.py", "own is not None and own is other._object()",
           "own is other._object()", "functions of two values that are gone are equal",
           ("patterns/test_own.py::test_functions_of_new_captured_values_differ",)),
    Mutant("fit-heads", "nn/adaptive/scorer.py", "Moments(*(x.sum(0, keepdim=True) for x in moments))",
           "Moments(*(x[:1] for x in moments))", "a shared scorer is fitted to the first head",
           ("nn/test_adaptive_start.py::test_a_shared_fit_counts_every_head",)),
    Mutant("match-there", "kernels/cpu/native_match.h", "Index end = there ? u : m.units;", "Index end = m.units;",
           "sub-blocks of padding match", ("kernels/test_native.py::test_best_matches_equal_the_maximum_of_all_pairs",)),
    Mutant("match-nan", "kernels/cpu/native_match.h", "best.nan[p] = sum[r][p] == sum[r][p] ? best.nan[p] : sum[r][p];", "",
           "a match that is not a number is lost",
           ("kernels/test_native.py::test_best_matches_keep_nan_in_its_block_and_infinities",)),
    Mutant("choose-ties", "kernels/cpu/native_choose.h", "for (Index i = many; surplus > 0 && i-- > 0;)",
           "for (Index i = 0; surplus > 0 && i < many; ++i)", "of equal scores the last blocks are chosen",
           ("kernels/test_native.py::test_chosen_blocks_are_the_first_of_the_best",)),
    Mutant("choose-zeros", "kernels/cpu/native_choose.h", "score + 0.0f", "score", "zeros are ranked by their sign",
           ("kernels/test_native.py::test_chosen_blocks_are_the_first_of_the_best",)),
    Mutant("rank-width", "selection/rank.py", "max(int(own.max()), 1)", "max(int(own.max()) - 1, 1)",
           "rows do not rank the block before their own",
           ("ops/test_selection.py::test_causal_rows_rank_only_blocks_before_them",)),
    Mutant("guard-pad", "nn/adaptive/guard.py", "return weights if padding is None else weights", "return weights if True else weights",
           "a guard counts the queries of padding", (GUARDS,)),
    Mutant("guard-counts", "nn/adaptive/guard.py", "slot >= counts[..., None], blocks", "slot >= slots, blocks",
           "a guard compares as many blocks of every row as the longest list has", (GUARDS,)),
    Mutant("guard-shared", "nn/adaptive/guard.py", "return forced, within & ~forced & visible", "return forced, within & visible",
           "a guard spends the list of a row on blocks that it has anyway", (GUARDS,)),
    Mutant("mha-reset", "nn/multihead.py", 'draws = ("sink", nn.init.zeros_), ("bias_k", nn.init.xavier_normal_), ("bias_v", nn.init.xavier_normal_)',
           'draws = ("sink", nn.init.zeros_), ("bias_k", nn.init.xavier_normal_)',
           "the extra value of add_bias_kv is not drawn anew", ("nn/test_masks.py",)),
    Mutant("stream-about", "ops/streaming/executor.py", 'at scale {self.scale!r}{terms}")', 'at scale {self.scale!r}")',
           "a file of another soft cap is continued",
           ("ops/test_streamed.py::test_a_file_of_another_stream_is_not_resumed",)),
    Mutant("block-shares", "selection/scores.py", "shares = (scores - total).logsumexp(3)", "shares = scores.logsumexp(3)",
           "queries with large scores decide for their block",
           ("nn/test_adaptive_learning.py::test_blocks_of_queries_learn_what_their_queries_seek",)),
    Mutant("absent-rows", "selection/scores.py", "absent = absent | ~self.present", "absent = absent & ~self.present",
           "queries of padding select for their block", ("nn/test_adaptive.py::test_padding_takes_no_part_in_the_choice",)),
    Mutant("distill-own", "selection/distill.py", '"with_own": scores.settings.budget.coverage is not None',
           '"with_own": True', "distillation is spent on the level of a row's scores",
           ("nn/test_adaptive_learning.py::test_every_parameter_gets_a_gradient",)),
    Mutant("distill-lists", "selection/types.py", "rows * row_tokens // self.block_size", "rows // self.block_size",
           "queries are compared on the lists of other blocks",
           ("nn/test_adaptive_learning.py::test_scorer_gradient_is_that_of_the_documented_loss",)),
)  # fmt: skip
QUICK = ("merge-top", "module-scale", "last-block")
"""Mutants planted by the test suite."""


def half(seed: str) -> tuple[Mutant, ...]:
    """Pseudo-random half of the mutants, rounded up, in list order.

    Mutants are ranked by a hash of the seed and their name, so that a mutant added later displaces at most one other.
    """
    ranked = sorted(MUTANTS, key=lambda mutant: hashlib.sha256(f"{seed}/{mutant.name}".encode()).digest())
    chosen = set(ranked[: -(-len(MUTANTS) // 2)])
    return tuple(mutant for mutant in MUTANTS if mutant in chosen)


def misfit(mutant: Mutant, root: Path = ROOT) -> str | None:
    """Why a mutant cannot be planted; None when it can."""
    times = (root / mutant.path).read_text(encoding="utf-8").count(mutant.old)
    return None if times == 1 else f"{mutant.name}: its text must stand once in {mutant.path}, found {times} times"


@contextmanager
def scratch() -> Iterator[Path]:
    """A copy of the code and its tests."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
            else:
                shutil.copy(source, copy / name)
        yield copy


def run(mutant: Mutant, copy: Path) -> Verdict:
    """Run the tests of a mutant in the copy as it is."""
    began = time.perf_counter()
    paths = os.pathsep.join(str(copy / name) for name in ("src", "tests"))
    environment = os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment["HYPOTHESIS_PROFILE"] = "planted"
    environment.pop("PYTEST_ADDOPTS", None)
    if mutant.native:
        # A library with a bug must not enter the cache that other processes use.
        environment["XDG_CACHE_HOME"] = str(copy / "cache")
        build = [sys.executable, "-m", "dilated_attention_pytorch.kernels.cpu.native"]
        subprocess.run(build, cwd=copy, env=environment, check=True, capture_output=True)
    judge = _interpreted if mutant.interpreted else _tested
    failed = f"none ended within {TIMEOUT} s, twice"
    for _ in range(2):
        try:
            failed = judge(mutant, copy, environment)
        except subprocess.TimeoutExpired as expired:
            # A bug may loop for ever; a process that stalls once and not again tells nothing of the bug.
            said = expired.stderr or b""
            print(f"{mutant.name}: no end within {TIMEOUT} s\n{said.decode(errors='replace')}", file=sys.stderr)
        else:
            break
    return Verdict(failed, round(time.perf_counter() - began, 1))


def _ended(command: list[str], copy: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command; one that takes too long ends with all it started.

    A process that outlives its parent, as a rank of a distributed test may, holds the pipe open: to wait for the end of
    what is written there would be to wait for it.
    """
    pipe = subprocess.PIPE
    child = subprocess.Popen(
        command, cwd=copy, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    with child:
        try:
            out, err = child.communicate(timeout=TIMEOUT)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, child.returncode, out, err)


def _tested(mutant: Mutant, copy: Path, environment: dict[str, str]) -> str | None:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # Where CI is set, pytest explains a failed comparison of two long lists in full, which takes minutes.
    command += ["--assert=plain", "-o", f"faulthandler_timeout={TIMEOUT - 10}"]
    chosen = [f"tests/{name}" for name in mutant.tests]
    done = _ended([*command, *chosen], copy, environment)
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        # A bug that writes out of bounds may end the process before any test fails.
        return f"{chosen[0]}: ended by signal {-done.returncode}"
    found = re.search(r"^FAILED (\S+?\.py::.*?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or found is None:
        raise RuntimeError(
            f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return found.group(1)


def _interpreted(mutant: Mutant, copy: Path, environment: dict[str, str]) -> str | None:
    for trial in mutant.tests:
        done = _ended([sys.executable, "tests/kernels/interpret_triton.py", trial], copy, environment)
        if done.returncode:
            # A kernel that reads where nothing is may end the process.
            if "KeyError" in done.stderr:
                raise RuntimeError(f"{mutant.name}: there is no trial {trial!r}")
            return f"{INTERPRETED}[{trial}]"
        found = json.loads(done.stdout.splitlines()[-1])
        if any(not error <= TOLERANCE for what, error in found.items() if what != "trial"):
            return f"{INTERPRETED}[{trial}]"
    return None


def plant(mutant: Mutant, copy: Path) -> Verdict:
    """Run the tests of a mutant with its bug in the copy, which is mended again."""
    if (reason := misfit(mutant, copy)) is not None:
        raise RuntimeError(reason)
    file = copy / mutant.path
    sound = file.read_text(encoding="utf-8")
    file.write_text(sound.replace(mutant.old, mutant.new), encoding="utf-8")
    try:
        return run(mutant, copy)
    finally:
        file.write_text(sound, encoding="utf-8")


def _keep(lines: list[dict[str, Any]], out: Path) -> None:
    """Write what was found, beside what is known of mutants that were not planted this time."""
    known = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []
    by_name = {line["mutant"]: line for line in [*known, *lines]}
    write(out, "".join(json.dumps(by_name[m.name]) + "\n" for m in MUTANTS if m.name in by_name))


def main() -> int:
    """Plant the mutants asked for; 0 when every one was caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--only", nargs="+", choices=[m.name for m in MUTANTS], metavar="NAME", help="names of mutants")
    some.add_argument("--half", nargs="?", const="", metavar="SEED", help="a random half; default seed: the commit")
    parser.add_argument("--check", action="store_true", help="only check that every mutant fits the code")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "mutants.jsonl")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if options.only is None or m.name in options.only]
    if options.half is not None:
        seed = options.half or git_sha() or time.strftime("%Y-%m-%d", time.gmtime())
        chosen = list(half(seed))
        print(f"{len(chosen)} of {len(MUTANTS)} mutants, seed {seed}", flush=True)
    reasons = [reason for m in chosen if (reason := misfit(m)) is not None]
    if reasons or options.check:
        print("\n".join(reasons) or f"all {len(chosen)} mutants fit the code")
        return bool(reasons)
    lines, sound = [], set[tuple[str, ...]]()
    # Tests have the one thread that `run` gives them.
    known = facts("cpu") | {"threads": 1}
    with scratch() as copy:
        for mutant in chosen:
            if mutant.tests not in sound:
                before = run(mutant, copy)
                if before.failed is not None:
                    raise RuntimeError(f"{mutant.name}: {before.failed} fails without the mutant too")
                sound.add(mutant.tests)
            verdict = plant(mutant, copy)
            caught = verdict.failed is not None
            line = {"mutant": mutant.name, "file": mutant.path, "what": mutant.what, "caught": caught}
            lines.append(line | {"by": verdict.failed, "seconds": verdict.seconds} | known)
            print(
                f"{'caught  ' if caught else 'SURVIVES'} {mutant.name:<17} {verdict.seconds:6.1f} s  {verdict.failed}",
                flush=True,
            )
    _keep(lines, options.out)
    survivors = [line["mutant"] for line in lines if not line["caught"]]
    print(
        f"{len(lines) - len(survivors)} of {len(lines)} caught"
        + (f"; missing tests: {', '.join(survivors)}" if survivors else "")
    )
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
