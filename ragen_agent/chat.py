"""Words <-> ids: a conversation only ever grows at its end, and the past is never tokenised anew."""

from collections.abc import Callable
from typing import Any

from jinja2.exceptions import TemplateError

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)  # for tokenizers that bring none: role, content, end of text
SLOT, SAID = "ragenslotzero", "ragensaidone"  # stand for a message while the template is rendered; letters survive every filter


class Chat:
    """A tokenizer's chat template as two functions that only append.

    `open(system, user)` begins a conversation; `next(ids, user)` are the ids to put behind a reply `ids`, whatever the
    template would do to the past. Text from the world is data: where it contains a control token's text it is encoded as
    plain characters.
    """

    def __init__(self, tokenizer: Any, prefix: str = ""):
        """`prefix` is put at the start of every reply, e.g. "<think>". Raises `ValueError` for a template that cannot append."""
        self.tokenizer, self.prefix = tokenizer, prefix
        self.template = tokenizer.chat_template or TEMPLATE
        if not tokenizer.chat_template and not tokenizer.eos_token:
            raise ValueError("a tokenizer without a chat template needs an eos_token to end a turn with")
        self._controls = [str(t) for t in tokenizer.all_special_tokens] + [str(t) for t in tokenizer.get_added_vocab()]
        closing = self._render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SAID}], opened=False)
        self._ending(closing, "a finished reply")
        tail = self._tokens(self._after_reply("Hi"))
        specials = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        ends = [i for i in tail if i in specials]
        if not ends:
            raise ValueError("the chat template ends a reply with no control token, so its end could not be sampled")
        self.end: int = ends[0]
        self.stop_ids = sorted({self.end} | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()))
        opening = self._render([{"role": "user", "content": "Hi"}], opened=True).rstrip()
        self.lead = ("<think>" if opening.endswith("<think>") else "") + prefix  # what a reply's text starts with, unsampled

    @property
    def ends(self) -> tuple[str, ...]:
        """The texts of the tokens that end a reply."""
        return tuple(self.tokenizer.convert_ids_to_tokens(i) for i in self.stop_ids)

    def open(self, system: str, user: str) -> list[int]:
        """The ids of a new conversation, up to where the reply starts."""
        return self._slotted([("system", system)] * bool(system), user)

    def next(self, ids: list[int], user: str) -> list[int]:
        """The ids behind a reply of sampled `ids`: its end token unless it was sampled, the user's message, the reply's header."""
        tail = self._tail(user)
        return tail[tail.index(self.end) + 1 :] if ids and ids[-1] == self.end else tail

    def encode(self, reply: str) -> list[int]:
        """The ids of a reply given as text (of a teacher), its end token included."""
        return [*self._tokens(reply), self.end]

    def text(self, ids: list[int]) -> str:
        """A reply's text: what was put before it and its sampled ids, the end token visible."""
        return self.lead + self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # -- rendering ---------------------------------------------------------------------------------------------------------

    def _render(self, messages: list[dict[str, str]], opened: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, chat_template=self.template, tokenize=False, add_generation_prompt=opened)

    def _slotted(self, before: list[tuple[str, str]], user: str) -> list[int]:
        system = "\n".join(text for _, text in before)
        contents = [system, user] if system else [user]
        messages = [{"role": role, "content": text} for role, text in [*before, ("user", user)]]
        slots = [f"{SLOT}{i}" for i in range(len(contents))]
        try:
            whole = self._render(messages, opened=True)
        except TemplateError as error:  # a template without a system role: the rules go into the first message
            if not system:
                raise ValueError(f"the chat template cannot render a user message: {error}") from error
            return self._slotted([], f"{system}\n\n{user}")
        marked = [{"role": m["role"], "content": s} for m, s in zip(messages, slots, strict=True)]
        return self._fill(whole, lambda: self._render(marked, opened=True), dict(zip(slots, contents, strict=True)))

    def _after_reply(self, user: str) -> str:
        talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SAID}, {"role": "user", "content": user}]
        return self._ending(self._render(talk, opened=True), "a second turn")

    def _tail(self, user: str) -> list[int]:
        return self._fill(self._after_reply(user), lambda: self._after_reply(f"{SLOT}0"), {f"{SLOT}0": user})

    def _ending(self, rendered: str, what: str) -> str:
        if SAID not in rendered:
            raise ValueError(f"the chat template does not keep a reply's text in {what}; it cannot be used for several turns")
        return rendered[rendered.index(SAID) + len(SAID) :]

    def _fill(self, whole: str, frame_of: Callable[[], str], contents: dict[str, str]) -> list[int]:
        """Ids of `whole`; where a content holds a control token's text, of the frame with each content encoded by itself, plainly."""
        if not any(control in text for text in contents.values() for control in self._controls):
            return self._tokens(whole + self.prefix)
        ids, frame = list[int](), frame_of()
        for slot, text in contents.items():
            head, _, frame = frame.partition(slot)
            ids += self._tokens(head) + self._plain(text)
        return ids + self._tokens(frame + self.prefix)

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False) if text else []

    def _plain(self, text: str) -> list[int]:
        """Ids of plain characters: no control token comes out of it, whatever the text says."""
        pieces = [text]
        for control in self._controls:
            pieces = [part for piece in pieces for part in apart(piece, control)]
        ids = [i for piece in pieces if piece for i in self.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=True)]
        if self.end in ids:
            raise ValueError("this tokenizer cannot write the text of its end token as plain characters")
        return ids


def apart(text: str, control: str) -> list[str]:
    """`text` in pieces none of which holds `control`: each occurrence is cut behind its first character."""
    parts = text.split(control) if len(control) > 1 else [text]
    last = len(parts) - 1
    return [(control[1:] if i else "") + part + (control[0] if i < last else "") for i, part in enumerate(parts)]
