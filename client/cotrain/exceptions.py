"""The errors of `cotrain.errors`, in the module where programs for the hosted services import them."""

from cotrain import errors
from cotrain.errors import *  # noqa: F403  # its `__all__`, and no name twice

__all__ = errors.__all__
