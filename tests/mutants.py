"""Mutants: rules of octavo and its benchmarks, each broken once, and the fast test that must then fail; no test file.

`python -m tests.mutants [NAME ...]` breaks one rule at a time in a copy of the tree and runs its test, of which a case
must fail by an assertion. It exits with 1 where a mutant survives, or its old text is not found exactly once.
"""

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NUM_WORKERS = 2
FAILURES = "mutant-failures.txt"  # in the copy: a line a failure, "assertion" or the exception's name

# fmt: off
# (the file, the test that names the rule, {mutant: (old text, new text)})
TABLE: tuple[tuple[str, str, dict[str, tuple[str, str]]], ...] = (
    ("octavo/numerics/formats.py", "tests/numerics/test_formats.py::test_published_limits", {
        "e4m3-max-240": ("max=info.max,", 'max=240.0 if name == "e4m3" else info.max,')}),
    ("octavo/run/optimizer.py", "tests/train/test_lora.py::test_run_learns_beside_a_base_that_stays", {
        "frozen-codes-at-each-step": ("trained_only=True", "trained_only=False")}),
    ("octavo/nn/adapted_linear.py", "tests/train/test_lora.py::test_gradients_are_those_of_plain_torch", {
        "adapters-without-alpha": ("down, b.t(), alpha=self.scale", "down, b.t(), alpha=1.0")}),
    ("octavo/train/lora.py", "tests/train/test_lora.py::test_merged_model_is_base_and_adapters", {
        "merged-under-the-base-s-scale": ("own.source.is_scaled = False", "pass")}),
    ("octavo/ops/attention/kv_scales.py",
     "tests/ops/attention/test_attention.py::test_a_calibrated_scale_is_amax_over_448", {
        "kv-max-240": ("FP8_MAX = torch.finfo(torch.float8_e4m3fn).max", "FP8_MAX = 240.0")}),
    ("octavo/numerics/delayed.py", "tests/numerics/test_delayed.py::test_old_amax_leaves_the_window", {
        "history-without-newest": ("rows = history if", "rows = history[:-1] if"),
        "history-without-staged": ("rows = history if", "rows = history[1:] if")}),
    ("octavo/numerics/delayed.py",
     "tests/numerics/test_delayed.py::test_callable_sees_the_staged_row_before_the_roll", {
        "history-rolls-twice": ("shifts=-1", "shifts=-2"),
        "scale-after-roll": ("reduce_history(history, recipe)\n", "reduce_history(history.roll(-1, 0), recipe)\n")}),
    ("octavo/nn/delayed.py", "tests/nn/test_scale_updates.py::test_micro_batches_of_a_step_are_one_update", {
        "scales-of-each-micro-batch": ("elif recipe.updates_at_steps:", "elif False:")}),
    ("octavo/nn/scale_updates.py",
     "tests/nn/test_scale_updates.py::test_a_step_that_is_not_the_models_changes_no_scale", {
        "scales-in-the-backward": ("if torch._C._current_graph_task_id() == -1:", "if True:")}),
    ("octavo/nn/weights/version.py",
     "tests/nn/test_scale_updates.py::test_a_step_that_is_not_the_models_changes_no_scale", {
        "scales-at-any-step": ("if model.note_step(held)]", "if model.note_step(held) or True]")}),
    ("octavo/nn/scale_updates.py",
     "tests/parallel/test_delayed_ranks.py::test_sharded_training_has_the_bits_of_one_process", {
        "amaxes-of-one-rank": ("            reduce_largest(flat, group)\n", "            pass\n")}),
    ("octavo/rl/engines/dealt.py", "tests/rl/test_ranks.py::test_a_run_on_ranks_has_the_bits_of_one_process", {
        "noise-of-own-requests": ("num_requests = num_before + first", "num_requests = num_before")}),
    ("octavo/rl/ranks.py", "tests/rl/test_ranks.py::test_a_run_on_ranks_has_the_bits_of_one_process", {
        "weights-of-each-rank": ("    mesh.broadcast(model.parameters())\n", "")}),
    ("octavo/rl/learner.py", "tests/rl/test_ranks.py::test_a_run_on_ranks_has_the_bits_of_one_process", {
        "routers-of-one-rank": ("self.routers.add(of_routers)", "self.routers.add(own_sums[0][1])")}),
    ("octavo/numerics/scaling.py", "tests/numerics/test_scaling.py::test_ragged_blocks_are_padded_with_zeros", {
        "ragged-block-wraps": ("torch.nn.functional.pad(x, (0, pad_cols, 0, pad_rows))",
                               "x[torch.arange(rows + pad_rows) % rows][:, torch.arange(cols + pad_cols) % cols]")}),
    ("octavo/ops/quantize/triton/device.py", "tests/testing/test_interpreter.py::test_casts_and_ragged_blocks", {
        "kernel-reads-neighbours": ("widen(tl.load(places, mask=is_in, other=0.0))", "widen(tl.load(places))")}),
    ("octavo/integrations/huggingface.py",
     "tests/integrations/test_huggingface.py::test_the_trainers_losses_are_plain_torchs", {
        "trainer-resumes-without-scales": ("octavo.nn.load_fp8_state_dict(model, load_file(path))", "pass")}),
    ("octavo/integrations/huggingface.py",
     "tests/integrations/test_huggingface.py::test_a_saved_model_is_a_plain_one", {
        "octavo-in-config-json": (
            "convert(model, config.recipe, ignore=config.ignore, overrides=config.overrides)",
            "convert(model, config.recipe); model.config.quantization_config = {'quant_method': 'octavo'}")}),
    ("octavo/integrations/huggingface.py",
     "tests/integrations/test_huggingface.py::test_the_callback_reports_logs_and_changes_levels", {
        "level-of-the-first-step": ("level = started[-1] if", "level = started[0] if")}),
    ("octavo/nn/conversion.py",
     "tests/nn/test_autocast_convert.py::test_a_model_with_adapters_is_refused_and_left_alone", {
        "adapters-in-fp8": ("_refuse_adapters(model)\n", "pass\n")}),
    ("octavo/nn/transposed_linear.py", "tests/nn/test_transposed_linear.py::test_gpt2_has_the_bits_of_linears", {
        "conv1d-learns-nothing": ("self.weight.t()", "self.weight.detach().t()")}),
    ("octavo/nn/fused_experts.py", "tests/nn/test_fused_experts.py::test_an_expert_is_quantized_as_it_would_be_alone", {
        "gate-and-up-share-blocks": ("(rows // 2, rows // 2) if is_pair else (rows,)", "(rows,)")}),
    ("octavo/nn/fused_experts.py", "tests/nn/test_fused_experts.py::test_outputs_and_gradients_are_the_experts", {
        "bias-of-the-expert-before": ("device=device), right=True)", "device=device), right=False)"),
        "experts-weigh-alike": ("CombineFunction.apply(x, weights.float(), routing)",
                                "CombineFunction.apply(x, weights.float() * 0 + 0.5, routing)")}),
    ("octavo/numerics/quantized.py", "tests/ops/quantize/test_reference.py::test_scales_run_along_rows_and_columns", {
        "scale-of-other-axis": ("block_amax(x, ", "block_amax(x.t().reshape(x.shape), ")}),
    ("octavo/ops/quantize/reference.py",
     "tests/ops/quantize/test_reference.py::test_scales_run_along_rows_and_columns", {
        "columns-scale-of-rows": ("rows(x.t(), scaling, quant_scale, amax_out)\n",
                                  "(rows(x.t(), scaling)[0], rows(x.reshape(*x.shape[::-1]), scaling)[1])\n")}),
    ("octavo/nn/functional/linear.py", "tests/nn/test_linear.py::test_backward_operands_are_made_of_the_source", {
        "wgrad-input-of-codes": (
            "return quantize_both(x, recipe.input, column_scaling=recipe.input_for_grad_weight, **known)",
            "return (q := quantize(x, recipe.input, **known)), quantize_columns(q.dequantize(x.dtype), recipe.input)"),
        "wgrad-grad-of-codes": ("return quantize_both(grad, recipe.grad_output, **known)",
            "return (q := quantize(grad, recipe.grad_output)), quantize_columns(q.dequantize(), recipe.grad_output)")}),
    ("octavo/ops/attention/__init__.py", "tests/ops/attention/test_attention.py::test_prefill_applies_both_scales", {
        "kv-packed-unscaled": ("if not exact:\n        k, v = (_decode(x, s, q.dtype)",
                               "if not exact:\n        k, v = (x.to(q.dtype)"),
        "kv-paged-unscaled": ("not is_fp8:\n        k, v = (_decode(x, s, q.dtype)",
                              "not is_fp8:\n        k, v = (x.to(q.dtype)")}),
    ("octavo/ops/attention/reference.py", "tests/ops/attention/test_attention.py::test_prefill_applies_both_scales", {
        "k-unscaled": ("product * k_scale[:, :, None, keys] *", "product *"),
        "v-unscaled": ("weights = p * v_scale", "weights = p")}),
    ("octavo/ops/attention/cache.py", "tests/ops/attention/test_attention.py::test_prefill_applies_both_scales", {
        "kv-known-scale-dropped": ("known.scale[role].expand(tokens, heads).clone()", "torch.ones(tokens, heads)")}),
    ("octavo/ops/attention/kv_read/reference.py",
     "tests/ops/attention/kv_read/test_kv_read.py::test_what_was_written", {
        "kv-read-unscaled": ("codes.float() * scale[page, :, offset][..., None]", "codes.float()")}),
    ("octavo/nn/attention_context.py", "tests/nn/test_modules.py::test_a_fast_pass_applies_both_kv_scales", {
        "kv-trainer-unscaled": ("codes.float() * scale[..., None]", "codes.float()")}),
    ("octavo/ops/gemm/scaled_mm/exact.py",
     "tests/ops/gemm/scaled_mm/test_exact.py::test_every_size_is_checked_before_its_first_product", {
        "exact-size-unchecked": ("if known is None or size not in known:", "if known is None:")}),
    ("octavo/nn/weights/write_watch.py", "tests/nn/test_check_weights.py::test_a_write_in_the_first_hundred_steps", {
        "watch-of-100-uses": ("if (version, step) != (self._version, self._step):", "if True:")}),
    ("octavo/nn/weights/cached.py", "tests/nn/test_linear.py::test_weight_is_quantized_once_a_version", {
        "codes-of-older-version": ("is weight and key == self._key and (", "is weight and (")}),
    ("octavo/serve/engine/engine.py", "tests/serve/test_new_weights.py::test_an_optimizer_of_ones_own_needs_no_call", {
        "pages-of-older-weights": ("self._model_state.now() != self._known_state", "False")}),
    ("octavo/nn/weights/version.py", "tests/serve/test_new_weights.py::test_an_optimizer_of_ones_own_needs_no_call", {
        "steps-of-optimizers-unseen": ("if model.note_step(held)]", "if False]"),
        "steps-of-other-models-count": ("any(id(parameter) in held for", "any(True for")}),
    ("octavo/nn/live_weights.py", "tests/rl/test_refit.py::test_no_code_is_stale_after_a_refit", {
        "refit-keeps-codes": ("            child.source.renew(child.weight, child.plan_for(recipe))\n"
                              "            found += child.quantized_weight(recipe)\n",
                              "            found += [q for _, q in child.source._forward or []]\n")}),
    ("octavo/weights/refit.py", "tests/rl/test_refit.py::test_no_code_is_stale_after_a_refit", {
        "refit-renews-nothing": ("codes = renew_codes(sampler)", "codes = []"),
        "refit-of-a-view-keeps-codes": ("        sampler.mark_weights_updated()\n", "")}),
    ("octavo/rl/correction.py", "tests/rl/test_correction.py::test_no_weight_is_above_the_configured_cap", {
        "tis-uncapped": ("rollout_logprobs).exp().clamp(max=cap)", "rollout_logprobs).exp()"),
        "tis-cap-not-the-config-s": ("rollout_logprobs, section.cap)", "rollout_logprobs)"),
        "tis-of-sequences-uncapped": ("LOG_RATIO_BOUND).exp().clamp(max=cap)", "LOG_RATIO_BOUND).exp()")}),
    ("octavo/rl/advantage.py", "tests/rl/test_advantage.py::test_distances_over_the_standard_deviation", {
        "grpo-without-std": ("centred / (rewards.std() + STD_EPS) if", "centred if")}),
    ("octavo/rl/advantage.py", "tests/rl/test_advantage.py::test_the_config_asks_for_the_standard_deviation", {
        "grpo-std-never": ('by_std = algorithm.name == "grpo" and', "by_std = False and"),
        "grpo-std-always": ('by_std = algorithm.name == "grpo" and', "by_std = True or")}),
    ("octavo/rl/learner.py", "tests/rl/test_learner.py::test_the_learning_rate_of_each_update", {
        "rl-lr-next-step": ("(self.num_updates + 1) /", "(self.num_updates + 2) /"),
        "rl-lr-last-step": ("(self.num_updates + 1) /", "self.num_updates /")}),
    ("octavo/rl/learner.py", "tests/rl/test_learner.py::test_every_logprob_is_of_the_rollout_s_temperature", {
        "temperature-1-in-loss": ("rollouts, self.config.rollout.temperature)", "rollouts, 1.0)"),
        "temperature-1-before-update": ("self.model, rollouts, temperature", "self.model, rollouts, 1.0"),
        "temperature-1-in-reference": ("self.reference, rollouts, temperature", "self.reference, rollouts, 1.0")}),
    ("octavo/rl/learner.py", "tests/rl/test_learner.py::test_the_loss_is_the_mean_that_the_config_names", {
        "rl-mean-of-means": ("= self.config.algorithm.loss_aggregation,", '= "seq-mean-token-mean",'),
        "rl-mean-over-rejected": ("is_kept=own, max_tokens=limit", "max_tokens=limit")}),
    ("octavo/rl/losses.py", "tests/rl/test_correction.py::test_rejected_tokens_count_nowhere", {
        "rl-mean-counts-rejected": ("kept / kept.sum().clamp_min(1)", "kept / kept.numel()")}),
    ("octavo/rl/warmup.py", "tests/rl/test_warmup.py::test_its_token_mean_and_the_learning_rate_of_each_step", {
        "warm-start-lr-last-step": ("step / LR_WARMUP_STEPS", "(step - 1) / LR_WARMUP_STEPS"),
        "warm-start-mean-of-means": ("for answer in answers])", 'for answer in answers], "seq-mean-token-mean")')}),
    ("octavo/rl/learner.py", "tests/rl/test_loop.py::test_an_infinity_that_fp8_hides_updates_nothing", {
        "rl-infinity-unseen": ("self.mesh.any(bool(is_infinite)) or not (", "not (")}),
    ("octavo/rl/warmup.py", "tests/rl/test_warmup.py::test_an_infinity_that_fp8_hides_stops_it", {
        "warm-start-infinity-unseen": ("if is_infinite or not (", "if not (")}),
    ("octavo/train/loop.py",
     "tests/test_cli_errors.py::test_a_folder_that_cannot_be_written_is_refused_before_any_work", {
        "train-folder-unasked": ('    check_writable(config.run.dir, "run.dir")\n', "")}),
    ("octavo/rl/loop.py",
     "tests/test_cli_errors.py::test_a_folder_that_cannot_be_written_is_refused_before_any_work", {
        "rl-folder-unasked": ('    check_writable(config.run.dir, "run.dir")\n', "")}),
    ("octavo/train/loop.py", "tests/train/test_full_disk.py::test_a_disk_without_room_for_a_checkpoint_is_refused", {
        "train-room-unasked": ('"run.dir", num_bytes=num_bytes)', '"run.dir")')}),
    ("octavo/train/schedule.py", "tests/train/test_schedule.py::test_warm_up_is_linear_and_reaches_the_peak", {
        "lr-warm-up-from-0": ("peak * (step + 1) /", "peak * step /")}),
    ("octavo/train/schedule.py", "tests/train/test_schedule.py::test_decay_falls_to_the_floor_at_the_last_step", {
        "lr-decay-one-longer": ("max(num_steps - 1 -", "max(num_steps -")}),
    ("octavo/train/loop.py", "tests/train/test_loop.py::test_every_update_has_the_learning_rate_of_its_own_step", {
        "lr-next-step": ("lr = learning_rate(step,", "lr = learning_rate(step + 1,"),
        "lr-last-step": ("lr = learning_rate(step,", "lr = learning_rate(step - 1,"),
        "lr-reported-next-step": ("lr=learning_rate(step - 1,", "lr=learning_rate(step,")}),
    ("octavo/train/step.py", "tests/train/test_step.py::test_the_loss_is_one_mean_over_all_targets", {
        "mean-over-all-tokens": ("sum(batch.num_targets for", "sum(len(batch.targets) for"),
        "mean-of-means": (" / num_targets\n", " / batch.num_targets / len(batches)\n")}),
    ("octavo/train/evaluate.py", "tests/train/test_step.py::test_a_validation_is_the_mean_over_its_targets", {
        "validation-over-all-tokens": ("sum(batch.num_targets for", "sum(len(batch.targets) for")}),
    ("octavo/nn/cross_entropy.py", "tests/nn/test_cross_entropy.py::test_reductions", {
        "cross-entropy-over-all-tokens": ("(targets != ignore_index).sum().clamp_min(1)", "targets.numel()")}),
    ("octavo/models/scoring.py", "tests/models/test_decoder.py::test_sequence_logprobs_are_log_softmax_of_the_logits", {
        "temperature-1-in-scoring": ("temperature=temperature,", "temperature=1.0,")}),
    ("octavo/run/metrics.py", "tests/run/test_metrics.py::test_sync_puts_the_rows_on_the_disk", {
        "metrics-unsynced": ("os.fsync(self._whole_file().fileno())", "self._whole_file()")}),
    ("octavo/run/atomic.py", "tests/models/test_written_whole.py::test_a_file_is_on_the_disk_before_it_is_renamed", {
        "file-unsynced": ("                os.fsync(file.fileno())\n", ""),
        "file-s-entry-unsynced": ("        sync_to_disk(path.parent)\n", ""),
        "file-deleted-first": ("os.replace(staging, path)", "(path.unlink(), os.replace(staging, path))")}),
    ("octavo/run/atomic.py", "tests/run/test_atomic.py::test_a_removed_folder_loses_its_name_first", {
        "folder-removed-under-its-name": ("removed = path.with_name(", "removed = path or path.with_name(")}),
    ("octavo/models/checkpoint/atomic.py",
     "tests/models/test_written_whole.py::test_a_folder_is_on_the_disk_before_it_takes_its_name", {
        "folder-s-files-unsynced": ('(*staging.rglob("*"), staging)', "(staging,)"),
        "folder-unsynced": ('(*staging.rglob("*"), staging)', 'staging.rglob("*")'),
        "folder-s-entry-unsynced": ("        sync_to_disk(target.parent)\n", ""),
        "no-fsync": ("os.fsync(descriptor)", "pass")}),
    ("octavo/models/checkpoint/atomic.py", "tests/models/test_written_whole.py::test_an_old_folder_is_deleted_last", {
        "folder-deleted-first": ("    target.rename(old)\n", "    shutil.rmtree(target)\n")}),
    ("octavo/serve/http/service.py", "tests/serve/http/test_refusals.py::test_no_part_of_a_key_opens_a_route", {
        "key-by-its-prefix": ("secrets.compare_digest(", "(lambda given, key: key.startswith(given))("),
        "key-and-more": ("secrets.compare_digest(", "bytes.startswith(")}),
    ("octavo/serve/http/chat.py", "tests/serve/http/test_refusals.py::test_no_part_of_a_key_opens_a_route", {
        "chat-without-key": ("dependencies=[Depends(require_api_key)]", "")}),
    ("octavo/serve/http/weights.py", "tests/serve/http/test_refusals.py::test_no_part_of_a_key_opens_a_route", {
        "weights-without-key": (", dependencies=[Depends(require_admin_key)]", "")}),
    ("octavo/serve/http/config.py",
     "tests/serve/http/test_schema_trials.py::test_a_worker_that_is_killed_is_replaced", {
        "schema-of-an-hour": ("schema_timeout_s: float = 10.0", "schema_timeout_s: float = 3600.0"),
        "schema-of-64-gib": ("max_schema_memory_bytes: int = 1 << 30", "max_schema_memory_bytes: int = 1 << 36")}),
    ("octavo/serve/http/body.py", "tests/serve/http/test_connections.py::test_requests_that_trickle_are_ended", {
        "body-without-time-out": ("asyncio.timeout(config.body_timeout_s)", "asyncio.timeout(None)")}),
    ("octavo/serve/http/connections.py", "tests/serve/http/test_connections.py::test_requests_that_trickle_are_ended", {
        "head-without-time-out": ("call_later(self.limits.head_timeout_s, self._end_slow_client)",
                                  "call_later(1e9, self._end_slow_client)")}),
    ("octavo/serve/http/config.py",
     "tests/serve/http/test_connections.py::test_the_limits_of_time_are_those_of_the_docs", {
        "body-of-an-hour": ("body_timeout_s: float = 60.0", "body_timeout_s: float = 3600.0")}),
    ("octavo/serve/http/connections.py",
     "tests/serve/http/test_pipelines.py::test_one_pipelined_request_begins_at_a_time", {
        "pipes-begin-at-once": ("            self.turns.join(self)\n", "            self.take_turn()\n"),
        "pipe-is-read-on": ("self.flow.pause_reading()\n            self.turns", "self.turns")}),
    ("octavo/serve/http/connections.py",
     "tests/serve/http/test_pipelines.py::test_all_pipelined_requests_are_answered_in_turns", {
        "last-come-first": ("next(iter(self._waiting))", "next(reversed(self._waiting))"),
        "turn-leaves-paused": ("self.flow.resume_reading()\n            super", "super")}),
    ("octavo/serve/http/connections.py",
     "tests/serve/http/test_pipelines.py::test_half_a_request_behind_a_half_close_ends_the_connection", {
        "half-closed-loses-its-turn": ("response_complete and self not in self.turns:", "response_complete:"),
        "half-closed-stays": ("if self._is_half_closed and", "if False and")}),
    ("octavo/serve/http/connections.py", "tests/serve/http/test_pipelines.py::test_lost_connections_take_no_turn", {
        "lost-connections-keep-turns": ("        self.turns.leave(self)\n", "")}),
    ("bench/serve/hostile_load.py", "tests/bench/test_hostile_load.py::test_the_docs_table_names_every_attack", {
        "attack-without-a-row": ("pipelined_requests, leaving_clients),", "pipelined_requests),")}),
    ("bench/serve/hostile_load.py", "tests/bench/test_hostile_load.py::test_long_texts_reach_a_tokenizer", {
        "no-text-is-tokenized": ("(5 * MEGABYTE, 3 * MEGABYTE)", "(5 * MEGABYTE, 5 * MEGABYTE)")}),
    ("octavo/serve/http/page.html",
     "tests/serve/http/test_page_script.py::test_a_character_of_several_tokens_is_one_with_all_their_details", {
        "page-shows-half-characters": ('  if (token === "") return;\n', ""),
        "page-drops-half-characters": ('  parts.push({ token, logprob, top });\n  if (token === "") return;\n',
                                       '  if (token === "") return;\n  parts.push({ token, logprob, top });\n')}),
    ("octavo/report/page.py", "tests/rl/test_report.py::test_plots_are_small_multiples_in_two_columns", {
        "report-in-one-column": ("repeat(2,minmax(0,1fr))", "repeat(1,minmax(0,1fr))")}),
    ("octavo/nn/conversion.py", "tests/nn/test_other_products.py::test_a_convolutions_share_is_not_claimed", {
        "convolution-as-a-linear": ('return math.nan if self.kind == "convolution" else 2', "return 2")}),
    ("bench/record_age.py", "tests/bench/test_measured.py::test_every_record_says_what_code_it_measures", {
        "peers-without-age": ('"peers": _ENGINE,', '"peers": (),')}),
    ("bench/rl_matrix/variants.py",
     "tests/bench/test_rl_matrix.py::test_variants_that_compare_corrections_roll_out_in_one_format", {
        "corrections-of-two-recipes": (', *_TIS),\n    "exact"', ', *_TIS, "rollout.recipe=rowwise"),\n    "exact"'),
        "corrections-of-two-kv-scales": (', *_TIS),\n    "exact"',
                                         ', *_TIS, "rollout.kv_scales=engine"),\n    "exact"')}),
    ("bench/rl_matrix/variants.py",
     "tests/bench/test_rl_matrix.py::test_a_group_of_corrections_has_every_variant_and_three_seeds", {
        "corrections-of-one-seed": ('"small",\n        3,', '"small",\n        1,'),
        "corrections-without-exact": ('    "exact": _EXACT,\n}', "}"),
        "corrections-without-bf16": ('    "bf16": _BF16,\n    "uncorrected"', '    "uncorrected"')}),
    ("bench/serve/offline.py", "tests/bench/test_serve.py::test_the_command_runs_a_toy_and_writes_its_record", {
        "serving-row-of-one-run": ("_NUM_RUNS = 3", "_NUM_RUNS = 1")}),
    ("bench/rl/workloads.py", "tests/bench/test_rl.py::test_a_whole_step_is_timed_five_times", {
        "two-whole-steps": ("minibatches=4,\n        passes=5,", "minibatches=4,\n        passes=2,")}),
    ("bench/training/convergence.py", "tests/bench/test_broken_recipes.py::test_the_gate_is_a_quarter_of_a_percent", {
        "convergence-gate-0.29": ("MAX_MEAN_PERCENT = 0.25", "MAX_MEAN_PERCENT = 0.29"),
        "convergence-gate-of-one-side": ("abs(self.mean) <=", "self.mean <=")}),
    ("bench/training/convergence.py",
     "tests/bench/test_broken_recipes.py::test_the_gate_complains_of_a_mistake_that_it_does_not_see", {
        "convergence-without-mistakes": ("MUST_FAIL = (BROKEN, *ORIGINALS)", "MUST_FAIL = (BROKEN,)")}),
    ("bench/training/perplexity.py",
     "tests/bench/test_perplexity.py::test_the_command_trains_three_seeds_of_each_kind", {
        "perplexity-of-one-seed": ('"--seeds", type=int, default=3', '"--seeds", type=int, default=1')}),
    ("octavo/ops/adamw/reference.py", "tests/ops/adamw/test_reference.py::test_a_shards_bits_are_the_wholes", {
        "rounding-by-place-in-shard": ("step.to(torch.int32), offset)", "step.to(torch.int32))")}),
    ("octavo/distributed/norm.py", "tests/distributed/test_shards.py::test_an_update_has_the_bits_of_one_process", {
        "norm-of-own-shard": ("tensors if like is None else like)", "[local(tensor) for tensor in tensors])")}),
    ("octavo/optim/adamw.py", "tests/distributed/test_shards.py::test_an_update_has_the_bits_of_one_process", {
        "offset-of-shard-is-zero": ("0 if param in whole_ones else global_offset(param)", "0")}),
    ("octavo/nn/weights/gathered.py",
     "tests/parallel/test_fp8_all_gather.py::test_mixed_recipes_have_the_bits_of_a_gather_in_bf16", {
        "codes-outlive-a-reshard": ("        self._codes = None\n\n    # Operands", "        pass\n\n    # Operands")}),
    ("octavo/nn/weights/shared_scales.py",
     "tests/parallel/test_fp8_all_gather.py::test_mixed_recipes_have_the_bits_of_a_gather_in_bf16", {
        "scale-of-own-rows": ("        reduce_largest(amaxes, self._group)\n", "")}),
    ("octavo/parallel/fp8_all_gather.py",
     "tests/parallel/test_gathered_weights.py::test_the_report_says_what_stays_in_high_precision", {
        "shards-cut-blocks": ("num_rows % (num_ranks * block_rows)", "num_rows % num_ranks"),
        "offloaded-shards-send-codes": ("and id(linear.weight) in offloaded", "and False")}),
    ("octavo/nn/weights/gathered_unit.py", "tests/parallel/test_gathered_weights.py::test_a_version_has_one_scale", {
        "a-scale-each-time-codes-are-sent": ("enumerate(is_new) if is_newer]", "enumerate(is_new)]")}),
    ("octavo/parallel/fp8_all_gather.py",
     "tests/parallel/test_fp8_all_gather.py::test_mixed_recipes_have_the_bits_of_a_gather_in_bf16", {
        "a-weight-made-again-for-its-bias": ('linear in coded and name == "weight"', "linear in coded")}),
    ("octavo/parallel/checkpoint.py",
     "tests/parallel/test_checkpoint.py::test_checkpoint_of_one_process_is_read_by_two", {
        "first-rows-on-every-rank": ("load_flat(name, first_row * size,", "load_flat(name, 0,")}),
    ("octavo/parallel/lend.py",
     "tests/rl/test_dealt_publish.py::test_a_flipped_bit_is_caught_on_all_ranks_and_the_old_weights_serve", {
        "bits-that-came-uncompared": ("is_whole, strict=True) if not is_well]", "is_whole, strict=True) if False]")}),
    ("octavo/rl/engines/dealt.py",
     "tests/rl/test_dealt_publish.py::test_a_flipped_bit_is_caught_on_all_ranks_and_the_old_weights_serve", {
        "damaged-weights-stay": ("            old.restore()\n", "")}),
    ("octavo/serve/router/updates.py",
     "tests/serve/router/test_admin.py::test_where_one_fails_all_have_their_old_weights", {
        "new-weights-on-some-replicas": ("await self._take_back(answers)", "await self._end(error.message)")}),
    ("octavo/serve/router/fleet.py",
     "tests/serve/router/test_admin.py::test_an_update_comes_to_all_replicas_and_outdates_one_that_starts_again", {
        "old-weights-after-a-restart": (".is_outdated = self.has_updates", ".is_outdated = False")}),
    ("octavo/serve/engine/graph_capture.py",
     "tests/serve/test_dealt_decoding.py::test_graphs_are_dropped_on_all_ranks_where_weights_moved_on_one", {
        "graphs-valid-on-one-rank": ("else group.together(self._is_in_place)", "else [self._is_in_place()]")}),
    ("octavo/train/rank_memory.py",
     "tests/train/test_rank_memory.py::test_gathered_units_and_reductions_are_predicted", {
        "next-layer-not-gathered": ("3 * layer * size + num_code", "2 * layer * size + num_code"),
        "root-reduced-in-bf16": ("reduction == \"ordered\" else (4, 0)", "reduction == \"ordered\" else (2, 0)")}),
    ("octavo/run/manifest.py",
     "tests/parallel/test_checkpoint.py::test_checkpoint_of_two_is_read_by_two_and_by_one", {
        "manifest-of-first-rank": ("% num_ranks == rank]", "% num_ranks == rank == 0]")}),
    ("octavo/models/export.py",
     "tests/parallel/test_checkpoint.py::test_model_of_shards_has_the_files_of_a_whole_one", {
        "export-of-rounded": ("            module.reshard()", "            pass")}),
    ("octavo/parallel/staging.py",
     "tests/parallel/test_checkpoint.py::test_background_save_holds_what_was_when_it_began", {
        "save-of-live-tensors": ("_as(tensor, copies[_key(tensor)])", "tensor")}),
    ("octavo/ops/packed/reference.py",
     "tests/ops/packed/test_reference.py::test_a_block_that_is_not_finite_has_the_scale_nan", {
        "wire-hides-infinities": ("torch.where(largest.isfinite(), scale.view(-1), torch.nan)", "scale.view(-1)")}),
    ("octavo/ops/packed/reference.py", "tests/ops/packed/test_reference.py::test_a_mean_and_what_it_lacks", {
        "owners-residual-of-the-mean": ("lost * (len(codes) if average else 1)", "lost")}),
    ("octavo/ops/packed/reference.py",
     "tests/ops/packed/test_reference.py::test_a_residual_and_the_codes_are_what_was_given", {
        "residual-without-the-last": ("values - _decoded(codes, scales, values.shape[1])",
                                      "x - _decoded(codes, scales, values.shape[1])")}),
    ("octavo/distributed/fp8_hook.py",
     "tests/distributed/test_fp8_hook.py::test_a_run_goes_on_with_the_same_bits", {
        "resume-without-residuals": ('in state["residuals"].items()}', "in ()}")}),
    ("octavo/distributed/fp8_hook.py",
     "tests/distributed/test_fp8_hook.py::test_what_is_ignored_or_small_is_averaged_in_fp32", {
        "small-buckets-in-fp8": ("< self.min_bytes:", "< 0:")}),
    ("octavo/distributed/reduced_in_fp8.py",
     "tests/distributed/test_fp8_hook.py::test_which_gradients_are_reduced_in_fp8", {
        "embeddings-in-fp8": ("isinstance(module, _LOOKUPS) or", "")}),
    ("octavo/distributed/reduction_q.py",
     "tests/distributed/test_reduction_q.py::test_what_a_rank_sends_does_not_depend_on_the_layout", {
        "random-bits-by-shard": ("start += member.rows * member.row_numel", "start += part.numel()")}),
    ("octavo/distributed/reduction_q.py",
     "tests/distributed/test_reduction_q.py::test_ranks_with_the_same_gradient_round_it_apart", {
        "random-bits-of-all-ranks-alike": ("{dist.get_rank()}", "0")}),
    ("octavo/distributed/reduction_q.py",
     "tests/distributed/test_reduction_q.py::test_a_call_repeats_itself_and_the_next_is_another", {
        "random-bits-of-all-steps-alike": ("/{self.num_calls}/", "/0/")}),
)
# fmt: on
MUTANTS = {name: (file, *change, test) for file, test, changes in TABLE for name, change in changes.items()}


def survival(name: str) -> str:
    """Why a mutant is not killed; empty where it is."""
    file, old, new, test = MUTANTS[name]
    source = (ROOT / file).read_text(encoding="utf-8")
    if (count := source.count(old)) != 1:
        return f"STALE: its old text is found {count} times in {file}, not once; write the mutant again"
    failures, output = run_tests([test], {file: source.replace(old, new)})
    if any(kind != "assertion" for kind in failures):
        return f"NO ASSERTION in {test}, but {', '.join(sorted(set(failures)))}\n{output}"
    return "" if failures else f"SURVIVED {test}\n{output}"


def run_tests(tests: list[str], changed: dict[str, str]) -> tuple[list[str], str]:
    """Run tests in a copy of the tree with some files changed: (what the failures are, the last lines of output)."""
    with tempfile.TemporaryDirectory() as folder:  # without what is hidden or made by runs
        tree = Path(shutil.copytree(ROOT, Path(folder, "tree"), ignore=shutil.ignore_patterns(".*", "runs")))
        for file, text in changed.items():
            (tree / file).write_text(text, encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants", "-p", "no:cacheprovider", *tests]
        environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        log = tree / FAILURES
        failures = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return failures, "\n".join((done.stdout + done.stderr).splitlines()[-5:])


def pytest_exception_interact(call: pytest.CallInfo[Any], report: Any) -> None:
    """As a plugin of the tests in the copy: note what failed by what."""
    assert call.excinfo is not None, "pytest calls this with one"
    is_call = getattr(report, "when", "collect") == "call"
    is_assertion = is_call and issubclass(call.excinfo.type, AssertionError | pytest.fail.Exception)
    with Path(FAILURES).open("a", encoding="utf-8") as file:
        file.write("assertion\n" if is_assertion else f"{call.excinfo.type.__name__}\n")


def main(names: list[str]) -> int:
    """Try the named mutants, or all; the exit code."""
    began, names = time.perf_counter(), names or list(MUTANTS)
    if unknown := [name for name in names if name not in MUTANTS]:
        print(f"no mutant {unknown[0]!r}; there are {', '.join(MUTANTS)}")
        return 2
    failures, output = run_tests(sorted({MUTANTS[name][3] for name in names}), {})
    if failures or " passed" not in output:
        print(f"the tests fail without any mutant, so they say nothing about one:\n{output}")
        return 1
    num_alive = 0
    with concurrent.futures.ThreadPoolExecutor(NUM_WORKERS) as pool:
        for name, reason in zip(names, pool.map(survival, names), strict=True):
            print(f"{name}: {reason or 'killed'}", flush=True)
            num_alive += bool(reason)
    print(f"{len(names) - num_alive} of {len(names)} mutants killed in {time.perf_counter() - began:.0f} s")
    return int(num_alive > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
