"""Share one processor between training and sampling. Pure: seconds in, a yes or no out.

While both have work, a second of training earns the decoder `s / (1 - s)` seconds, which it may use
before training goes on. One decode step cannot be cut short, so it may overdraw by one; that is
owed to training and paid back first. What the decoder has no work for is not saved up.

So, of any stretch in which both have work, with T seconds of training and D of decoding, d the longest
decode step and t the longest stretch of training between two visits:

    T >= (1 - s) * (T + D - d)    training keeps its share, up to one decode step
    D >= s * (T + D - t)          and so does the decoder, up to one stretch of training
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Share:
    """What the decoder may use now."""

    sampling_share: float
    """The decoder's part `s` of the time, `0 <= s < 1`; with 0 it runs only while training rests."""
    credit_s: float = 0.0
    """Below zero after a decode step that took longer than what was left."""

    @property
    def may_decode(self) -> bool:
        """Tell whether the decoder may take one more step before training goes on."""
        return self.credit_s > 0

    def trained(self, seconds: float) -> None:
        """Count what training took."""
        self.credit_s += seconds * self.sampling_share / (1 - self.sampling_share)

    def decoded(self, seconds: float) -> None:
        """Count what the decoder took while training had to wait."""
        self.credit_s -= seconds

    def forfeit(self) -> None:
        """Forget what the decoder could still use: it has nothing to do. What it owes stays."""
        self.credit_s = min(0.0, self.credit_s)
