"""The frozen base model: how it is loaded, attends, and is compiled; knows no adapter."""
