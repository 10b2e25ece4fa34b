"""Small random models of many classes of transformers, and what must come of each.

The windows, chunks and contexts are a few tokens long, so that a short text goes past their edges.
"""

import torch
import transformers

V = 61
COMMON = dict(vocab_size=V, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
              max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
GROUPED = dict(COMMON, num_key_value_heads=2)
HEADS = dict(GROUPED, head_dim=8)
GPT = dict(vocab_size=V, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
LOCAL = dict(num_local_experts=4, num_experts_per_tok=2)
MLA = dict(COMMON, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
           v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=2, topk_group=1,
           first_k_dense_replace=1, n_shared_experts=1)
ALTERNATING = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
LINEAR = dict(linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2)
CONVOLUTIONS = dict(conv_L_cache=4, layer_types=["conv", "full_attention", "conv"])
LONGROPE = dict(max_position_embeddings=64, original_max_position_embeddings=16,
                rope_parameters=dict(rope_type="longrope", rope_theta=1e4, short_factor=[1.0] * 4,
        long_factor=[4.0] * 4))

CLASSES = {
    "GPT-2": ("GPT2LMHeadModel", GPT),
    "GPT-Neo": ("GPTNeoForCausalLM", dict(vocab_size=V, hidden_size=32, num_layers=4, num_heads=4, window_size=6,
                                          attention_types=[[["global", "local"], 2]], max_position_embeddings=64,
                                          bos_token_id=1, eos_token_id=2)),
    "GPT-J": ("GPTJForCausalLM", dict(GPT, rotary_dim=4)),
    "GPT-NeoX": ("GPTNeoXForCausalLM", COMMON),
    "GPT-NeoX Japanese": ("GPTNeoXJapaneseForCausalLM", dict(COMMON, intermediate_multiple_size=2)),
    "CodeGen": ("CodeGenForCausalLM", dict(GPT, rotary_dim=4)),
    "GPTBigCode": ("GPTBigCodeForCausalLM", GPT),
    "OpenAI GPT": ("OpenAIGPTLMHeadModel", GPT),
    "OPT": ("OPTForCausalLM", dict(COMMON, ffn_dim=48, word_embed_proj_dim=32)),
    "BLOOM": ("BloomForCausalLM", dict(vocab_size=V, hidden_size=32, n_layer=3, n_head=4)),
    "Falcon rotary": ("FalconForCausalLM", dict(COMMON, new_decoder_architecture=True, num_kv_heads=2, alibi=False)),
    "Falcon ALiBi": ("FalconForCausalLM", dict(COMMON, multi_query=False, alibi=True, new_decoder_architecture=False,
                                               parallel_attn=False)),
    "MPT": ("MptForCausalLM", dict(vocab_size=V, d_model=32, n_layers=3, n_heads=4, expansion_ratio=2, max_seq_len=64)),
    "Llama": ("LlamaForCausalLM", GROUPED),
    "Llama dynamic NTK": ("LlamaForCausalLM", dict(GROUPED, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4,
        factor=4.0))),
    "Llama YaRN": ("LlamaForCausalLM", dict(GROUPED, rope_parameters=dict(rope_type="yarn", rope_theta=1e4,
        factor=4.0, original_max_position_embeddings=16))),
    "Llama 4": ("Llama4ForCausalLM", dict(HEADS, **LOCAL, num_hidden_layers=4, intermediate_size_mlp=48,
        attention_chunk_size=6)),
    "Mistral": ("MistralForCausalLM", dict(GROUPED, sliding_window=6)),
    "Mixtral": ("MixtralForCausalLM", dict(GROUPED, **LOCAL)),
    "Ministral": ("MinistralForCausalLM", dict(HEADS, **ALTERNATING)),
    "Ministral 3": ("Ministral3ForCausalLM", HEADS),
    "Qwen2": ("Qwen2ForCausalLM", GROUPED),
    "Qwen2 window": ("Qwen2ForCausalLM", dict(GROUPED, use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", dict(GROUPED, **EXPERTS, shared_expert_intermediate_size=16)),
    "Qwen3": ("Qwen3ForCausalLM", HEADS),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", dict(HEADS, **EXPERTS)),
    "Qwen3-Next": ("Qwen3NextForCausalLM", dict(HEADS, **EXPERTS, **LINEAR, shared_expert_intermediate_size=16,
                   layer_types=["linear_attention", "full_attention", "linear_attention"])),
    "Qwen3.5": ("Qwen3_5ForCausalLM", dict(HEADS, **LINEAR, layer_types=["linear_attention", "full_attention",
        "linear_attention"])),
    "Gemma": ("GemmaForCausalLM", HEADS),
    "Gemma 2": ("Gemma2ForCausalLM", dict(HEADS, **ALTERNATING)),
    "Gemma 3": ("Gemma3ForCausalLM", dict(HEADS, **ALTERNATING)),
    "Gemma 3n": ("Gemma3nForCausalLM", dict(HEADS, **ALTERNATING, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=V, laurel_rank=4, num_kv_shared_layers=0, intermediate_size=[48] * 3,
        activation_sparsity_pattern=[0.0] * 3, altup_num_inputs=2)),
    "Gemma 3n shared keys": ("Gemma3nForCausalLM", dict(HEADS, sliding_window=6, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=V, laurel_rank=4, num_kv_shared_layers=2, intermediate_size=[48] * 4,
        activation_sparsity_pattern=[0.0] * 4, altup_num_inputs=2)),
    "Phi": ("PhiForCausalLM", COMMON),
    "Phi-3": ("Phi3ForCausalLM", GROUPED),
    "Phi-3 longrope": ("Phi3ForCausalLM", dict(GROUPED, **LONGROPE)),
    "PhiMoE": ("PhimoeForCausalLM", dict(GROUPED, **LOCAL, sliding_window=None)),
    "OLMo": ("OlmoForCausalLM", COMMON),
    "OLMo 2": ("Olmo2ForCausalLM", COMMON),
    "OLMo 3": ("Olmo3ForCausalLM", dict(COMMON, **ALTERNATING)),
    "OLMoE": ("OlmoeForCausalLM", dict(COMMON, num_experts=4, num_experts_per_tok=2)),
    "Cohere": ("CohereForCausalLM", COMMON),
    "Cohere 2": ("Cohere2ForCausalLM", dict(GROUPED, **ALTERNATING)),
    "Granite": ("GraniteForCausalLM", GROUPED),
    "GraniteMoE": ("GraniteMoeForCausalLM", dict(GROUPED, **LOCAL)),
    "GraniteMoE hybrid": ("GraniteMoeHybridForCausalLM", dict(GROUPED, **LOCAL, shared_intermediate_size=16,
                          layer_types=["mamba", "attention", "mamba"], mamba_n_heads=4, mamba_d_head=16,
        mamba_expand=2, mamba_d_state=8, mamba_n_groups=1)),
    "SmolLM3": ("SmolLM3ForCausalLM", GROUPED),
    "StarCoder2": ("Starcoder2ForCausalLM", dict(GROUPED, sliding_window=6)),
    "StableLM": ("StableLmForCausalLM", GROUPED),
    "DeepSeek-V2": ("DeepseekV2ForCausalLM", dict(MLA)),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", dict(MLA)),
    "LFM2": ("Lfm2ForCausalLM", dict(GROUPED, **CONVOLUTIONS)),
    "LFM2-MoE": ("Lfm2MoeForCausalLM", dict(GROUPED, **CONVOLUTIONS, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, num_dense_layers=1)),
    "LFM3": ("Lfm3ForCausalLM", dict(HEADS, num_hidden_layers=4, conv_L_cache=4, sliding_window=6,
             layer_types=["conv", "sliding_attention", "full_attention", "conv"])),
    "LFM3 convolutions alone": ("Lfm3ForCausalLM", dict(HEADS, num_hidden_layers=2, conv_L_cache=4,
        layer_types=["conv", "conv"])),
    "LFM2 convolutions alone": ("Lfm2ForCausalLM", dict(GROUPED, num_hidden_layers=2, conv_L_cache=4,
        layer_types=["conv", "conv"])),
    "Mamba": ("MambaForCausalLM", dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=8)),
    "Mamba 2": ("Mamba2ForCausalLM", dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=8,
        num_heads=8, head_dim=8, n_groups=1)),
    "Falcon Mamba": ("FalconMambaForCausalLM", dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, state_size=8)),
    "RWKV": ("RwkvForCausalLM", dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, context_length=64)),
    "Jamba": ("JambaForCausalLM", dict(GROUPED, num_experts=2, num_experts_per_tok=1, use_mamba_kernels=False,
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8)),
    "Bamba": ("BambaForCausalLM", dict(GROUPED, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16,
        mamba_d_state=8, mamba_n_groups=1)),
    "Falcon-H1": ("FalconH1ForCausalLM", dict(HEADS, mamba_n_heads=4, mamba_d_head=16, mamba_d_ssm=64,
        mamba_d_state=8, mamba_n_groups=1)),
    "RecurrentGemma": ("RecurrentGemmaForCausalLM", dict(HEADS, lru_width=32, attention_window_size=6)),
    "Zamba 2": ("Zamba2ForCausalLM", dict(GROUPED, num_hidden_layers=3, mamba_d_state=8, mamba_ngroups=1,
        n_mamba_heads=4, num_mem_blocks=1, layers_block_type=["mamba", "hybrid", "mamba"], use_mem_rope=False,
        use_mamba_kernels=False)),
    "xLSTM": ("xLSTMForCausalLM", dict(vocab_size=V, hidden_size=32, num_hidden_layers=2, num_heads=4)),
    "GLM": ("GlmForCausalLM", HEADS),
    "GLM 4": ("Glm4ForCausalLM", HEADS),
    "GLM 4 MoE": ("Glm4MoeForCausalLM", dict(HEADS, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1)),
    "Nemotron": ("NemotronForCausalLM", HEADS),
    "Helium": ("HeliumForCausalLM", HEADS),
    "ERNIE 4.5": ("Ernie4_5ForCausalLM", HEADS),
    "ERNIE 4.5 MoE": ("Ernie4_5_MoeForCausalLM", dict(GROUPED, moe_num_experts=4, moe_k=2, moe_intermediate_size=16,
        moe_num_shared_experts=1, moe_layer_start_index=1)),
    "Seed-OSS": ("SeedOssForCausalLM", HEADS),
    "GPT-OSS": ("GptOssForCausalLM", dict(HEADS, **LOCAL, **ALTERNATING, rope_parameters=dict(rope_type="default",
        rope_theta=1e4))),
    "ModernBERT decoder": ("ModernBertDecoderForCausalLM", dict(COMMON, local_attention=6,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"])),
    "Persimmon": ("PersimmonForCausalLM", COMMON),
    "XGLM": ("XGLMForCausalLM", dict(vocab_size=V, d_model=32, num_layers=3, attention_heads=4, ffn_dim=48,
        max_position_embeddings=64)),
    "BioGPT": ("BioGptForCausalLM", COMMON),
    "CTRL": ("CTRLLMHeadModel", dict(vocab_size=V, n_embd=32, n_layer=3, n_head=4, n_positions=64, dff=48)),
    "EXAONE 4": ("Exaone4ForCausalLM", dict(HEADS, **ALTERNATING)),
    "Hunyuan": ("HunYuanDenseV1ForCausalLM", HEADS),
    "Arcee": ("ArceeForCausalLM", HEADS),
    "Apertus": ("ApertusForCausalLM", GROUPED),
    "BitNet": ("BitNetForCausalLM", GROUPED),
    "DBRX": ("DbrxForCausalLM", dict(vocab_size=V, d_model=32, n_heads=4, n_layers=3, max_seq_len=64,
        attn_config=dict(kv_n_heads=2, rope_theta=1e4, clip_qkv=8.0), ffn_config=dict(ffn_hidden_size=32,
        moe_num_experts=4, moe_top_k=2, hidden_size=32))),
    "DiffLlama": ("DiffLlamaForCausalLM", dict(GROUPED, head_dim=8)),
    "Doge": ("DogeForCausalLM", GROUPED),
    "Dots 1": ("Dots1ForCausalLM", dict(HEADS, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1)),
    "JetMoE": ("JetMoeForCausalLM", dict(vocab_size=V, hidden_size=32, num_hidden_layers=3, num_key_value_heads=4,
        kv_channels=8, intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64)),
    "MiniMax": ("MiniMaxForCausalLM", dict(HEADS, **LOCAL, layer_types=["linear_attention", "full_attention",
        "linear_attention"], block_size=4)),
    "NanoChat": ("NanoChatForCausalLM", GROUPED),
    "VaultGemma": ("VaultGemmaForCausalLM", dict(HEADS, **ALTERNATING)),
    "CWM": ("CwmForCausalLM", dict(HEADS, **ALTERNATING)),
    "LongCat Flash": ("LongcatFlashForCausalLM", dict(vocab_size=V, hidden_size=32, num_layers=2, num_hidden_layers=4,
        num_attention_heads=4, ffn_hidden_size=48, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=8, head_dim=8, moe_topk=2, n_routed_experts=4, zero_expert_num=2,
        expert_ffn_hidden_size=16, max_position_embeddings=64)),
    "GLM MoE DSA": ("GlmMoeDsaForCausalLM", dict(MLA, index_topk=4, index_head_dim=16, index_n_heads=2)),
    "XLNet": ("XLNetLMHeadModel", dict(vocab_size=V, d_model=32, n_layer=3, n_head=4, d_inner=48)),
    "BERT as decoder": ("BertLMHeadModel", dict(COMMON, is_decoder=True)),
    "RoBERTa as decoder": ("RobertaForCausalLM", dict(COMMON, is_decoder=True, pad_token_id=0)),
    "ELECTRA as encoder": ("ElectraForCausalLM", dict(COMMON, embedding_size=32)),
}

# Trees go as paths: a window, a state, positions that the model counts itself, or no place for a mask.
AS_PATHS = {"GPT-Neo", "BLOOM", "Falcon ALiBi", "MPT", "Llama 4", "Mistral", "Ministral", "Qwen2 window", "Gemma 2",
            "Gemma 3", "Gemma 3n", "Gemma 3n shared keys", "OLMo 3", "Cohere 2", "StarCoder2", "LFM2", "LFM2-MoE",
            "LFM3", "GPT-OSS", "ModernBERT decoder", "EXAONE 4", "VaultGemma", "CWM"}
RECURRENT, CACHELESS = "it keeps a recurrent state", "its forward takes no cache"
OTHER_LOGITS, CONVOLUTIONS_ALONE = "with a cache it computes other logits", "none of its layers is attention"
REFUSED = dict.fromkeys(["Qwen3-Next", "Qwen3.5", "GraniteMoE hybrid", "Mamba", "Mamba 2", "Falcon Mamba", "RWKV",
                         "Jamba", "Bamba", "Falcon-H1", "RecurrentGemma", "Zamba 2", "xLSTM"], RECURRENT) | {
    "OpenAI GPT": CACHELESS, "XLNet": CACHELESS, "MiniMax": "uses cache of its own",
    "GLM MoE DSA": "layers of the kind DynamicIndexedLayer",
    "LFM2 convolutions alone": CONVOLUTIONS_ALONE, "LFM3 convolutions alone": CONVOLUTIONS_ALONE,
    "RoBERTa as decoder": OTHER_LOGITS, "ELECTRA as encoder": OTHER_LOGITS,
}


def build(name, deviation=0.25, **changes):
    """The model of that name, its weights drawn large enough that a wrong mask or position shows."""
    kind, sizes = CLASSES[name]
    made = getattr(transformers, kind)
    config = made.config_class(**{**sizes, **changes})
    torch.manual_seed(7)
    model = made(config).eval()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, deviation, generator=generator)
    return model
