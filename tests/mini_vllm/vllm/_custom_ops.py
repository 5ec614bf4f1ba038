"""Compiled operators and what they make: nothing here has any."""
