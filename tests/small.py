"""Small random models in folders, as transformers saves them."""

import torch

from lab.measure.prompts import PROMPTS


def tokenizer(texts):
    """A byte-level BPE of 320 tokens, trained on these texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def save(folder, kind="llama", texts=None, seed=0, vocab_size=320):
    """A model of four layers with its tokenizer, as save_pretrained writes it; sizes that integer kernels take."""
    from transformers import Lfm2Config, Lfm2ForCausalLM, LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    sizes = dict(vocab_size=vocab_size, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
                 num_key_value_heads=2, intermediate_size=128, max_position_embeddings=512, initializer_range=0.07,
                 bos_token_id=None, eos_token_id=0, pad_token_id=None)
    model = LlamaForCausalLM(LlamaConfig(**sizes)) if kind == "llama" else Lfm2ForCausalLM(Lfm2Config(
        **sizes, block_auto_adjust_ff_dim=False, layer_types=["conv", "full_attention"] * 2))
    model.save_pretrained(folder)
    tokenizer(texts or [text for each in PROMPTS.values() for text in each]).save_pretrained(folder)
    return folder
