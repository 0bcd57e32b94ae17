"""The parameters of Liger Kernel 0.8.5, typed as data: the facts that the alias is compared with.

A row has names, and the names of their parameters in order with defaults. Indented lines continue a row.
"""


def _rows(text: str) -> dict[str, str]:
    """Return the parameters of each name."""
    rows = [row.partition(":") for row in text.strip().replace("\n    ", " ").splitlines()]
    return {name: parameters.strip() for names, _, parameters in rows for name in names.split()}


# The parameters of `apply_liger_kernel_to_<type>` by type. Every default is True, except that a minus sign marks False
# and that the default of `model` is None. `**` marks further keyword arguments.
APPLY = _rows("""
granite: rope cross_entropy -fused_linear_cross_entropy rms_norm swiglu model
llama smollm3 ministral mistral mixtral qwen2 qwen3 qwen3_moe qwen2_5_vl qwen3_vl_moe phi3 olmo2 olmo3 falcon_h1
    hunyuan_v1_dense hunyuan_v1_moe exaone4: rope -cross_entropy fused_linear_cross_entropy rms_norm swiglu model
llava: -cross_entropy fused_linear_cross_entropy model **
llama4: rope -cross_entropy fused_linear_cross_entropy rms_norm swiglu model layer_norm
mllama muse_glimmer: rope -cross_entropy fused_linear_cross_entropy layer_norm rms_norm swiglu model
nemotron: relu_squared -cross_entropy fused_linear_cross_entropy model **
pixtral: rope rms_norm swiglu model
gemma gemma2 gemma3_text: rope -cross_entropy fused_linear_cross_entropy rms_norm geglu model
gemma3 paligemma: rope -cross_entropy fused_linear_cross_entropy layer_norm rms_norm geglu model
gemma4_text: -rope -cross_entropy fused_linear_cross_entropy rms_norm geglu model
gemma4: -rope -cross_entropy fused_linear_cross_entropy -layer_norm rms_norm geglu model
gpt_oss qwen3_vl: rope -cross_entropy fused_linear_cross_entropy rms_norm -swiglu model
qwen2_vl: rope -cross_entropy fused_linear_cross_entropy rms_norm layer_norm swiglu model
glm4 glm4v glm4v_moe qwen3_next qwen3_5 qwen3_5_moe deepseek_v2 deepseek_v3: -rope -cross_entropy
    fused_linear_cross_entropy rms_norm swiglu model
internvl smolvlm: -cross_entropy fused_linear_cross_entropy rms_norm layer_norm model **
deepseek_v4: -rope -cross_entropy fused_linear_cross_entropy rms_norm -swiglu model
""")

# The parameters of `__init__` and, after the arrow, of `forward` of each class, without self.
CLASSES = _rows("""
LigerExperts: config -> hidden_states top_k_index top_k_weights
LigerGEGLUMLPForGemma4: config layer_idx=None -> x
LigerGroupNorm: num_channels num_groups eps=1e-06 bias=False init_fn='ones' -> hidden_states
LigerHunyuanV1SwiGLUMLP: config layer_idx=None is_shared_mlp=False -> x
LigerMHC: layer hc c tmax=20 rms_eps=1e-06 pre_eps=0.0 sinkhorn_eps=1e-06 post_mult=2.0 phi_dtype=torch.float16
    allow_fp32=False -> x
LigerMegatronCrossEntropy: ignore_index=-100 label_smoothing=0.0 reduction='none' label_smoothing_formula='megatron'
    label_smoothing_mode='partition' -> vocab_parallel_logits target tp_group=None
LigerMegatronRMSNorm: config hidden_size eps=1e-05 persist_layer_norm=False zero_centered_gamma=False
    normalization='RMSNorm' -> x
LigerRMSNormForGemma: hidden_size eps=1e-06 offset=1.0 casting_mode='gemma' init_fn='zeros' in_place=True row_mode=None
    -> hidden_states
LigerRMSNormForGemma2 LigerRMSNormForQwen3Next LigerRMSNormForMuseGlimmerTextCentered: hidden_size eps=1e-06 offset=1.0
    casting_mode='gemma' init_fn='zeros' in_place=False row_mode=None -> hidden_states
LigerRMSNormForGemma3: dim eps=1e-06 offset=1.0 casting_mode='gemma' init_fn='zeros' in_place=False -> hidden_states
LigerRMSNormForGemma4: dim eps=1e-06 offset=0.0 casting_mode='gemma' init_fn='ones' in_place=False with_scale=True ->
    hidden_states
LigerRMSNormForGlm4 LigerRMSNormForOlmo2: hidden_size eps=1e-06 offset=0.0 casting_mode='llama' init_fn='ones'
    in_place=False row_mode=None -> hidden_states
LigerBlockSparseTop2MLP LigerFalconH1MLP LigerFalconH1SwiGLUMLP LigerGEGLUMLP LigerMLP LigerPhi3SwiGLUMLP
    LigerSwiGLUMLPForMuseGlimmer: config -> x
LigerCrossEntropyLoss: weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0 reduction='mean'
    softcap=None return_z_loss=False return_token_accuracy=False return_predicted_tokens=False -> _input target
LigerDyT: hidden_size beta=True init_alpha=0.5 -> x
LigerFusedAddRMSNorm: hidden_size eps=1e-06 offset=0.0 casting_mode='llama' init_fn='ones' in_place=False ->
    hidden_states residual
LigerFusedCETVDLoss: ignore_index=-100 -> student_logits teacher_logits target
LigerFusedLinearCPOLoss: ignore_index=-100 beta=0.1 alpha=1.0 label_smoothing=0.0 compute_nll_loss=True compiled=True
    average_log_prob=False chunk_size=1 -> lin_weight _input target bias=None
LigerFusedLinearCosineSimilarityLoss LigerFusedLinearJSDLoss: weight_hard_loss=0.5 weight_soft_loss=0.5 beta=0.5
    ignore_index=-100 temperature=1.0 compiled=True chunk_size=1024 return_soft_hard_loss=False -> student_input
    student_weight teacher_input teacher_weight true_labels student_bias=None teacher_bias=None
LigerFusedLinearCrossEntropyLoss: ce_weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0
    reduction='mean' softcap=None return_z_loss=False accum_dtype=None use_token_scaling=False
    return_token_accuracy=False return_predicted_tokens=False -> lin_weight _input target bias=None
LigerFusedLinearDPOLoss: ignore_index=-100 beta=0.1 alpha=1.0 compute_nll_loss=False compiled=True use_ref_model=True
    average_log_prob=False chunk_size=1 loss_type='sigmoid' label_smoothing=0.0 discopop_tau=0.05 -> lin_weight _input
    target bias=None ref_input=None ref_weight=None ref_bias=None
LigerFusedLinearGRPOLoss: beta=0.04 compiled=True use_ref_model=True chunk_size=1 epsilon_low=0.2 epsilon_high=0.2
    loss_type='dapo' max_completion_length=None importance_sampling_level='token' sapo_temperature_pos=1.0
    sapo_temperature_neg=1.05 temperature=1.0 delta=None use_bias_correction_kl=False vespo_k_pos=2.0
    vespo_lambda_pos=3.0 vespo_k_neg=3.0 vespo_lambda_neg=2.0 -> _input lin_weight selected_token_ids attention_mask
    advantages bias=None ref_per_token_logps=None old_per_token_logps=None ref_input=None ref_weight=None ref_bias=None
    vllm_is_ratio=None num_items_in_batch=None
LigerFusedLinearJSD: jsd_beta=0.5 ignore_index=-100 temperature=1.0 accum_dtype=None -> student_input student_weight
    teacher_input teacher_weight shift_labels
LigerFusedLinearKLDivLoss: reduction='batchmean' ignore_index=-100 temperature=1.0 eps=1e-10 accum_dtype=None ->
    student_input student_weight target shift_labels=None
LigerFusedLinearKTOLoss: ignore_index=-100 beta=0.1 compiled=True use_ref_model=False average_log_prob=False
    chunk_size=1 -> _input lin_weight target bias=None preference_labels=None ref_input=None ref_weight=None
    ref_bias=None kl=None
LigerFusedLinearORPOLoss: ignore_index=-100 beta=0.1 compute_nll_loss=True compiled=True chunk_size=1 -> lin_weight
    _input target bias=None nll_target=None
LigerFusedLinearSimPOLoss: ignore_index=-100 beta=0.1 alpha=1.0 label_smoothing=0.0 compute_nll_loss=True compiled=True
    gamma=0.5 chunk_size=1 -> lin_weight _input target bias=None
LigerJSD: beta=0.5 ignore_index=-100 -> log_q log_p shift_labels=None
LigerKLDIVLoss: eps=1e-10 *args ** -> y_pred y_true
LigerLayerNorm: hidden_size eps=1e-06 bias=False init_fn='ones' impl=None mode=None backend=None -> hidden_states
LigerModulatedRMSNorm: hidden_size eps=1e-06 offset=0.0 casting_mode='llama' init_fn='ones' in_place=True
    elementwise_affine=True -> hidden_states scale shift=None
LigerMultiTokenAttention: in_channels out_channels kernel_size stride=1 padding=0 dilation=1 groups=1 bias=True
    sparse=False -> scores
LigerPolyNorm: eps=1e-06 in_place=True -> hidden_states
LigerQwen3MoeSwiGLUMLP LigerSwiGLUMLP: config intermediate_size=None -> x
LigerRMSNorm: hidden_size eps=1e-06 offset=0.0 casting_mode='llama' init_fn='ones' in_place=True row_mode=None
    elementwise_affine=True -> hidden_states
LigerRMSNormForMuseGlimmer: dim=None eps=1e-06 offset=0.0 casting_mode='gemma' init_fn='ones' in_place=False
    with_scale=True -> hidden_states
LigerReLUSquared LigerSoftmax: -> x
LigerSparsemax: dim=-1 -> x
LigerTVDLoss: reduction='batchmean' ignore_index=-100 -> p q shift_labels=None
LigerTiledGEGLUMLP LigerTiledSwiGLUMLP: config num_shards=None -> x
LigerVocabParallelCrossEntropy: ignore_index=-100 label_smoothing=0.0 reduction='none' label_smoothing_formula='pytorch'
    label_smoothing_mode='global' -> vocab_parallel_logits target tp_group=None
""")

# The parameters of the functions of a module, by the module and the name.
FUNCTIONS = _rows("""
transformers.functional.liger_mhc_apply: x f_out h_pre h_post h_res return_x_in=False
transformers.functional.liger_mhc_coeffs: x phi b alpha_pre alpha_post alpha_res allow_fp32=False tmax=20 rms_eps=1e-06
    pre_eps=0.0 sinkhorn_eps=1e-06 post_mult=2.0
transformers.functional.liger_mhc_forward: x layer phi b alpha_pre alpha_post alpha_res allow_fp32=False tmax=20
    rms_eps=1e-06 pre_eps=0.0 sinkhorn_eps=1e-06 post_mult=2.0 return_coeffs=False
transformers.functional.liger_mhc_post_res: x f_out h_post h_res
transformers.functional.liger_mhc_pre: x h_pre
transformers.qwen2vl_mrope.liger_multimodal_rotary_pos_emb: q k cos sin mrope_section unsqueeze_dim=1
transformers.rope.liger_rotary_pos_emb: q k cos sin position_ids=None unsqueeze_dim=1 rotary_dim=None
transformers.rope.liger_rotary_pos_emb_gpt_oss: q k cos sin
transformers.rope.liger_rotary_pos_emb_vision: q k cos sin
transformers.functional.liger_cross_entropy: input target weight=None size_average=None ignore_index=-100 reduce=None
    reduction='mean' label_smoothing=0.0 lse_square_scale=0.0 softcap=None return_z_loss=False
    return_token_accuracy=False return_predicted_tokens=False
transformers.functional.liger_fused_linear_cross_entropy: input weight target bias=None ce_weight=None ignore_index=-100
    lse_square_scale=0.0 label_smoothing=0.0 reduction='mean' softcap=None return_z_loss=False accum_dtype=None
    use_token_scaling=False return_token_accuracy=False return_predicted_tokens=False chunk_mem_const=1
transformers.functional.liger_fused_linear_scaled_cross_entropy_tp: input weight target tp_group temperature=1.0
    ignore_index=-100 tiles_per_reduce=1 return_entropy=False
transformers.functional.liger_fused_linear_jsd: student_input student_weight teacher_input teacher_weight
    shift_labels=None jsd_beta=0.5 ignore_index=-100 temperature=1.0 accum_dtype=None
transformers.functional.liger_fused_linear_kl_div: student_input student_weight target shift_labels=None
    reduction='batchmean' ignore_index=-100 temperature=1.0 eps=1e-10 accum_dtype=None
transformers.functional.liger_geglu: a b
transformers.functional.liger_group_norm: X affine_scaling_weight affine_shifting_bias num_channels num_groups eps
transformers.functional.liger_jsd: input target shift_labels=None beta=0.5 ignore_index=-100
transformers.functional.liger_kl_div: input target size_average=True reduce=True reduction='mean' log_target=False
    eps=1e-10
transformers.functional.liger_sparsemax: input dim=-1
transformers.functional.liger_multi_token_attention: scores weight bias=None stride=1 padding=0 dilation=1 groups=1
    sparse=False
transformers.functional.liger_fused_neighborhood_attention: query key value kernel_size=7 dilation=1 scale=None
transformers.functional.liger_tvd: input target shift_labels=None reduction='mean' ignore_index=-100
transformers.functional.liger_layer_norm: X W B eps
transformers.functional.liger_qwen2vl_mrope: q k cos sin mrope_section unsqueeze_dim=1
transformers.functional.liger_relu_squared: x
transformers.functional.liger_rms_norm: X W eps offset=0.0 casting_mode='llama' in_place=True
transformers.functional.liger_modulated_rms_norm: X W scale shift=None eps=1e-06 offset=0.0 casting_mode='llama'
    in_place=True
transformers.functional.liger_poly_norm: X W B eps=1e-06 in_place=True
transformers.functional.liger_fused_add_rms_norm: X R W eps offset=0.0 casting_mode='llama' in_place=True
transformers.functional.liger_rope: q k cos sin position_ids=None unsqueeze_dim=1 rotary_dim=None
transformers.functional.liger_swiglu: a b
transformers.functional.liger_softmax: x
transformers.functional.liger_dyt: x alpha gamma beta
transformers.functional.liger_attn_res: V w_query w_norm eps=1e-06
functional.rms_norm: x weight eps=1e-06 offset=0.0 casting_mode='llama' in_place=False row_mode=None impl=None mode=None
    backend=None
functional.layer_norm: x weight bias=None eps=1e-06 impl=None mode=None backend=None
functional.jsd: _input target shift_labels=None beta=0.5 ignore_index=-100 impl=None mode=None backend=None
functional.softmax: x impl=None mode=None backend=None
functional.swiglu: a b gate_multiplier=1.0 down_multiplier=1.0 impl=None mode=None backend=None
functional.rope: q k cos sin position_ids=None unsqueeze_dim=1 impl=None mode=None backend=None
functional.cross_entropy: input target weight=None ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0
    reduction='mean' softcap=None return_z_loss=False return_token_accuracy=False return_predicted_tokens=False
    impl=None mode=None backend=None
functional.fused_add_rms_norm: X R W eps=1e-06 offset=0.0 casting_mode='llama' in_place=False impl=None mode=None
    backend=None
functional.geglu: a b impl=None mode=None backend=None
functional.kl_div: y_pred y_true reduction='batchmean' log_target=False eps=1e-10 impl=None mode=None backend=None
functional.fused_linear_jsd: student_input student_weight teacher_input teacher_weight shift_labels=None jsd_beta=0.5
    ignore_index=-100 temperature=1.0 impl=None mode=None backend=None
functional.fused_linear_cross_entropy: _input weight target bias=None ce_weight=None ignore_index=-100
    lse_square_scale=0.0 label_smoothing=0.0 reduction='mean' softcap=None return_z_loss=False accum_dtype=None
    use_token_scaling=False return_token_accuracy=False return_predicted_tokens=False impl=None mode=None backend=None
utils.is_peft_available:
utils.infer_device:
utils.is_npu_available:
transformers.liger_rotary_pos_emb: q k cos sin position_ids=None unsqueeze_dim=1 rotary_dim=None
transformers.liger_llama4_text_rotary_pos_emb: xq xk freqs_cis
transformers.liger_llama4_vision_rotary_pos_emb: query key freqs_ci
""")

# The arguments of the autograd functions of `liger_kernel.ops`.
OPS = _rows("""
LigerMHCCoeffsFunction: x phi b alpha_pre alpha_post alpha_res allow_fp32 tmax rms_eps pre_eps sinkhorn_eps post_mult
LigerMHCPostResFunction: x f_out h_post h_res
LigerMHCPreFunction: x h_pre
LigerEmbeddingFunction: embeddings indices
LigerFusedCETVDFunction: student_logits teacher_logits target ignore_index=-100
LigerFusedGateUpSiLUMulFunction: y in_place=False
LigerFusedMoEFunction: x gate_up_proj down_proj top_k_index top_k_weights
LigerLlama4RopeFunction: q k freqs_cis BLOCK_SIZE=None
LigerAttnResFunction: V_stacked w_query w_norm eps
LigerCrossEntropyFunction: _input target weight ignore_index=-100 lse_square_scale=0.0 label_smoothing=0.0
    reduction='mean' softcap=None return_z_loss=False return_token_accuracy=False return_predicted_tokens=False
LigerDyTFunction: x alpha gamma beta
LigerFusedAddRMSNormFunction: X R W eps offset=0.0 casting_mode='llama' in_place=False
LigerFusedLinearCrossEntropyFunction: _input weight target bias=None ce_weight=None ignore_index=-100
    lse_square_scale=0.0 label_smoothing=0.0 reduction='mean' softcap=None return_z_loss=False accum_dtype=None
    use_token_scaling=False return_token_accuracy=False return_predicted_tokens=False ce_impl=None ce_mode=None
    chunk_mem_const=1
LigerFusedLinearJSDFunction: student_input student_weight teacher_input teacher_weight shift_labels=None jsd_beta=0.5
    ignore_index=-100 temperature=1.0 accum_dtype=None jsd_impl=None jsd_mode=None
LigerFusedLinearKLDivFunction: student_input student_weight target shift_labels=None reduction='batchmean'
    ignore_index=-100 temperature=1.0 eps=1e-10 accum_dtype=None
LigerFusedLinearScaledCrossEntropyFunction: _input weight target temperature=1.0 ignore_index=-100 m_tiles_per_cluster=1
    return_entropy=False selected_token_ids=None
LigerFusedLinearScaledCrossEntropyTPFunction: _input weight target tp_group temperature=1.0 ignore_index=-100
    tiles_per_reduce=1 return_entropy=False
LigerFusedNeighborhoodAttentionFunction: query key value kernel_size=7 dilation=1 scale=None
LigerGELUMulFunction: a b
LigerGroupNormFunction: X affine_scaling_weight affine_shifting_bias num_channels num_groups eps
LigerJSDFunction: _input target shift_labels=None beta=0.5 ignore_index=-100 jsd_impl=None jsd_mode=None
LigerKLDivLossFunction: y_pred y_true reduction='batchmean' log_target=False eps=1e-10
LigerLayerNormFunction: X W B eps
LigerModulatedRMSNormFunction: X W scale shift eps offset=0.0 casting_mode='llama' in_place=True
LigerMultiTokenAttentionFunction: scores weight bias=None stride=1 padding=0 dilation=1 groups=1 sparse=False
LigerPolyNormFunction: X W B eps=1e-06 in_place=True
LigerQwen2VLMRopeFunction: q k cos sin mrope_section unsqueeze_dim=1
LigerReLUSquaredFunction: X
LigerRMSNormFunction: X W eps offset=0.0 casting_mode='llama' in_place=True row_mode=None
LigerRopeFunction: q k cos sin position_ids=None unsqueeze_dim=1 rotary_dim=None
LigerSoftmaxFunction: input_
LigerSparsemaxFunction: x dim
LigerSiLUMulFunction: a b gate_multiplier=1.0 down_multiplier=1.0
LigerTVDLossFunction: p q shift_labels=None reduction='batchmean' ignore_index=-100
LigerVocabParallelCEFunction: vocab_parallel_logits target tp_group ignore_index label_smoothing label_smoothing_formula
    label_smoothing_mode
""")
