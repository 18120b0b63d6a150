"""Version, names and limits of the protocol, for processes that import no message."""

__version__ = "0.1.0"

PROTOCOL = 1
"""Protocol version, incremented by every incompatible change between client and server."""
CUSTOM = "custom"
"""Name of the loss that `loss_fn_config.loss_id` defines."""
ROUTED_EXPERTS = "routed_experts"
"""Name of the experts of a datum's tokens among the loss inputs of the message."""
MAX_SWEEP_RUNS = 64
"""Maximum number of runs in one request. Redis accepts their ops in one script, at 0.1 ms each."""
NO_POLICY_STEP = -1
"""Value of `policy_step` for a target that no policy of the run sampled, such as one of the prompt."""
