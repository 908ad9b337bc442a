"""Make the untaught form of the embedded model: a word-level tokenizer of everything the worlds say, and a random small Llama."""

import re
import sys
from pathlib import Path

import gymnasium
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import ragen_envs
from ragen_agent.pretrained import Pretrained, save
from ragen_agent.prompts import ANSWER, THINK, UNANSWER, UNTHINK, Prompt
from ragen_envs.text_env import TextEnv

WORD = r"\n|</?think>|</?answer>|\|\||\w+|[^\w\s]"
CONTROLS = ("<|pad|>", "<|unk|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def words() -> list[str]:
    """Every word that a world, its rules or a prompt uses, tags and numbers first."""
    seen = dict.fromkeys([THINK, UNTHINK, ANSWER, UNANSWER, "||", "\n", *map(str, range(21))])
    prompts = (Prompt(), Prompt(think=False))
    for env_id in ragen_envs.IDS:
        env = gymnasium.make(env_id)
        assert isinstance(env.unwrapped, TextEnv)
        seen |= dict.fromkeys(env.unwrapped.symbols)
        for seed in range(40):
            observation, info = env.reset(seed=seed)
            after = env.step(" || ".join(info["actions"]))
            texts = [*info["actions"], observation, after[0]]
            texts += [p.system(info["rules"]) + p.user(1, observation, info) + p.user(2, after[0], after[4], -0.5) for p in prompts]
            for text in texts:
                seen |= dict.fromkeys(re.findall(WORD, text))
    return list(seen)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; control tokens exist only as added tokens, so that no text of a world can spell one."""
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<|unk|>", *words()])}, unk_token="<|unk|>"))
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORD), "isolated"), pre_tokenizers.Split(Regex(r"[^\S\n]+"), "removed")]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<|pad|>",
        unk_token="<|unk|>",
        eos_token="<|end|>",
        additional_special_tokens=["<|system|>", "<|user|>", "<|assistant|>"],
    )
    made.chat_template = TEMPLATE
    return made


def main(folder: str) -> None:
    """Write the model to `folder`."""
    torch.manual_seed(0)
    words_of = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words_of),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=words_of.convert_tokens_to_ids("<|end|>"),  # pyright: ignore
        pad_token_id=words_of.convert_tokens_to_ids("<|pad|>"),  # pyright: ignore
    )
    save(Path(folder), Pretrained(LlamaForCausalLM(config), words_of, Prompt(style="brief")))


if __name__ == "__main__":
    main(sys.argv[1])
