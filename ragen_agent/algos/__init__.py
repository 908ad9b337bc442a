"""The optimizers: nn.Modules that hold the policy."""

from ragen_agent.algos.brpo import ARPO, BRPO
from ragen_agent.algos.grpo import GRPO, DrGRPO
from ragen_agent.algos.lookup import ALGOS, find
from ragen_agent.algos.ppo import PPO
from ragen_agent.algos.starpo import StarPO, Totals, combine

__all__ = ["ALGOS", "ARPO", "BRPO", "GRPO", "PPO", "DrGRPO", "StarPO", "Totals", "combine", "find"]
