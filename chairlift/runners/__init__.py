"""Runners compute steps; one folder or file a kind of model."""
