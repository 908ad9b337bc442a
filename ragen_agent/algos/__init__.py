"""The optimizers: nn.Modules that hold the policy."""

from ragen_agent.algos.brpo import ARPO, BRPO, Normalised
from ragen_agent.algos.dapo import DAPO
from ragen_agent.algos.gigpo import MTGRPO, GiGPO
from ragen_agent.algos.grpo import GRPO, RLOO, DrGRPO
from ragen_agent.algos.gspo import CISPO, GSPO, GSPOToken
from ragen_agent.algos.lookup import ALGOS, find
from ragen_agent.algos.ppo import PPO
from ragen_agent.algos.reinforce import ReBN, ReinforcePP, ReinforcePPBaseline
from ragen_agent.algos.starpo import StarPO, Totals, combine

__all__ = [
    "ALGOS",
    "ARPO",
    "BRPO",
    "CISPO",
    "DAPO",
    "DrGRPO",
    "GRPO",
    "GSPO",
    "GSPOToken",
    "GiGPO",
    "MTGRPO",
    "Normalised",
    "PPO",
    "RLOO",
    "ReBN",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "StarPO",
    "Totals",
    "combine",
    "find",
]
