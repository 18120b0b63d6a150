"""Sample requests from claim to result, with the own decoder or vLLM. Independent of training."""
