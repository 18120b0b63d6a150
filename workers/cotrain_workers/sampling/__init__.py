"""A sample request from its claim to its result, by the own decoder or by vLLM; knows no training."""
