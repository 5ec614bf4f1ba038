"""The engine `transformers`: the installed release's own `from_pretrained`, run in a worker on tensors without data."""
