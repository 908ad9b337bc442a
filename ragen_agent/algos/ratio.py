"""The ratio of new to old policy, of a token or of a whole episode (GSPO, arXiv 2507.18071), however the episode's rows are cut."""

from torch import Tensor

from ragen_agent.algos import functional as F
from ragen_agent.algos.totals import Totals, lengths, written
from ragen_agent.batch import Batch
from ragen_agent.model import Scores

RATIOS = ("token", "sequence", "sequence-token")


def log_ratio(new: Tensor, batch: Batch) -> Tensor:
    """(E,) the sum of log(new / old) over the sampled tokens of each episode in these rows, without gradient; `new` (B, T) logprobs."""
    change = F.log_ratio(new.detach(), written(batch, "old"), batch.sampled)
    return F.episode_sum(change, batch.sampled, batch.episode, len(batch.group))


def acting(new: Scores, batch: Batch, totals: Totals, ratio: str) -> Scores:
    """What a surrogate sees as new: with a sequence ratio, logprobs whose distance from old is the mean over the episode's tokens.

    Their gradient is each token's own: with one advantage for the episode, those of its tokens add up to the gradient of
    s = exp(mean log(new / old)), in whatever micro-batches they are. ValueError where an episode is not whole and `totals` do not know s.
    """
    if ratio == "token":
        return new
    change = totals.log_ratio
    if change is None:
        length = lengths(batch)
        if ((length > 0) & (length != totals.length)).any():
            raise ValueError(f"ratio {ratio!r} is of whole episodes, and some of their rows are not here: give algo.totals(minibatch)")
        change = log_ratio(new.logprob, batch)
    mean = F.spread(change / totals.length.clamp(min=1), batch.episode, batch.sampled)
    old = written(batch, "old").masked_fill(~batch.sampled, 0.0)
    return new._replace(logprob=old + mean + (new.logprob - new.logprob.detach()))
