"""Log-probabilities of the raw model: prompt scores and the most probable tokens."""

import numpy as np
import torch

from cotrain_workers.engine.decoding.requests import NOT_COMPUTED_LOGPROB, SampleRequest, TopK
from cotrain_workers.engine.model.unembedding import picked_logprobs

SKIPPED = -1  # target without a log-probability


class PromptScores:
    """Requested log-probabilities of a prompt of `P` tokens, filled page by page.

    The hidden state of row `i` predicts token `i + 1`.
    """

    def __init__(self, request: SampleRequest) -> None:
        size, last_n = len(request.prompt), request.prompt_logprobs_last_n
        self._first_own_row = 0 if last_n is None else max(0, size - 1 - last_n)
        # Targets are scored at all positions; `last_n` does not apply to them.
        has_targets = request.target_prompt_logprobs is not None
        self.first_row = 0 if has_targets else self._first_own_row
        self._prompt = request.prompt
        self._targets = request.target_prompt_logprobs
        k = request.topk_prompt_logprobs
        self.logprobs = np.full(size, np.nan, np.float32) if request.prompt_logprobs else None
        self.topk = (
            TopK(np.zeros((size, k), np.int32), np.full((size, k), NOT_COMPUTED_LOGPROB, np.float32)) if k else None
        )
        self.targets = None if self._targets is None else np.full(self._targets.shape, np.nan, np.float32)

    def rows(self, start: int, stop: int) -> range:
        """Return those of the rows `start` to `stop` whose log-probabilities are requested."""
        return range(max(start, self.first_row), min(stop, len(self._prompt) - 1))

    def fill(self, rows: range, logits: torch.Tensor) -> bool:
        """Compute results from `logits` `[len(rows), V]`; return False if they are not finite."""
        if not torch.isfinite(logits.amax(dim=-1)).all():
            return False
        after = slice(rows.start + 1, rows.stop + 1)
        columns = self._columns(rows, after, logits.device)
        found, _ = picked_logprobs(logits, columns)
        values = found.float().cpu().numpy()
        before = max(0, self._first_own_row - rows.start)  # rows that only the targets need
        own = slice(rows.start + 1 + before, rows.stop + 1)
        if self.logprobs is not None:
            self.logprobs[own] = values[before:, 0]
        if self._targets is not None and self.targets is not None:
            here = slice(rows.start, rows.stop)
            skipped = self._targets[here] == SKIPPED
            self.targets[here] = np.where(skipped, np.nan, values[:, 1:])
        if self.topk is not None and before < len(rows):
            ids, logprobs = likeliest(logits[before:], self.topk.token_ids.shape[1])
            self.topk.token_ids[own] = ids.cpu().numpy()
            self.topk.logprobs[own] = logprobs.cpu().numpy()
        return True

    def _columns(self, rows: range, after: slice, device: torch.device) -> torch.Tensor:
        """Return the tokens to score in each row: the prompt's own token, then the targets."""
        columns = [self._prompt[after, None]]
        if self._targets is not None:
            columns.append(self._targets[rows.start : rows.stop].clip(min=0))
        return torch.from_numpy(np.concatenate(columns, axis=1)).to(device)


def likeliest(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and log-probabilities of the `k` most probable tokens, int32 and float32 `[n, k]`.

    Equally probable tokens are ordered by id, and the lowest ids of the last place are included.
    """
    ids = lowest_first(logits, k)
    logprobs, _ = picked_logprobs(logits, ids)
    return ids.int(), logprobs.float()


def lowest_first(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the ids of the `k` largest logits per row, int64 `[n, k]`; equal ones by id.

    torch defines no order among equals. On CUDA it may change with the number of rows, and so with
    other requests of the batch.
    """
    least = logits.topk(k, dim=-1).values[:, -1:]
    size = logits.shape[-1]
    # All ids above the last value come before those with that value, and no two keys are equal.
    keys = torch.arange(size, dtype=torch.int32, device=logits.device).expand_as(logits)
    keys = torch.where(logits > least, keys - size, keys).masked_fill_(logits < least, size)
    ids = keys.topk(k, dim=-1, largest=False).indices.sort(dim=-1).values
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)
