"""LoRA on a row of many adapters: the reference loop, grouped products, and checks of both."""
