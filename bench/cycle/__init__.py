"""A mixed training cycle of the engine: against one tenant, against PEFT by hand, and phase by phase."""
