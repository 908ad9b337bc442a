"""What tests play with: byte tokenizers and chat templates made offline, tiny random models of many architectures, a bigram model."""

from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

START, END, TEXT_END = "<|im_start|>", "<|im_end|>", "<|endoftext|>"

CHATML = """{%- for m in messages -%}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

# As Qwen3's: what the assistant thought before the last user message is dropped, so the past is rewritten with every turn.
FORGETFUL = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set content = m.content -%}
{%- if m.role == 'assistant' and '</think>' in content and loop.index0 < ns.last -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
{%- endif -%}
<|im_start|>{{ m.role }}
{{ content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""

# As Gemma's: no system role, the assistant is called model, content is stripped, a BOS-like token opens the whole.
STRICT = """{{- '<|endoftext|>' -}}
{%- if messages[0].role == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Roles must alternate') }}{%- endif -%}
{%- set role = 'model' if m.role == 'assistant' else m.role -%}
<|im_start|>{{ role }}
{{ m.content | trim }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>model
{% endif -%}"""

TEMPLATES = {"chatml": CHATML, "forgetful": FORGETFUL, "strict": STRICT, "none": None}


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE (GPT-2) writes for each of the 256 bytes, in the order of the bytes."""
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(rest)) for byte in range(256)]


def byte_tokenizer(template: str = "chatml", merges: tuple[tuple[str, str], ...] = (), pad: str = TEXT_END) -> PreTrainedTokenizerFast:
    """A token for each byte (its id is the byte), then one for each merge, then START, END (which is EOS), TEXT_END.

    `template` is a key of TEMPLATES. Without merges a text has one tokenisation; with them it has several, of which `encode` knows one.
    """
    letters = byte_letters()
    words = letters + ["".join(pair) for pair in merges]
    core = Tokenizer(BPE({word: i for i, word in enumerate(words)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (START, END, TEXT_END)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=pad, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = TEMPLATES[template]
    return tokenizer


def split_tokenizer() -> PreTrainedTokenizerFast:
    """`hello` is one token (259), and `he` (256), `ll` (257), `llo` (258) are too: decoding `he llo` and encoding again gives other ids."""
    return byte_tokenizer(merges=(("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")))


SIZE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 2048}
GROUPED = {**SIZE, "num_key_value_heads": 1}
HEADED = {**GROUPED, "head_dim": 16}
ARCHS: dict[str, dict] = {  # transformers' name of an architecture -> what makes it tiny
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3": HEADED,
    "gemma": HEADED,
    "gemma2": {**HEADED, "query_pre_attn_scalar": 16, "sliding_window": 64},
    "mistral": {**HEADED, "sliding_window": 64},
    "phi": SIZE,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 2048},
    "gpt_neox": SIZE,
    "olmo": SIZE,
    "olmo2": SIZE,
}


def tiny(arch: str = "llama", vocab_size: int = 259, seed: int = 0, **settings) -> PreTrainedModel:
    """A random model of 2 layers and 32 channels in fp32, in eval mode; equal arguments give equal weights, and no global RNG moves.

    The weights are ten times larger than usual, so that what a model says depends on what it read.
    """
    tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    wanted = {"vocab_size": vocab_size, "initializer_range": 0.2, "dtype": "float32", **tokens, **ARCHS[arch], **settings}
    config = AutoConfig.for_model(arch, **wanted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"  # transformers 5 renamed it on the way


class BigramConfig(PreTrainedConfig):
    """The settings of a BigramLM: the vocabulary is all there is."""

    model_type = "bigram"

    def __init__(self, vocab_size: int = 3, **kwargs):
        self.vocab_size = self.hidden_size = vocab_size
        self.num_hidden_layers = 1
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


class BigramBody(PreTrainedModel):
    """Token -> its row of logits, called a hidden state; a cache of one empty channel knows how much was read."""

    config_class = BigramConfig

    def __init__(self, config: BigramConfig):
        super().__init__(config)
        self.table = nn.Embedding(config.vocab_size, config.vocab_size)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, input_ids: Tensor, use_cache: bool | None = None, cache=None, past_key_values=None, **_) -> BaseModelOutputWithPast:
        cache = past_key_values if cache is None else cache
        if use_cache:
            cache = DynamicCache() if cache is None else cache
            nothing = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
            cache.update(nothing, nothing, 0)
        read: dict[str, Any] = {CACHE: cache}
        return BaseModelOutputWithPast(last_hidden_state=self.table(input_ids), **read)


class BigramLM(PreTrainedModel, GenerationMixin):
    """A causal model whose logits depend on the previous token only, so that every logprob is known by hand: `table[previous]`.

    Its output embedding is the identity and stays it. It saves, loads (also through the Auto classes) and generates as any other.
    """

    config_class = BigramConfig
    base_model_prefix = "model"

    def __init__(self, config: BigramConfig):
        super().__init__(config)
        self.model = BigramBody(config)
        self.lm_head = nn.Linear(config.vocab_size, config.vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(False)
        self.post_init()

    @classmethod
    def of(cls, logits: Tensor) -> "BigramLM":
        """The model with (V, V) `logits`, row = previous token; log-probabilities are logits too."""
        made = cls(BigramConfig(vocab_size=len(logits))).eval()
        with torch.no_grad():
            made.model.table.weight.copy_(logits)
            made.lm_head.weight.copy_(torch.eye(len(logits)))
        return made

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache=None,
        past_key_values=None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **_,
    ) -> CausalLMOutputWithPast:
        read = self.model(input_ids, cache=past_key_values if cache is None else cache, use_cache=use_cache)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(read.last_hidden_state[:, kept])
        return CausalLMOutputWithPast(logits=logits, **{CACHE: read[CACHE]} if use_cache else {})


AutoConfig.register("bigram", BigramConfig)
AutoModelForCausalLM.register(BigramConfig, BigramLM)
