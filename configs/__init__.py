"""Configuration groups that ship with the package."""
