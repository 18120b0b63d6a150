"""cotrain: train LoRA adapters on a server that many people share."""
