"""Bugs in patches of Hugging Face models: what they compute, what they leave behind, what they say."""

from mutations.mutation import Layer

FORWARDS, EXPERTS, UNDO, PROOF, INFER = LAYERS = (
    Layer("patch forwards"),
    Layer("patch experts"),
    Layer("patch undo"),
    Layer("patch proof, audit"),
    Layer("patch infer"),
)

_LOGITS = "test_patch.py::test_logits_and_greedy_tokens_stay"
_RULES = "test_experts.py::test_the_same_experts_with_the_same_weights"

FORWARDS.add(
    "offset-dropped-where-sums-are-normed",
    'run(self, "add_rms_norm", hidden_states, residual, self.weight, state.eps, state.offset)',
    'run(self, "add_rms_norm", hidden_states, residual, self.weight, state.eps)',
    f"{_LOGITS}[gemma]",
)
FORWARDS.add(
    "transposed-heads-normed-as-they-lie",
    "return norm(self, hidden_states.transpose(1, 2)).transpose(1, 2)",
    "hidden_states = hidden_states.contiguous().view(hidden_states.transpose(1, 2).shape)",
    "test_patch.py::test_each_piece_alone[gemma3_text-norms]",
)
FORWARDS.add(
    "gelu-as-silu",
    'run(self, "silu_mul", gate, up) if act == "silu" else',
    'run(self, "silu_mul", gate, up) if act != "none" else',
    f"{_LOGITS}[gemma]",
)
FORWARDS.add(
    "bias-of-an-mlp-forgotten",
    'if state.act == "silu" and bias is None:',
    'if state.act == "silu":',
    "test_patch_refused.py::test_biases_of_an_mlp",
)
FORWARDS.add(
    "norm-after-attention-skipped",
    "_through(self, hidden_states, how.after_attention, how.attention_dropout)",
    "_through(self, hidden_states, how.attention_dropout)",
    f"{_LOGITS}[gemma2]",
)
FORWARDS.add(
    "layer-adds-its-input-alone",
    "hidden_states, residual = getattr(self, how.joining)(hidden_states, residual)",
    "hidden_states, _ = getattr(self, how.joining)(hidden_states, residual)",
    f"{_LOGITS}[llama]",
)
FORWARDS.add(
    "queries-unbounded",
    "found = [x.clamp(-bound, bound) for x in found]",
    "found[1:] = [x.clamp(-bound, bound) for x in found[1:]]",
    f"{_LOGITS}[olmoe]",
)
FORWARDS.add(
    "all-sequences-have-the-first-ones-positions",
    "    if len(cos) > 1:  # sequences",
    "    if len(cos) > 2:  # sequences",
    f"{_LOGITS}[llama]",
)
FORWARDS.add(
    "rotated-in-place-in-training",
    "trained = torch.is_grad_enabled() and any(",
    "trained = torch.is_inference_mode_enabled() and any(",
    "test_patch_training.py::test_a_training_step[llama-plain]",
)
FORWARDS.add(
    "what-a-hook-keeps-overwritten",
    "in_place = own and not trained",
    "in_place = not trained",
    "test_patch.py::test_what_a_hook_keeps_is_not_overwritten",
)
FORWARDS.add(
    "head-norms-fused-past-a-hook",
    "all(hasattr(n, STATE) and not hooked(n) for n in norms)",
    "all(hasattr(n, STATE) for n in norms)",
    "test_patch.py::test_hooks_stay_and_see_every_call",
)
FORWARDS.add(
    "projections-joined-past-a-hook",
    "if any(hooked(layer) for layer in layers):",
    "if False:",
    "test_patch.py::test_hooks_stay_and_see_every_call",
)
FORWARDS.add(
    "dropout-at-inference",
    "dropout = self.attention_dropout if self.training else 0.0",
    "dropout = self.attention_dropout",
    "test_patch_training.py::test_dropout_of_attention_is_for_training",
)
FORWARDS.add(
    "gradients-to-the-wrong-parameters",
    "return None, *grad.split(ctx.sizes)",
    "return None, *reversed(grad.split(ctx.sizes))",
    "test_patch_training.py::test_a_training_step[gemma-plain]",
)
FORWARDS.add(
    "parameters-that-moved-not-seen",
    "if not torch.compiler.is_compiling() and not _are_views(whole, parts):",
    "if whole is None:",
    "test_patch.py::test_parameters_that_move_are_followed",
)
FORWARDS.add(
    "joined-in-inference-mode",
    "@torch.inference_mode(False)\n@torch.no_grad()\ndef _join",
    "@torch.no_grad()\ndef _join",
    "test_patch.py::test_what_is_joined_in_inference_mode_can_be_trained",
)
FORWARDS.add(
    "backend-of-attention-dropped",
    '**said, **scoring, **_chosen(backends, "attention")',
    "**said, **scoring",
    "test_audit.py::test_the_kernel_that_was_asked_for",
)

FORWARDS.add(
    "mean-over-ignored-tokens",
    "losses.sum() / (targets != ignore_index).sum()",
    "losses.mean()",
    "test_loss.py::test_loss_and_gradients_stay[llama]",
)
FORWARDS.add(
    "labels-not-shifted",
    "F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()",
    "labels",
    "test_loss.py::test_loss_and_gradients_stay[llama]",
)
FORWARDS.add(
    "no-logits-in-evaluation",
    "if labels is None or not torch.is_grad_enabled() or not whole",
    "if labels is None or not whole",
    "test_loss.py::test_logits_stay_where_they_are_asked_for",
)
FORWARDS.add(
    "soft-cap-of-logits-dropped",
    'if getattr(model.config, "final_logit_softcapping", None):',
    "if False:",
    "test_loss.py::test_what_stays_in_torch",
)

EXPERTS.add(
    "limit-of-experts-not-read",
    "True, float(module.limit), float(module.alpha), 1.0",
    "True, 7.0, float(module.alpha), 1.0",
    f"{_RULES}[gpt_oss]",
)
EXPERTS.add(
    "experts-not-transposed",
    "return w_gate_up.mT, w_down.mT, *biases",
    "return w_gate_up.mT, w_down, *biases",
    f"{_RULES}[gpt_oss with experts as wide as tokens]",
)
EXPERTS.add(
    "choice-without-its-bias",
    "bias = getattr(module, how.bias).float() if how.bias else None",
    "bias = None",
    f"{_RULES}[deepseek_v3]",
)
EXPERTS.add(
    "groups-forgotten",
    "groups = [getattr(module, name) for name in how.groups] or (1, 1)",
    "groups = (1, 1)",
    f"{_RULES}[deepseek_v3]",
)
EXPERTS.add(
    "weights-of-experts-not-scaled",
    "scaling = float(getattr(module, how.scaling)) if how.scaling else 1.0",
    "scaling = 1.0",
    f"{_RULES}[deepseek_v2]",
)
EXPERTS.add(
    "attribute-that-renormalizes-not-read",
    "getattr(module, how.renormalizes) if isinstance(how.renormalizes, str) else how.renormalizes",
    "bool(how.renormalizes)",
    f"{_LOGITS}[qwen3_moe]",
)
EXPERTS.add(
    "router-in-the-models-dtype",
    "logits = F.linear(rows.float(), self.weight.float())",
    "logits = F.linear(rows, self.weight)",
    "test_experts.py::test_routers_of_deepseek_compute_in_float32",
)
EXPERTS.add(
    "shared-experts-forgotten",
    "made: Tensor = self.experts(rows, ids, weights, add=shared)",
    "made: Tensor = self.experts(rows, ids, weights)",
    f"{_LOGITS}[deepseek_v2]",
)
EXPERTS.add(
    "weights-of-experts-copied",
    "w_gate_up, w_down = module.gate_up_proj, module.down_proj\n",
    "w_gate_up, w_down = module.gate_up_proj, module.down_proj.clone()\n",
    "test_experts.py::test_weights_are_not_copied[mixtral]",
)
EXPERTS.add(
    "routes-where-gradients-are-needed",
    "    if aside(self, hidden_states):\n",
    "    if False:\n",
    "test_patch_training.py::test_a_training_step[mixtral-plain]",
)
EXPERTS.add(
    "activation-of-experts-not-asked",
    'if not how.interleaved and act != "silu":',
    "if False:",
    "test_experts.py::test_another_activation_stays[mixtral]",
)
EXPERTS.add(
    "groups-by-their-best-expert-let-through",
    "if how.only and getattr(module, how.only[0]) != how.only[1]:",
    "if False:",
    "test_experts.py::test_groups_by_their_best_expert_stay_with_transformers",
)
EXPERTS.add(
    "router-patched-without-its-experts",
    "return None if hasattr(found, swap.STATE) else",
    "return None if found is not None else",
    "test_experts.py::test_another_activation_stays[mixtral]",
)
EXPERTS.add(
    "block-of-another-tool-not-seen",
    "why = _missing(module, *experts.needed(how)) or swap.refusal(self._block(name))",
    "why = _missing(module, *experts.needed(how))",
    "test_experts.py::test_a_block_that_another_tool_computes_stays",
)
EXPERTS.add(
    "audit-hides-a-router-in-torch",
    "if why := known[2] or aside:",
    "if why := known[2]:",
    "test_experts.py::test_in_training_torch_routes_and_the_audit_says_so",
)
EXPERTS.add(
    "audit-misses-a-router-that-stepped-aside",
    "                self._aside.add(name)\n",
    "                pass\n",
    "test_experts.py::test_in_training_torch_routes_and_the_audit_says_so",
)
EXPERTS.add(
    "audit-misses-idle-experts",
    "            if not computes & ran.get(where, set()) and not fused:\n",
    '            if piece != "experts" and not computes & ran.get(where, set()) and not fused:\n',
    "test_experts.py::test_a_patch_that_does_not_run_is_noticed",
)

UNDO.add(
    "weights-stay-views",
    "            module.tilery_patch.joined.split(module)\n",
    "            pass\n",
    "test_patch.py::test_unpatched_bit_for_bit[llama]",
)
UNDO.add(
    "config-shared",
    "own = self.model.config, copy.deepcopy(self.model.config)",
    "own = self.model.config, self.model.config",
    "test_patch.py::test_two_models_of_a_class_do_not_touch_each_other",
)
UNDO.add(
    "attention-stays-patched",
    "        model.set_attn_implementation(record.attention)",
    "        pass",
    "test_patch.py::test_unpatched_bit_for_bit[qwen3]",
)
UNDO.add(
    "backends-stay-on-modules",
    "vars(module).pop(BACKENDS, None)",
    "pass",
    "test_patch.py::test_unpatched_bit_for_bit[llama]",
)
UNDO.add(
    "hook-of-accelerate-keeps-the-patch",
    "    if below_hook:\n",
    "    if False:\n",
    "test_patch.py::test_hooks_as_accelerates_stay",
)
UNDO.add(
    "a-pickle-forgets-the-patch",
    "    made: Any = _subclass(base, forward)\n    return made.__new__(made)",
    "    made: Any = base\n    return made.__new__(made)",
    "test_patch.py::test_a_copy_is_patched_by_itself",
)
UNDO.add(
    "failed-patch-stays",
    "    except BaseException:\n        unpatch(model)\n",
    "    except BaseException:\n",
    "test_verify.py::test_a_wrong_table_is_noticed_and_taken_back",
)
UNDO.add(
    "generate-batch-let-through",
    "            if hasattr(self.model, name):\n                vars(self.model)[name] = refuse_paged",
    "            pass",
    "test_patch_refused.py::test_what_is_refused",
)

PROOF.add(
    "errors-not-held-against-a-bound",
    "if bad := [e for e in found if not e.patched <= e.allowed]:",
    "if bad := [e for e in found if e.patched > 1e9]:",
    "test_verify.py::test_a_wrong_table_is_noticed_and_taken_back",
)
PROOF.add(
    "nan-passes",
    "if not e.patched <= e.allowed]",
    "if e.patched > e.allowed]",
    "test_verify.py::test_nan_is_no_proof",
)
PROOF.add(
    "few-tokens-unproven",
    "TOKENS = (24, 4)",
    "TOKENS = (24, 24)",
    "test_verify.py::test_every_layer_is_as_exact_as_in_torch",
)
PROOF.add(
    "training-mode-lost",
    "            module.training = mode",
    "            pass",
    "test_verify.py::test_every_layer_is_as_exact_as_in_torch",
)
PROOF.add(
    "audit-misses-idle-attention",
    "if BACKENDS in vars(module) and not _ATTENTION & ran.get(name, set()):",
    "if False:",
    "test_audit.py::test_what_did_not_run_raises",
)
PROOF.add(
    "audit-misses-a-sum-in-torch",
    'computes, where = {"add_rms_norm"}, f"{name}.{vars(module)[STATE].layer.joining}"',
    'computes, where = _COMPUTES[piece], f"{name}.{vars(module)[STATE].layer.joining}"',
    "test_audit.py::test_what_did_not_run_raises",
)
PROOF.add(
    "strict-of-a-patch-forgotten",
    "if (record.strict if strict is None else strict)",
    "if strict",
    "test_audit.py::test_what_did_not_run_raises",
)
PROOF.add(
    "plans-stay-watched",
    "            if not _watches:\n",
    "            if False:\n",
    "test_audit.py::test_nothing_is_left_when_it_ends",
)

INFER.add(
    "logits-compared-past-a-difference",
    "steps = alike.shape[1] if first is None else first + 1",
    "steps = alike.shape[1]",
    "test_infer.py::test_tokens_and_logits_that_differ",
)
INFER.add(
    "rate-of-one-sequence",
    "request.batch_size * later / (run.times[-1] - run.times[0])",
    "later / (run.times[-1] - run.times[0])",
    "test_infer.py::test_both_arms_and_what_is_said",
)
INFER.add(
    "both-arms-patched",
    "    if name == TORCH:\n        yield None\n        return\n",
    "",
    "test_infer.py::test_a_patch_that_computes_something_else_shows",
)
FORWARDS.add(
    "transposed-angles-taken-as-they-lie",
    "cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (cos, sin))\n",
    "\n",
    "test_patch.py::test_tables_of_angles_that_are_transposed",
)
