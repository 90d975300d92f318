"""Numbered SQL files that build schema orch."""
