"""Who plays: a language model, a random player, the exact player, a script. All of them in the one loop."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ragen_agent.backends.base import Backend, Sampling
from ragen_agent.chat import Chat
from ragen_agent.prompts import Prompt, answer_in
from ragen_agent.types import Reply, Trajectory

JOIN = " || "


class Policy(Protocol):
    """Anything that answers for a batch of live episodes."""

    asks: Mapping[str, Any]
    """Settings it wants of the env, such as {"hints": True} for the exact player."""

    def act(self, episodes: Sequence[Trajectory]) -> list[Reply]:
        """One reply an episode, in order."""
        ...


class RandomPolicy:
    """A uniformly random player: as many legal moves as the turn allows, each drawn uniformly and independently."""

    asks: Mapping[str, Any] = {}

    def __init__(self, seed: int = 0):
        """`seed` and the episode's own seed and luck decide the moves."""
        self.seed = seed

    def act(self, episodes: Sequence[Trajectory]) -> list[Reply]:
        """See the class."""
        return [self._reply(episode) for episode in episodes]

    def _reply(self, episode: Trajectory) -> Reply:
        rng = np.random.default_rng([self.seed, episode.seed, episode.luck, len(episode.turns)])
        names = episode.info["actions"]
        action = JOIN.join(names[i] for i in rng.integers(len(names), size=episode.now["allowed"]))
        return Reply(action, action)


class SolverPolicy:
    """The exact player of each game, through the env's own hints."""

    asks: Mapping[str, Any] = {"hints": True}

    def act(self, episodes: Sequence[Trajectory]) -> list[Reply]:
        """The best moves, as many as the turn allows."""
        actions = [JOIN.join(episode.now["plan"][: episode.now["allowed"]]) for episode in episodes]
        return [Reply(action, action) for action in actions]


class ScriptedPolicy:
    """Says given texts, one a turn, the last one again when they run out; for tests and demonstrations."""

    asks: Mapping[str, Any] = {}

    def __init__(self, actions: Sequence[str]):
        """`actions` are answers such as "Up || Left"."""
        self.actions = list(actions)

    def act(self, episodes: Sequence[Trajectory]) -> list[Reply]:
        """See the class."""
        actions = [self.actions[min(len(episode.turns), len(self.actions) - 1)] for episode in episodes]
        return [Reply(action, action) for action in actions]


class Conversation:
    """The token ids of an episode so far: every turn's context, extended and never rewritten."""

    def __init__(self, chat: Chat, prompt: Prompt):
        """`prompt.window` turns are seen, the current one among them; 0: all of them."""
        self.chat, self.prompt = chat, prompt

    def context(self, episode: Trajectory) -> list[int]:
        """The prompt ids of the next reply. Full history extends the last prompt; a window opens anew with its replies' own ids."""
        turns = len(episode.turns)
        if turns and not self.prompt.window:
            last = episode.turns[-1].reply
            return last.prompt_ids + last.ids + self.chat.next(last.ids, self._user(episode, turns))
        first = max(0, turns + 1 - self.prompt.window) if self.prompt.window else 0
        ids = self.chat.open(self.prompt.system(episode.rules), self._user(episode, first))
        for k in range(first, turns):
            said = episode.turns[k].reply.ids
            ids = ids + said + self.chat.next(said, self._user(episode, k + 1))
        return ids

    def _user(self, episode: Trajectory, k: int) -> str:
        if k == 0:
            return self.prompt.user(1, episode.observation, episode.info)
        turn = episode.turns[k - 1]
        return self.prompt.user(k + 1, turn.observation, turn.info, turn.reward)


class LLMPolicy:
    """A language model: context in, sampled ids out, and the answer read from them."""

    asks: Mapping[str, Any] = {}

    def __init__(self, backend: Backend, chat: Chat, prompt: Prompt | None = None, sampling: Sampling | None = None, seed: int = 0):
        """Stop ids come from the chat template; `seed`, the episode's seed and luck, and the turn decide every draw."""
        self.backend, self.chat, self.prompt, self.seed = backend, chat, prompt or Prompt(), seed
        sampling = sampling or Sampling()
        self.sampling = Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens, tuple(chat.stop_ids))
        self.conversation = Conversation(chat, self.prompt)

    def act(self, episodes: Sequence[Trajectory]) -> list[Reply]:
        """One reply an episode; an episode whose context leaves no room gets an empty one with finish "context"."""
        prompts = [self.conversation.context(episode) for episode in episodes]
        fits = [i for i, prompt in enumerate(prompts) if len(prompt) < self.backend.context]
        seeds = [(self.seed, episodes[i].seed, episodes[i].luck, len(episodes[i].turns)) for i in fits]
        replies = [Reply("", "", prompt, [], [], "context") for prompt in prompts]
        for i, done in zip(fits, self.backend.generate([prompts[i] for i in fits], self.sampling, seeds), strict=True):
            text = self.chat.text(done.ids)
            replies[i] = Reply(text, answer_in(text, self.prompt.think, self.chat.ends), prompts[i], done.ids, done.logprobs, done.finish)
        return replies


class TeacherPolicy:
    """The exact player speaking through a model's own prompts and tokens: what supervised fine-tuning learns from.

    It thinks its whole plan and answers the first moves of it: as many as the turn allows, or, in a share `spread` of the turns,
    a random number of them, so that boards half-way to the goal are seen too. It errs on request, in thought and play alike: in a
    share `noise` of the turns one move of the plan is a random one, and each move is one with probability `slip`.
    """

    asks: Mapping[str, Any] = {"hints": True}

    def __init__(self, chat: Chat, prompt: Prompt, seed: int = 0, spread: float = 0.0, noise: float = 0.0, slip: float = 0.0):
        """See the class."""
        self.chat, self.prompt, self.seed, self.spread, self.noise, self.slip = chat, prompt, seed, spread, noise, slip
        self.conversation = Conversation(chat, prompt)

    def act(self, episodes: Sequence[Trajectory]) -> list[Reply]:
        """Well-formed replies with the ids of their text; their logprobs are 0, for nothing was sampled."""
        return [self._reply(episode) for episode in episodes]

    def _reply(self, episode: Trajectory) -> Reply:
        plan = list(episode.now["plan"])
        most = min(episode.now["allowed"], len(plan))
        rng = np.random.default_rng([self.seed, episode.seed, episode.luck, len(episode.turns)])
        if rng.random() < self.noise:
            plan[int(rng.integers(most))] = str(rng.choice(episode.info["actions"]))
        if self.slip:
            plan = [str(rng.choice(episode.info["actions"])) if rng.random() < self.slip else move for move in plan]
        action = JOIN.join(plan[: int(rng.integers(1, most + 1)) if rng.random() < self.spread else most])
        text = self.prompt.reply(" ".join(plan), action)
        ids = self.chat.encode(text)
        return Reply(text, action, self.conversation.context(episode), ids, [0.0] * len(ids))
