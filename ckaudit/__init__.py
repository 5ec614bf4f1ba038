"""Tell, before anyone downloads a weight, whether a checkpoint will load into the software that will serve it."""

__version__ = "0.1.0.dev0"
