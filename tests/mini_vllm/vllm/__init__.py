"""A package with the shape of vLLM, small enough to be read: what the replay touches of a release, and models that load in odd ways."""
