"""The frozen base model: how it is loaded, attends, and which kernels it has; knows no adapter."""
