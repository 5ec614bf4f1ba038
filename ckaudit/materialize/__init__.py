"""Load a checkpoint for real: on a device, every value looked at, one forward pass."""
