"""Names and limits of messages, for processes that import no message."""

CUSTOM = "custom"
"""Name of the loss that `loss_fn_config.loss_id` defines."""
ROUTED_EXPERTS = "routed_experts"
"""Name of the experts of a datum's tokens among the loss inputs of the message."""
MAX_SWEEP_RUNS = 64
"""Maximum number of runs in one request. Redis accepts their ops in one script, at 0.1 ms each."""
NO_POLICY_STEP = -1
"""Value of `policy_step` for a target that no policy of the run sampled, such as one of the prompt."""
