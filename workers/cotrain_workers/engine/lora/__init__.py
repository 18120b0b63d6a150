"""LoRA on a row of many adapters: the reference loop, grouped products, their self-check."""
